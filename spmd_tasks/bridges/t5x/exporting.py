"""--mode export --format t5x: writes a checkpoint that T5X restores: weights, Adafactor's state and the step.

    spmd-tasks --mode export --format t5x --job_log_dir runs/t5 --out MODEL_DIR      # MODEL_DIR/checkpoint_<step>

The arrays have the names, shapes and layout (layers apart, or scanned) of the checkpoint of T5X that the job started
from, else those of `t5x.examples.t5`, or of `scalable_t5` where Adafactor has the rules of scanned layers (UMT5). The
position of the input is not exported.
"""

from collections.abc import Mapping
from typing import Any

from etils import epath
from flax import traverse_util
import jax
from jax.sharding import Mesh
import numpy as np

from spmd_tasks import exit_codes
from spmd_tasks.bridges._lazy_arrays import device_array
from spmd_tasks.bridges.t5x._files import open_checkpoint, write_checkpoint
from spmd_tasks.bridges.t5x._weights import Layout
from spmd_tasks.bridges.t5x.origin import MOMENTS, T5xOrigin, moments_of
from spmd_tasks.checkpoints.manifest import CheckpointError
from spmd_tasks.command import OpenJob
from spmd_tasks.distributed import is_primary
from spmd_tasks.distributed.watchdog import watch_steps
from spmd_tasks.experiment import partition_job
from spmd_tasks.learning.adafactor import T5X_HEADS_FACTOR_RULES, T5X_SCANNED_FACTOR_RULES
from spmd_tasks.programs.job_directory import SavedSteps
from spmd_tasks.runtime import TrainState


def export_checkpoint(opened: OpenJob, target: epath.Path, *, step: int | None, mesh: Mesh) -> int:
  """Exports the checkpoint of a step (None: the newest) into a MODEL_DIR, new or not; returns exit code OK.

  Raises:
    CheckpointError: there is no such checkpoint, or it is damaged.
    UserError: the model is none of T5X's, or the target has that step already.
  """
  job = opened.job
  model = partition_job(job, mesh)
  limit_s = job.experiment.first_step_timeout_s
  with (
    opened.emergency.on_failure(),
    watch_steps(opened.directory / 'export', opened.emergency, timeout_s=limit_s, first_step_timeout_s=limit_s),
  ):
    checkpointer = SavedSteps(opened.directory).open_checkpoints(read_only=True)
    try:
      restored = checkpointer.restore(model.canonical_state, step)
    finally:
      checkpointer.close()
    if restored is None:
      raise CheckpointError(f'{opened.directory / "checkpoints"} has no checkpoint: train first.')
    origin = job.experiment.origin()
    layout = layout_of(restored.state, model.task.learner.optimizer)
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
      stored |= _theirs(layout.moments(moment, weights, set(ours)), ours)
    # T5X's partitioner lays out no factored moments, but those of experts; what it does not lay out is in the msgpack.
    of_experts = tuple(f'{name}/' for name in layout.experts(weights))
    factors = {n for n in stored if n.endswith(('/v_row', '/v_col')) and not n.startswith(of_experts)}
    inline |= {f'state/param_states/{name}' for name in factors | (empty.keys() - stored.keys())}
    arrays |= {f'state/param_states/{name}': array for name, array in {**empty, **stored}.items()}
  return write_checkpoint(target, step, arrays, inline, is_writer=is_writer)


def _theirs(table: Any, ours: Mapping[str, Any]) -> dict[str, Any]:
  back = table.inverse()
  dtypes = {slot.name: ours[rule.source[0].name].dtype for rule in back.rules for slot in rule.target}
  lazy = {name: device_array(leaf) for name, leaf in ours.items()}
  return back.convert_lazily(lazy, {name: jax.ShapeDtypeStruct((), dtype) for name, dtype in dtypes.items()})
