"""T5xOrigin: initializes a job from a checkpoint of T5X, with its optimizer state and step; also exports checkpoints.

    spmd-tasks --exp t5.Small --set init_from=t5x:MODEL_DIR --set init_from_step=1000000 ...
    spmd-tasks --mode export --format t5x --job_log_dir runs/t5 --out MODEL_DIR      # MODEL_DIR/checkpoint_<step>

    class FineTuning(MyExperiment):
      def origin(self):
        return T5xOrigin(path='MODEL_DIR', assignment_map=((r'(.*)decoder/logits_dense(.*)', None),), from_scratch=True)

A job without checkpoints also evaluates, decodes and serves these weights. An export has what T5X restores: weights,
Adafactor's state and the step, but not the state of the input. Names, shapes and layout (scanned or not) are those of
the T5X checkpoint from which the job started, or else those of `t5x.examples.t5`, or of `scalable_t5` if Adafactor has
its factor rules (UMT5).
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
from spmd_tasks.bridges._rules import Rule, RuleTable
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
from spmd_tasks.programs.job_directory import CheckpointRecord
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
    path: the checkpoint, or its MODEL_DIR.
    step: the step in a MODEL_DIR; None for the newest.
    with_optimizer: whether to restore Adafactor's moments and the step.
    with_step: whether to restore the step if `with_optimizer` is false; otherwise, the job starts at step 0.
    assignment_map: (regular expression, replacement) pairs, as in T5X. The first expression that matches the whole name
      of a weight in T5X (`target/decoder/...`) replaces it by the name in the checkpoint, or by None to initialize the
      weight as usual.
    from_scratch: whether to initialize weights as usual that the checkpoint lacks (`fallback_to_scratch` of T5X). If it
      lacks some layers of a stack, all layers of that weight are initialized.
  """

  path: str
  step: int | None = None
  with_optimizer: bool = True
  with_step: bool = False
  assignment_map: Sequence[tuple[str, str | None]] = ()
  from_scratch: bool = False

  def start(self, model: PartitionedModel, seed: int) -> tuple[TrainState, int, str]:
    """Returns the state of a new job. Raises a UserError if the weights or moments do not fit the job."""
    checkpoint = open_checkpoint(self.path, self.step)
    layout, lazy = self._lazy_weights(model, checkpoint)
    moments = self._lazy_moments(model, checkpoint, layout) if self.with_optimizer else None
    state = model.init(seed)
    state = state.replace(weights=_replace_leaves(model, lambda s: s.weights, lazy, state))
    phrase = f'starting from {len(lazy)} weights of {checkpoint.path}'
    if moments is None and not self.with_step:
      return state, 0, phrase
    opt_state = _replace_leaves(model, lambda s: s.learner.opt_state, moments or {}, state)
    count = np.asarray(checkpoint.step, np.int32)  # NumPy, so that the step and the optimizer's share no buffer
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
    """Returns the checkpoint's variables and step."""
    checkpoint = open_checkpoint(self.path, self.step)
    return RestoredVariables(self.variables(model, storage), checkpoint.step, str(checkpoint.path))

  def variables(self, model: PartitionedModel, storage: Any = None) -> Variables:
    """Returns the padded variables."""
    _, lazy = self._lazy_weights(model, open_checkpoint(self.path, self.step))
    padded = traverse_util.flatten_dict(model.padded_state.weights, sep='/')
    if missing := sorted(padded.keys() - lazy.keys()):
      raise UserError(f'{self.path} lacks {len(missing)} weights, such as {missing[0]}: train before you evaluate.')
    true = traverse_util.flatten_dict(model.abstract_state.weights, sep='/')
    flat = {name: place_on_mesh(lazy[name].reshape(true[name].shape), leaf) for name, leaf in padded.items()}
    return {'params': traverse_util.unflatten_dict(flat, sep='/')}

  def frozen(self, model: PartitionedModel, storage: Any = None) -> Any:
    """Returns the padded frozen weights, with None for trained weights."""
    weights = self.variables(model, storage)['params']
    trained = without_frozen(weights, model.weight_specs)
    return jax.tree.map(lambda t, w: w if t is None else None, trained, weights, is_leaf=lambda x: x is None)

  def identity(self) -> Mapping[str, str]:
    """Returns the path; T5X's checkpoints have no digest."""
    return {'t5x': str(open_checkpoint(self.path, self.step).path)}

  def check(self, restored: Restored, checkpoints: epath.Path) -> None:
    """Raises a CheckpointError if the frozen weights of a checkpoint have another path."""
    identity = self.identity()
    if restored.base is not None and restored.base != identity:
      raise CheckpointError(
        f'{checkpoints} has weights that were trained with the frozen weights of {restored.base}, not {identity}.'
      )

  def _lazy_weights(self, model: PartitionedModel, checkpoint: T5xCheckpoint) -> tuple[Layout, dict[str, LazyArray]]:
    """Returns the layout of the checkpoint, and our weights by name, without reading them."""
    target = traverse_util.flatten_dict(model.canonical_state.weights, sep='/')
    source = checkpoint.weights
    if not source:
      raise UserError(f'{checkpoint.path} has no weights below target/: use another checkpoint of T5X.')
    layout = Layout.of(source, str(checkpoint.path))
    table = layout.weights(target)
    if self.assignment_map or self.from_scratch:
      rules, source = self._assign(table.rules, source)
      table = dataclasses.replace(table, rules=rules)
      target = {slot.name: target[slot.name] for rule in rules for slot in rule.target}
    table.check(source, target)
    return layout, table.convert_lazily(source, target)

  def _assign(self, rules: Sequence[Rule], stored: Mapping[str, LazyArray]) -> tuple[tuple[Rule, ...], dict[str, Any]]:
    """Applies `assignment_map` and `from_scratch`.

    Args:
      rules: the rules of all weights.
      stored: the arrays of the checkpoint.

    Returns:
      The rules of the weights to restore, and their arrays by T5X's names in these rules.
    """
    arrays, unused, dropped = {}, {pattern for pattern, _ in self.assignment_map}, set()
    for rule in rules:
      (slot,) = rule.source
      name: str | None = slot.name
      for pattern, replacement in self.assignment_map:
        if match := re.fullmatch(pattern, f'target/{slot.name}'):
          unused.discard(pattern)
          name = None if replacement is None else match.expand(replacement).removeprefix('target/')
          if name is not None and name not in stored:
            raise UserError(
              f'assignment_map replaces {slot.name} by {name}, which {self.path} does not have: correct the pattern.'
            )
          break
      if name is not None and name in stored:
        arrays[slot.name] = stored[name]
      elif name is None or self.from_scratch:
        dropped |= {target.name for target in rule.target}
    if unused:
      raise UserError(
        f'assignment_map has patterns that match no weight: {", ".join(sorted(unused))}. Correct or remove them.'
      )
    rules = tuple(rule for rule in rules if not dropped.intersection(slot.name for slot in rule.target))
    return rules, {slot.name: arrays[slot.name] for rule in rules for slot in rule.source if slot.name in arrays}

  def _lazy_moments(
    self, model: PartitionedModel, checkpoint: T5xCheckpoint, layout: Layout
  ) -> dict[str, LazyArray] | None:
    """Returns our moments by their names in the optimizer state; None if the checkpoint has none."""
    prefix = 'state/param_states/'
    stored = {name.removeprefix(prefix): array for name, array in checkpoint.arrays.items() if name.startswith(prefix)}
    if not stored:
      return None
    if self.assignment_map or self.from_scratch:
      raise UserError('assignment_map and from_scratch do not apply to moments: set with_optimizer=False.')
    shapes = traverse_util.flatten_dict(model.canonical_state.weights, sep='/')
    ours = moments_of(model.canonical_state.learner.opt_state, shapes)
    remedy = f'use Adafactor.as_t5x(scanned={layout.scanned}, heads_apart={layout.heads_apart}, ...), or restore only '
    remedy += 'the weights with with_optimizer=False.'
    if not ours['v'] and not ours['v_row']:
      raise UserError(f'{checkpoint.path} has the state of Adafactor, but the job has another optimizer: {remedy}')
    if not ours['m'] and any(array.shape != (1,) for name, array in stored.items() if name.endswith('/m')):
      raise UserError(f"{checkpoint.path} has momentum, but the job's Adafactor has none: set momentum, or {remedy}")
    moments: dict[str, LazyArray] = {}
    for moment in MOMENTS:
      target = {name: leaf for name, (_, leaf) in ours[moment].items()}
      table = layout.weights(shapes, moment, target)
      names = (slot.name for rule in table.rules for slot in rule.source)
      source = {name: stored[name] for name in names if name in stored}
      try:
        table.check(source, target)
      except UserError as error:
        raise UserError(f'Adafactor moments ({moment}): {error}\nOr {remedy}') from error
      lazy = table.convert_lazily(source, target)
      moments |= {ours[moment][name][0]: array for name, array in lazy.items()}
    return moments


def open_origin(place: str, step: int | None) -> T5xOrigin:
  """Returns the origin of `init_from = t5x:PLACE`."""
  return T5xOrigin(path=str(absolute_path(place)), step=step)


def moments_of(opt_state: Any, weights: Mapping[str, Any]) -> dict[str, dict[str, tuple[str, Any]]]:
  """Returns Adafactor's moments, without placeholders: moment -> weight -> (name in the optimizer state, leaf)."""
  moments: dict[str, dict[str, tuple[str, Any]]] = {moment: {} for moment in MOMENTS}
  for name, leaf in leaves_by_name(opt_state).items():
    if match := re.fullmatch(r'0/(v_row|v_col|v)/(.*)|\d+/(ema)/(.*)', name):
      moments[match[1] or 'm'][match[2] or match[4]] = (name, leaf)
  unfactored = {weight for weight, (_, leaf) in moments['v'].items() if leaf.shape == weights[weight].shape}
  return {
    moment: {
      weight: leaf for weight, leaf in leaves.items() if moment == 'm' or (weight in unfactored) == (moment == 'v')
    }
    for moment, leaves in moments.items()
  }


def _replace_leaves(
  model: PartitionedModel, part: Callable[[TrainState], Any], lazy: Mapping[str, LazyArray], state: TrainState
) -> Any:
  """Returns a part of the state in which the leaves named in `lazy` are replaced."""

  def replaced_leaves(tree: Any) -> dict[str, Any]:
    return {name: leaf for name, leaf in leaves_by_name(part(tree)).items() if name in lazy}

  canonical = {name: place_on_mesh(lazy[name], leaf) for name, leaf in replaced_leaves(model.canonical_state).items()}
  padded = model.from_canonical(canonical, replaced_leaves)
  return jax.tree_util.tree_map_with_path(lambda path, old: padded.get(leaf_name(path), old), part(state))


def _is_factored(node: Any) -> bool:
  return isinstance(node, optax.FactoredState)


def export_checkpoint(opened: OpenJob, target: epath.Path, *, step: int | None, mesh: Mesh) -> int:
  """Exports a checkpoint to a MODEL_DIR; returns the exit code OK.

  Args:
    opened: the job.
    target: the MODEL_DIR, which may exist.
    step: the step of the checkpoint; None for the newest.
    mesh: the mesh to read the checkpoint on.

  Raises:
    CheckpointError: there is no such checkpoint, or it is damaged.
    UserError: the model is not one of T5X's, or the target has a checkpoint of that step.
  """
  job = opened.job
  task = job.task.as_task('--mode export')
  model = partition_job(job, mesh)
  limit_s = job.experiment.first_step_timeout_s
  with (
    opened.emergency.on_failure(),
    watch_steps(opened.directory / 'export', opened.emergency, timeout_s=limit_s, first_step_timeout_s=limit_s),
  ):
    with contextlib.closing(CheckpointRecord(opened.directory).open_checkpoints(read_only=True)) as checkpointer:
      restored = checkpointer.restore(model.canonical_state, step)
    if restored is None:
      raise CheckpointError(f'{opened.directory / "checkpoints"} has no checkpoint: train first.')
    origin = job.experiment.origin()
    layout = layout_of(restored.state, task.learner.optimizer)
    if isinstance(origin, T5xOrigin):
      checkpoint = open_checkpoint(origin.path, origin.step)
      layout = Layout.of(checkpoint.weights, str(checkpoint.path))
    path = write_state(target, restored.state, layout, is_writer=is_primary())
  if is_primary():
    print(f'exported step {restored.step} to {path}', flush=True)
  return exit_codes.OK


def layout_of(state: TrainState, optimizer: Any) -> Layout:
  """Returns the layout in which to export a model that did not start from T5X, by the factor rules of its Adafactor."""
  rules, decoder_only = getattr(optimizer, 'factor_rules', None), 'encoder_stack' not in state.weights
  scanned, heads_apart = rules == T5X_SCANNED_FACTOR_RULES, rules == T5X_HEADS_FACTOR_RULES
  return Layout(scanned=scanned, heads_apart=heads_apart, decoder_only=decoder_only)


def write_state(target: epath.PathLike, state: TrainState, layout: Layout, *, is_writer: bool = True) -> epath.Path:
  """Writes a state in the checkpoint layout (`PartitionedModel.to_canonical`) as a checkpoint of T5X.

  The optimizer state is written only if the optimizer is Adafactor.
  """
  weights = traverse_util.flatten_dict(state.weights, sep='/')
  step, inline = int(state.step), {'state/step'}
  target_arrays = _t5x_arrays(layout.weights(weights), weights)
  arrays = {'state/step': np.asarray(step, np.int32)}
  arrays |= {f'target/{name}': array for name, array in target_arrays.items()}
  moments = moments_of(state.learner.opt_state, weights)
  if moments['v'] or moments['v_row']:
    placeholders = {f'{name}/{moment}': np.zeros(1, np.float32) for name in target_arrays for moment in MOMENTS}
    stored: dict[str, Any] = {}
    for moment in MOMENTS:
      ours = {name: leaf for name, (_, leaf) in moments[moment].items()}
      stored |= _t5x_arrays(layout.weights(weights, moment, ours), ours)
    # T5X writes arrays that its partitioner does not shard into the msgpack file: factored moments except of experts.
    factors = {name for name in stored if name.endswith(('/v_row', '/v_col')) and '/expert/' not in name}
    inline |= {f'state/param_states/{name}' for name in factors | (placeholders.keys() - stored.keys())}
    arrays |= {f'state/param_states/{name}': array for name, array in {**placeholders, **stored}.items()}
  return write_checkpoint(target, step, arrays, inline, is_writer=is_writer)


def _t5x_arrays(table: RuleTable, ours: Mapping[str, Any]) -> dict[str, Any]:
  """Converts our weights or moments to lazy arrays of T5X."""
  inverse = table.inverse()
  dtypes = {slot.name: ours[rule.source[0].name].dtype for rule in inverse.rules for slot in rule.target}
  lazy = {name: device_array(leaf) for name, leaf in ours.items()}
  return inverse.convert_lazily(lazy, {name: jax.ShapeDtypeStruct((), dtype) for name, dtype in dtypes.items()})
