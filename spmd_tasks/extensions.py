"""Defines how packages extend the core: with modes, kinds of experiments, hooks of a training run, and formats.

The core trains, evaluates and decodes. Everything else (serving, plans, tuning, the bridges) is an extension: a package
that the core never imports by name. An extension declares what it adds, and its pyproject.toml names the declaration:

    COUNT = Mode(name='census', run='census.counting:run', help='counts the weights')
    EXTENSION = Extension(name='census', modes=(COUNT,))

    [project.entry-points."spmd_tasks.extensions"]
    census = "census:EXTENSION"

Our own extensions are found in the same way. The binary reads all declarations at every start, even for `--help`, so a
module with a declaration must import nothing heavy: it names code as `module:function`, which is imported when it is
called.
"""

from collections.abc import Callable, Iterator, Mapping
import dataclasses
import functools
import importlib
from importlib import metadata
import importlib.util
import sys
from typing import Any

from spmd_tasks.errors import UserError

ENTRY_POINTS = 'spmd_tasks.extensions'  # the group

# A function, or `module:function`, which is imported when it is called.
Reference = str | Callable[..., Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flag:
  """A flag of the binary, as argparse defines it; several modes may have a flag of the same name and type."""

  name: str  # without the dashes
  help: str
  metavar: str | None = None
  type: Callable[[str], Any] = str
  choices: tuple[str, ...] | None = None
  is_switch: bool = False  # takes no value, and is True if given
  bare: Any = None  # the value of the flag if it is given without one, not a str; None: it needs a value
  repeats: bool = False  # may be repeated: its value is a list, to which `--NAME.KEY=VALUE` adds `KEY=VALUE`
  may_differ: bool = False  # between the processes of a job, such as an address


CHECKPOINT_STEP = Flag(name='checkpoint_step', type=int, metavar='N', help='a step; default: the newest')
ACCEPT_CONFIG_CHANGES = Flag(
  name='accept_config_changes', is_switch=True, help='resume with a changed config; its numbers will differ'
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mode:
  """What `--mode NAME` runs."""

  name: str
  help: str
  run: Reference  # `(Command) -> exit code`, see command.py
  flags: tuple[Flag, ...] = ()  # only of this mode; flags.py defines the flags of every mode
  words: str = ''  # what the arguments without a flag are, such as 'DIR', which are then in `flags.words`; '': none
  remedies: Mapping[str, str] = dataclasses.field(default_factory=dict)  # what to do instead of giving another flag
  # `(argparse.Namespace) -> None`: raises a UserError for contradictory flags; imports nothing heavy.
  check: Reference | None = None
  needs_directory: bool = False  # whether the mode needs --job_log_dir
  prints_result: bool = False  # a failed write to stdout makes the command fail
  extra: str | None = None  # the extra of spmd-tasks that installs `packages`
  packages: tuple[str, ...] = ()  # must be importable


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
  """A format of weights of another program."""

  name: str  # of `init_from = NAME:PLACE` and of `--mode export --format NAME`
  help: str
  # `(place, init_from_step) -> Origin` (runtime/origin.py): the weights of a new job with `init_from = NAME:PLACE`.
  origin: Reference | None = None
  # `(OpenJob, target, *, step, mesh) -> exit code`: writes a checkpoint of a job to the path `target`.
  export: Reference | None = None
  # `(directory) -> (experiment, overrides) or None`: the experiment with which `spmd_tasks.load` loads a directory.
  recognize: Reference | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExperimentKind:
  """Experiments that do not subclass Experiment, such as another framework's."""

  name: str  # for messages: 'an experiment of NAME'
  base: str  # `module:Class`, the subclass of Experiment that all adapted experiments subclass
  recognizes: Reference  # `(object) -> bool`: whether an object is the class of such an experiment
  adapt: Reference  # `(class) -> subclass of base`; may ask JAX for its devices
  before_import: Reference | None = None  # `(module) -> None`, called before an experiment's module is imported
  # `(experiment, parts) -> built parts`: builds `task`, `train_input`, `eval_inputs` and `decode_inputs` in place of
  # Fiddle, from what the methods of the experiment return.
  build: Reference | None = None
  # `(Command, OpenJob) -> exit code` (command.py): runs --mode decode and decode_once for experiments whose inputs are
  # not prompts, in place of programs/decode.py.
  decode: Reference | None = None
  short_names: tuple[tuple[str, str], ...] = ()  # (abbreviation of the start of a name, what it abbreviates)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Extension:
  """What a package adds to the core: modes, kinds of experiments, formats of weights, flags and hooks."""

  name: str
  modes: tuple[Mode, ...] = ()
  kinds: tuple[ExperimentKind, ...] = ()
  formats: tuple[Format, ...] = ()
  # Flags of every mode. `expand`, `(argparse.Namespace) -> exit code or None`, is called for every command and
  # translates them to the core's flags, such as a gin file to --exp and --set. An exit code ends the command.
  flags: tuple[Flag, ...] = ()
  expand: Reference | None = None
  # What to write instead of another program's flag (without dashes, or FLAG=CHOICE). The sentence ends the error about
  # the unknown flag.
  foreign_flags: Mapping[str, str] = dataclasses.field(default_factory=dict)
  unbuilt_configs: tuple[str, ...] = ()  # packages whose Fiddle configs are built by the objects that hold them
  keeps_numbers: Reference | None = None  # `(path) -> bool`: whether a field of the config changes no numbers
  fields_of_process: tuple[str, ...] = ()  # names of fields that may differ between the processes of a job
  # Names of fields that name modules to import, or functions to call as `module:name`. A saved config alone must not
  # decide them (references.py).
  fields_of_modules: tuple[str, ...] = ()
  packages: tuple[str, ...] = ()  # installed packages whose modules, such as experiments, a saved config may name
  # `(Job, mode, directory) -> Job`, called for every job: returns the job that the mode runs, changed or not. Raises a
  # UserError if the mode cannot run the job in the directory.
  prepare_job: Reference | None = None
  # `(Job) -> sequence of TrainHooks` (programs/hooks.py), called for every training job. Must decide quickly whether
  # the job needs hooks, and import only then.
  train_hooks: Reference | None = None


@functools.cache
def extensions() -> tuple[Extension, ...]:
  """Returns the extensions of all installed packages; an extension that cannot be loaded is reported and skipped."""
  loaded = []
  for point in sorted(metadata.entry_points(group=ENTRY_POINTS), key=lambda point: point.name):
    try:
      extension = point.load()
      assert isinstance(extension, Extension), f'{extension!r} is not an Extension'
    except Exception as error:  # a broken package must not disable the others' modes
      print(f'spmd-tasks: extension {point.name} ({point.value}) cannot be loaded: {error}', file=sys.stderr)
    else:
      loaded.append(extension)
  return tuple(loaded)


def call(reference: Reference, *args: Any, **kwargs: Any) -> Any:
  """Imports a function and calls it."""
  return load(reference)(*args, **kwargs)


def load(reference: Reference) -> Any:
  """Returns a function; imports it if it is named as `module:name`."""
  if not isinstance(reference, str):
    return reference
  module, _, name = reference.partition(':')
  return getattr(importlib.import_module(module), name)


def formats() -> tuple[Format, ...]:
  """Returns the formats of all extensions."""
  return tuple(fmt for extension in extensions() for fmt in extension.formats)


def kinds() -> tuple[ExperimentKind, ...]:
  """Returns the kinds of experiments of all extensions."""
  return tuple(kind for extension in extensions() for kind in extension.kinds)


def kind_of(cls: type) -> ExperimentKind | None:
  """Returns the kind of an adapted experiment's class; imports nothing, as its base is imported already."""
  for kind in kinds():
    module, _, name = kind.base.partition(':')
    if module in sys.modules and issubclass(cls, getattr(sys.modules[module], name)):
      return kind
  return None


def expand(flags: Any) -> int | None:
  """Translates the flags of extensions to the core's; returns an exit code if the command ends there."""
  codes = (call(extension.expand, flags) for extension in extensions() if extension.expand is not None)
  return next((code for code in codes if code is not None), None)


def keeps_numbers(path: str) -> bool:
  """Returns whether an extension says that a field of the config changes no numbers."""
  return any(call(extension.keeps_numbers, path) for extension in extensions() if extension.keeps_numbers is not None)


def prepare_job(job: Any, mode: str, directory: Any) -> Any:
  """Returns the job that the extensions prepare for a mode. Raises a UserError if the mode cannot run it."""
  for extension in extensions():
    if extension.prepare_job is not None:
      job = call(extension.prepare_job, job, mode, directory)
  return job


def train_hooks(job: Any) -> Iterator[Any]:
  """Yields the hooks that extensions add to a training job."""
  for extension in extensions():
    if extension.train_hooks is not None:
      yield from call(extension.train_hooks, job)


def require(extra: str, *packages: str, wants: str) -> None:
  """Raises a UserError that says how to install an extra, if one of its packages is missing.

  Args:
    extra: an extra of spmd-tasks, such as 'serve'.
    packages: the packages' import names.
    wants: what needs them, such as '--mode serve'.
  """
  for package in packages:
    if package not in sys.modules and importlib.util.find_spec(package) is None:
      raise UserError(f"{wants} needs {package}, which is not installed: pip install 'spmd-tasks[{extra}]'.")
