"""T5xOrigin: a new job goes on from a checkpoint of T5X, with its optimizer state and step; and the way back.

    spmd-tasks --exp t5.Small --set init_from=t5x:MODEL_DIR --set init_from_step=1000000 ...
    spmd-tasks --mode export --format t5x --job_log_dir runs/t5 --out MODEL_DIR      # MODEL_DIR/checkpoint_<step>

    class FineTuning(MyExperiment):
      def origin(self):
        return T5xOrigin(path='MODEL_DIR', assignment_map=((r'(.*)decoder/logits_dense(.*)', None),), from_scratch=True)

The weights of a job without a checkpoint of its own are evaluated, decoded and served from there, too. An export has
what T5X restores, weights, Adafactor's state and the step: by the names, shapes and layout (layers apart, or scanned)
of the checkpoint of T5X that the job started from, else those of `t5x.examples.t5`, or of `scalable_t5` where Adafactor
has its rules (UMT5). The position of the input is not exported.
"""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import dataclasses
import re
from typing import Any

from etils import epath
from flax import traverse_util
import jax
from jax.sharding import Mesh
import numpy as np
import optax

from spmd_tasks import exit_codes
from spmd_tasks.bridges._lazy_arrays import LazyArray, device_array, place_on_mesh
from spmd_tasks.bridges._rules import Rule
from spmd_tasks.bridges.t5x._files import T5xCheckpoint, open_checkpoint, write_checkpoint
from spmd_tasks.bridges.t5x._weights import Layout
from spmd_tasks.checkpoints.checkpointer import Restored
from spmd_tasks.checkpoints.manifest import CheckpointError
from spmd_tasks.command import OpenJob
from spmd_tasks.distributed import is_primary
from spmd_tasks.distributed.watchdog import watch_steps
from spmd_tasks.errors import UserError
from spmd_tasks.experiment import partition_job
from spmd_tasks.files import absolute_path
from spmd_tasks.learning.adafactor import T5X_HEADS_FACTOR_RULES, T5X_SCANNED_FACTOR_RULES
from spmd_tasks.learning.frozen_weights import without_frozen
from spmd_tasks.programs.job_directory import SavedSteps
from spmd_tasks.runtime import PartitionedModel, TrainState
from spmd_tasks.runtime.origin import Base, RestoredVariables
from spmd_tasks.runtime.partition import Part
from spmd_tasks.runtime.task import Variables
from spmd_tasks.sharding.weights import leaf_name, leaves_by_name

MOMENTS = ('v_row', 'v_col', 'v', 'm')


@dataclasses.dataclass(frozen=True, kw_only=True)
class T5xOrigin(Base):
  """A checkpoint of T5X.

  Attributes:
    path: of the checkpoint, or of the MODEL_DIR.
    step: in a MODEL_DIR; None: the newest.
    with_optimizer: whether Adafactor's moments and the step are taken, too.
    with_step: whether without them the step is taken; else a new job begins at step 0.
    assignment_map: T5X's: (regular expression, replacement) pairs. The first whose expression matches the whole name of
      a weight, as T5X names it (`target/decoder/...`), says the name that it has in the checkpoint; None: it is drawn.
    from_scratch: T5X's `fallback_to_scratch`: weights that the checkpoint lacks are drawn; where it lacks some
      layers of a stack, that weight is drawn for all of them.
  """

  path: str
  step: int | None = None
  with_optimizer: bool = True
  with_step: bool = False
  assignment_map: Sequence[tuple[str, str | None]] = ()
  from_scratch: bool = False

  def start(self, model: PartitionedModel, seed: int) -> tuple[TrainState, int, str]:
    """Returns the state of a new job. Raises a UserError if the weights or moments are not those of the job."""
    checkpoint = open_checkpoint(self.path, self.step)
    layout, lazy = self._lazy_weights(model, checkpoint)
    moments = self._lazy_moments(model, checkpoint, layout) if self.with_optimizer else None
    state = model.init(seed)
    state = state.replace(weights=_overwritten(model, lambda s: s.weights, lazy, state))
    phrase = f'starting from {len(lazy)} weights of {checkpoint.path}'
    if moments is None and not self.with_step:
      return state, 0, phrase
    opt_state = _overwritten(model, lambda s: s.learner.opt_state, moments or {}, state)
    count = np.asarray(checkpoint.step, np.int32)  # not of JAX: the step and the optimizer's must not share a buffer
    opt_state = jax.tree.map(
      lambda node: node._replace(count=jax.device_put(count, node.count.sharding)) if _is_factored(node) else node,
      opt_state,
      is_leaf=_is_factored,
    )
    step = jax.device_put(count, state.step.sharding)
    state = state.replace(step=step, learner=state.learner.replace(opt_state=opt_state))
    with_moments = ', with its optimizer state' if moments is not None else ''
    return state, checkpoint.step, f'{phrase}{with_moments}, after step {checkpoint.step}'

  def weights(self, model: PartitionedModel, part: Part, storage: Any = None) -> RestoredVariables | None:
    """Returns the checkpoint's variables, at its step."""
    checkpoint = open_checkpoint(self.path, self.step)
    return RestoredVariables(self.variables(model, storage), checkpoint.step, str(checkpoint.path))

  def variables(self, model: PartitionedModel, storage: Any = None) -> Variables:
    """Returns the padded variables."""
    _, lazy = self._lazy_weights(model, open_checkpoint(self.path, self.step))
    padded = traverse_util.flatten_dict(model.padded_state.weights, sep='/')
    if missing := sorted(padded.keys() - lazy.keys()):
      raise UserError(f'{self.path} lacks {len(missing)} weights, {missing[0]} for one: train before you evaluate.')
    true = traverse_util.flatten_dict(model.abstract_state.weights, sep='/')
    flat = {name: place_on_mesh(lazy[name].reshape(true[name].shape), leaf) for name, leaf in padded.items()}
    return {'params': traverse_util.unflatten_dict(flat, sep='/')}

  def frozen(self, model: PartitionedModel, storage: Any = None) -> Any:
    """Returns the padded frozen weights, with None for those that are trained."""
    weights = self.variables(model, storage)['params']
    trained = without_frozen(weights, model.weight_specs)
    return jax.tree.map(lambda t, w: w if t is None else None, trained, weights, is_leaf=lambda x: x is None)

  def identity(self) -> Mapping[str, str]:
    """Returns the place: T5X's checkpoints have no digest."""
    return {'t5x': str(open_checkpoint(self.path, self.step).path)}

  def check(self, restored: Restored, checkpoints: epath.Path) -> None:
    """Raises a CheckpointError if the checkpoint's frozen weights are of another place."""
    here, there = self.identity(), restored.base
    if there is not None and there != here:
      raise CheckpointError(f'{checkpoints} has weights that were trained beside {there}, not beside {here}.')

  def _lazy_weights(self, model: PartitionedModel, checkpoint: T5xCheckpoint) -> tuple[Layout, dict[str, LazyArray]]:
    """Returns the layout of the checkpoint, and our weights by name; nothing is read."""
    wanted = traverse_util.flatten_dict(model.canonical_state.weights, sep='/')
    given = checkpoint.weights
    if not given:
      raise UserError(f'{checkpoint.path} has no weights: T5X keeps them below target/.')
    layout = Layout.of(given, str(checkpoint.path))
    table = layout.weights(wanted)
    if self.assignment_map or self.from_scratch:
      rules, given = self._assigned(table.rules, given)
      table = dataclasses.replace(table, rules=rules)
      wanted = {slot.name: wanted[slot.name] for rule in rules for slot in rule.target}
    table.check(given, wanted)
    return layout, table.convert_lazily(given, wanted)

  def _assigned(self, rules: Sequence[Rule], given: Mapping[str, LazyArray]) -> tuple[tuple[Rule, ...], dict[str, Any]]:
    """Returns the rules of the weights that are taken, and what the checkpoint has for them."""
    found, unused, dropped = {}, {pattern for pattern, _ in self.assignment_map}, set()
    for rule in rules:
      (slot,) = rule.source
      name: str | None = slot.name
      for pattern, replacement in self.assignment_map:
        if match := re.fullmatch(pattern, f'target/{slot.name}'):
          unused.discard(pattern)
          name = None if replacement is None else match.expand(replacement).removeprefix('target/')
          if name is not None and name not in given:
            raise UserError(f'assignment_map gives {name} for {slot.name}, but {self.path} has no such weight.')
          break
      if name is not None and name in given:
        found[slot.name] = given[name]
      elif name is None or self.from_scratch:
        dropped |= {target.name for target in rule.target}
    if unused:
      raise UserError(f'assignment_map has patterns that match no weight: {", ".join(sorted(unused))}.')
    kept = tuple(rule for rule in rules if not dropped.intersection(slot.name for slot in rule.target))
    return kept, {slot.name: found[slot.name] for rule in kept for slot in rule.source if slot.name in found}

  def _lazy_moments(
    self, model: PartitionedModel, checkpoint: T5xCheckpoint, layout: Layout
  ) -> dict[str, LazyArray] | None:
    """Returns our moments by their place in the optimizer state; None if the checkpoint has none."""
    prefix = 'state/param_states/'
    stored = {n.removeprefix(prefix): a for n, a in checkpoint.arrays.items() if n.startswith(prefix)}
    if not stored:
      return None
    if self.assignment_map or self.from_scratch:
      raise UserError('assignment_map and from_scratch are of weights, not of moments: set with_optimizer=False too.')
    shapes = traverse_util.flatten_dict(model.canonical_state.weights, sep='/')
    ours = moments_of(model.canonical_state.learner.opt_state, shapes)
    remedy = f"Adafactor.as_t5x(scanned={layout.scanned}, heads_apart={layout.heads_apart}, ...) is T5X's; "
    remedy += 'with_optimizer=False takes weights alone.'
    if not ours['v'] and not ours['v_row']:
      raise UserError(f'{checkpoint.path} has the state of an Adafactor, and the job has another optimizer: {remedy}')
    if not ours['m'] and any(a.shape != (1,) for name, a in stored.items() if name.endswith('/m')):
      raise UserError(f'{checkpoint.path} has momentum, which the Adafactor of the job has not: set momentum. {remedy}')
    found: dict[str, LazyArray] = {}
    for moment in MOMENTS:
      wanted = {name: leaf for name, (_, leaf) in ours[moment].items()}
      table = layout.weights(shapes, moment, wanted)
      names = (slot.name for rule in table.rules for slot in rule.source)
      given = {name: stored[name] for name in names if name in stored}
      try:
        table.check(given, wanted)
      except UserError as error:
        raise UserError(f'These are moments ({moment}): {error}\n{remedy}') from error
      lazy = table.convert_lazily(given, wanted)
      found |= {ours[moment][name][0]: array for name, array in lazy.items()}
    return found


def open_origin(place: str, step: int | None) -> T5xOrigin:
  """Returns the origin that `init_from = t5x:PLACE` names."""
  return T5xOrigin(path=str(absolute_path(place)), step=step)


def moments_of(opt_state: Any, weights: Mapping[str, Any]) -> dict[str, dict[str, tuple[str, Any]]]:
  """Returns Adafactor's moments: moment -> weight -> (place in the state, leaf); placeholders are left out."""
  found: dict[str, dict[str, tuple[str, Any]]] = {moment: {} for moment in MOMENTS}
  for place, leaf in leaves_by_name(opt_state).items():
    if match := re.fullmatch(r'0/(v_row|v_col|v)/(.*)|\d+/(ema)/(.*)', place):
      found[match[1] or 'm'][match[2] or match[4]] = (place, leaf)
  whole = {name for name, (_, leaf) in found['v'].items() if leaf.shape == weights[name].shape}
  return {
    moment: {name: each for name, each in leaves.items() if moment == 'm' or (name in whole) == (moment == 'v')}
    for moment, leaves in found.items()
  }


def _overwritten(
  model: PartitionedModel, part: Callable[[TrainState], Any], lazy: Mapping[str, LazyArray], state: TrainState
) -> Any:
  """Returns a part of the state with the arrays in their places."""

  def chosen(tree: Any) -> dict[str, Any]:
    return {place: leaf for place, leaf in leaves_by_name(part(tree)).items() if place in lazy}

  canonical = {place: place_on_mesh(lazy[place], leaf) for place, leaf in chosen(model.canonical_state).items()}
  placed = model.from_canonical(canonical, chosen)
  return jax.tree_util.tree_map_with_path(lambda path, old: placed.get(leaf_name(path), old), part(state))


def _is_factored(node: Any) -> bool:
  return isinstance(node, optax.FactoredState)


def export_checkpoint(opened: OpenJob, target: epath.Path, *, step: int | None, mesh: Mesh) -> int:
  """Exports the checkpoint of a step (None: the newest) into a MODEL_DIR, new or not; returns exit code OK.

  Raises:
    CheckpointError: there is no such checkpoint, or it is damaged.
    UserError: the model is none of T5X's, or the target has that step already.
  """
  job = opened.job
  task = job.task.as_task('--mode export')
  model = partition_job(job, mesh)
  limit_s = job.experiment.first_step_timeout_s
  with (
    opened.emergency.on_failure(),
    watch_steps(opened.directory / 'export', opened.emergency, timeout_s=limit_s, first_step_timeout_s=limit_s),
  ):
    with contextlib.closing(SavedSteps(opened.directory).open_checkpoints(read_only=True)) as checkpointer:
      restored = checkpointer.restore(model.canonical_state, step)
    if restored is None:
      raise CheckpointError(f'{opened.directory / "checkpoints"} has no checkpoint: train first.')
    origin = job.experiment.origin()
    layout = layout_of(restored.state, task.learner.optimizer)
    if isinstance(origin, T5xOrigin):
      given = open_checkpoint(origin.path, origin.step)
      layout = Layout.of(given.weights, str(given.path))
    path = write_state(target, restored.state, layout, is_writer=is_primary())
  if is_primary():
    print(f'exported step {restored.step} to {path}', flush=True)
  return exit_codes.OK


def layout_of(state: TrainState, optimizer: Any) -> Layout:
  """Returns the layout in which a model that is not from T5X is written: that of which its Adafactor has the rules."""
  rules, decoder_only = getattr(optimizer, 'factor_rules', None), 'encoder_stack' not in state.weights
  scanned, heads_apart = rules == T5X_SCANNED_FACTOR_RULES, rules == T5X_HEADS_FACTOR_RULES
  return Layout(scanned=scanned, heads_apart=heads_apart, decoder_only=decoder_only)


def write_state(target: epath.PathLike, state: TrainState, layout: Layout, *, is_writer: bool = True) -> epath.Path:
  """Writes a state in the layout of our checkpoints (`PartitionedModel.to_canonical`) as one of T5X's.

  Of an optimizer that is not Adafactor, nothing is written.
  """
  weights = traverse_util.flatten_dict(state.weights, sep='/')
  step, inline = int(state.step), {'state/step'}
  target_arrays = _theirs(layout.weights(weights), weights)
  arrays = {'state/step': np.asarray(step, np.int32), **{f'target/{n}': each for n, each in target_arrays.items()}}
  moments = moments_of(state.learner.opt_state, weights)
  if moments['v'] or moments['v_row']:
    empty = {f'{name}/{moment}': np.zeros(1, np.float32) for name in target_arrays for moment in MOMENTS}
    stored: dict[str, Any] = {}
    for moment in MOMENTS:
      ours = {name: leaf for name, (_, leaf) in moments[moment].items()}
      stored |= _theirs(layout.weights(weights, moment, ours), ours)
    # T5X's partitioner lays out no factored moments, but those of experts; what it does not lay out is in the msgpack.
    factors = {name for name in stored if name.endswith(('/v_row', '/v_col')) and '/expert/' not in name}
    inline |= {f'state/param_states/{name}' for name in factors | (empty.keys() - stored.keys())}
    arrays |= {f'state/param_states/{name}': array for name, array in {**empty, **stored}.items()}
  return write_checkpoint(target, step, arrays, inline, is_writer=is_writer)


def _theirs(table: Any, ours: Mapping[str, Any]) -> dict[str, Any]:
  back = table.inverse()
  dtypes = {slot.name: ours[rule.source[0].name].dtype for rule in back.rules for slot in rule.target}
  lazy = {name: device_array(leaf) for name, leaf in ours.items()}
  return back.convert_lazily(lazy, {name: jax.ShapeDtypeStruct((), dtype) for name, dtype in dtypes.items()})
