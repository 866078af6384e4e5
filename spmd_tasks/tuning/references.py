"""Computes the reference model's log-probabilities of pairs of answers before the first step of a job.

    job = name_references(job, job_log_dir)           # its inputs read <job_log_dir>/reference/<input>.npy
    compute_references(job, model, state, ...)        # with the weights that training starts from

The reference is the model that training starts from. The loss needs only its log-probabilities, so one pass over the
pairs suffices, and training does not keep a second model. A resumed job reads the files that it wrote at its start.
Each source of a mixture has its own file.
"""

from collections.abc import Callable
import dataclasses
import functools
import hashlib
import io
import itertools
import json

from etils import epath
import jax
import jax.numpy as jnp
import numpy as np

from spmd_tasks.distributed.agreement import primary_decides
from spmd_tasks.errors import UserError
from spmd_tasks.experiment import Job
from spmd_tasks.files import make_directory, storage_errors, write_durably
from spmd_tasks.inputs import Input, Prefetcher
from spmd_tasks.inputs.mixture import map_sources, sources_of
from spmd_tasks.programs.hooks import TrainHook, TrainRun
from spmd_tasks.runtime import PartitionedModel, TrainState
from spmd_tasks.tuning.preference_loss import ReferenceLoss, label_log_probs, pair_log_probs
from spmd_tasks.tuning.preferences import PreferenceInput

_DIRECTORY = 'reference'
_WRITE_LIMIT_S = 600


def name_references(job: Job, job_log_dir: epath.Path | None) -> Job:
  """Returns the job with a file of its directory as the `reference` of each input of pairs that has no file.

  Without a directory, or if the loss computes the reference in every step (reference='base'), these inputs get zeros.

  Raises a UserError if the loss computes the reference, but an input has a file or is `reference_free`.
  """

  def with_reference(name: str, source: Input) -> Input:
    if not isinstance(source, PreferenceInput):
      return source
    if uses_base and (source.reference_free or source.reference is not None):
      setting = 'reference_free=True' if source.reference_free else f'reference={source.reference}'
      raise UserError(
        f"{name} has {setting}, but with reference='base' the loss computes the reference in every step: remove one of "
        'the two.'
      )
    if source.reference_free or source.reference is not None:
      return source
    if uses_base or job_log_dir is None:
      return source.without_reference()
    return dataclasses.replace(source, reference=str(job_log_dir / _DIRECTORY / f'{name}.npy'))

  loss = job.task.as_task('a comparison of answers').loss
  uses_base = isinstance(loss, ReferenceLoss) and loss.reference_from == 'base'
  return dataclasses.replace(
    job,
    train_input=map_sources(with_reference, job.train_input, 'train_input'),
    eval_inputs={name: map_sources(with_reference, source, f'eval_{name}') for name, source in job.eval_inputs.items()},
  )


class ComputeReferences(TrainHook):
  """Computes the reference files of a new job from its first state; checks the files of a resumed job."""

  def start(self, run: TrainRun) -> None:
    if not _inputs_with_own_file(run.job, run.job_log_dir):
      return
    with run.timed('reference', 'evaluation'):
      on_batch = functools.partial(run.watchdog.beat, run.first_step, 'reference')
      job, model, step = run.job, run.model, run.first_step
      for line in compute_references(job, model, run.state, step, run.job_log_dir, on_batch=on_batch):
        run.message(line)


def _inputs_with_own_file(job: Job, job_log_dir: epath.Path) -> list[PreferenceInput]:
  """Returns the inputs of pairs whose reference file is in the job's directory."""
  directory = job_log_dir / _DIRECTORY
  return [
    source
    for data in (job.train_input, *job.eval_inputs.values())
    for source in sources_of(data)
    if isinstance(source, PreferenceInput) and source.reference and epath.Path(source.reference).parent == directory
  ]


def compute_references(
  job: Job,
  model: PartitionedModel,
  state: TrainState,
  step: int,
  job_log_dir: epath.Path,
  *,
  on_batch: Callable[[], None],
) -> list[str]:
  """Writes the reference files of a new job; checks the files of a resumed job.

  Args:
    job: the result of `name_references`.
    model, state, step: what training starts from.
    job_log_dir: where the files are; inputs with a file elsewhere are skipped.
    on_batch: called after each batch.

  Returns lines for the user.

  Raises a UserError if a resumed job's file is missing or belongs to other pairs, or if a pair is invalid.
  """
  lines = []
  for source in _inputs_with_own_file(job, job_log_dir):
    path = epath.Path(source.reference or '')
    # The settings that determine the tokens of pairs.
    identity = {'source': source.source.open().fingerprint(), 'seq_len': source.seq_len}
    identity |= source.block_encoder().identity()
    if step > 0:
      _check(path, identity)
      continue
    values = _compute(source.numbered(), model, state, job.experiment.input_timeout_s, on_batch)
    num_left_out = int(np.isnan(values[:, 0]).sum())
    buffer = io.BytesIO()
    np.save(buffer, values)
    about = {'pairs': identity, 'num_pairs': len(values), 'num_left_out': num_left_out, 'digest': _digest(buffer)}

    def write(path=path, buffer=buffer, about=about) -> None:
      with storage_errors(path):
        make_directory(path.parent)
        write_durably(path, buffer.getvalue())
        write_durably(path.with_suffix('.json'), json.dumps(about, indent=1) + '\n')

    primary_decides(write, f'write_{path.stem}', limit_s=_WRITE_LIMIT_S)
    lines.append(
      f'the mean log-probability under the reference model is {np.nanmean(values[:, 0]):.2f} for the '
      f'{len(values) - num_left_out} chosen answers, {np.nanmean(values[:, 1]):.2f} for the rejected ones: {path}'
    )
  return lines


def _compute(
  pairs: PreferenceInput, model: PartitionedModel, state: TrainState, timeout_s: float, on_batch: Callable[[], None]
) -> np.ndarray:
  """Returns the log-probabilities of each record's chosen and rejected answer, float32 [N, 2]; NaN if left out."""

  def reference_step(variables, batch):
    predictions = model.task.predict(variables, batch)
    log_probs = label_log_probs(predictions, batch)
    sums = pair_log_probs(log_probs, batch | {'reference_log_probs': jnp.zeros_like(batch['weights'])})
    # The record of each pair, from the tokens of its first segment: [B, P].
    num_pairs = sums.chosen.shape[1]
    is_chosen = batch['segment_ids'] % 2 == 1

    def records_of(records, segment_ids):
      return jax.ops.segment_max(records, segment_ids // 2, num_segments=num_pairs)

    records = jax.vmap(records_of)(jnp.where(is_chosen, batch['record_index'], 0), batch['segment_ids'])
    return jnp.stack([sums.chosen, sums.rejected], axis=-1), jnp.maximum(records, 0)

  values = np.full((len(pairs.source.open()), 2), np.nan, np.float32)
  is_known = np.zeros(len(values), bool)
  step = model.batch_step('reference_step', pairs.element_spec(), reference_step)
  variables = state.variables
  iterator = pairs.make_iterator(shard_index=jax.process_index(), shard_count=jax.process_count())
  with Prefetcher(iterator, step.place, timeout_s=timeout_s) as batches:
    # Fetches a batch's results after launching the next batch, so that the device is never idle.
    results = itertools.chain((step(variables, batch) for batch, _ in batches), [()])
    for result, _ in itertools.pairwise(results):
      log_probs, records = map(np.asarray, result)
      on_batch()
      is_pair = records > 0
      values[records[is_pair] - 1] = log_probs[is_pair]
      is_known[records[is_pair] - 1] = True
  if not np.isfinite(values[is_known]).all():
    raise UserError(
      'a log-probability of the reference model is not finite: check the pairs for ids outside the vocabulary, and the '
      'model for weights that are not finite.'
    )
  return values


def _digest(buffer: io.BytesIO) -> str:
  return hashlib.blake2b(buffer.getvalue(), digest_size=16).hexdigest()


def _check(path: epath.Path, identity: dict[str, object]) -> None:
  remedy = 'put it back, or train from the start in a new --job_log_dir.'
  try:
    about = dict(json.loads(path.with_suffix('.json').read_text()))
    if _digest(io.BytesIO(path.read_bytes())) != about.get('digest'):
      raise ValueError('its digest has changed')
  except (OSError, ValueError, TypeError) as error:
    raise UserError(f"{path}, the reference model's log-probabilities, cannot be read ({error}): {remedy}") from error
  if about.get('pairs') != identity:
    changed = [name for name, value in identity.items() if about.get('pairs', {}).get(name) != value]
    raise UserError(f'{path} has log-probabilities of other pairs ({", ".join(changed)} changed): {remedy}')
