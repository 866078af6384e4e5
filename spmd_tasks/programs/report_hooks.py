"""Hooks that report: metrics and their rates, progress, the time until the first step, and goodput."""

from collections.abc import Mapping
import dataclasses
import json
import math
import time
from typing import Any

import jax
import numpy as np

from spmd_tasks.activity import set_activity
from spmd_tasks.distributed import is_primary
from spmd_tasks.errors import is_own
from spmd_tasks.files import is_remote, storage_errors, write_durably
from spmd_tasks.inputs.base import progress_of, source_names
from spmd_tasks.layers.losses import RESERVED_METRICS
from spmd_tasks.programs.goodput import Goodput, steady_now
from spmd_tasks.programs.hooks import Logged, TrainHook, TrainRun
from spmd_tasks.programs.interval_hooks import describe_interval
from spmd_tasks.programs.job_directory import PARAMETERS_FILE, STARTUP_FILE, SavedSteps
from spmd_tasks.programs.training_loop import Outcome
from spmd_tasks.runtime import PartitionedModel, format_parameter_table
from spmd_tasks.runtime.compilation import CompilationCounter
from spmd_tasks.runtime.input_layout import InputSpec
from spmd_tasks.runtime.metrics import Metric, finish_metrics, make_writer, split_summaries
from spmd_tasks.sharding import infer_partition_spec_based_on_rank
from spmd_tasks.sharding.specs import even_spec, num_parts, spec_axes
from spmd_tasks.sharding.weights import SPLIT_BY_DEFAULT, is_quantized


class CountGoodput(TrainHook):
  """Counts the time of steps, and says at the start of the loop and at its end what the time goes to."""

  def open(self, run: TrainRun) -> None:
    run.stack.callback(run.goodput.close)

  def start(self, run: TrainRun) -> None:
    run.goodput.resume(run.first_step)

  def after_step(self, run: TrainRun, outcome: Outcome) -> None:
    run.goodput.step(outcome.step, is_skipped=outcome.skipped, seconds_waited=run.batches.seconds_waited)

  def after_skipped_step(self, run: TrainRun, outcome: Outcome) -> None:
    self.after_step(run, outcome)

  def after_loop(self, run: TrainRun) -> None:
    run.goodput.switch('program_end')


class ShowProgress(TrainHook):
  """Describes the model, and reports the time until the first step, every finished step, and every skipped one."""

  def start(self, run: TrainRun) -> None:
    interval = describe_interval(run.experiment.checkpoint_every)
    run.message(f'{_describe(run.model, run.origin)}; a checkpoint {interval}')
    if is_primary():
      with storage_errors(run.job_log_dir / PARAMETERS_FILE):
        write_durably(run.job_log_dir / PARAMETERS_FILE, format_parameter_table(run.model) + '\n')

  def after_first_step(self, run: TrainRun) -> None:
    set_activity(None)
    run.progress.step(run.step)
    step, total = run.model.train_step, steady_now() - run.goodput.begun
    phases = {'trace': step.trace_seconds, 'compile': step.compile_seconds, 'total': total}
    run.message(
      f'first step finished {total:.1f} s after the start, of which {step.trace_seconds:.1f} s traced and '
      f'{step.compile_seconds:.1f} s compiled it'
    )
    if is_primary():
      with storage_errors(run.job_log_dir / STARTUP_FILE):
        write_durably(run.job_log_dir / STARTUP_FILE, json.dumps(phases) + '\n')

  def after_step(self, run: TrainRun, outcome: Outcome) -> None:
    run.progress.step(outcome.step)

  def after_skipped_step(self, run: TrainRun, outcome: Outcome) -> None:
    run.message(
      f'skipped an update after step {outcome.step}: loss {float(outcome.metrics["loss"])}, gradient norm '
      f'{float(outcome.metrics["grad_norm"])}; weights and optimizer are unchanged'
    )


class LogMetrics(TrainHook):
  """Writes metrics to files and shows them: of the first step, every `log_every_steps`, and of the last one.

  They are those of the step itself, and what has happened since the logged step before.
  """

  def start(self, run: TrainRun) -> None:
    """A collective call."""
    loss = getattr(run.job.task, 'loss', None)  # Pax' tasks have none
    self._is_own_loss = loss is not None and is_own(loss)
    self._writer = make_writer(run.job_log_dir, trackers=run.experiment.trackers, primary=is_primary())
    run.stack.callback(self._writer.close)
    counted, number = count_batch(run.model.input_layout.spec)
    peak, self._num_uneven = None, 1
    if jax.devices()[0].platform != 'cpu':  # none of their peaks is known
      self._num_uneven = 2  # the second step runs while the hooks of the first one compile
      from spmd_tasks.runtime.flops import peak_steps_per_second

      peak = peak_steps_per_second(run.model)
    self._rates = StepRates(counted=counted, counted_per_step=number, peak_steps_per_second=peak, goodput=run.goodput)

  def before_loop(self, run: TrainRun) -> None:
    self._compilations = run.stack.enter_context(CompilationCounter())

  def after_step(self, run: TrainRun, outcome: Outcome) -> None:
    step, experiment = outcome.step, run.experiment
    if run.first_step < step <= run.first_step + self._num_uneven:
      self._rates.start(step)
    if step == run.first_step + 1:  # everything is compiled now
      self._num_programs = self._compilations.num_programs
    if step % experiment.log_every_steps == 0 or step in (run.first_step + 1, experiment.num_train_steps):
      metrics = self._metrics(run, outcome)
      summaries, histograms = split_summaries([jax.device_get(outcome.outputs)] if outcome.outputs else [])
      metrics |= summaries
      self._writer.write(step, metrics)
      run.logged = Logged(step, metrics)
      self._writer.write_histograms(step, histograms)
      run.progress.log(step, metrics, self._own_names(outcome.metrics))

  def _own_names(self, step_metrics: Mapping[str, jax.Array]) -> list[str]:
    """Returns the names of those metrics of a step that a loss of the experiment's own has returned."""
    return [name for name in step_metrics if name not in (*RESERVED_METRICS, 'accuracy')] if self._is_own_loss else []

  def _metrics(self, run: TrainRun, outcome: Outcome) -> dict[str, Metric]:
    """Returns all metrics of a step; waits for the step. A collective call."""
    metrics = finish_metrics(jax.device_get(outcome.metrics), source_names(run.job.train_input))
    del metrics['skipped']
    counts = {
      'num_skipped_steps': run.loop.num_skipped,
      'padding_waste': run.model.padding_waste,
      'num_compilations': self._compilations.num_programs - self._num_programs,
    }
    progress = progress_of(run.job.train_input, run.loop.outcome_input_state)
    return metrics | self._rates.since_last(outcome.step) | run.goodput.metrics() | progress | run.metrics | counts


class ProfileOnRequest(TrainHook):
  """Looks every few seconds whether `profile_now` in the job's directory asks for a profile (profiling.py)."""

  _profile: Any = None  # a Profile
  _looked = 0.0

  def after_step(self, run: TrainRun, outcome: Outcome) -> None:
    if self._profile is not None:
      self._profile.after_step(run, outcome)
      self._profile = self._profile if self._profile.is_running else None
    elif time.monotonic() - self._looked > (60 if is_remote(run.job_log_dir) else 2):
      self._looked = time.monotonic()
      if (request := run.job_log_dir / 'profile_now').exists():
        from spmd_tasks.programs.profiling import take_request

        self._profile = take_request(run, request, outcome.step)


class ReportEnd(TrainHook):
  """Says that the training is complete, and why if that is early; the last hook, when all others are done."""

  def finish(self, run: TrainRun) -> None:
    if run.step < run.experiment.num_train_steps:
      run.message(f'Ended after step {run.step} of {run.experiment.num_train_steps}: {run.end_reason}.')
      if is_primary():
        with storage_errors(run.job_log_dir):
          SavedSteps(run.job_log_dir).record(run.step, is_last=True)
    run.message(run.goodput.end())


@dataclasses.dataclass(kw_only=True)
class StepRates:
  """Measures rates from one logged step to the next."""

  counted: str  # beside steps: 'tokens', or 'examples' of batches without tokens
  counted_per_step: int  # of a training batch
  peak_steps_per_second: float | None  # at the devices' peak FLOP/s; None where the peak is not known
  goodput: Goodput  # counts the time in the loop
  _last: tuple[int, float, float] = (-1, 0.0, 0.0)

  def start(self, step: int) -> None:
    """Starts to measure after `step`, one of the first, so that compilation is left out."""
    self._last = step, *self.goodput.loop_seconds()

  def since_last(self, step: int) -> dict[str, float]:
    """Returns steps and what is counted per second, waiting and MFU since the last call; {} if no step was made."""
    last_step, last_seconds, last_waited = self._last
    if step <= last_step:
      return {}
    self.start(step)
    steps_per_second = (step - last_step) / (self._last[1] - last_seconds)
    rates = {
      'steps_per_second': steps_per_second,
      f'{self.counted}_per_second': steps_per_second * self.counted_per_step,
      'host_wait_fraction': (self._last[2] - last_waited) / (self._last[1] - last_seconds),
    }
    if self.peak_steps_per_second is not None:
      rates['mfu'] = steps_per_second / self.peak_steps_per_second
    return rates


def count_batch(spec: InputSpec) -> tuple[str, int]:
  """Counts what a batch has: 'tokens', the positions of its largest integer input [B, T], or else 'examples', its rows.

  Positions that a text does not fill count as well.
  """
  texts = [each.shape for each in spec.values() if len(each.shape) == 2 and np.issubdtype(each.dtype, np.integer)]
  return ('tokens', max(map(math.prod, texts))) if texts else ('examples', next(iter(spec.values())).shape[0])


def _describe(model: PartitionedModel, origin: str) -> str:
  axes = ' x '.join(f'{name} {size}' for name, size in model.mesh.shape.items())
  padding = f', {100 * model.padding_waste:.1f}% more stored as padding' if model.padding_waste else ''
  trained = ''
  if model.has_frozen_weights:
    share = model.num_trained_params / model.total_num_params
    trained = f', {model.num_trained_params:,} of them trained ({share:.2%})'
  specs = [spec for spec in jax.tree.leaves(model.weight_specs, is_leaf=is_quantized) if not is_quantized(spec)]
  whole = sum(math.prod(spec.shape) for spec in specs if len(spec.shape) > 1 and not any(spec.split_dims))
  if whole and model.mesh.size > 1:
    trained += f', {whole:,} of them in kernels without split dims, whole on every device'
  by_default = [spec for spec in specs if SPLIT_BY_DEFAULT in spec.tags]
  if by_default and model.mesh.size > 1:
    count, name = sum(math.prod(spec.shape) for spec in by_default), next(filter(None, by_default[0].split_dims))
    trained += f', {count:,} of them in kernels without split dims, whose largest dim is split as {name!r}'
  devices = f'{model.mesh.size} {jax.devices()[0].platform} devices'
  return (
    f'{model.total_num_params:,} parameters{trained}{padding}, mesh {axes} ({devices}), {origin}{_uneven_rows(model)}'
  )


def _uneven_rows(model: PartitionedModel) -> str:
  """Says so if the devices that split a batch, or a microbatch of the learner, do not divide its rows."""
  mesh, true = model.mesh, next(iter(model.input_layout.spec.values()))
  spec = infer_partition_spec_based_on_rank(
    len(true.shape), model.inputs_split_mapping, mesh.axis_names, model.axis_rules
  )
  if spec is None:
    return ''
  num_microbatches = model.task.learner.num_microbatches
  num_rows = true.shape[0] // num_microbatches
  even = even_spec(spec, (num_rows,), mesh.shape)
  wanted, used = (num_parts(spec_axes(each, len(each))[0], mesh.shape) for each in (spec, even))
  if wanted == used:
    return ''
  part = 'microbatch' if num_microbatches > 1 else 'batch'
  return (
    f'; the rows of a {part}, {num_rows}, are no multiple of the {wanted} devices that split them, so each computes '
    f'{num_rows // used}: a multiple of {wanted} is faster'
  )
