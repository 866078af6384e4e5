"""Write errors on stdout and stderr do not stop a command, and printed control characters are escaped."""

import io
import os
import re
import subprocess
import sys
import warnings

import pytest
import tqdm

from spmd_tasks import exit_codes, flags, main, streams
from spmd_tasks.errors import UserError
from spmd_tasks.extensions import Mode
from spmd_tasks.programs.preview import format_example
from tests import binary

CODE = """
import os, sys
from spmd_tasks.streams import tolerate_write_errors, stdout_error

tolerate_write_errors()
for _ in range(3):
  print('x' * 100_000, flush=True)
  print('x' * 100_000, file=sys.stderr, flush=True)
with open(sys.argv[1], 'w') as file:  # must not get the descriptor of a standard stream, to which libraries write
  print(file.fileno() > 2, stdout_error() is not None, file=file)
"""


@pytest.mark.parametrize('shell, lost', [('>&- 2>&- <&-', False), ('>/dev/full 2>/dev/full', True), ('', False)])
def test_a_process_continues_without_its_streams(tmp_path, shell, lost):
  command = ['bash', '-c', f'exec "$@" {shell}', 'bash', binary.sys.executable, '-c', CODE, str(tmp_path / 'file')]
  env = os.environ | {'PYTHONPATH': str(binary.REPOSITORY)}
  with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env) as process:
    process.stdout.close()  # with '' the reader closes the pipe
    process.stderr.close()
    assert process.wait(60) == 0
  assert (tmp_path / 'file').read_text() == f'True {lost}\n'


def test_a_list_that_cannot_be_printed_is_a_failure():
  command = [binary.sys.executable, '-m', 'spmd_tasks', '--list']
  with open('/dev/full', 'w') as full:
    ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, cwd=binary.REPOSITORY)
  assert ended.returncode == exit_codes.FAILED
  assert ended.stderr == 'spmd-tasks: output was lost, because stdout cannot be written: No space left on device\n'


@pytest.mark.parametrize('prints_result, code', [(True, exit_codes.FAILED), (False, exit_codes.OK)])
def test_a_mode_fails_if_its_result_cannot_be_printed(monkeypatch, prints_result, code):
  mode = Mode(name='census', help='counts', run=lambda command: exit_codes.OK, prints_result=prints_result)
  monkeypatch.setattr(flags, 'all_modes', lambda: (mode,))
  monkeypatch.setattr(main, 'stdout_error', lambda: OSError(28, 'No space left on device'))
  assert main.run(['--mode', 'census']) == code


# --- control characters ---

CONTROL = 'a\x1b[2Jb\rc\x08d\x7fe\x9bf\u202eg\u2066h\u2028i'
ESCAPED = r'a\x1b[2Jb\rc\x08d\x7fe\x9bf\u202eg\u2066h\u2028i'


def test_control_characters_are_escaped_and_other_characters_are_not():
  assert streams.escape(CONTROL) == ESCAPED
  plain = 'naïve 日本語 עברית 🙂\u200d↔️\n\ttabs and lines'
  assert streams.escape(plain) == plain


def test_every_print_of_a_command_is_escaped(monkeypatch, capsys):
  def run(command):
    print('out', CONTROL)
    print('err', CONTROL, file=sys.stderr)
    warnings.warn(CONTROL, stacklevel=1)
    raise UserError(f'{CONTROL}\nsecond line')

  monkeypatch.setattr(flags, 'all_modes', lambda: (Mode(name='census', help='counts', run=run),))
  with pytest.warns(UserWarning, match='^a'):
    assert main.run(['--mode', 'census']) == exit_codes.USAGE
  out, err = capsys.readouterr()
  assert out == f'out {ESCAPED}\n'
  assert f'err {ESCAPED}\n' in err
  assert err.endswith(f'spmd-tasks: {ESCAPED}\nsecond line\n')


def test_logs_and_tracebacks_of_a_process_are_escaped():
  program = f"""
from spmd_tasks import main

def run(argv, called):
  from absl import logging
  logging.warning('%s', {CONTROL!r})
  raise ValueError({CONTROL!r})

main._run = run
main.main()
"""
  ended = binary.run_python(program, fresh=True)
  assert ended.returncode == exit_codes.FAILED
  assert re.search(rf'^\d\d:\d\d:\d\d warning: {re.escape(ESCAPED)}\n', ended.stderr, re.MULTILINE)
  assert ended.stderr.endswith(f'ValueError: {ESCAPED}\n')


def test_a_progress_bar_may_move_the_cursor_but_text_may_not():
  stream = io.StringIO()
  escaped = streams._EscapedStream(stream)
  with tqdm.tqdm(total=2, file=escaped, desc='x\x1b[2J') as bar:
    bar.update()
    bar.write(CONTROL, file=escaped)
  assert stream.getvalue().startswith('\rx' + r'\x1b[2J: ')
  assert f'{ESCAPED}\n' in stream.getvalue()
  assert '\x1b' not in stream.getvalue()


@pytest.mark.parametrize('is_coloured', [True, False])
def test_texts_of_a_preview_have_only_our_colors(is_coloured):
  shown = format_example(CONTROL, [(CONTROL, True), (f'{CONTROL}\n', False)], is_coloured)
  assert shown.count(ESCAPED) == 3
  for colour in ('\x1b[1;32m', '\x1b[2m', '\x1b[36m', '\x1b[0m'):
    shown = shown.replace(colour, '')
  assert '\x1b' not in shown
