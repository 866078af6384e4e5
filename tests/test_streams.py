"""Output that cannot be written is lost, and nothing else: closed streams, full disks, readers that have left."""

import os
import subprocess

import pytest

from tests import binary

CODE = """
import os, sys
from spmd_tasks.streams import lose_output, lost_output

lose_output()
for _ in range(3):
  print('x' * 100_000, flush=True)
  print('x' * 100_000, file=sys.stderr, flush=True)
with open(sys.argv[1], 'w') as file:  # never in the place of a standard stream, which libraries write to
  print(file.fileno() > 2, lost_output() is not None, file=file)
"""


@pytest.mark.parametrize('shell, lost', [('>&- 2>&- <&-', False), ('>/dev/full 2>/dev/full', True), ('', False)])
def test_a_process_goes_on_without_its_streams(tmp_path, shell, lost):
  command = ['bash', '-c', f'exec "$@" {shell}', 'bash', binary.sys.executable, '-c', CODE, str(tmp_path / 'file')]
  env = os.environ | {'PYTHONPATH': str(binary.REPOSITORY)}
  with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env) as process:
    process.stdout.close()  # with '' the reader leaves
    process.stderr.close()
    assert process.wait(60) == 0
  assert (tmp_path / 'file').read_text() == f'True {lost}\n'
