"""The docs are true: their code runs, their links lead somewhere, the files and flags that they name exist.

How a fenced block is tested is said by its first line:

    ```bash                   run by `bash -e`; a failing command fails the test
    ```bash no-run            for other machines (srun, kubectl), or tested elsewhere: `bash -n` only
    ```console                `$ command` lines are run, what they print is compared with what stands below them,
                              where `...` stands for anything, over lines too
    ```python                 run by `python`
    ```python no-run          of another framework: `ast.parse` only
    ```python file=my/a.py    written to that file of the working directory, for the blocks after it
    ```yaml, ```text, ```json are read by people (yaml is parsed)

All blocks of one document run in order in one directory, empty at first. `spmd-tasks` and `python` are those of this
environment; the tests' server forks them (tests/fork_server.py), except for `extending` and with --all.
"""

import ast
from collections.abc import Iterator, Mapping
import dataclasses
import doctest
import functools
import os
from pathlib import Path
import re
import subprocess
import sys

import pytest

from spmd_tasks import exit_codes
from spmd_tasks.flags import all_modes, make_parser
from tests import forked

ROOT = Path(__file__).parents[1]
README = ROOT / 'README.md'
GUIDES = [README, *sorted((ROOT / 'docs').glob('*.md')), *sorted((ROOT / 'docs' / 'benchmarks').glob('*.md'))]
ALL = [*GUIDES, ROOT / 'CHANGELOG.md', ROOT / 'CONTRIBUTING.md', *sorted((ROOT / 'docs' / 'design').glob('*.md'))]
KINDS = {'bash', 'bash no-run', 'console', 'python', 'python file', 'python no-run', 'yaml', 'text', 'json', 'nginx'}
BLOCK_LIMIT_S = 180
INSTALLED = Path(sys.executable).parent


@dataclasses.dataclass(frozen=True)
class Block:
  """One fenced block: `kind` is one of KINDS, `file` what stands behind `file=`, `line` the line of its fence."""

  document: str
  line: int
  kind: str
  file: str
  text: str

  def __str__(self) -> str:
    return f'{self.document}:{self.line} ({self.kind})'


def blocks_of(path: Path) -> list[Block]:
  """The fenced blocks of a document; fences stand at the start of a line."""
  blocks, lines, start = [], [], None
  for number, line in enumerate(path.read_text(encoding='utf-8').splitlines(), 1):
    if not line.startswith('```'):
      lines.append(line)
    elif start is None:
      start, info, lines = number, line[3:].strip(), []
    else:
      kind, _, file = info.partition('=')
      document = os.path.relpath(path, ROOT)
      blocks.append(Block(document, start, kind, file, ''.join(f'{line}\n' for line in lines)))
      start = None
  assert start is None, f'{path}:{start}: a fence that is not closed'
  return blocks


def prose_of(path: Path) -> str:
  """The document without its fenced blocks."""
  return re.sub(r'^```.*?^```', '', path.read_text(encoding='utf-8'), flags=re.DOTALL | re.MULTILINE)


def environment_with(programs: Path) -> dict[str, str]:
  """The commands in `programs` and those of this system, on CPUs; they compile as tests do, quickly and not twice."""
  own = {name: value for name, value in os.environ.items() if name != 'JAX_NUM_CPU_DEVICES'}
  path = f'{programs}{os.pathsep}{os.environ["PATH"]}'
  return own | {'PATH': path, 'TF_CPP_MIN_LOG_LEVEL': '2', 'JAX_PLATFORMS': 'cpu'}


@pytest.fixture(scope='module')
def environment(tmp_path_factory) -> dict[str, str]:
  """`spmd-tasks` and `python` are forked by the tests' server."""
  if not forked.is_running():
    return environment_with(INSTALLED)
  programs = tmp_path_factory.mktemp('programs')
  forked.make_programs(programs)
  return environment_with(programs)


def run(argv: list[str], directory: Path, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
  """Runs a part of a block to its end; stdout has both streams in it."""
  return subprocess.run(
    argv,
    cwd=directory,
    env={**environment, forked.OWNER_VARIABLE: os.environ.get(forked.OWNER_VARIABLE, '')},  # by tests/costs.py
    stdin=subprocess.DEVNULL,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    timeout=BLOCK_LIMIT_S,
    check=False,
  )


def console_parts(text: str) -> Iterator[tuple[str, str]]:
  """(command, what it prints) of a console block; a backslash at its end continues a command."""
  for part in re.split(r'^\$ ', text, flags=re.MULTILINE)[1:]:
    command, _, printed = re.sub(r'\\\n', '\\\\\n', part).partition('\n')
    while command.endswith('\\'):
      more, _, printed = printed.partition('\n')
      command = f'{command[:-1]}{more}'
    yield command, printed


def execute(block: Block, directory: Path, environment: Mapping[str, str]) -> None:
  """Runs one block; an AssertionError has its output."""
  if block.kind == 'python file':
    path = directory / block.file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(block.text, encoding='utf-8')
  elif block.kind in ('bash', 'python'):
    argv = (
      ['bash', '-e', '-c', block.text] if block.kind == 'bash' else ['bash', '-c', 'exec python -c "$0"', block.text]
    )
    done = run(argv, directory, environment)
    assert done.returncode == 0, f'{block} ended with {done.returncode}:\n{done.stdout}'
  elif block.kind == 'console':
    for command, wanted in console_parts(block.text):
      done = run(['bash', '-c', command], directory, environment)
      flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
      printed = re.sub(r'^\d\d:\d\d:\d\d ', '', done.stdout, flags=re.MULTILINE)  # the docs leave the clock out
      assert doctest.OutputChecker().check_output(wanted, printed, flags), (
        f'{block}: {command}\nprints\n{done.stdout}\nnot\n{wanted}'
      )


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize('path', GUIDES, ids=[path.stem for path in GUIDES])
def test_the_code_of_the_docs_runs(path, tmp_path, environment):
  if path.stem == 'extending':  # entry points are read by a new process
    environment = environment_with(INSTALLED)
  for block in blocks_of(path):
    execute(block, tmp_path, environment)


@pytest.mark.parametrize('path', ALL, ids=lambda path: path.stem)
def test_every_block_has_a_kind_that_is_tested_and_can_be_parsed(path):
  for block in blocks_of(path):
    assert block.kind in KINDS, f'{block}: unknown kind; see the docstring of tests/test_docs.py'
    if block.kind.startswith('python'):
      ast.parse(block.text)
    elif block.kind.startswith('bash'):
      subprocess.run(['bash', '-n', '-c', block.text], check=True)
    elif block.kind == 'yaml':
      list(pytest.importorskip('yaml').safe_load_all(block.text))
    elif block.kind == 'console':
      assert list(console_parts(block.text)), f'{block}: no `$ command` in it'


def test_names_in_python_blocks_are_defined(tmp_path):
  """Also on pages whose code runs with --all alone; every block is a module of its own."""
  blocks = {}
  for path in ALL:
    for block in blocks_of(path):
      if block.kind in ('python', 'python file'):
        name = f'block_{len(blocks)}.py'
        blocks[name] = block
        (tmp_path / name).write_text(block.text, encoding='utf-8')
  found = run(
    [INSTALLED / 'ruff', 'check', '--isolated', '--select=F821', '--output-format=concise', '.'], tmp_path, os.environ
  )
  assert found.returncode == 0, re.sub(r'block_\d+\.py', lambda name: str(blocks[name[0]]), found.stdout)


@pytest.mark.parametrize(
  'kind, text, is_true',
  [
    ('bash', 'false\ntrue\n', False),
    ('python', 'assert 1 + 1 == 3\n', False),
    ('console', '$ echo a; echo b >&2; echo c\na\n...\nc\n', True),
    ('console', '$ echo a; echo b; echo c\na\nc\n', False),
    ('bash no-run', 'false\n', True),
  ],
)
def test_a_block_that_is_not_true_fails(kind, text, is_true, tmp_path, environment):
  block = Block(document='x.md', line=1, kind=kind, file='', text=text)
  if is_true:
    execute(block, tmp_path, environment)
  else:
    with pytest.raises(AssertionError, match=r'x\.md:1'):
      execute(block, tmp_path, environment)


def slug(heading: str) -> str:
  """The anchor that GitHub makes of a heading."""
  return re.sub(r'[^\w\- ]', '', heading.strip().lower()).replace(' ', '-')


def anchors_of(path: Path) -> set[str]:
  return {slug(heading) for heading in re.findall(r'^#+ (.*)$', prose_of(path), flags=re.MULTILINE)}


@functools.cache
def flags_of_the_binary() -> frozenset[str]:
  return frozenset(option for action in make_parser(all_modes())._actions for option in action.option_strings)


@pytest.mark.parametrize('path', ALL, ids=lambda path: path.stem)
def test_what_a_document_names_is_there(path):
  """Relative links lead somewhere; files and flags exist."""
  for target in re.findall(r'\[[^\]]*\]\(([^)\s]+)\)', prose_of(path)):
    if re.match(r'[a-z]+:', target):
      continue
    file, _, anchor = target.partition('#')
    found = path if not file else (path.parent / file).resolve()
    assert found.exists(), f'{path.name} links to {target}, which does not exist'
    if anchor:
      assert anchor in anchors_of(found), f'{path.name} links to {target}: no such heading'
  for name in re.findall(r'`((?:spmd_tasks|tests|scripts|docs)/[\w./-]*)`', prose_of(path)):
    assert (ROOT / name).exists(), f'{path.name} names {name}, which does not exist'
  known = flags_of_the_binary() | ({'--loudness'} if path.stem == 'extending' else set())
  text = path.read_text(encoding='utf-8')
  commands = re.findall(r'(?:spmd-tasks|spmd_tasks\.main|scripts/quickstart)((?:[^\n\\]|\\\n)*)', text)
  used = {flag for command in commands for flag in re.findall(r'(?<![\w-])--\w[\w-]*', command)}
  assert used <= known, f'{path.name} uses {sorted(used - known)}'


def test_the_page_of_flags_has_every_flag():
  text = (ROOT / 'docs' / 'flags.md').read_text(encoding='utf-8')
  flags = flags_of_the_binary() - {'-h', '--help'}
  assert [flag for flag in sorted(flags) if f'`{flag}' not in text] == []


def sentences_of_the_package() -> list[str]:
  """Every string in the package, with ... for each value that is formatted into it."""
  sentences = []
  for path in (ROOT / 'spmd_tasks').rglob('*.py'):
    for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
      if isinstance(node, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else '...' for part in node.values]
        sentences.append(''.join(str(part) for part in parts))
      elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        sentences.append(node.value)
  return sentences


def test_messages_in_the_troubleshooting_page_are_printed_by_the_package():
  text = (ROOT / 'docs' / 'troubleshooting.md').read_text(encoding='utf-8')
  messages = re.findall(r'^\| (?:\d+, )?`([^`]* [^`]*)`', text, flags=re.MULTILINE)
  assert len(messages) > 20
  sentences = sentences_of_the_package()
  for message in messages:
    pattern = re.compile('.*'.join(re.escape(part.strip()) for part in message.split('...')), flags=re.DOTALL)
    assert any(pattern.search(sentence) for sentence in sentences), f'nothing prints {message!r}'


@pytest.mark.parametrize('path', [path for path in ALL if path.name != 'CHANGELOG.md'], ids=lambda path: path.stem)
def test_code_has_at_most_88_columns(path):
  """What the site shows without scrolling on a screen of 1,400 pixels (docs/code.css)."""
  wide = [f'{block}: {line}' for block in blocks_of(path) for line in block.text.splitlines() if len(line) > 88]
  assert wide == []


def test_readme_is_short():
  assert len(README.read_bytes()) <= 8 * 1024


def test_the_multi_host_guide_has_every_exit_code():
  text = (ROOT / 'docs' / 'multi_host.md').read_text(encoding='utf-8')
  assert [code for code in exit_codes.NAMES if f'\n| {code} |' not in text] == []
