"""Resolves an experiment and its overrides to one config, encodes it as JSON, and builds the Job.

    resolved = resolve('lm.StdlibTiny', ['num_layers=4', 'task.learner.clip_global_norm=0.5'])
    job = resolved.build()

Overrides of an experiment's fields are applied before `task()`, `train_input()` and the other methods are called, so
they see the new values. Overrides of `task`, `train_input`, `eval_inputs.<name>` and `decode_inputs.<name>` change the
configs that the methods returned.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import functools
import inspect
import os
from pathlib import Path
import types
from typing import Any

import fiddle as fdl

from spmd_tasks import inputs, references
from spmd_tasks.config import registry
from spmd_tasks.config.encoding import encode, encode_field, show
from spmd_tasks.config.refusals import refuse_node, refuse_path, refuse_value
from spmd_tasks.config.tree import (
  DROP,
  UNSET,
  Field,
  apply_changes,
  check_buildable,
  check_numbers,
  copy_config,
  fields_of,
  is_node,
  walk,
  without_foreign_configs,
)
from spmd_tasks.config.values import is_of_type, parse_value, type_of_field
from spmd_tasks.errors import JobError, UserError, own_code_errors
from spmd_tasks.experiment import Experiment, Job
from spmd_tasks.extensions import call, extensions, kind_of, load
from spmd_tasks.inputs.base import is_input

ConfigPath = tuple[str, ...]
Prepare = Callable[[Experiment], None]
PARTS = ('task', 'train_input', 'eval_inputs', 'decode_inputs')
# The fields that are needed to connect the processes, before an experiment of another framework is adapted.
TIMEOUTS = ('first_step_timeout_s',)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResolvedConfig:
  """An experiment with all overrides applied, before its parts are built."""

  name: str
  experiment: Experiment
  parts: dict[str, Any]  # by PARTS: Fiddle configs or built objects; for the last two, dicts of them by name
  overrides: dict[str, Any]  # the user's overrides by path, as JSON
  code_directories: tuple[Path, ...] = ()  # where the functions are that the config may name (references.py)

  def build(self) -> Job:
    """Builds all parts together, so that a config that they share gives one shared object.

    Raises a UserError: a part refuses its fields, or its own code fails; the message begins with its config path.
    """
    try:
      with own_code_errors(f'building {self.name}'):
        kind = kind_of(type(self.experiment))
        if kind is None or kind.build is None:
          has_configs = any(isinstance(field.value, fdl.Buildable) for _, field in walk(self.parts))
          built = fdl.build(without_foreign_configs(self.parts)) if has_configs else dict(self.parts)
        else:
          built = call(kind.build, self.experiment, self.parts)
    except UserError as error:
      raise _without_fiddle_context(error, str(error)) from error
    except _VALUE_ERRORS as error:  # from a value whose type or size the part does not check
      if 'Fiddle context:' not in str(error) or _wants_tracebacks():
        raise
      raise _without_fiddle_context(error, f'its fields give {_describe(error)}') from error

    def as_input(path: str, cfg: Any, data: Any) -> Any:
      return _as_input(path, data, repeats=path == 'train_input', again=functools.partial(fdl.build, cfg))

    built['train_input'] = as_input('train_input', self.parts['train_input'], built['train_input'])
    configs = self.parts['eval_inputs']
    built['eval_inputs'] = {
      name: as_input(f'eval_inputs.{name}', configs[name], data) for name, data in built['eval_inputs'].items()
    }
    return Job(name=self.name, experiment=self.experiment, code_directories=self.code_directories, **built)


def resolve(
  experiment: str | type[Experiment],
  overrides: Sequence[str] = (),
  prepare: Prepare | None = None,
  experiment_path: Sequence[str | os.PathLike[str]] = (),
) -> ResolvedConfig:
  """Resolves an experiment with `path=value` overrides.

  Args:
    experiment: its name or class.
    overrides: of two overrides of a path, the later one wins.
    prepare: called with the experiment before its methods are called, which may ask JAX for its devices. If an
      extension adapts the experiment, which may ask as well, `prepare` is first called with an experiment that has only
      the timeouts, and then again.
    experiment_path: directories of modules, which are prepended to sys.path.

  Raises a UserError: the experiment or a path is unknown, a value has another type, or fields contradict each other.
  """
  directories = registry.add_to_search_path(experiment_path)
  with contextlib.suppress(OSError):  # the current directory was deleted
    directories.append(Path.cwd().resolve())
  cls = registry.get(experiment) if isinstance(experiment, str) else experiment

  def timeouts() -> dict[str, Any]:
    split = [split_override(override) for override in overrides]
    own = fdl.Config(Experiment)
    return {path[0]: parse_override(own, path, text) for path, text in split if len(path) == 1 and path[0] in TIMEOUTS}

  directories += references.directories_of(cls)
  cls = adapted(cls, timeouts, prepare)
  return resolve_changed(cls, fdl.Config(cls), {}, overrides, prepare=prepare, code_directories=directories)


def to_json(resolved: ResolvedConfig) -> dict[str, Any]:
  """Returns, as strict JSON, the experiment's name, its overrides, and the value of every field by path."""
  config = {path: encode_field(field.value) for path, field in walk(_root_of(resolved.experiment, resolved.parts))}
  saved = {'experiment': resolved.name, 'overrides': dict(resolved.overrides), 'config': dict(sorted(config.items()))}
  origin = _origins(resolved)
  return saved | {'origin': origin} if origin else saved


def _origins(resolved: ResolvedConfig) -> list[str]:
  """Returns the directories from which a later command of the same user may import the job's modules."""
  names = [] if registry.is_registered(resolved.name) else [type(resolved.experiment).__module__]
  origins = [root for name in names if (root := references.import_root(name)) is not None]
  for path, field in walk(_root_of(resolved.experiment, resolved.parts)):
    for name in modules_in(tuple(path.split('.')), field.value):
      module = name.partition(':')[0]
      places = [place for place in resolved.code_directories if references.is_below(module, [place])]
      origins += [place.parent if references.is_installed(place.parent) else place for place in places[:1]]
  return [str(path) for path in dict.fromkeys(origins) if registry.is_origin(path)]


def modules_in(path: ConfigPath, value: Any) -> Iterator[str]:
  """Yields the modules and functions (`module:name`) that the value of a field names.

  Only the `fields_of_modules` of extensions name any. A text without a colon is a module only if it is in a list.
  """
  fields = {name for extension in extensions() for name in extension.fields_of_modules}
  if path[-1] not in fields:
    return
  stack = [(value, False)]
  while stack:
    value, is_listed = stack.pop()
    if isinstance(value, str):
      if '://' not in value and (':' in value or is_listed):
        yield value
    elif isinstance(value, Mapping):
      stack += [(item, False) for pair in value.items() for item in pair]
    elif isinstance(value, tuple | list | set | frozenset):
      stack += [(item, True) for item in value]


def resolve_changed(
  cls: type[Experiment],
  config: fdl.Config,
  part_changes: Mapping[ConfigPath, Any],
  overrides: Sequence[str],
  *,
  earlier: Mapping[str, Any] = types.MappingProxyType({}),
  prepare: Prepare | None = None,
  check: Callable[[dict[ConfigPath, Any]], dict[ConfigPath, Any]] = dict,
  code_directories: Sequence[Path] = (),
) -> ResolvedConfig:
  """Applies overrides to an experiment's `config`, and `part_changes` and overrides to the parts that it returns.

  Args:
    earlier: the overrides in the saved config, as JSON.
    prepare: as in `resolve`.
    check: returns the values of overrides, or raises a UserError for one of them.
    code_directories: for the ResolvedConfig.
  """
  changes, on_parts = _own_changes(cls, config, overrides)
  changes = check(changes)
  experiment = build_experiment(cls, apply_changes(config, changes))
  if prepare is not None:
    prepare(experiment)
  try:
    parts = parts_of(experiment, config.__arguments__)
  except UserError:  # perhaps because the name of a field is misspelled
    for path, text in on_parts:
      if path[0] not in PARTS:
        parse_override(_root_of(experiment, {}), path, text)
    raise
  parts = apply_changes(parts, _check_paths(parts, part_changes))
  # The tree includes the experiment's fields, for the nearest names in errors.
  root = _root_of(experiment, parts)
  changed_parts = check({path: parse_override(root, path, text) for path, text in on_parts})
  parts = apply_changes(parts, changed_parts)
  # Without a subclass's own fields, whose seeds may have any size.
  check_numbers({field.name: getattr(experiment, field.name) for field in dataclasses.fields(Experiment)} | parts)
  kind = kind_of(cls)
  if kind is None or kind.build is None:
    check_buildable(parts)
  set_now = {'.'.join(path): encode(value) for path, value in (changes | changed_parts).items()}
  return ResolvedConfig(
    name=registry.name_of(cls),
    experiment=experiment,
    parts=parts,
    overrides=dict(earlier) | set_now,
    code_directories=tuple(dict.fromkeys(code_directories)),
  )


def resolve_experiment(
  experiment: str | type[Experiment],
  overrides: Sequence[str] = (),
  experiment_path: Sequence[str | os.PathLike[str]] = (),
) -> Experiment:
  """Returns an experiment with the overrides of its own fields, without its parts, which may ask JAX for its devices.

  Arguments and errors are as in `resolve`.
  """
  registry.add_to_search_path(experiment_path)
  cls = adapted(registry.get(experiment) if isinstance(experiment, str) else experiment, dict, None)
  changes, _ = _own_changes(cls, fdl.Config(cls), overrides)
  return build_experiment(cls, apply_changes(fdl.Config(cls), changes))


def _own_changes(
  cls: type[Experiment], config: fdl.Config, overrides: Sequence[str]
) -> tuple[dict[ConfigPath, Any], list[tuple[ConfigPath, str]]]:
  """Returns the values that overrides give to the experiment's own fields, and the overrides of its parts."""
  split = [((cls._renamed.get(path[0], path[0]), *path[1:]), text) for path, text in map(split_override, overrides)]
  for path, _ in split:
    cls.refuse_removed(path[0], fields_of(config))
  changes = {path: parse_override(config, path, text) for path, text in split if path[0] in fields_of(config)}
  return changes, [(path, text) for path, text in split if path[0] not in fields_of(config)]


def adapted(cls: type, timeouts: Callable[[], Mapping[str, Any]], prepare: Prepare | None) -> type[Experiment]:
  """Returns the class itself, or the subclass of Experiment to which an extension adapts it, after `prepare`."""
  kind = None if registry.is_experiment(cls) else registry.foreign_kind(cls)
  if kind is None:
    return cls
  if prepare is not None:
    prepare(load(kind.base)(**timeouts()))
  return call(kind.adapt, cls)


def build_experiment(cls: type, config: fdl.Config) -> Experiment:
  if inspect.isabstract(cls):
    missing = ', '.join(f'{name}()' for name in sorted(getattr(cls, '__abstractmethods__', ())))
    raise UserError(f'experiment {registry.name_of(cls)} does not define {missing}: define it, or choose a subclass.')
  for name, field in fields_of(config).items():
    if field.value is UNSET:
      raise UserError(
        f'experiment {registry.name_of(cls)} has no value for its field {name}: give it one in the class, or '
        f'--set {name}=...'
      )
  what = f'creating {registry.name_of(cls)}'
  with _field_errors(what, config.__arguments__), own_code_errors(what):
    return cls(**config.__arguments__)


def parts_of(experiment: Experiment, changed: Iterable[str]) -> dict[str, Any]:
  """Returns the parts from the methods of an experiment; `changed` are the fields that have been set."""
  parts = {}
  for name in PARTS:
    what = f'{name}() of {registry.name_of(type(experiment))}'
    with _field_errors(what, changed), own_code_errors(what, part=experiment):
      parts[name] = getattr(experiment, name)()
    if name.endswith('_inputs'):
      if not isinstance(parts[name], Mapping):
        raise UserError(
          f"{name}() returned {show(encode(parts[name]))}: return a dict by name, such as {{'valid': ...}}."
        )
      parts[name] = dict(parts[name])
      if name == 'eval_inputs':
        parts[name] = {key: _unbuilt_input(experiment, f'{name}.{key}', data) for key, data in parts[name].items()}
  parts['train_input'] = _unbuilt_input(experiment, 'train_input', parts['train_input'])
  return copy_config(parts)


def _unbuilt_input(experiment: Experiment, path: str, data: Any) -> Any:
  """Returns a config unchanged, and anything else as an Input."""
  method, _, key = path.partition('.')

  def again() -> Any:  # for data that can be read only once
    returned = getattr(experiment, method)()
    return returned[key] if key else returned

  if isinstance(data, fdl.Buildable):
    return data
  return _as_input(path, data, repeats=not key, again=again)


def _as_input(path: str, data: Any, *, repeats: bool, again: Callable[[], Any]) -> Any:
  """Returns data as an Input; `again` returns the data once more."""
  if is_input(data):
    return data
  return inputs.as_input(path, data, repeats=repeats, again=again)  # a lazy export: plain data are rare


def _root_of(experiment: Experiment, parts: Mapping[str, Any]) -> dict[str, Any]:
  return {name: field.value for name, field in fields_of(experiment).items()} | dict(parts)


_VALUE_ERRORS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


@contextlib.contextmanager
def _field_errors(what: str, changed: Iterable[str]) -> Iterator[None]:
  """Turns an error from an unchecked value into a UserError that names the fields.

  `changed` are the fields that have been set; if there are none, the error is a bug and is raised unchanged.
  """
  try:
    yield
  except (UserError, JobError) as error:
    if isinstance(error, UserError) and 'Fiddle context:' in str(error):  # a Task built the configs in its fields
      raise _without_fiddle_context(error, str(error)) from error
    raise
  except _VALUE_ERRORS as error:
    names = sorted(changed)
    if not names or _wants_tracebacks():
      raise
    more = f' and {len(names) - 8} more' if len(names) > 8 else ''
    raise UserError(
      f'{what} fails with {_describe(error)}: correct the fields that were set ({", ".join(names[:8])}{more}).'
    ) from error


def _describe(error: Exception) -> str:
  message = ' '.join(str(error).partition('\n\nFiddle context:')[0].split())
  return f'{type(error).__name__}: {message[:300]} (JAX_TRACEBACK_FILTERING=off shows the traceback)'


def _wants_tracebacks() -> bool:
  return os.environ.get('JAX_TRACEBACK_FILTERING') == 'off'


def _without_fiddle_context(error: Exception, message: str) -> UserError:
  """Returns a UserError with the message `task.model: <message>`, without Fiddle's context."""
  message = message.partition('\n\nFiddle context:')[0]
  context = f'{error}{error.__cause__}'.partition('\n\nFiddle context:')[2]
  _, _, path = context.partition(' at <root>')
  path = path.partition(' with positional')[0]
  path = path.replace("']", '').replace("['", '.').replace('[', '.').replace(']', '').strip('.')
  return UserError(f'{path}: {message}' if path else message)


def _check_paths(root: Any, changes: Mapping[ConfigPath, Any]) -> dict[ConfigPath, Any]:
  """Returns the changes whose paths exist in `root`; a missing path is an error, unless the change is DROP."""
  present = dict(walk(root))
  missing = [path for path, value in changes.items() if '.'.join(path) not in present]
  lost = ['.'.join(path) for path in missing if changes[path] is not DROP]
  if lost:
    raise UserError(
      f'the overrides remove {", ".join(lost)}, which the saved config sets: leave these overrides out, or start a new '
      'run.'
    )
  return {path: value for path, value in changes.items() if path not in missing}


def split_override(override: str) -> tuple[ConfigPath, str]:
  """Splits `path=value` into the names in the path and the text of the value. Raises a UserError for other forms."""
  path, equals, text = override.partition('=')
  if not equals or not all(path.strip().split('.')):
    words = [] if equals else override[:80].lstrip(' -').replace(':', ' ').split()
    example = f'{words[0] if words else "num_train_steps"}=100'
    raise UserError(f'{override[:80]!r} is not an override: write path=value, for example {example}.')
  return tuple(path.strip().split('.')), text.strip()


def parse_override(root: Any, path: ConfigPath, text: str) -> Any:
  """Parses `text` as a value for the field of `root` at `path`. Raises a UserError with the remedy."""
  field = find_field(root, path)
  name = '.'.join(path)
  present = None if field.value is UNSET else field.value
  kind = type_of_field(path[-1], field.annotation, None if is_node(present) else present)
  if is_node(present):
    if text == 'None' and kind is not Any and is_of_type(None, kind):
      return None

    refuse_node(present, name, text)
  try:
    return parse_value(text, kind)
  except ValueError:
    refuse_value(field, kind, name, text)


def find_field(root: Any, path: ConfigPath) -> Field:
  """Returns the field of `root` at `path`. Raises a UserError with the nearest names if there is none."""
  node, field = root, None
  for depth, name in enumerate(path):
    fields = fields_of(node)
    if name not in fields:
      refuse_path(root, node, path, depth)
    field = fields[name]
    node = field.value
  assert field is not None
  return field
