"""Finds experiment classes by name.

A name is one of three:

* `lm.StdlibTiny`: class StdlibTiny of our experiments/lm.py.
* `vision.Tiny`: class Tiny of a module that another package registers under the name `vision`, in its pyproject.toml:

      [project.entry-points."spmd_tasks.experiments"]
      vision = "their_package.experiments.vision"

* `package.module.Class`: any importable class; the current directory counts. It may be an experiment of another
  framework, of a kind that an extension recognizes (extensions.py).

A saved config names other classes and functions as `package:QualName` of the nearest package that exports them
(`symbol_of`), so that files can move inside a package. Its experiment's name may have less imported than one that the
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
from spmd_tasks.errors import UserError
from spmd_tasks.experiments import DIRECTORY, is_own_module, modules_of_others

_EXPERIMENTS = 'spmd_tasks.experiments'
_MAX_NAME_LENGTH = 500

T = TypeVar('T', bound=type)
_registry: dict[str, type] = {}


class UnknownExperimentError(UserError):
  """There is no experiment of a name; the message has the nearest names."""


def register(cls: T) -> T:
  """Registers an experiment class, so that --list shows its name and its docstring's first line.

  Raises a UserError: there is no docstring, or another class has the name.
  """
  name = name_of(cls)
  doc = vars(cls).get('__doc__') or ''
  if not doc.strip() or doc.startswith(f'{cls.__name__}('):  # dataclasses fill a missing one with the signature
    raise UserError(f'experiment {name} has no docstring: describe it in one line, which --list shows.')
  other = _registry.get(name, cls)
  if (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
    raise UserError(
      f'experiment {name} is registered twice, by {other.__module__} and by {cls.__module__}: rename one of them.'
    )
  _registry[name] = cls
  return cls


def known(name: str) -> type | None:
  """The experiment class that a module imported already has registered by this name."""
  return _registry.get(name)


def get(name: str) -> type:
  """The experiment class of a name that the user typed; the current directory is put in front of sys.path.

  It is a subclass of Experiment, or one that an extension recognizes and adapts.

  Raises:
    UnknownExperimentError: there is no such module or class; the message has the nearest names.
    UserError: the class is not an experiment, its module fails when it is imported (the message has the module's own
      error and line), or two packages register the module's name.
  """
  try:
    return _registry.get(name) or find_class(name, is_typed=True)
  except UnknownExperimentError:
    for short, whole in (pair for kind in extensions.kinds() for pair in kind.short_names):
      if name.startswith(short):
        return find_class(f'{whole}{name.removeprefix(short)}', is_typed=True)
    raise


def split_name(name: str) -> tuple[str, str]:
  """The module and the class of a name."""
  if len(name) > _MAX_NAME_LENGTH:  # to look for the nearest name takes time that is quadratic in the length
    raise UnknownExperimentError(
      f'unknown experiment {name[:60]!r}...: a name has at most {_MAX_NAME_LENGTH} characters, and this one '
      f'{len(name)}.'
    )
  module_name, _, class_name = name.rpartition('.')
  if not module_name or not all(part.isidentifier() for part in name.split('.')):
    raise _unknown(name)
  return module_name, class_name


def find_class(name: str, *, is_typed: bool) -> type:
  """Imports what `get` or a saved config (not `is_typed`) names."""
  module_name, class_name = split_name(name)
  module = _find_module(name, module_name, in_current_directory=is_typed)
  # A name in a file meets no module's own __getattr__, which might import others, except for our lazy exports.
  may_be_lazy = is_typed or module_name.partition('.')[0] == 'spmd_tasks'
  cls = getattr(module, class_name, None) if may_be_lazy else vars(module).get(class_name)
  if cls is None:
    near = difflib.get_close_matches(class_name, _experiment_names(module), n=3, cutoff=0.5)
    if is_typed and hasattr(module, '__path__') and importlib.util.find_spec(name):  # its class is missing
      module_name, near = name, _experiment_names(import_module(name, name))[:3]
    raise _unknown(name, [f'{module_name}.{other}' for other in near])
  if not is_experiment(cls) and foreign_kind(cls) is None:
    others = ''.join(f', or of an experiment of {kind.name}' for kind in extensions.kinds())
    raise UserError(
      f'{name} is not an experiment: --exp takes the name of a subclass of spmd_tasks.experiment.Experiment{others}.'
    )
  return cls


def name_of(cls: type) -> str:
  """The name under which `get` finds the class in a new process, whichever of its names it was asked for by."""
  package, _, module = cls.__module__.rpartition('.')
  if package == _EXPERIMENTS:
    return f'{module}.{cls.__name__}'
  is_ours = cls.__module__.startswith('spmd_tasks.')
  return f'{public_module_of(cls) if is_ours else cls.__module__}.{cls.__name__}'


def _find_module(name: str, module_name: str, *, in_current_directory: bool) -> ModuleType:
  if '.' not in module_name:  # a registered name, which nothing in the current directory shadows
    if is_own_module(module_name):
      return import_module(name, f'{_EXPERIMENTS}.{module_name}')
    modules = sorted(modules_of_others().get(module_name, []))
    if len(modules) > 1:
      raise UserError(
        f'experiment {name} is ambiguous: {" and ".join(modules)} are both registered as {module_name!r}: write for '
        f'example {modules[0]}.{name.rpartition(".")[2]}.'
      )
    if modules:
      return import_module(name, modules[0])
  if in_current_directory and '' not in sys.path:
    add_to_search_path([Path.cwd()])
  # Parents are imported one by one: a parent that is missing means "no such name", one that fails means a bug in it.
  parts = module_name.split('.')
  for end in range(1, len(parts) + 1):
    prefix = '.'.join(parts[:end])
    try:
      spec = importlib.util.find_spec(prefix)
    except (ImportError, ValueError):
      spec = None
    if spec is None:
      from spmd_tasks.config.listing import with_other_part

      raise _unknown(name, with_other_part(name, end - 1))
    if spec.origin and Path(spec.origin).parent == DIRECTORY:  # experiments.lm, in our checkout
      prefix = f'{_EXPERIMENTS}.{Path(spec.origin).stem}'
    module = import_module(name, prefix)
  return module


def is_registered(name: str) -> bool:
  """Whether a new process finds the experiment without being told where, as one of this or an installed package."""
  module = name.rpartition('.')[0]
  known = is_own_module(module) or module in modules_of_others() or module in registered_modules()
  return known or module.startswith('spmd_tasks.')


def registered_modules() -> set[str]:
  """The modules that other packages register."""
  return {module.partition(':')[0] for modules in modules_of_others().values() for module in modules}


def import_module(name: str, module_name: str) -> ModuleType:
  """Imports the module of an experiment `name`; a UserError has the module's own error and line."""
  try:
    for kind in extensions.kinds() if not module_name.startswith('spmd_tasks.') else ():
      if kind.before_import is not None:
        extensions.call(kind.before_import, module_name)
    return importlib.import_module(module_name)
  except Exception as error:
    from spmd_tasks.user_code import place_of_error

    remedy = 'install what is missing, or correct' if isinstance(error, ModuleNotFoundError) else 'correct'
    raise UserError(
      f'experiment {name} cannot be loaded: importing {module_name} fails with {type(error).__name__}: {error} '
      f'({place_of_error(error)}); {remedy} that module.'
    ) from error


def is_experiment(value: object) -> bool:
  """Whether a value is a subclass of Experiment."""
  from spmd_tasks.experiment import Experiment  # imports JAX

  return inspect.isclass(value) and issubclass(value, Experiment)


def foreign_kind(value: object) -> extensions.ExperimentKind | None:
  """The kind of experiments that a value is a class of; None for our own, and for all else."""
  return next((kind for kind in extensions.kinds() if extensions.call(kind.recognizes, value)), None)


def _experiment_names(module: ModuleType) -> list[str]:
  return [
    key
    for key, value in vars(module).items()
    if (is_experiment(value) or foreign_kind(value)) and value.__module__ == module.__name__
  ]


def _unknown(name: str, near: Sequence[str] = ()) -> UnknownExperimentError:
  from spmd_tasks.config.listing import unknown_sentence

  return UnknownExperimentError(unknown_sentence(name, near, _registry))


def add_to_search_path(directories: Iterable[str | os.PathLike[str]]) -> list[Path]:
  """Puts directories in front of sys.path, the first one first; returns them as absolute paths.

  Raises a UserError: there is no such directory.
  """
  resolved = []
  for directory in directories:
    path = Path(directory).expanduser()
    if not path.is_dir():
      raise UserError(f'--experiment_path {directory} is not a directory: name the one that holds your modules.')
    resolved.append(path.resolve())
  missing = [str(path) for path in resolved if str(path) not in sys.path]
  if missing:
    sys.path[:0] = missing
    importlib.invalidate_caches()
  return resolved


def is_origin(directory: Path) -> bool:
  """Whether a directory always means the same one: absolute, without links, and none of a process or a device."""
  is_kernels = str(directory).startswith(('/proc/', '/dev/', '/sys/'))
  return directory.is_absolute() and directory.is_dir() and directory.resolve() == directory and not is_kernels


def symbol_of(value: Any) -> str:
  """The name of a class or function as `package:QualName`, such as `jax:relu`, whatever private module defines it."""
  return f'{public_module_of(value)}:{value.__qualname__}'


def current_symbol(symbol: str) -> str:
  """Returns today's name of a class of ours that has moved and is still exported by its former package."""
  module, _, name = symbol.partition(':')
  if not module.startswith('spmd_tasks.') or name not in _loaded(module).get('__all__', ()):
    return symbol
  try:
    return symbol_of(getattr(sys.modules[module], name))
  except ImportError:  # it needs an extra, and whatever needs the class says so
    return symbol


def public_module_of(value: Any) -> str:
  """The nearest package around a class or function that exports it by its own name, else its module.

  Of the module all up to the first private part counts.
  """
  module = value.__module__ or 'builtins'
  name = value.__qualname__.partition('.')[0]
  public = module.partition('._')[0]
  outermost = _loaded(module).get(name)
  packages = public.split('.') if public != module else public.split('.')[:-1]
  for end in range(len(packages), 0, -1):
    package = '.'.join(packages[:end])
    if outermost is not None and _exports(package, name, outermost):
      return package
  return public


def _exports(package: str, name: str, value: Any) -> bool:
  found = _loaded(package)
  if name in found:
    return found[name] is value
  return name in found.get('__all__', ()) and getattr(sys.modules[package], name, None) is value  # a lazy export


def _loaded(module: str) -> dict[str, Any]:
  """The names in a module that was imported already; nothing is imported."""
  return vars(sys.modules[module]) if module in sys.modules else {}
