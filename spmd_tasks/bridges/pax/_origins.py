"""Initializes a Pax experiment from checkpoints: a job of Paxml, or arrays of other jobs selected by rules.

    --set continue_from=/jobs/pax          # weights, other variables, optimizer state and step, as a restart of Paxml
    --set init_from=/jobs/pax              # weights and other variables, at step 0, with a new optimizer state

Modes that only read weights accept both, and can use the optimizer's averaged weights.

    task.train.init_from_checkpoint_rules = {
        '/jobs/old/checkpoints': tasks_lib.CheckpointLoadingRules(
            task_p=OldExperiment().task(), load_rules=[(r'params/decoder/lm/(.*)', 'params/lm/{}')])}

With rules, a variable is initialized by the first rule of the first checkpoint whose pattern matches its path (with
slashes) at the start. A source `ema/...` is the averaged weight. Other variables are initialized as usual, and so is
the optimizer state unless a rule loads it. The checkpoints may be Paxml's, or ours of a Pax experiment. They store
shapes, so `task_p` and `input_specs_provider_p` are ignored.
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
_AVERAGE = re.compile(r'\d+/(?:.*/)?ema/((?:params|non_trainable)/.*)')  # an averaged weight in the optimizer state
# Prefixes of names in our checkpoints -> prefixes in _Source.
_OWN_PREFIXES = {'weights/': 'variables/params/', 'non_trainable/': 'variables/', 'learner/opt_state/': 'opt_state/'}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaxJob(Origin):
  """A checkpoint of Paxml from which a Pax experiment is initialized.

  Attributes:
    directory: a job of Paxml, its `checkpoints`, or one checkpoint.
    step: the step of the checkpoint; None for the newest.
    continues: whether to restore the optimizer state and the step, too, and not only the variables.
  """

  directory: str
  step: int | None
  continues: bool = False

  def start(self, model: PartitionedModel, seed: int) -> tuple[TrainState, int, str]:
    """Reads the checkpoint; each device reads its own shards.

    As in Paxml, the random keys of a step follow from the seed and the step number.

    Raises a UserError if there is no such checkpoint, or it does not fit the model and learner.
    """
    path = self._open().path
    return _restore_state(model, path, seed) if self.continues else _restore_variables(model, path, seed)

  def weights(self, model: PartitionedModel, part: Part, storage: Any = None) -> RestoredVariables | None:
    """Reads only the arrays that `part` selects."""
    checkpoint, canonical = self._open(), model.canonical_state
    leaves, structure = jax.tree_util.tree_flatten_with_path(pax_state(canonical))
    selected = {id(leaf) for leaf in jax.tree.leaves(part(canonical))}
    names = [checkpoint.name_of(path) for path, _ in leaves]
    targets = {name: leaf for name, (_, leaf) in zip(names, leaves, strict=True) if id(leaf) in selected}
    # Variables of the checkpoint that the model lacks are an error, as in `start`.
    extra = {name for name in checkpoint.arrays if name.startswith('mdl_vars.')}.difference(names)
    stored = {name: array for name, array in checkpoint.arrays.items() if name in extra or name in targets}
    arrays = read_arrays(stored, targets, str(checkpoint.path))
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
      return open_pax_checkpoint(_checkpoints_directory(absolute_path(self.directory)), self.step)
    except UserError as error:
      raise UserError(f'{error} (for continue_from or init_from = {self.directory!r})') from error


def _restore_state(model: PartitionedModel, path: Any, seed: int) -> tuple[TrainState, int, str]:
  canonical = model.canonical_state
  abstract = pax_state(canonical).replace(step=jax.ShapeDtypeStruct((), jnp.uint32, sharding=canonical.step.sharding))
  restored = read_pax_checkpoint(path, abstract)
  variables = dict(restored.mdl_vars)
  rng = jax.random.key_data(model.task.make_key(seed))

  def zero():  # a new array each time, because a step donates every leaf
    return jax.device_put(jnp.zeros((), jnp.int32), canonical.step.sharding)

  state = TrainState(
    step=jax.jit(lambda step: step.astype(jnp.int32), out_shardings=canonical.step.sharding)(restored.step),
    rng=jax.device_put(rng, canonical.rng.sharding),
    weights=variables.pop('params'),
    learner=canonical.learner.replace(opt_state=restored.opt_states, num_skipped=zero(), num_skipped_in_a_row=zero()),
    non_trainable=variables,
  )
  step = int(restored.step)
  return model.from_canonical(state), step, f'continuing after step {step} of {path}'


def _restore_variables(model: PartitionedModel, path: Any, seed: int) -> tuple[TrainState, int, str]:
  canonical = model.canonical_state
  restored = read_pax_checkpoint(path, {'mdl_vars': canonical.variables})['mdl_vars']
  variables = model.from_canonical(restored, lambda state: state.variables)
  state = model.init(seed)
  state = state.replace(
    weights=variables['params'], non_trainable={name: variables[name] for name in state.non_trainable}
  )
  return state, 0, f'starting from the weights of {path}'


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Source:
  """The arrays of a checkpoint: variables by collection/name, and optimizer state by learner number/name."""

  path: Any
  step: int
  variables: Mapping[str, StoredArray]
  opt_state: Mapping[str, StoredArray]

  def variable(self, name: str) -> StoredArray | None:
    """Returns a variable, or for `ema/<name>` its average; an untrained variable is its own average."""
    if not name.startswith(_EMA):
      return self.variables.get(name)
    averages = {match[1]: array for key, array in self.opt_state.items() if (match := _AVERAGE.fullmatch(key))}
    name = name.removeprefix(_EMA)
    return averages.get(name, self.variables.get(name)) if averages else None


class LoadingRules(Origin):
  """Initializes a new state, and replaces the arrays that the task's `init_from_checkpoint_rules` select."""

  def start(self, model: PartitionedModel, seed: int) -> tuple[TrainState, int, str]:
    """Returns a new state with the arrays that the rules select.

    Raises a UserError if a checkpoint lacks such an array or has another shape, or a pattern matches no variable with
    `safe_load`.
    """
    rules_by_place = self._rules_by_place(model)
    if not rules_by_place:
      return model.init(seed), 0, 'starting from new weights'
    canonical = model.canonical_state
    variables, opt_state = _by_name(canonical.variables), _by_name(canonical.learner.opt_state)
    new: dict[str, jax.Array] = {}
    new_opt_state: dict[str, jax.Array] = {}
    step = None
    for directory, rules in rules_by_place.items():
      source = _open_source(directory, rules.step)
      origins = _match_rules(variables.keys() - new.keys(), rules, is_safe=rules.safe_load)
      new |= _read_arrays(source, origins, source.variable, variables)
      if rules.partial_load_opt_states:
        origins = _match_rules(opt_state.keys() - new_opt_state.keys(), rules, is_safe=False)
        new_opt_state |= _read_arrays(source, origins, source.opt_state.get, opt_state)
      elif rules.load_opt_states and not new_opt_state:
        new_opt_state = _read_arrays(source, {name: name for name in opt_state}, source.opt_state.get, opt_state)
      step = source.step if rules.load_step and step is None else step
    logging.info('Loaded by init_from_checkpoint_rules: %s', ', '.join(sorted(new)))
    state = model.init(seed)
    loaded = _replace_leaves(model, state, lambda s: s.variables, new)
    state = state.replace(
      weights=loaded.pop('params'),
      non_trainable={name: loaded[name] for name in state.non_trainable},
      learner=state.learner.replace(
        opt_state=_replace_leaves(model, state, lambda s: s.learner.opt_state, new_opt_state)
      ),
    )
    if step is not None:
      state = state.replace(step=jax.device_put(jnp.asarray(step, jnp.int32), state.step.sharding))
    places = ' and '.join(map(str, rules_by_place))
    return state, step or 0, f'starting with {len(new)} of {len(variables)} variables of {places}'

  def weights(self, model: PartitionedModel, part: Part, storage: Any = None) -> RestoredVariables | None:
    """Returns a new job's variables; averages only if the rules load optimizer state. Returns None without rules."""
    rules_by_place = self._rules_by_place(model)
    if not rules_by_place:
      return None
    loads_averages = any(rules.load_opt_states or rules.partial_load_opt_states for rules in rules_by_place.values())
    state, step, _ = self.start(model, 0)
    places = ' and '.join(map(str, rules_by_place))
    return RestoredVariables(part(state) if loads_averages else state.variables, step, places)

  def _rules_by_place(self, model: PartitionedModel) -> Mapping[str, Any]:
    """Returns the task's `paxml.tasks_lib.CheckpointLoadingRules` by the directory of a job or checkpoint."""
    return model.task.task.train.init_from_checkpoint_rules or {}  # type: ignore[attr-defined]


def _match_rules(names: Iterable[str], rules: Any, *, is_safe: bool) -> dict[str, str]:
  """Maps each name that a rule matches to its name in the checkpoint."""
  patterns = [(re.compile(pattern), origin) for pattern, origin in rules.load_rules]
  ignored = [re.compile(pattern) for pattern in rules.ignore_rules or ()]
  origins, unused = {}, {pattern.pattern for pattern, _ in patterns}
  for name in sorted(names):
    if any(pattern.match(name) for pattern in ignored):
      continue
    for pattern, origin in patterns:
      if match := pattern.match(name):
        origins[name] = origin.format(*match.groups()).replace('.', '/')
        unused.discard(pattern.pattern)
        break
  if is_safe and unused:
    raise UserError(
      f'init_from_checkpoint_rules has safe_load and patterns that match no variable: {sorted(unused)}. Correct them.'
    )
  return origins


def _read_arrays(
  source: _Source, origins: Mapping[str, str], find: Callable[[str], StoredArray | None], targets: Mapping[str, Any]
) -> dict[str, jax.Array]:
  stored = {name: array for name, origin in origins.items() if (array := find(origin)) is not None}
  if missing := sorted(origin for name, origin in origins.items() if name not in stored):
    raise UserError(
      f'init_from_checkpoint_rules load {missing[0]!r} and {len(missing) - 1} others that {source.path} does not have; '
      f'it has names such as {min(source.variables, default=None)!r}. Correct the rules.'
    )
  try:
    with damage_of(source.path):
      return read_arrays(stored, {name: targets[name] for name in stored}, str(source.path))
  except DamagedCheckpointError as error:
    raise CheckpointError(f'checkpoint {source.path} is damaged: {error}. Choose another step.') from error


def _replace_leaves(model: PartitionedModel, state: TrainState, part: Callable[[TrainState], Any], new: Any) -> Any:
  """Returns a part of the state in which some leaves are replaced by the unpadded arrays `new`."""
  padded = model.from_canonical(new, lambda s: {name: _by_name(part(s))[name] for name in new}) if new else {}
  return jax.tree_util.tree_map_with_path(lambda path, old: padded.get(_name(path), old), part(state))


def _open_source(directory: str, step: int | None) -> _Source:
  path = _checkpoints_directory(absolute_path(directory))
  if checkpoint_format(path) == 'spmd_tasks':
    own = CheckpointDirectory(path=path)
    step = choose(own, step, own.saved_leaves(step) or (), prefix='', rejected=set())
    assert step is not None
    path = own.step_path(step)
    manifest = read_manifest(path)
    names = [leaf.name for leaf in manifest.leaves]
    stores = open_arrays(path / manifest.state_name, names, is_ocdbt=manifest.is_ocdbt)
    arrays = [StoredArray(store=store, true_shape=tuple(store.shape)) for store in stores]
    by_name = dict(zip(map(_name_of_own_leaf, names), arrays, strict=True))
  else:
    checkpoint = open_pax_checkpoint(path, step)
    path, step = checkpoint.path, checkpoint.step
    by_name = {_name_of_pax_leaf(name): array for name, array in checkpoint.arrays.items()}

  def with_prefix(prefix: str) -> dict[str, StoredArray]:
    return {name.removeprefix(prefix): array for name, array in by_name.items() if name.startswith(prefix)}

  return _Source(path=path, step=step, variables=with_prefix('variables/'), opt_state=with_prefix('opt_state/'))


def _name_of_own_leaf(name: str) -> str:
  return next((to + name.removeprefix(old) for old, to in _OWN_PREFIXES.items() if name.startswith(old)), name)


def _name_of_pax_leaf(name: str) -> str:
  """Converts a name such as opt_states_0.no_prefix_2.m.params.w to opt_state/0/no_prefix/2/m/params/w."""
  if name.startswith('opt_states'):
    state, *variable = re.split(r'(?=\.(?:params|non_trainable|batch_stats)\.)', name, maxsplit=1)
    name = re.sub(r'_(\d+)(?=[._]|$)', r'.\1', state).replace('opt_states', 'opt_state', 1) + ''.join(variable)
  return name.replace('mdl_vars', 'variables', 1).replace('.', '/')


def _name(path: Any) -> str:
  return jax.tree_util.keystr(path, simple=True, separator='/').replace('.', '/')


def _by_name(tree: Any) -> dict[str, Any]:
  return {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def is_pax_job(directory: str) -> bool:
  """Whether the newest checkpoint of a job is Paxml's."""
  path = absolute_path(directory)
  return checkpoint_format(_checkpoints_directory(path)) == 'pax' or is_complete(path)


def _checkpoints_directory(path: Any) -> Any:
  """Returns `<path>/checkpoints` if it exists, or else the path."""
  return path / 'checkpoints' if (path / 'checkpoints').is_dir() else path
