"""Resolves an experiment and its overrides to one config, writes that as JSON, reads JSON back, and builds the Job.

    resolved = resolve('lm.StdlibTiny', ['num_layers=4', 'task.learner.clip_global_norm=0.5'])
    job = resolved.build()

An override of an experiment's field applies before `task()`, `train_input()` and the other methods are called, so that
they see the new value. An override of `task`, `train_input`, `eval_inputs.<name>` or `decode_inputs.<name>` changes the
config that the method returned.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import inspect
import json
import os
from typing import Any

import fiddle as fdl

from spmd_tasks import inputs
from spmd_tasks.config import registry
from spmd_tasks.config.encoding import decode, encode, encode_field, show
from spmd_tasks.config.overrides import Path, parse_override, split_override
from spmd_tasks.config.saved_config import SavedConfig, checked_config
from spmd_tasks.config.search_path import add_to_search_path, may_be_imported, origin_of, own_directory
from spmd_tasks.config.tree import (
  DROP,
  UNSET,
  apply_changes,
  check_buildable,
  check_numbers,
  copy_config,
  fields_of,
  is_node,
  walk,
  without_foreign_configs,
)
from spmd_tasks.config.values import describe_type, is_of_type, unwrap
from spmd_tasks.errors import UserError, naming_own_code
from spmd_tasks.experiment import MESH_FIELDS, Experiment, Job
from spmd_tasks.inputs.base import is_input
from spmd_tasks.wings import call, kind_of, load, wings

Prepare = Callable[[Experiment], None]
_PARTS = ('task', 'train_input', 'eval_inputs', 'decode_inputs')
# The timeouts of an experiment, which no experiment of another framework decides.
_TIMEOUTS = ('heartbeat_timeout_s', 'shutdown_timeout_s', 'first_step_timeout_s')


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResolvedConfig:
  """An experiment with all overrides applied, before its parts are built.

  `parts` contains the Fiddle configs (or built objects) `task`, `train_input`, `eval_inputs` and `decode_inputs` (the
  last two are dicts by name). `overrides` contains the values that the user set, by path, as JSON.
  """

  name: str
  experiment: Experiment
  parts: dict[str, Any]
  overrides: dict[str, Any]

  def build(self) -> Job:
    """Builds the parts, once and together: a config that is shared between them gives one shared object.

    Raises:
      UserError: a part refuses its fields, or its own code fails; the message begins with its config path.
    """
    try:
      with naming_own_code(f'building {self.name}'):
        kind = kind_of(type(self.experiment))
        if kind is None or kind.build is None:
          has_configs = any(isinstance(field.value, fdl.Buildable) for _, field in walk(self.parts))
          built = fdl.build(without_foreign_configs(self.parts)) if has_configs else dict(self.parts)
        else:
          built = call(kind.build, self.experiment, self.parts)
    except UserError as error:
      raise _without_fiddle_context(error) from error
    built['train_input'] = self._input('train_input', self.parts['train_input'], built['train_input'])
    built['eval_inputs'] = {
      name: self._input(f'eval_inputs.{name}', self.parts['eval_inputs'][name], each)
      for name, each in built['eval_inputs'].items()
    }
    return Job(name=self.name, experiment=self.experiment, **built)

  def _input(self, path: str, cfg: Any, built: Any) -> Any:
    """Returns an Input of what the config of an input has built, which may be plain data."""
    return _as_input(path, built, repeats=path == 'train_input', again=functools.partial(fdl.build, cfg))


def resolve(
  experiment: str | type[Experiment], overrides: Sequence[str] = (), prepare: Prepare | None = None
) -> ResolvedConfig:
  """Resolves an experiment, given by name or class, with `path=value` overrides; the later one of a path wins.

  Args:
    experiment: the name or class.
    overrides: each `path=value`.
    prepare: called with the experiment before its parts are made, which may ask JAX for the number of devices. Where a
      wing adapts the experiment, which may ask as well, this is called before, with one that has nothing but its
      timeouts, and with the experiment again.

  Raises:
    UserError: the experiment or a path is unknown, a value has another type, or fields contradict each other.
  """
  cls = registry.get(experiment) if isinstance(experiment, str) else experiment

  def timeouts() -> dict[str, Any]:
    split = [split_override(override) for override in overrides]
    own = fdl.Config(Experiment)
    return {path[0]: parse_override(own, path, text) for path, text in split if _is_timeout(path)}

  cls = _adapted(cls, timeouts, prepare)
  return _resolve(cls, fdl.Config(cls), {}, overrides, {}, prepare)


def to_json(resolved: ResolvedConfig) -> dict[str, Any]:
  """Returns strict JSON of the experiment's name, its overrides, and every field's value by path, with defaults."""
  config = {path: encode_field(field.value) for path, field in walk(_root_of(resolved.experiment, resolved.parts))}
  saved = {'experiment': resolved.name, 'overrides': dict(resolved.overrides), 'config': dict(sorted(config.items()))}
  origin = None if registry.is_registered(resolved.name) else origin_of(type(resolved.experiment))
  return saved if origin is None else saved | {'origin': origin}


def from_json(
  saved: Mapping[str, Any],
  overrides: Sequence[str] = (),
  experiment_path: Sequence[str | os.PathLike[str]] = (),
  prepare: Prepare | None = None,
) -> ResolvedConfig:
  """Resolves the config that `to_json` saved, with further overrides. `prepare`: as in `resolve`.

  Saved values replace the code's defaults of today. A field that the code added since then has its default. The file
  decides neither what is imported nor what is called: its experiment is registered, imported already, in a module
  below `experiment_path`, or where this user's own job found it (search_path.py), and every class and function comes
  from the experiment's own code.

  Raises:
    UserError: the experiment may not be imported; the JSON is not a saved config, a saved path does not exist any more,
      a value is not of its field's type, or the code now has another class, function or object at a path.
  """
  why_not = ''
  if isinstance(saved, SavedConfig) and not experiment_path:
    own, why_not = own_directory(saved.path, saved)
    experiment_path = [] if own is None else [own]
  saved = checked_config(saved)
  cls = registry.get_saved(saved['experiment'], experiment_path, why_not)

  def timeouts() -> dict[str, Any]:
    return {name: decode(saved['config'][name]) for name in _TIMEOUTS if name in saved['config']}

  cls = _adapted(cls, timeouts, prepare)
  config = fdl.Config(cls)
  is_part = {path: path.split('.')[0] in _PARTS for path in saved['config']}
  of_experiment = {path: value for path, value in saved['config'].items() if not is_part[path]}
  of_parts = {path: value for path, value in saved['config'].items() if is_part[path]}
  config = apply_changes(config, _refuse_modules(_changes_to(config, of_experiment), experiment_path))
  for name in MESH_FIELDS:
    if name in of_experiment:  # also a value that equals the bare default: the class's layout may give another one
      setattr(config, name, decode(of_experiment[name]))
  _leave_mesh_to_its_layout(cls, config)
  as_saved = _build_experiment(cls, config)
  if prepare is not None:
    prepare(as_saved)
  changes = _refuse_modules(_changes_to(_parts_of(as_saved), of_parts), experiment_path)
  return _resolve(cls, config, changes, overrides, saved['overrides'], None)


def _resolve(
  cls: type,
  config: fdl.Config,
  part_changes: Mapping[Path, Any],
  overrides: Sequence[str],
  earlier_overrides: Mapping[str, Any],
  prepare: Prepare | None,
) -> ResolvedConfig:
  split = [split_override(override) for override in overrides]
  on_experiment = [(path, text) for path, text in split if path[0] in fields_of(config)]
  on_parts = [(path, text) for path, text in split if path[0] not in fields_of(config)]
  changes = {path: parse_override(config, path, text) for path, text in on_experiment}
  experiment = _build_experiment(cls, apply_changes(config, changes))
  if prepare is not None:
    prepare(experiment)
  parts = _parts_of(experiment)
  parts = apply_changes(parts, _check_paths(parts, part_changes))
  # The experiment's fields are in the tree too, for the nearest names.
  root = _root_of(experiment, parts)
  changed_parts = {path: parse_override(root, path, text) for path, text in on_parts}
  parts = apply_changes(parts, changed_parts)
  # A subclass's own fields may be any numbers, such as how many tokens to train on; where a part has them, it counts.
  check_numbers({field.name: getattr(experiment, field.name) for field in dataclasses.fields(Experiment)} | parts)
  kind = kind_of(cls)
  if kind is None or kind.build is None:
    check_buildable(parts)
  given = {'.'.join(path): encode(value) for path, value in (changes | changed_parts).items()}
  return ResolvedConfig(
    name=registry.name_of(cls), experiment=experiment, parts=parts, overrides=dict(earlier_overrides) | given
  )


def _is_timeout(path: Path) -> bool:
  return len(path) == 1 and path[0] in _TIMEOUTS


def _adapted(cls: type, timeouts: Callable[[], Mapping[str, Any]], prepare: Prepare | None) -> type[Experiment]:
  """Returns a subclass of Experiment: the class itself, or what a wing makes of it after `prepare`."""
  kind = None if registry.is_experiment(cls) else registry.foreign_kind(cls)
  if kind is None:
    return cls
  if prepare is not None:
    prepare(load(kind.base)(**timeouts()))
  return call(kind.adapt, cls)


def _leave_mesh_to_its_layout(cls: type, config: fdl.Config) -> None:
  """Unsets the mesh fields that equal the values from `mesh`, so that overrides of `mesh` have an effect."""
  given = {name: getattr(config, name) for name in MESH_FIELDS if name in config.__arguments__}
  for name in given:
    delattr(config, name)
  filled = _build_experiment(cls, config)
  for name, value in given.items():
    if getattr(filled, name) != value:
      setattr(config, name, value)


def _build_experiment(cls: type, config: fdl.Config) -> Experiment:
  if inspect.isabstract(cls):
    missing = ', '.join(f'{name}()' for name in sorted(getattr(cls, '__abstractmethods__', ())))
    raise UserError(f'experiment {registry.name_of(cls)} does not define {missing}: define it, or name a subclass.')
  for name, field in fields_of(config).items():
    if field.value is UNSET:
      raise UserError(
        f'experiment {registry.name_of(cls)} has no value for its field {name}: give it one in the class, or '
        f'--set {name}=...'
      )
  with naming_own_code(f'making {registry.name_of(cls)}'):
    return cls(**config.__arguments__)


def _parts_of(experiment: Experiment) -> dict[str, Any]:
  parts = {}
  for name in _PARTS:
    with naming_own_code(f'{name}() of {registry.name_of(type(experiment))}', part=experiment):
      parts[name] = getattr(experiment, name)()
    if name.endswith('_inputs'):
      if not isinstance(parts[name], Mapping):
        raise UserError(
          f"{name}() returned {show(encode(parts[name]))}: return a dict by name, such as {{'valid': ...}}."
        )
      parts[name] = dict(parts[name])
      if name == 'eval_inputs':
        parts[name] = {key: _unbuilt_input(experiment, f'{name}.{key}', each) for key, each in parts[name].items()}
    elif parts[name] is None:
      raise UserError(f'{name}() of {registry.name_of(type(experiment))} returned None: return it, or its fdl.Config.')
  parts['train_input'] = _unbuilt_input(experiment, 'train_input', parts['train_input'])
  return copy_config(parts)


def _unbuilt_input(experiment: Experiment, path: str, given: Any) -> Any:
  """Returns a config, or an Input; data that can be read only once are asked of the experiment again."""
  method, _, key = path.partition('.')

  def again() -> Any:
    made = getattr(experiment, method)()
    return made[key] if key else made

  if isinstance(given, fdl.Buildable):
    return given
  return _as_input(path, given, repeats=not key, again=again)


def _as_input(path: str, given: Any, **how: Any) -> Any:
  return given if is_input(given) else inputs.as_input(path, given, **how)  # a lazy face: plain data are rare


def _root_of(experiment: Experiment, parts: Mapping[str, Any]) -> dict[str, Any]:
  return {name: field.value for name, field in fields_of(experiment).items()} | dict(parts)


def _changes_to(root: Any, saved: Mapping[str, Any]) -> dict[Path, Any]:
  """Returns the changes that give `root` the saved values."""
  present = dict(walk(root))
  changes: dict[Path, Any] = {}
  refused = []
  for path, value in saved.items():
    if path not in present:
      refused.append(f'{path} (saved as {show(value)}) does not exist any more')
      continue
    field = present[path]
    now = None if field.value is UNSET else encode_field(field.value)
    if field.value is not UNSET and json.dumps(now, sort_keys=True) == json.dumps(value, sort_keys=True):
      continue  # compared as text: 1, 1.0 and True are different values
    key = tuple(path.split('.'))
    keys_now, keys = _keys_of(now), _keys_of(value)
    if keys and keys <= keys_now:
      changes |= {(*key, name): DROP for name in keys_now - keys}
      continue
    try:
      decoded = decode(value, field.value)
    except ValueError:
      refused.append(f'{path} was {show(value)} and is {show(now)} now')
      continue
    kind = unwrap(field.annotation)
    if is_node(field.value) and kind is Any and (decoded is not None or path in _PARTS):
      refused.append(f'{path} was {show(value)} and is {show(now)} now')
    elif is_of_type(field.value, kind) and not is_of_type(decoded, kind):
      refused.append(f'{path} is {show(value)} and should be of type {describe_type(kind)}')
    else:
      changes[key] = decoded
  if refused:
    raise UserError(
      f'the saved config does not fit the code of today: {"; ".join(refused)}. Run it with the code that saved it, or '
      'start a new run.'
    )
  return changes


def _refuse_modules(changes: dict[Path, Any], experiment_path: Sequence[str | os.PathLike[str]]) -> dict[Path, Any]:
  """Returns the changes, or raises a UserError for a module in them that a file alone must not have imported."""
  fields = {name for wing in wings() for name in wing.fields_of_modules}
  for path, names in changes.items():
    for name in names if path[-1] in fields and isinstance(names, tuple | list) else ():
      if not may_be_imported(name, (), add_to_search_path(experiment_path)):
        raise UserError(
          f'the saved config names the module {name} at {".".join(path)}, and a file alone never decides what is '
          f'imported: {registry.remedy(name.partition(".")[0])}.'
        )
  return changes


def _keys_of(encoded: Any) -> set[str]:
  """Returns the keys of an encoded dict of nodes; an empty set for any other value."""
  return set(encoded.get('keys', ())) if isinstance(encoded, dict) else set()


def _check_paths(root: Any, changes: Mapping[Path, Any]) -> dict[Path, Any]:
  """Returns the changes whose paths exist in `root`; only a key that is to be dropped may be missing."""
  present = dict(walk(root))
  missing = [path for path, value in changes.items() if '.'.join(path) not in present]
  lost = ['.'.join(path) for path in missing if changes[path] is not DROP]
  if lost:
    raise UserError(
      f'the overrides remove {", ".join(lost)}, which the saved config sets to another value than the default: leave '
      'those overrides out or start a new run.'
    )
  return {path: value for path, value in changes.items() if path not in missing}


def _without_fiddle_context(error: UserError) -> UserError:
  """Returns the error with the message `task.model: <message of the part>`, without Fiddle's context."""
  message = str(error).partition('\n\nFiddle context:')[0]
  context = f'{error}{error.__cause__}'.partition('\n\nFiddle context:')[2]
  _, _, path = context.partition(' at <root>')
  path = path.partition(' with positional')[0]
  path = path.replace("']", '').replace("['", '.').replace('[', '.').replace(']', '').strip('.')
  return UserError(f'{path}: {message}' if path else message)
