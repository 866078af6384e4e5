"""Decodes the datasets of a Pax experiment with the model's `decode`, and writes Paxml's output files.

    decoder = PaxDecoder(model, job.decode_inputs, job_log_dir, trackers=('tensorboard',), on_batch=..., report=print)
    decoder.run('valid', variables, step)

    <job_log_dir>/decoder_out/<dataset>/decoder_out_<step>_shard_0.jsonl    a value of process_decode_out on each line
    <job_log_dir>/decoder_out/<dataset>/decoder_out_<step>_shard_0.pickle   the list of its (key, value) pairs
    <job_log_dir>/decoder_out/<dataset>/decoder_out_<step>_weights_from.txt   where the weights are from, if not the job
    <job_log_dir>/summaries/decode_test_<dataset>/                          metrics: events, and metrics.jsonl

Both files are written atomically, the .jsonl last. If a dataset has one, it is not decoded again with the same
checkpoint; an interrupted job decodes the dataset again, to the same outputs. A dataset is decoded from its start, up
to its end with `reset_for_eval`, or else for `eval_loop_num_batches`. Process 0 processes and writes the outputs of all
processes, as in Paxml.
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
from praxis import base_hyperparams, base_layer, base_model, pax_fiddle

from spmd_tasks import exit_codes
from spmd_tasks.bridges.pax._input import PaxInput, flatten_batch, next_batch, string_leaves
from spmd_tasks.command import Command, OpenJob
from spmd_tasks.distributed import is_primary
from spmd_tasks.distributed.agreement import primary_decides
from spmd_tasks.distributed.preemption import PreemptedError
from spmd_tasks.errors import UserError
from spmd_tasks.experiment import partition_job
from spmd_tasks.files import make_directory, read_text, storage_errors, write_durably
from spmd_tasks.programs.progress import Progress
from spmd_tasks.programs.restored_weights import open_reader
from spmd_tasks.runtime import PartitionedModel
from spmd_tasks.runtime.compilation import StepsByShape
from spmd_tasks.runtime.metrics import make_writer
from spmd_tasks.runtime.task import Variables

_AGREE_LIMIT_S = 300


def decode(command: Command, opened: OpenJob) -> int:
  """Runs --mode decode and decode_once of a Pax experiment; returns OK, or PreemptionGuard's exit code.

  With --mode decode, checkpoints before `decode_start_after_n_steps` are skipped.

  Raises:
    CheckpointError: there is no such checkpoint, or it is damaged.
    UserError: there are no datasets, the command names a file of prompts, or PaxDecoder raises it.
  """
  job: Any = opened.job  # with a PaxTask and PaxInputs
  flags, watch = command.flags, command.mode == 'decode'
  if flags.decode_input is not None:
    raise UserError(
      f'--decode_input {flags.decode_input} is a file of prompts, but {job.name} decodes batches of its own datasets: '
      'leave it out, and return the inputs from decode_datasets().'
    )
  if not job.decode_inputs:
    raise UserError(f'experiment {job.name} has no decode inputs: return some from its decode_datasets().')
  model = partition_job(job)
  with open_reader(job, model, opened.directory, 'decode', opened.emergency) as reader:
    step = -1
    progress = Progress(len(job.decode_inputs), 0, primary=is_primary())
    reader.stack.callback(progress.close)
    decoder = PaxDecoder(
      model,
      job.decode_inputs,
      opened.directory,
      trackers=job.experiment.trackers,
      on_batch=lambda: reader.beat(step, 'decode'),
      report=progress.message,
      first_step=job.task.task.train.decode_start_after_n_steps if watch else 0,
    )
    part = model.task.decoding_variables
    try:
      for variables, step, place in reader.checkpoints(
        decoder.compile, step=flags.checkpoint_step, part=part, watch=watch
      ):
        for name in job.decode_inputs:
          decoder.run(name, variables, step, place)
      return exit_codes.OK
    except PreemptedError:
      if is_primary():
        print(f'{reader.guard.cause}: the same command continues after what is finished.', flush=True)
      return reader.guard.exit_code


@dataclasses.dataclass(eq=False)
class PaxDecoder:
  """Decodes the datasets of a job with one or more checkpoints.

  Attributes:
    model: the partitioned PaxTask, whose Praxis model must define `decode`.
    inputs: the datasets by name.
    job_log_dir: the directory of the job.
    trackers: the trackers of the metrics, as in Experiment.
    on_batch: called before every batch; may raise to stop decoding.
    report: prints a line to the user.
    first_step: checkpoints of earlier steps are not decoded.
    in_training: whether a training job decodes, which uses the training seed.

  Raises (on construction):
    UserError: the Praxis model does not define `decode`.
  """

  model: PartitionedModel
  inputs: Mapping[str, PaxInput]
  job_log_dir: epath.Path
  _: dataclasses.KW_ONLY
  trackers: Sequence[str]
  on_batch: Callable[[], None]
  report: Callable[[str], None]
  first_step: int = 0
  in_training: bool = False

  def __post_init__(self):
    model, number = self.model, jax.ShapeDtypeStruct((), jnp.int32)
    model_class = type(model.task.model)
    if model_class.decode is base_model.BaseModel.decode:
      raise UserError(f'{model_class.__name__} has no decode(), which decode jobs call: define it, or use --mode eval.')
    decode_step = functools.partial(cast(Any, model.task).decode_step, in_training=self.in_training)
    self._steps_by_shape = StepsByShape(lambda spec: model.batch_step('decode_step', spec, decode_step, number, number))
    self._steps = {name: self._steps_by_shape.of(pax_input.element_spec()) for name, pax_input in self.inputs.items()}

  def compile(self) -> None:
    """Compiles the decode steps unless they are compiled."""
    for step in self._steps.values():
      step.compile()

  def run(self, name: str, variables: Variables, step: int, place: str | None = None) -> 'Decoded | None':
    """Decodes a dataset and writes its outputs, unless they exist.

    Args:
      name: the name of the dataset.
      variables: padded variables on the mesh.
      step: the train step of the variables.
      place: where the variables are from; None for a checkpoint of this job.

    Returns:
      The metrics on process 0; None on other processes, or if the dataset is not decoded.

    Raises:
      UserError: the dataset has no batch, several processes have batches with strings, or the outputs of this step
        exist and are from variables of another place.
      StorageError: the outputs cannot be written.
    """
    if step < self.first_step:
      self.report(
        f'step {step}  decode {name}: skipped before step {self.first_step} (task.train.decode_start_after_n_steps)'
      )
      return None
    dataset = self.inputs[name].make(jax.process_index(), jax.process_count())
    directory = self.job_log_dir / 'decoder_out' / dataset.name
    stem = f'decoder_out_{step}_shard_0'
    jsonl_file = directory / f'{stem}.jsonl'
    place_file = directory / f'decoder_out_{step}_weights_from.txt'
    title = f'step {step}{"" if place is None else f" of {place}"}  decode {name}:'

    def read_state() -> tuple[bool, str | None]:
      return jsonl_file.exists(), read_text(place_file).strip() if place_file.exists() else None

    with storage_errors(jsonl_file):
      is_done, earlier_place = primary_decides(read_state, 'is_decoded', limit_s=_AGREE_LIMIT_S)
    if is_done and earlier_place != place:
      raise UserError(
        f'{jsonl_file} has outputs of the weights of {earlier_place or "this job"}, not of {place or "this job"}: '
        'choose another --job_log_dir.'
      )
    if is_done:
      self.report(f'{title} already done, in {jsonl_file}')
      return None
    self.report(f'{title} to {jsonl_file}')
    if is_primary():
      with storage_errors(place_file):
        if place is None:
          place_file.unlink(missing_ok=True)
        else:
          make_directory(directory)
          write_durably(place_file, f'{place}\n')
    collected = _DecodeResults(cast(Any, self.model.task).task)
    for batch, (arrays, texts) in enumerate(self._batches(dataset), start=1):
      self.on_batch()
      decode_step = self._steps_by_shape.of(arrays) if self.inputs[name].shapes_may_vary else self._steps[name]
      global_arrays = decode_step.place(arrays)
      output = jax.device_get(decode_step(variables, global_arrays, np.int32(step), np.int32(batch)))
      if is_primary():
        collected.add(dataset, output, texts)
    if not is_primary():
      return None
    if not collected.num_batches:
      raise UserError(f'the decode dataset {name!r} has no batch: correct decode_datasets().')
    metrics = collected.metrics()
    summaries = self.job_log_dir / 'summaries' / f'decode_test_{dataset.name}'
    writer = make_writer(summaries, trackers=self.trackers, primary=True)
    writer.write(step, metrics, place)
    writer.close()
    _write_outputs(directory, stem, collected.outputs)
    metrics_text = ''.join(f'  {key} {value:.6g}' for key, value in metrics.items() if not key.endswith('-weight'))
    self.report(f'{title} {len(collected.outputs)} outputs of {collected.num_batches} batches{metrics_text}')
    decoded, processed = collected.metrics_by_stage
    return Decoded(dataset.name, decoded, processed, collected.num_batches)

  def _batches(self, dataset: Any) -> Iterator[tuple[dict[str, np.ndarray], dict[str, Any]]]:
    """Yields (arrays, strings) of the batches that Paxml decodes, without prefetching: the dataset may be stateful."""
    limit = None if dataset.reset_for_eval or dataset.eval_loop_num_batches == -1 else dataset.eval_loop_num_batches
    for _ in itertools.count() if limit is None else range(limit):
      try:
        batch = next_batch(dataset)
      except StopIteration:
        return
      texts = string_leaves(batch)
      if texts and jax.process_count() > 1:
        raise UserError(
          f'the decode dataset {dataset.name!r} has strings in its batches ({", ".join(sorted(texts))}), which must be '
          'on process 0 to be processed: leave them out, or decode with one process.'
        )
      yield flatten_batch(batch), texts


class Decoded(NamedTuple):
  """The metrics of one dataset, in the form for `task.early_stopping_fn`."""

  dataset: str  # the name in Pax
  decoded: Mapping[str, float]  # metrics of decode
  processed: Mapping[str, float]  # metrics of process_decode_out
  num_batches: int


class _DecodeResults:
  """Collects the outputs and metrics of one dataset, as Paxml's decode program does."""

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
    self.metrics_by_stage: list[dict[str, float]] = []  # of decode and of process_decode_out; set by `metrics`

  def add(self, dataset: Any, output: Any, texts: Mapping[str, Any]) -> None:
    """Adds the outputs of a decode step, as host arrays, and the strings of its batch."""
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
      result = f'{len(processed)} values' if isinstance(processed, tuple | list) else f'a {type(processed).__name__}'
      raise UserError(
        f'{model}.process_decode_out returns {result}, which must be three: weighted scalars, (key, value) pairs and '
        'metrics.'
      )
    scalars, pairs, clu_metrics = processed
    self._process_metrics.store(scalars)
    self.outputs.extend(pairs)
    if clu_metrics:
      self._process_clu_metrics = metric_utils.merge_clu_metrics(self._process_clu_metrics, clu_metrics)

  def metrics(self) -> dict[str, float]:
    """Returns the scalar metrics over all batches, by the names of Paxml's summaries."""
    scalars, left_out = {}, []
    for prefix, means, metrics in (
      ('decode_metrics', self._decode_metrics, self._clu_metrics),
      ('process_decode_metrics', self._process_metrics, self._process_clu_metrics),
    ):
      values = means.finalize()
      for name, (value, weight) in values.items():
        scalars[f'{prefix}/{name}'] = value
        scalars[f'{prefix}/{name}-weight'] = weight
      stage_metrics = metric_utils.as_float_dict(values)
      for name, value in metric_utils.compute_metric_values(metrics).items():
        if isinstance(value, clu_values.Scalar):
          scalars[self._task.decode.metrics_prefix + name] = stage_metrics[name] = value.value
        else:
          left_out.append(name)
      self.metrics_by_stage.append(stage_metrics)
    for name, values in self._summaries.items():
      if base_layer.get_summary_base_type(base_layer.get_summary_type_from_key(name)) is base_layer.SummaryType.SCALAR:
        scalars[name] = np.mean([np.mean(value) for value in values])
      else:
        left_out.append(name)
    if left_out:
      logging.warning('These summaries of decoding are not scalars and not written: %s.', ', '.join(left_out))
    return {name: float(np.mean(value)) for name, value in scalars.items()}


def _write_outputs(directory: epath.Path, stem: str, outputs: list[tuple[str, Any]]) -> None:
  """Writes Paxml's two files to a temporary directory, and moves the complete ones to `directory`."""
  with storage_errors(directory), tempfile.TemporaryDirectory() as temporary:
    source = pathlib.Path(temporary)
    suffixes = ['.pickle', '.jsonl']
    try:
      io_utils.write_key_value_pairs(source / stem, outputs)
    except TypeError as error:  # Paxml also leaves out files that it cannot write
      unfinished = '.jsonl' if (source / f'{stem}.jsonl').exists() else '.pickle'
      suffixes = suffixes[: suffixes.index(unfinished)]
      logging.error(
        '%s: %s files cannot store an output of process_decode_out: %s', directory / stem, unfinished, error
      )
    make_directory(directory)
    for suffix in suffixes:
      write_durably(directory / f'{stem}{suffix}', (source / f'{stem}{suffix}').read_bytes())
