"""Finds experiment classes by name.

A name has one of three forms:

* `lm.StdlibTiny`: class StdlibTiny of our experiments/lm.py.
* `vision.Tiny`: class Tiny of a module that another package registers under the name `vision`, in its pyproject.toml:

      [project.entry-points."spmd_tasks.experiments"]
      vision = "their_package.experiments.vision"

* `package.module.Class`: any importable class; the current directory is searched as well. It may be an experiment of
  another framework, if an extension recognizes it (extensions.py).

In a saved config, other classes and functions are named `package:QualName` by the nearest package that exports them
(`symbol_of`), so that files can move within a package. The name of its experiment may import less than a name that the
user types: from_saved.py.
"""

from collections.abc import Iterable, Sequence
import difflib
import importlib
import importlib.util
import inspect
import os
from pathlib import Path
import sys
from types import ModuleType
from typing import Any, TypeVar

from spmd_tasks import extensions
from spmd_tasks.config.listing import unknown_sentence, with_other_part
from spmd_tasks.errors import UserError
from spmd_tasks.experiments import DIRECTORY, is_own_module, modules_by_entry_point
from spmd_tasks.user_code import place_of_error

_EXPERIMENTS = 'spmd_tasks.experiments'

T = TypeVar('T', bound=type)
_registry: dict[str, type] = {}


class UnknownExperimentError(UserError):
  """There is no experiment of this name; the message has the nearest names."""


def register(cls: T) -> T:
  """Registers an experiment class, so that --list shows its name and the first line of its docstring.

  Raises a UserError: there is no docstring.
  """
  name = name_of(cls)
  doc = vars(cls).get('__doc__') or ''
  if not doc.strip() or doc.startswith(f'{cls.__name__}('):  # the signature, which dataclasses use as a default
    raise UserError(f'experiment {name} has no docstring: describe it in one line, which --list shows.')
  _registry[name] = cls
  return cls


def known(name: str) -> type | None:
  """Returns the experiment class that an imported module has registered by this name, or None."""
  return _registry.get(name)


def get(name: str) -> type:
  """Returns the experiment class of a name that the user typed; prepends the current directory to sys.path.

  It is a subclass of Experiment, or a class that an extension recognizes and adapts.

  Raises:
    UnknownExperimentError: there is no such module or class; the message has the nearest names.
    UserError: the class is not an experiment, importing its module fails (the message has the error and its line), or
      two packages register the module's name.
  """
  try:
    return _registry.get(name) or find_class(name, is_typed=True)
  except UnknownExperimentError:
    for short, whole in (pair for kind in extensions.kinds() for pair in kind.short_names):
      if name.startswith(short):
        return find_class(f'{whole}{name.removeprefix(short)}', is_typed=True)
    raise


def split_name(name: str) -> tuple[str, str]:
  """Returns the module and the class of a name."""
  module_name, _, class_name = name.rpartition('.')
  if not module_name or not all(part.isidentifier() for part in name.split('.')):
    raise _unknown(name)
  return module_name, class_name


def find_class(name: str, *, is_typed: bool) -> type:
  """Imports the experiment class that the user (`is_typed`) or a saved config names."""
  module_name, class_name = split_name(name)
  module = _find_module(name, module_name, in_current_directory=is_typed)
  # For a name in a file no module's __getattr__ is called, which might import others, except for our lazy exports.
  may_be_lazy = is_typed or module_name.partition('.')[0] == 'spmd_tasks'
  cls = getattr(module, class_name, None) if may_be_lazy else vars(module).get(class_name)
  if cls is None:
    near = difflib.get_close_matches(class_name, _experiment_names(module), n=3, cutoff=0.5)
    if is_typed and hasattr(module, '__path__') and importlib.util.find_spec(name):  # the name has no class
      module_name, near = name, _experiment_names(import_module(name, name))[:3]
    raise _unknown(name, [f'{module_name}.{other}' for other in near])
  if not is_experiment(cls) and foreign_kind(cls) is None:
    others = ''.join(f', or of an experiment of {kind.name}' for kind in extensions.kinds())
    raise UserError(f'{name} is not an experiment: name a subclass of spmd_tasks.experiment.Experiment{others}.')
  return cls


def name_of(cls: type) -> str:
  """Returns the one name under which `get` finds the class in a new process."""
  package, _, module = cls.__module__.rpartition('.')
  if package == _EXPERIMENTS:
    return f'{module}.{cls.__name__}'
  is_ours = cls.__module__.startswith('spmd_tasks.')
  return f'{public_module_of(cls) if is_ours else cls.__module__}.{cls.__name__}'


def _find_module(name: str, module_name: str, *, in_current_directory: bool) -> ModuleType:
  if '.' not in module_name:  # a registered name, which the current directory cannot shadow
    if is_own_module(module_name):
      return import_module(name, f'{_EXPERIMENTS}.{module_name}')
    modules = sorted(modules_by_entry_point().get(module_name, []))
    if len(modules) > 1:
      raise UserError(
        f'experiment {name} is ambiguous: {" and ".join(modules)} are both registered as {module_name!r}: write for '
        f'example {modules[0]}.{name.rpartition(".")[2]}.'
      )
    if modules:
      return import_module(name, modules[0])
  if in_current_directory and '' not in sys.path:
    add_to_search_path([Path.cwd()])
  # Parents are imported one by one: a missing parent means an unknown name, and a failing import a bug in the parent.
  parts = module_name.split('.')
  for end in range(1, len(parts) + 1):
    prefix = '.'.join(parts[:end])
    try:
      spec = importlib.util.find_spec(prefix)
    except (ImportError, ValueError):
      spec = None
    if spec is None:
      raise _unknown(name, with_other_part(name, end - 1))
    if spec.origin and Path(spec.origin).parent == DIRECTORY:  # experiments.lm, in our checkout
      prefix = f'{_EXPERIMENTS}.{Path(spec.origin).stem}'
    module = import_module(name, prefix)
  return module


def is_registered(name: str) -> bool:
  """Returns whether the experiment is of this package, or registered by another installed package."""
  module = name.rpartition('.')[0]
  is_listed = is_own_module(module) or module in modules_by_entry_point() or module in registered_modules()
  return is_listed or module.startswith('spmd_tasks.')


def registered_modules() -> set[str]:
  """Returns the modules that other packages register."""
  return {module.partition(':')[0] for modules in modules_by_entry_point().values() for module in modules}


def import_module(name: str, module_name: str) -> ModuleType:
  """Imports the module of an experiment `name`. Raises a UserError with the module's own error and its line."""
  try:
    for kind in extensions.kinds() if module_name.partition('.')[0] != 'spmd_tasks' else ():
      if kind.before_import is not None:
        extensions.call(kind.before_import, module_name)
    return importlib.import_module(module_name)
  except Exception as error:
    remedy = 'install what is missing, or correct' if isinstance(error, ModuleNotFoundError) else 'correct'
    raise UserError(
      f'experiment {name} cannot be loaded: importing {module_name} fails with {type(error).__name__}: {error} '
      f'({place_of_error(error)}); {remedy} that module.'
    ) from error


def is_experiment(value: object) -> bool:
  """Returns whether a value is a subclass of Experiment."""
  from spmd_tasks.experiment import Experiment  # imports JAX

  return inspect.isclass(value) and issubclass(value, Experiment)


def foreign_kind(value: object) -> extensions.ExperimentKind | None:
  """Returns the kind of another framework's experiment class; None for any other value."""
  return next((kind for kind in extensions.kinds() if extensions.call(kind.recognizes, value)), None)


def _experiment_names(module: ModuleType) -> list[str]:
  return [
    key
    for key, value in vars(module).items()
    if (is_experiment(value) or foreign_kind(value)) and value.__module__ == module.__name__
  ]


def _unknown(name: str, near: Sequence[str] = ()) -> UnknownExperimentError:
  return UnknownExperimentError(unknown_sentence(name, near, _registry))


def add_to_search_path(directories: Iterable[str | os.PathLike[str]]) -> list[Path]:
  """Prepends directories to sys.path, in their order; returns them as absolute paths.

  Raises a UserError: there is no such directory.
  """
  resolved = []
  for directory in directories:
    path = Path(directory).expanduser()
    if not path.is_dir():
      raise UserError(f'--experiment_path {directory} is not a directory: give the directory of your modules.')
    resolved.append(path.resolve())
  missing = [str(path) for path in resolved if str(path) not in sys.path]
  if missing:
    sys.path[:0] = missing
    importlib.invalidate_caches()
  return resolved


def is_origin(directory: Path) -> bool:
  """Returns whether a path always names the same directory: absolute, without links, not in /proc, /dev or /sys."""
  is_virtual = str(directory).startswith(('/proc/', '/dev/', '/sys/'))
  return directory.is_absolute() and directory.is_dir() and directory.resolve() == directory and not is_virtual


def symbol_of(value: Any) -> str:
  """Returns the public name of a class or function, `package:QualName`, such as `jax:relu`."""
  return f'{public_module_of(value)}:{value.__qualname__}'


def current_symbol(symbol: str) -> str:
  """Returns the current name of a class of ours that has moved, if its former package still exports it."""
  module, _, name = symbol.partition(':')
  if not module.startswith('spmd_tasks.') or name not in _loaded(module).get('__all__', ()):
    return symbol
  try:
    return symbol_of(getattr(sys.modules[module], name))
  except ImportError:  # it needs an extra, which the user of the class reports
    return symbol


def public_module_of(value: Any) -> str:
  """Returns the innermost parent package that exports a class or function by its name, else its module.

  A module's name is cut before its first private part.
  """
  module = value.__module__ or 'builtins'
  name = value.__qualname__.partition('.')[0]
  public = module.partition('._')[0]
  definition = _loaded(module).get(name)  # for a nested class or a method, the outermost class
  packages = public.split('.') if public != module else public.split('.')[:-1]
  for end in range(len(packages), 0, -1):
    package = '.'.join(packages[:end])
    if definition is not None and _exports(package, name, definition):
      return package
  return public


def _exports(package: str, name: str, value: Any) -> bool:
  names = _loaded(package)
  if name in names:
    return names[name] is value
  return name in names.get('__all__', ()) and getattr(sys.modules[package], name, None) is value  # a lazy export


def _loaded(module: str) -> dict[str, Any]:
  """Returns the names in an imported module; {} if it is not imported."""
  return vars(sys.modules[module]) if module in sys.modules else {}
