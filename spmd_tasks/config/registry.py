"""Experiment names to experiment classes; neither JAX nor Fiddle is imported until an experiment is.

`lm.StdlibTiny` is class StdlibTiny of experiments/lm.py; any other name is an importable
`package.module.Class`, looked for in the current directory too.
"""

import ast
import difflib
import importlib
import importlib.util
import inspect
from pathlib import Path
import sys
import traceback
from types import ModuleType
from typing import TypeVar

from spmd_tasks.errors import UserError
from spmd_tasks.experiments import DIRECTORY

_EXPERIMENTS = 'spmd_tasks.experiments'

T = TypeVar('T', bound=type)
_registry: dict[str, type] = {}


def register(cls: T) -> T:
  """Registers an experiment class as `<last part of its module>.<class name>`; --list shows its docstring's first line.

  Raises:
    UserError: there is no docstring, or another class has the name.
  """
  name = f'{cls.__module__.rpartition(".")[2]}.{cls.__name__}'
  if not (vars(cls).get('__doc__') or '').strip() or _is_dataclass_signature(cls):
    raise UserError(f'experiment {name} has no docstring: describe it in one line, which --list shows.')
  other = _registry.get(name)
  if other is not None and (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
    raise UserError(
      f'experiment {name} is registered twice, by {other.__module__} and by {cls.__module__}: rename one of them.'
    )
  _registry[name] = cls
  return cls


def _is_dataclass_signature(cls: type) -> bool:
  # dataclasses fill a missing docstring with the signature.
  return (cls.__doc__ or '').startswith(f'{cls.__name__}(')


def _is_register(decorator: ast.expr) -> bool:
  return (isinstance(decorator, ast.Name) and decorator.id == 'register') or (
    isinstance(decorator, ast.Attribute) and decorator.attr == 'register'
  )


def list_experiments(directory: Path = DIRECTORY) -> list[tuple[str, str]]:
  """(name, first line of the docstring) of every registered experiment, read from the source without importing it."""
  found = []
  for path in sorted(directory.glob('*.py')):
    for node in ast.parse(path.read_text(encoding='utf-8'), filename=str(path)).body:
      if isinstance(node, ast.ClassDef) and any(_is_register(decorator) for decorator in node.decorator_list):
        found.append((f'{path.stem}.{node.name}', (ast.get_docstring(node) or '').partition('\n')[0]))
  return found


def get(name: str) -> type:
  """The experiment class of a name.

  Raises:
    UserError: there is no such module or class (with the nearest names), it is not an experiment, or its module fails
      when it is imported (with the module's own error and line).
  """
  if name in _registry:
    return _registry[name]
  module_name, _, class_name = name.rpartition('.')
  if not module_name or not all(part.isidentifier() for part in name.split('.')):
    raise _unknown(name)
  module = _find_module(name, module_name)
  cls = getattr(module, class_name, None)
  if cls is None:
    near = difflib.get_close_matches(class_name, _experiment_names(module), n=3, cutoff=0.5)
    raise _unknown(name, [f'{module_name}.{other}' for other in near])
  if not _is_experiment(cls):
    raise UserError(
      f'{name} is not an experiment: --exp takes the name of a subclass of spmd_tasks.experiment.Experiment.'
    )
  return cls


def name_of(cls: type) -> str:
  """The name under which `get` finds the class in a new process; the same however it was asked for."""
  package, _, module = cls.__module__.rpartition('.')
  return f'{module if package == _EXPERIMENTS else cls.__module__}.{cls.__name__}'


def _find_module(name: str, module_name: str) -> ModuleType:
  if '.' not in module_name and _is_own_module(module_name):
    return _import(name, f'{_EXPERIMENTS}.{module_name}')
  if '' not in sys.path and str(Path.cwd()) not in sys.path:
    sys.path.insert(0, str(Path.cwd()))
    importlib.invalidate_caches()
  # Parents are imported one by one: a parent that is missing means "no such name", one that fails means a bug in it.
  parts = module_name.split('.')
  for end in range(1, len(parts) + 1):
    prefix = '.'.join(parts[:end])
    try:
      spec = importlib.util.find_spec(prefix)
    except (ImportError, ValueError):
      spec = None
    if spec is None:
      raise _unknown(name)
    module = _import(name, prefix)
  return module


def _is_own_module(module_name: str) -> bool:
  return (DIRECTORY / f'{module_name}.py').is_file()


def _import(name: str, module_name: str) -> ModuleType:
  try:
    return importlib.import_module(module_name)
  except Exception as error:
    raise UserError(
      f'experiment {name} cannot be loaded: importing {module_name} fails with {type(error).__name__}: {error} '
      f'({_place(error)}); correct that module.'
    ) from error


def _place(error: Exception) -> str:
  """file:line of the innermost frame in an experiment's own code, not in a library or in this package."""
  if isinstance(error, SyntaxError) and error.filename:
    return f'{error.filename}:{error.lineno}'
  frames = traceback.extract_tb(error.__traceback__)
  last = next((frame for frame in reversed(frames) if _is_own_code(Path(frame.filename))), frames[-1])
  return f'{last.filename}:{last.lineno}'


def _is_own_code(path: Path) -> bool:
  if path.is_relative_to(DIRECTORY):
    return True
  libraries = (Path(__file__).parents[1], Path(ast.__file__).parent)
  return path.is_file() and 'site-packages' not in path.parts and not any(map(path.is_relative_to, libraries))


def _is_experiment(value: object) -> bool:
  from spmd_tasks.experiment import Experiment  # imports JAX

  return inspect.isclass(value) and issubclass(value, Experiment)


def _experiment_names(module: ModuleType) -> list[str]:
  return [key for key, value in vars(module).items() if _is_experiment(value) and value.__module__ == module.__name__]


def _unknown(name: str, near: list[str] | None = None) -> UserError:
  known = sorted({registered for registered, _ in list_experiments()} | set(_registry))
  near = near or difflib.get_close_matches(name, known, n=3, cutoff=0.5)
  nearest = f' Nearest: {", ".join(near)}.' if near else ''
  return UserError(
    f'unknown experiment {name!r}.{nearest} Use a registered name (--list shows them) or package.module.Class, '
    'importable from here or from the current directory.'
  )
