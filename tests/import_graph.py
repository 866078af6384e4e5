"""Who imports whom among this repository's Python files, and which tests a change can reach.

An import counts wherever it stands in a file. A name that a package exports is in the module that defines it, so
`from spmd_tasks import Task` is an import of `spmd_tasks.runtime.task`.
"""

import ast
import collections
from collections.abc import Collection, Iterator
import functools
from pathlib import Path
import re
import subprocess
import tomllib
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
_FOLDERS = ('experiments', 'scripts', 'spmd_tasks', 'tests')


class Import(NamedTuple):
  """A dotted name that a file imports, anywhere in it: `from a import b` gives `a.b`."""

  importer: Path
  name: str
  line: int

  def __str__(self):
    return f'{self.importer.relative_to(ROOT)}:{self.line} imports {self.name}'


def dotted_name(path: Path) -> str:
  return '.'.join(path.relative_to(ROOT).with_suffix('').parts).removesuffix('.__init__')


MODULES = {dotted_name(path): path for folder in _FOLDERS for path in sorted((ROOT / folder).rglob('*.py'))}


@functools.cache
def text_of(path: Path) -> str:
  return path.read_text(encoding='utf-8')


@functools.cache
def imports_in(path: Path) -> tuple[Import, ...]:
  def found() -> Iterator[Import]:
    for node in ast.walk(ast.parse(text_of(path))):
      if isinstance(node, ast.Import):
        yield from (Import(path, alias.name, node.lineno) for alias in node.names)
      elif isinstance(node, ast.ImportFrom):
        assert not node.level, f'{path}:{node.lineno}: a relative import'
        yield from (Import(path, f'{node.module}.{alias.name}', node.lineno) for alias in node.names)

  return tuple(found())


def module_of(name: str) -> str | None:
  """Returns the module that a dotted name is in, None for other projects' names."""
  names = ['.'.join(name.split('.')[:end]) for end in range(name.count('.') + 1, 0, -1)]
  module = next((name for name in names if name in MODULES), None)
  if module is not None and module != name and MODULES[module].name == '__init__.py':
    exported = (
      imported.name
      for imported in imports_in(MODULES[module])
      if imported.name.rpartition('.')[2] == name.split('.')[-1]
    )
    return module_of(next(exported, module))
  return module


# What starts `spmd-tasks` in another process.
_STARTERS = {ROOT / 'tests' / 'binary.py', ROOT / 'tests' / 'forked.py'}

_CONFTESTS = {path for path in MODULES.values() if path.name == 'conftest.py'}


@functools.cache
def _extensions() -> dict[Path, set[str]]:
  """Returns the modules of each extension, by its package's directory, with the words that ask for it: its modes."""
  declared = tomllib.loads(text_of(ROOT / 'pyproject.toml'))['project']['entry-points']['spmd_tasks.extensions']
  packages = {MODULES[place.partition(':')[0]].parent: name for name, place in declared.items()}
  modes = re.compile(r"Mode\(\s*name='(\w+)'")
  return {package: {name, *modes.findall(text_of(package / '__init__.py'))} for package, name in packages.items()}


@functools.cache
def used_by(path: Path) -> frozenset[Path]:
  """Returns the files that a Python file imports or names, and the conftest.py of its folders.

  A registered experiment, a script and a file of the same folder are used by a file that has their names. A file that
  starts `spmd-tasks` uses what training needs, and the extensions whose modes it has as words; so does a file that runs
  a notebook.
  """
  text = text_of(path)
  modules = {module_of(imported.name) for imported in imports_in(path)}
  first = {imported.name.partition('.')[0] for imported in imports_in(path)}  # of `sys.path`'s folders
  modules |= {f'{folder}.{name}' for name in first for folder in ('scripts', dotted_name(path.parent))}
  modules |= {f'experiments.{name}' for name in re.findall(r'\b([a-z]\w*)\.[A-Z]\w+', text)}
  modules |= {f'scripts.{name}' for name in re.findall(r'\bscripts/(\w+)', text)}
  used = {MODULES[module] for module in modules & MODULES.keys()}
  used |= {file for file in path.parent.glob('*.py') if f"'{file.name}'" in text}
  if "/ 'scripts'" in text:
    used |= {*(ROOT / 'scripts').glob('*.py')}
  used |= {folder / 'conftest.py' for folder in path.parents if folder.is_relative_to(ROOT / 'tests')} & _CONFTESTS
  if used & _STARTERS or '.ipynb' in text:
    words = set(re.findall(r'\w+', text))
    used.add(ROOT / 'spmd_tasks' / 'main.py')
    used |= {file for package, names in _extensions().items() if names & words for file in package.rglob('*.py')}
  return frozenset(used - {path})


def reached_from(changed: Collection[Path]) -> set[Path]:
  """Returns the Python files that use one of the changed files, directly or by way of others.

  A file that is not Python's is used by the files that have its name, or else the name of its folder, in them; a page
  of the docs also by those that read its folder. What tests/conftest.py imports is not followed: it would reach all.
  """
  reached = {path for path in changed if path.suffix == '.py'}
  for path in set(changed) - reached:
    by_name = {file for file in MODULES.values() if path.name in text_of(file)}
    folder = f"'{path.parent.name}'" if path.suffix == '.md' else path.parent.name
    if path.suffix == '.md' or not by_name:
      by_name |= {file for file in MODULES.values() if folder in text_of(file)}
    reached |= by_name
  users = collections.defaultdict(set)
  for file in MODULES.values():
    for used in used_by(file) if file != ROOT / 'tests' / 'conftest.py' else ():
      users[used].add(file)
  new = reached
  while new:
    new = {user for path in new for user in users[path]} - reached
    reached |= new
  return reached


def changed_files(root: Path = ROOT) -> list[Path]:
  """Returns the files that differ from the commit where this branch left main, and those that git does not know."""
  git = lambda *args: subprocess.check_output(['git', *args], cwd=root, text=True)
  branches = git('for-each-ref', '--format=%(refname)', 'refs/remotes/origin/main', 'refs/heads/main').split()
  base = git('merge-base', 'HEAD', branches[-1]).strip() if branches else 'HEAD'
  names = git('diff', '--name-only', '-z', base) + git('ls-files', '--others', '--exclude-standard', '-z')
  return [root / name for name in names.split('\0') if name]
