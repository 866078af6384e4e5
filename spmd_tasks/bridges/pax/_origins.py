"""The states that a Pax experiment starts from when checkpoints are named: a job of Paxml, or parts of other jobs.

    --set continue_from=/jobs/pax          # weights, other variables, optimizer state and step, as Paxml would
    --set init_from=/jobs/pax              # weights and other variables, at step 0, with a new optimizer state

Modes that only read weights take them from either, with the averages that the optimizer keeps.

    task.train.init_from_checkpoint_rules = {
        '/jobs/old/checkpoints': tasks_lib.CheckpointLoadingRules(
            task_p=OldExperiment().task(), load_rules=[(r'params/decoder/lm/(.*)', 'params/lm/{}')])}

By rules, a variable, named by its path with slashes, takes the first rule of the first checkpoint whose pattern
matches at its start. A source that begins with `ema/` is the average of that weight. What no rule names keeps its new
value, and so does the optimizer's state unless a rule loads it. The checkpoints are Paxml's, or ours of a Pax
experiment, whose arrays have shapes: `task_p` and `input_specs_provider_p` are not looked at.
"""

from collections.abc import Callable, Iterable, Mapping
import dataclasses
import re
from typing import Any

from absl import logging
import jax
import jax.numpy as jnp

from spmd_tasks.bridges.pax._checkpoints import (
  PaxCheckpoint,
  StoredArray,
  checkpoint_format,
  is_complete,
  open_pax_checkpoint,
  read_arrays,
  read_pax_checkpoint,
)
from spmd_tasks.bridges.pax._task import pax_state
from spmd_tasks.checkpoints.arrays import damage_of, open_arrays
from spmd_tasks.checkpoints.checkpoint_directory import CheckpointDirectory
from spmd_tasks.checkpoints.manifest import CheckpointError, DamagedCheckpointError, read_manifest
from spmd_tasks.checkpoints.verifying import choose
from spmd_tasks.errors import UserError
from spmd_tasks.files import absolute_path
from spmd_tasks.runtime import Origin, PartitionedModel, TrainState
from spmd_tasks.runtime.origin import RestoredVariables
from spmd_tasks.runtime.partition import Part

_EMA = 'ema/'
_AVERAGE = re.compile(r'\d+/(?:.*/)?ema/((?:params|non_trainable)/.*)')  # in a state of optimizers
# Where a checkpoint of ours has what Paxml's TrainState has.
_OWN_PLACES = {'weights/': 'variables/params/', 'non_trainable/': 'variables/', 'learner/opt_state/': 'opt_state/'}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaxJob(Origin):
  """A checkpoint of Paxml that a Pax experiment starts from.

  Attributes:
    directory: a job of Paxml, its `checkpoints`, or one checkpoint.
    step: of the checkpoint; None takes the newest.
    takes_all: whether the job goes on with the optimizer's state and the step; otherwise it has the variables alone.
  """

  directory: str
  step: int | None
  takes_all: bool = False

  def start(self, model: PartitionedModel, seed: int) -> tuple[TrainState, int, str]:
    """Reads the checkpoint, each device its own part of each array.

    The steps derive their keys from the seed's, with the step's number, as Paxml's do.

    Raises a UserError: there is no such checkpoint, or it is not one of this model and learner.
    """
    path = self._open().path
    return _whole_state(model, path, seed) if self.takes_all else _variables(model, path, seed)

  def weights(self, model: PartitionedModel, part: Part, storage: Any = None) -> RestoredVariables | None:
    """Reads the arrays that `part` selects, and no other."""
    checkpoint, canonical = self._open(), model.canonical_state
    leaves, structure = jax.tree_util.tree_flatten_with_path(pax_state(canonical))
    selected = {id(leaf) for leaf in jax.tree.leaves(part(canonical))}
    names = [checkpoint.name_of(path) for path, _ in leaves]
    wanted = {name: leaf for name, (_, leaf) in zip(names, leaves, strict=True) if id(leaf) in selected}
    # A variable of the checkpoint that the model lacks is an error, as it is when a job starts from it.
    extra = {name for name in checkpoint.arrays if name.startswith('mdl_vars.')}.difference(names)
    stored = {name: array for name, array in checkpoint.arrays.items() if name in extra or name in wanted}
    arrays = read_arrays(stored, wanted, str(checkpoint.path))
    values = [arrays.get(name, leaf) for name, (_, leaf) in zip(names, leaves, strict=True)]
    read = jax.tree_util.tree_unflatten(structure, values)
    others = dict(read.mdl_vars)
    state = canonical.replace(
      weights=others.pop('params'),
      non_trainable=others,
      learner=canonical.learner.replace(opt_state=read.opt_states),
    )
    return RestoredVariables(model.from_canonical(part(state), part), checkpoint.step, str(checkpoint.path))

  def _open(self) -> PaxCheckpoint:
    try:
      return open_pax_checkpoint(_checkpoints_of(absolute_path(self.directory)), self.step)
    except UserError as error:
      raise UserError(f'{error} (looked for by continue_from or init_from = {self.directory!r})') from error


def _whole_state(model: PartitionedModel, path: Any, seed: int) -> tuple[TrainState, int, str]:
  canonical = model.canonical_state
  wanted = pax_state(canonical).replace(step=jax.ShapeDtypeStruct((), jnp.uint32, sharding=canonical.step.sharding))
  found = read_pax_checkpoint(path, wanted)
  variables = dict(found.mdl_vars)
  rng = jax.random.key_data(model.task.make_key(seed))

  def zero():  # an array of its own each time: a step donates every leaf
    return jax.device_put(jnp.zeros((), jnp.int32), canonical.step.sharding)

  state = TrainState(
    step=jax.jit(lambda step: step.astype(jnp.int32), out_shardings=canonical.step.sharding)(found.step),
    rng=jax.device_put(rng, canonical.rng.sharding),
    weights=variables.pop('params'),
    learner=canonical.learner.replace(opt_state=found.opt_states, num_skipped=zero(), num_skipped_in_a_row=zero()),
    non_trainable=variables,
  )
  number = int(found.step)
  return model.from_canonical(state), number, f'going on after step {number} of {path}'


def _variables(model: PartitionedModel, path: Any, seed: int) -> tuple[TrainState, int, str]:
  canonical = model.canonical_state
  found = read_pax_checkpoint(path, {'mdl_vars': canonical.variables})['mdl_vars']
  variables = model.from_canonical(found, lambda state: state.variables)
  state = model.init(seed)
  state = state.replace(
    weights=variables['params'], non_trainable={name: variables[name] for name in state.non_trainable}
  )
  return state, 0, f'starting from the weights of {path}'


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Source:
  """A checkpoint: its arrays by names that begin with the collection, or with the number of the learner."""

  path: Any
  step: int
  variables: Mapping[str, StoredArray]
  opt_state: Mapping[str, StoredArray]

  def variable(self, name: str) -> StoredArray | None:
    """Returns a variable, or for `ema/<name>` its average; where it was not trained it has none, and is its own."""
    if not name.startswith(_EMA):
      return self.variables.get(name)
    averages = {match[1]: array for key, array in self.opt_state.items() if (match := _AVERAGE.fullmatch(key))}
    wanted = name.removeprefix(_EMA)
    return averages.get(wanted, self.variables.get(wanted)) if averages else None


class LoadingRules(Origin):
  """What the rules of a task name, in a state that is new otherwise; without rules, all is new."""

  def start(self, model: PartitionedModel, seed: int) -> tuple[TrainState, int, str]:
    """Makes a new state and overwrites what the rules name.

    Raises a UserError: a checkpoint lacks an array that a rule names or has it in another shape, or `safe_load` is set
    and a pattern matches no variable.
    """
    rules_by_place = self._rules(model)
    if not rules_by_place:
      return model.init(seed), 0, 'starting from new weights'
    canonical = model.canonical_state
    variables, opt_state = _by_name(canonical.variables), _by_name(canonical.learner.opt_state)
    new: dict[str, jax.Array] = {}
    new_opt_state: dict[str, jax.Array] = {}
    step = None
    for directory, rules in rules_by_place.items():
      source = _open(directory, rules.step)
      origins = _origins(variables.keys() - new.keys(), rules, safe=rules.safe_load)
      new |= _read(source, origins, source.variable, variables)
      if rules.partial_load_opt_states:
        origins = _origins(opt_state.keys() - new_opt_state.keys(), rules, safe=False)
        new_opt_state |= _read(source, origins, source.opt_state.get, opt_state)
      elif rules.load_opt_states and not new_opt_state:
        new_opt_state = _read(source, {name: name for name in opt_state}, source.opt_state.get, opt_state)
      step = source.step if rules.load_step and step is None else step
    logging.info('Taken by init_from_checkpoint_rules: %s', ', '.join(sorted(new)))
    state = model.init(seed)
    loaded = _overwritten(model, state, lambda s: s.variables, new)
    state = state.replace(
      weights=loaded.pop('params'),
      non_trainable={name: loaded[name] for name in state.non_trainable},
      learner=state.learner.replace(opt_state=_overwritten(model, state, lambda s: s.learner.opt_state, new_opt_state)),
    )
    if step is not None:
      state = state.replace(step=jax.device_put(jnp.asarray(step, jnp.int32), state.step.sharding))
    places = ' and '.join(map(str, rules_by_place))
    return state, step or 0, f'starting with {len(new)} of {len(variables)} variables of {places}'

  def weights(self, model: PartitionedModel, part: Part, storage: Any = None) -> RestoredVariables | None:
    """Returns a new job's variables, averaged ones only if the rules load the optimizer's state; None without rules."""
    rules_by_place = self._rules(model)
    if not rules_by_place:
      return None
    loads_averages = any(rules.load_opt_states or rules.partial_load_opt_states for rules in rules_by_place.values())
    state, step, _ = self.start(model, 0)
    places = ' and '.join(map(str, rules_by_place))
    return RestoredVariables(part(state) if loads_averages else state.variables, step, places)

  def _rules(self, model: PartitionedModel) -> Mapping[str, Any]:
    """Returns the task's `paxml.tasks_lib.CheckpointLoadingRules` by the directory of a job, or one checkpoint."""
    return model.task.task.train.init_from_checkpoint_rules or {}  # type: ignore[attr-defined]


def _origins(names: Iterable[str], rules: Any, *, safe: bool) -> dict[str, str]:
  """Returns the name in the checkpoint of each name that a rule matches."""
  patterns = [(re.compile(pattern), origin) for pattern, origin in rules.load_rules]
  ignored = [re.compile(pattern) for pattern in rules.ignore_rules or ()]
  found, unused = {}, {pattern.pattern for pattern, _ in patterns}
  for name in sorted(names):
    if any(pattern.match(name) for pattern in ignored):
      continue
    for pattern, origin in patterns:
      if match := pattern.match(name):
        found[name] = origin.format(*match.groups()).replace('.', '/')
        unused.discard(pattern.pattern)
        break
  if safe and unused:
    raise UserError(
      f'init_from_checkpoint_rules has safe_load, and these patterns match no variable: {sorted(unused)}.'
    )
  return found


def _read(
  source: _Source, origins: Mapping[str, str], find: Callable[[str], StoredArray | None], targets: Mapping[str, Any]
) -> dict[str, jax.Array]:
  stored = {name: array for name, origin in origins.items() if (array := find(origin)) is not None}
  if missing := sorted(origin for name, origin in origins.items() if name not in stored):
    raise UserError(
      f'init_from_checkpoint_rules asks for {missing[0]!r} and {len(missing) - 1} others that {source.path} does not '
      f'hold; it holds, for one, {min(source.variables, default=None)!r}. Correct the rules.'
    )
  try:
    with damage_of(source.path):
      return read_arrays(stored, {name: targets[name] for name in stored}, str(source.path))
  except DamagedCheckpointError as error:
    raise CheckpointError(f'checkpoint {source.path} is damaged: {error}. Name another step of it.') from error


def _overwritten(model: PartitionedModel, state: TrainState, part: Callable[[TrainState], Any], new: Any) -> Any:
  """Returns a part of the state with new arrays, which come unpadded, in their places."""
  placed = model.from_canonical(new, lambda s: {name: _by_name(part(s))[name] for name in new}) if new else {}
  return jax.tree_util.tree_map_with_path(lambda path, old: placed.get(_name(path), old), part(state))


def _open(directory: str, step: int | None) -> _Source:
  path = _checkpoints_of(absolute_path(directory))
  if checkpoint_format(path) == 'spmd_tasks':
    own = CheckpointDirectory(path=path)
    step = choose(own, step, own.saved_leaves(step) or (), prefix='', rejected=set())
    assert step is not None
    path = own.step_path(step)
    manifest = read_manifest(path)
    names = [leaf.name for leaf in manifest.leaves]
    stores = open_arrays(path / manifest.state_name, names, is_ocdbt=manifest.is_ocdbt)
    arrays = [StoredArray(store=store, true_shape=tuple(store.shape)) for store in stores]
    named = dict(zip(map(_own_name, names), arrays, strict=True))
  else:
    checkpoint = open_pax_checkpoint(path, step)
    path, step = checkpoint.path, checkpoint.step
    named = {_pax_name(name): array for name, array in checkpoint.arrays.items()}

  def below(prefix: str) -> dict[str, StoredArray]:
    return {name.removeprefix(prefix): array for name, array in named.items() if name.startswith(prefix)}

  return _Source(path=path, step=step, variables=below('variables/'), opt_state=below('opt_state/'))


def _own_name(name: str) -> str:
  return next((to + name.removeprefix(place) for place, to in _OWN_PLACES.items() if name.startswith(place)), name)


def _pax_name(name: str) -> str:
  """Returns `opt_state/0/no_prefix/2/m/params/w` for opt_states_0.no_prefix_2.m.params.w."""
  if name.startswith('opt_states'):
    state, *variable = re.split(r'(?=\.(?:params|non_trainable|batch_stats)\.)', name, maxsplit=1)
    name = re.sub(r'_(\d+)(?=[._]|$)', r'.\1', state).replace('opt_states', 'opt_state', 1) + ''.join(variable)
  return name.replace('mdl_vars', 'variables', 1).replace('.', '/')


def _name(path: Any) -> str:
  return jax.tree_util.keystr(path, simple=True, separator='/').replace('.', '/')


def _by_name(tree: Any) -> dict[str, Any]:
  return {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def is_pax_job(directory: str) -> bool:
  """Tells whether the newest checkpoint of a job is Paxml's."""
  path = absolute_path(directory)
  return checkpoint_format(_checkpoints_of(path)) == 'pax' or is_complete(path)


def _checkpoints_of(path: Any) -> Any:
  """Returns the directory of checkpoints of a job, if it is one; else the path itself."""
  return path / 'checkpoints' if (path / 'checkpoints').is_dir() else path
