"""The protocol by which other packages add to the core: modes, kinds of experiments, hooks of a training run, formats.

The core trains, evaluates and decodes. Everything else (serving, plans, tuning, the bridges) is a wing: a package that
the core never imports by name. A wing declares what it adds, and its pyproject.toml names the declaration:

    WING = Wing(name='census', modes=(Mode(name='census', run='census.counting:run', help='counts the weights'),))

    [project.entry-points."spmd_tasks.wings"]
    census = "census:WING"

Our own wings are found in the same way. Declarations are read whenever the binary starts, `--help` included, so the
module with a declaration imports nothing heavy: code is named as `module:function` and imported when it is called.
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

ENTRY_POINTS = 'spmd_tasks.wings'  # the group

# A function, or `module:function`, which is imported when it is called.
Reference = str | Callable[..., Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flag:
  """A flag of the binary, `--name`, as argparse knows it; several modes may have one of the same name and type.

  Attributes:
    name: without the dashes.
    help: what --help says.
    metavar: stands for the value.
    type: makes the value of its text.
    choices: the only values.
    is_switch: the flag takes no value and is True if it is given.
    may_differ: whether the processes of a job may give it differently, such as an address.
  """

  name: str
  help: str
  metavar: str | None = None
  type: Callable[[str], Any] = str
  choices: tuple[str, ...] | None = None
  is_switch: bool = False
  may_differ: bool = False


CHECKPOINT_STEP = Flag(name='checkpoint_step', type=int, metavar='N', help='a step; default: the newest')
ACCEPT_CONFIG_CHANGES = Flag(
  name='accept_config_changes', is_switch=True, help='resume with a changed config; its numbers will differ'
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mode:
  """What `--mode NAME` runs.

  Attributes:
    name: of the mode.
    help: what it does, in a few words.
    run: `(Command) -> exit code`, see command.py.
    flags: the flags that this mode reads, beside those that every mode reads. Another mode refuses them.
    remedies: by flag of other modes: what to do instead of giving it to this mode.
    check: `(argparse.Namespace) -> None`, raises a UserError for flags that do not go together; imports nothing heavy.
    needs_directory: whether the mode cannot do without --job_log_dir.
    extra: the extra of spmd-tasks that installs `packages`.
    packages: the packages that must be importable.
  """

  name: str
  help: str
  run: Reference
  flags: tuple[Flag, ...] = ()
  remedies: Mapping[str, str] = dataclasses.field(default_factory=dict)
  check: Reference | None = None
  needs_directory: bool = False
  extra: str | None = None
  packages: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wing:
  """What a package adds to the core.

  Attributes:
    name: of the wing, for messages.
    modes: of the binary.
    train_hooks: `(Job) -> sequence of hooks` of the training loop (programs/train.py). It is called for every training
      job, so it finds out quickly whether the job needs any, and imports what they need only then.
  """

  name: str
  modes: tuple[Mode, ...] = ()
  train_hooks: Reference | None = None


@functools.cache
def wings() -> tuple[Wing, ...]:
  """The wings of all installed packages. One whose declaration fails is named on stderr and left out."""
  found = []
  for point in sorted(metadata.entry_points(group=ENTRY_POINTS), key=lambda point: point.name):
    try:
      wing = point.load()
      assert isinstance(wing, Wing), f'{wing!r} is no Wing'
    except Exception as error:  # one broken package must not take the others' modes away
      print(f'spmd-tasks: wing {point.name} ({point.value}) cannot be loaded: {error}', file=sys.stderr)
    else:
      found.append(wing)
  return tuple(found)


def call(reference: Reference, *args: Any, **kwargs: Any) -> Any:
  """Imports a function and calls it."""
  return load(reference)(*args, **kwargs)


def load(reference: Reference) -> Any:
  """Returns a function, or imports what `module:name` names."""
  if not isinstance(reference, str):
    return reference
  module, _, name = reference.partition(':')
  return getattr(importlib.import_module(module), name)


def train_hooks(job: Any) -> Iterator[Any]:
  """Yields the hooks that wings add to the training of a job."""
  for wing in wings():
    if wing.train_hooks is not None:
      yield from call(wing.train_hooks, job)


def require(extra: str, *packages: str, wants: str) -> None:
  """Raises a UserError with the command that installs an extra if one of its packages cannot be imported.

  Args:
    extra: of spmd-tasks, such as 'serve'.
    packages: by the names under which they are imported.
    wants: what needs them, such as '--mode serve'.
  """
  for package in packages:
    if package not in sys.modules and importlib.util.find_spec(package) is None:
      raise UserError(f"{wants} needs {package}, which is not installed: pip install 'spmd-tasks[{extra}]'.")
