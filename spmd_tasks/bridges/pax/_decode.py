"""PaxDecoder: decodes the datasets of a Pax experiment by the model's own `decode`, and writes what Paxml writes.

    decoder = PaxDecoder(model, job.decode_inputs, job_log_dir, trackers=('tensorboard',), on_batch=..., report=print)
    decoder.run('valid', variables, step)

    <job_log_dir>/decoder_out/<dataset>/decoder_out_<step>_shard_0.jsonl    a value of process_decode_out on each line
    <job_log_dir>/decoder_out/<dataset>/decoder_out_<step>_shard_0.pickle   the list of its (key, value) pairs
    <job_log_dir>/decoder_out/<dataset>/decoder_out_<step>_weights_from.txt   the place of weights of no checkpoint here
    <job_log_dir>/summaries/decode_test_<dataset>/                          metrics: events, and metrics.jsonl

Both files appear as a whole, the .jsonl last: a dataset that has one is not decoded again with the same checkpoint. A
job that was stopped decodes an unfinished dataset from its start, and writes the same outputs. Every checkpoint decodes
a dataset from its start: all batches where the input says `reset_for_eval`, else `eval_loop_num_batches`. Process 0
processes and writes the outputs of all processes, as in Paxml.
"""

import collections
from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import functools
import itertools
import pathlib
import tempfile
from typing import Any, NamedTuple, cast

from absl import logging
from clu import values as clu_values
from etils import epath
import jax
import jax.numpy as jnp
import numpy as np
from paxml import base_metrics, io_utils, metric_utils, summary_utils
from praxis import base_hyperparams, base_layer, pax_fiddle

from spmd_tasks.bridges.pax._input import PaxInput, flatten_batch, next_batch, take_strings
from spmd_tasks.distributed import is_primary
from spmd_tasks.distributed.agreement import primary_decides
from spmd_tasks.errors import UserError
from spmd_tasks.files import make_directory, read_text, storage_errors, write_durably
from spmd_tasks.runtime import PartitionedModel
from spmd_tasks.runtime.compilation import StepsByShape
from spmd_tasks.runtime.metrics import make_writer
from spmd_tasks.runtime.task import Variables

_LOOK_LIMIT_S = 300


@dataclasses.dataclass(eq=False)
class PaxDecoder:
  """Decodes each dataset with any number of checkpoints of a partitioned PaxTask.

  `on_batch` is called before every batch, and may raise to end the decoding; `report` shows a line to the user.
  """

  model: PartitionedModel
  inputs: Mapping[str, PaxInput]
  job_log_dir: epath.Path
  _: dataclasses.KW_ONLY
  trackers: Sequence[str]
  on_batch: Callable[[], None]
  report: Callable[[str], None]
  first_step: int = 0  # checkpoints of earlier steps are not decoded
  in_training: bool = False

  def __post_init__(self):
    model, number = self.model, jax.ShapeDtypeStruct((), jnp.int32)
    decode_step = functools.partial(cast(Any, model.task).decode_step, in_training=self.in_training)
    self._steps_by_shape = StepsByShape(lambda spec: model.batch_step('decode_step', spec, decode_step, number, number))
    self._steps = {name: self._steps_by_shape.of(each.element_spec()) for name, each in self.inputs.items()}

  def compile(self) -> None:
    """Compiles the decode steps; does nothing the second time."""
    for step in self._steps.values():
      step.compile()

  def run(self, name: str, variables: Variables, step: int, place: str | None = None) -> 'Decoded | None':
    """Decodes a dataset with variables (padded, on the mesh) of a train step, unless its outputs are there already.

    `place` says where the variables come from, if from no checkpoint of the job. Process 0 gets what was decoded.

    Raises:
      UserError: the dataset has no batch, a batch has texts, which several processes cannot pass on, or the outputs of
        this step are there already with variables of another place.
      StorageError: the outputs cannot be written.
    """
    if step < self.first_step:
      self.report(
        f'step {step}  decode {name}: not before step {self.first_step}, task.train.decode_start_after_n_steps'
      )
      return None
    dataset = self.inputs[name].make(jax.process_index(), jax.process_count())
    directory = self.job_log_dir / 'decoder_out' / dataset.name
    stem = f'decoder_out_{step}_shard_0'
    done = directory / f'{stem}.jsonl'
    note = directory / f'decoder_out_{step}_weights_from.txt'
    title = f'step {step}{"" if place is None else f" of {place}"}  decode {name}:'

    def place_of_outputs() -> tuple[bool, str | None]:
      return done.exists(), read_text(note).strip() if note.exists() else None

    with storage_errors(done):
      is_done, other = primary_decides(place_of_outputs, 'is_decoded', limit_s=_LOOK_LIMIT_S)
    if is_done and other != place:
      raise UserError(
        f'{done} has the outputs of weights of {other or "the job itself"}, not of {place or "the job itself"}: choose '
        'another --job_log_dir.'
      )
    if is_done:
      self.report(f'{title} done already, in {done}')
      return None
    self.report(f'{title} to {done}')
    if is_primary():
      with storage_errors(note):
        if place is None:
          note.unlink(missing_ok=True)
        else:
          make_directory(directory)
          write_durably(note, f'{place}\n')
    decoded = _DecodedDataset(cast(Any, self.model.task).task)
    for batch, (arrays, texts) in enumerate(self._batches(dataset), start=1):
      self.on_batch()
      decode_step = self._steps_by_shape.of(arrays) if self.inputs[name].shapes_may_vary else self._steps[name]
      placed = decode_step.place(arrays)
      output = jax.device_get(decode_step(variables, placed, np.int32(step), np.int32(batch)))
      if is_primary():
        decoded.add(dataset, output, texts)
    if not is_primary():
      return None
    if not decoded.num_batches:
      raise UserError(f'decode dataset {name!r} has no batch, its source is empty: correct decode_datasets().')
    metrics = decoded.metrics()
    summaries = self.job_log_dir / 'summaries' / f'decode_test_{dataset.name}'
    writer = make_writer(summaries, trackers=self.trackers, primary=True)
    writer.write(step, metrics, place)
    writer.close()
    _write_outputs(directory, stem, decoded.outputs)
    shown = ''.join(f'  {key} {value:.6g}' for key, value in metrics.items() if not key.endswith('-weight'))
    self.report(f'{title} {len(decoded.outputs)} outputs of {decoded.num_batches} batches{shown}')
    of_decode, of_processing = decoded.by_origin
    return Decoded(dataset.name, of_decode, of_processing, decoded.num_batches)

  def _batches(self, dataset: Any) -> Iterator[tuple[dict[str, np.ndarray], dict[str, Any]]]:
    """Yields (arrays, texts) of the batches that Paxml decodes. The dataset is not read ahead: it may keep a state."""
    limit = None if dataset.reset_for_eval or dataset.eval_loop_num_batches == -1 else dataset.eval_loop_num_batches
    for _ in itertools.count() if limit is None else range(limit):
      try:
        batch = next_batch(dataset)
      except StopIteration:
        return
      texts = take_strings(batch)
      if texts and jax.process_count() > 1:
        raise UserError(
          f'decode dataset {dataset.name!r} has texts in its batches ({", ".join(sorted(texts))}), which a process '
          'cannot pass on to process 0, where outputs are processed: leave them out, or decode by one process.'
        )
      yield flatten_batch(batch), texts


class Decoded(NamedTuple):
  """The metrics of one dataset, as `task.early_stopping_fn` gets them."""

  dataset: str  # its name in Pax
  decoded: Mapping[str, float]  # of decode
  processed: Mapping[str, float]  # of process_decode_out
  num_batches: int


class _DecodedDataset:
  """Gathers what one dataset's batches give, as Paxml's decode program does."""

  def __init__(self, task: Any):
    self._task = task
    self._decode_metrics, self._process_metrics = (
      base_hyperparams.instantiate(task.metrics or pax_fiddle.Config(base_metrics.MeanMetrics)) for _ in range(2)
    )
    self._clu_metrics: dict[str, Any] = {}
    self._process_clu_metrics: dict[str, Any] = {}
    self._summaries: dict[str, list[Any]] = collections.defaultdict(list)
    self.outputs: list[tuple[str, Any]] = []  # (key, value) pairs of process_decode_out
    self.num_batches = 0
    self.by_origin: list[dict[str, float]] = []  # metrics of decode and of process_decode_out, once they are computed

  def add(self, dataset: Any, output: Any, texts: Mapping[str, Any]) -> None:
    """Adds the outputs (host arrays) of a decode step, and the texts of its batch, to what there is."""
    self.num_batches += 1
    self._decode_metrics.store(output.weighted_scalars)
    self._clu_metrics = metric_utils.merge_clu_metrics(self._clu_metrics, output.clu_metrics)
    for name, value in summary_utils.flatten_summary_dict(output.summary_tensors):
      self._summaries[name].append(value)
    per_example = output.per_example_out
    per_example.update(texts)
    with jax.default_device(jax.local_devices(backend='cpu')[0]):
      processed = self._task.model.process_decode_out(dataset, per_example)
    if not isinstance(processed, tuple | list) or len(processed) != 3:
      model = type(self._task.model).__name__
      kind = f'{len(processed)} values' if isinstance(processed, tuple | list) else f'a {type(processed).__name__}'
      raise UserError(
        f'{model}.process_decode_out returns {kind}: return weighted scalars, (key, value) pairs and metrics.'
      )
    scalars, pairs, clu_metrics = processed
    self._process_metrics.store(scalars)
    self.outputs.extend(pairs)
    if clu_metrics:
      self._process_clu_metrics = metric_utils.merge_clu_metrics(self._process_clu_metrics, clu_metrics)

  def metrics(self) -> dict[str, float]:
    """Returns the metrics over all batches, by the names of Paxml's summaries; images and the like are left out."""
    found, left_out = {}, []
    for prefix, means, metrics in (
      ('decode_metrics', self._decode_metrics, self._clu_metrics),
      ('process_decode_metrics', self._process_metrics, self._process_clu_metrics),
    ):
      values = means.finalize()
      for name, (value, weight) in values.items():
        found[f'{prefix}/{name}'] = value
        found[f'{prefix}/{name}-weight'] = weight
      own = metric_utils.as_float_dict(values)
      for name, value in metric_utils.compute_metric_values(metrics).items():
        if isinstance(value, clu_values.Scalar):
          found[self._task.decode.metrics_prefix + name] = own[name] = value.value
        else:
          left_out.append(name)
      self.by_origin.append(own)
    for name, values in self._summaries.items():
      if base_layer.get_summary_base_type(base_layer.get_summary_type_from_key(name)) is base_layer.SummaryType.SCALAR:
        found[name] = np.mean([np.mean(value) for value in values])
      else:
        left_out.append(name)
    if left_out:
      logging.warning('These summaries of decoding are no numbers and are not written: %s.', ', '.join(left_out))
    return {name: float(np.mean(value)) for name, value in found.items()}


def _write_outputs(directory: epath.Path, stem: str, outputs: list[tuple[str, Any]]) -> None:
  """Has Paxml write its two files in a temporary directory, and moves them to `directory` as they are complete."""
  with storage_errors(directory), tempfile.TemporaryDirectory() as temporary:
    made = pathlib.Path(temporary)
    suffixes = ['.pickle', '.jsonl']
    try:
      io_utils.write_key_value_pairs(made / stem, outputs)
    except TypeError as error:  # Paxml, too, leaves out a file that cannot be made
      unfinished = '.jsonl' if (made / f'{stem}.jsonl').exists() else '.pickle'
      suffixes = suffixes[: suffixes.index(unfinished)]
      logging.error('%s: process_decode_out gives what %s files cannot hold: %s', directory / stem, unfinished, error)
    make_directory(directory)
    for suffix in suffixes:
      write_durably(directory / f'{stem}{suffix}', (made / f'{stem}{suffix}').read_bytes())
