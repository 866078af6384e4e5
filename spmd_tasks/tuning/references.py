"""Computes the reference model's log-probabilities of pairs of answers, before the first step of a job.

    job = name_references(job, job_log_dir)           # its inputs read <job_log_dir>/reference/<input>.npy
    compute_references(job, model, state, ...)        # of the weights that the job starts from

The reference is the model that training starts from, so that one pass over the pairs with these weights gives all that
the loss needs of it, and no second model is held while training. With LoRA the weights at the start compute what the
base does. A resumed job reads the files that it wrote at its start. Sources of a mixture have a file each.
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
from spmd_tasks.tuning.preference_loss import ReferenceLoss, pair_log_probs
from spmd_tasks.tuning.preferences import PreferenceInput

_DIRECTORY = 'reference'
_WRITE_LIMIT_S = 600


def name_references(job: Job, job_log_dir: epath.Path | None) -> Job:
  """Returns the job with files of its own directory as the `reference` of all inputs of pairs that name no file.

  Without a directory, and if the loss computes the reference in every step (reference='base'), these read no file.

  Raises:
    UserError: the loss computes the reference, but an input names a file or is `reference_free`.
  """

  def named(name: str, each: Input) -> Input:
    if not isinstance(each, PreferenceInput):
      return each
    if reads_base and (each.reference_free or each.reference is not None):
      own = 'reference_free' if each.reference_free else f"{each.reference} as its reference's log-probabilities"
      raise UserError(
        f"{name} has {own}, but the loss computes those of the base in every step (reference='base'): leave one of the "
        'two out.'
      )
    if each.reference_free or each.reference is not None:
      return each
    if reads_base or job_log_dir is None:
      return each.without_reference()
    return dataclasses.replace(each, reference=str(job_log_dir / _DIRECTORY / f'{name}.npy'))

  loss = job.task.as_task('a comparison of answers').loss
  reads_base = isinstance(loss, ReferenceLoss) and loss.reference_from == 'base'
  return dataclasses.replace(
    job,
    train_input=map_sources(named, job.train_input, 'train_input'),
    eval_inputs={name: map_sources(named, each, f'eval_{name}') for name, each in job.eval_inputs.items()},
  )


class ComputeReferences(TrainHook):
  """Computes the files of a new job's references from the first state; a resumed job checks that it has them."""

  def start(self, run: TrainRun) -> None:
    if not _own(run.job, run.job_log_dir):
      return
    with run.timed('reference', 'evaluation'):
      on_batch = functools.partial(run.watchdog.beat, run.first_step, 'reference')
      job, model, step = run.job, run.model, run.first_step
      for line in compute_references(job, model, run.state, step, run.job_log_dir, on_batch=on_batch):
        run.message(line)


def _own(job: Job, job_log_dir: epath.Path) -> list[PreferenceInput]:
  own = job_log_dir / _DIRECTORY
  return [
    each
    for given in (job.train_input, *job.eval_inputs.values())
    for each in sources_of(given)
    if isinstance(each, PreferenceInput) and each.reference and epath.Path(each.reference).parent == own
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
  """Writes the reference files of a new job; for a resumed job, checks that they are there and fit.

  Args:
    job: as `name_references` returns it.
    model, state, step: what the job starts from.
    job_log_dir: gets the files; inputs that name a file elsewhere keep theirs.
    on_batch: called after every batch.

  Returns:
    Lines for the user.

  Raises:
    UserError: the job is resumed, but a file is missing or is of other pairs; or a pair cannot be used.
  """
  lines = []
  for each in _own(job, job_log_dir):
    path = epath.Path(each.reference or '')
    # The settings that decide a pair's tokens.
    identity = {'source': each.source.open().fingerprint(), 'seq_len': each.seq_len, **each.block_encoder().identity()}
    if step > 0:
      _check(path, identity)
      continue
    values = _compute(each.numbered(), model, state, job.experiment.input_timeout_s, on_batch)
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
      f'the reference model gives the {len(values) - num_left_out} chosen answers log-probability '
      f'{np.nanmean(values[:, 0]):.2f} on average and the rejected ones {np.nanmean(values[:, 1]):.2f}: {path}'
    )
  return lines


def _compute(
  pairs: PreferenceInput, model: PartitionedModel, state: TrainState, timeout_s: float, on_batch: Callable[[], None]
) -> np.ndarray:
  """float32 [N, 2]: log-probabilities of every record's chosen and rejected answer; NaN for one that is left out."""

  def reference_step(variables, batch):
    predictions = model.task.predict(variables, batch)
    sums = pair_log_probs(predictions, batch | {'reference_log_probs': jnp.zeros_like(batch['weights'])})
    # The number of a pair's record, of its first segment's tokens. [B, P]
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
    # Each batch is fetched after the next one was launched, so that the device always has work.
    launched = itertools.chain((step(variables, batch) for batch, _ in batches), [()])
    for done, _ in itertools.pairwise(launched):
      log_probs, records = map(np.asarray, done)
      on_batch()
      is_pair = records > 0
      values[records[is_pair] - 1] = log_probs[is_pair]
      is_known[records[is_pair] - 1] = True
  if not np.isfinite(values[is_known]).all():
    raise UserError(
      'a log-probability of the reference model is not finite: look for ids outside the vocabulary in the pairs, and '
      'for weights that are not finite in the model.'
    )
  return values


def _digest(buffer: io.BytesIO) -> str:
  return hashlib.blake2b(buffer.getvalue(), digest_size=16).hexdigest()


def _check(path: epath.Path, identity: dict[str, object]) -> None:
  remedy = 'put it back, or train from the start in a new --job_log_dir.'
  try:
    about = dict(json.loads(path.with_suffix('.json').read_text()))
    content = path.read_bytes()
  except (OSError, ValueError, TypeError) as error:
    raise UserError(f"{path}, the reference model's log-probabilities, cannot be read ({error}): {remedy}") from error
  if _digest(io.BytesIO(content)) != about.get('digest'):
    raise UserError(f"{path}, the reference model's log-probabilities, is damaged: {remedy}")
  if about.get('pairs') != identity:
    changed = [name for name, value in identity.items() if about.get('pairs', {}).get(name) != value]
    raise UserError(f'{path} has log-probabilities of other pairs ({", ".join(changed)} changed): {remedy}')
