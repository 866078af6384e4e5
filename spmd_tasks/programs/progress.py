"""Shows a job's progress on stderr: a bar on terminals, one line per logged step elsewhere.

Usage:

    progress = make_progress(num_train_steps, first_step, primary=True)
    progress.step(7)                      # every finished step
    progress.log(7, metrics, own)         # every logged step; `own`: names of an own loss's metrics
    progress.message('step 7  eval valid: ' + format_metrics(metrics))
"""

from collections.abc import Sequence
import sys
import time
from typing import Protocol, TextIO

from tqdm import tqdm

from spmd_tasks.runtime import Metrics, scalars

_MAX_OWN = 4


class Progress(Protocol):
  """Receives every finished step, the metrics of logged steps, and messages."""

  def step(self, step: int) -> None: ...

  def log(self, step: int, metrics: Metrics, own: Sequence[str] = ()) -> None: ...

  def message(self, text: str) -> None: ...

  def close(self) -> None: ...


class BarProgress:
  """A tqdm bar whose postfix shows the newest loss; messages scroll above it."""

  def __init__(self, total: int, initial: int, stream: TextIO):
    self._stream = stream
    self._bar = tqdm(total=total, initial=initial, unit='step', file=stream, dynamic_ncols=True, mininterval=0.2)

  def step(self, step: int) -> None:
    self._bar.update(step - self._bar.n)

  def log(self, step: int, metrics: Metrics, own: Sequence[str] = ()) -> None:
    self._bar.set_postfix_str(_summary(metrics, own), refresh=False)

  def message(self, text: str) -> None:
    self._bar.write(text, file=self._stream)

  def close(self) -> None:
    self._bar.close()


class LineProgress:
  """Prints one line per logged step, with the time of day."""

  def __init__(self, total: int, stream: TextIO):
    self._total = total
    self._stream = stream

  def step(self, step: int) -> None:
    pass

  def log(self, step: int, metrics: Metrics, own: Sequence[str] = ()) -> None:
    self.message(f'step {step}/{self._total}  {_summary(metrics, own)}')

  def message(self, text: str) -> None:
    print(time.strftime('%H:%M:%S'), text, file=self._stream, flush=True)

  def close(self) -> None:
    pass


class SilentProgress:
  """Shows nothing, for processes other than process 0."""

  def step(self, step: int) -> None:
    pass

  def log(self, step: int, metrics: Metrics, own: Sequence[str] = ()) -> None:
    pass

  def message(self, text: str) -> None:
    pass

  def close(self) -> None:
    pass


def make_progress(total: int, initial: int, *, primary: bool, stream: TextIO | None = None) -> Progress:
  """Makes a bar if the stream (default: stderr) is a terminal, else lines; shows nothing if not `primary`."""
  stream = stream or sys.stderr
  if not primary:
    return SilentProgress()
  return BarProgress(total, initial, stream) if stream.isatty() else LineProgress(total, stream)


def format_metrics(metrics: Metrics) -> str:
  """Formats metrics for people: `loss 1.2345  accuracy 0.5000`. Metrics with one value per expert are left out."""
  return '  '.join(f'{name} {value:.4f}' for name, value in scalars(metrics).items() if name != 'num_batches')


def _summary(all_metrics: Metrics, own: Sequence[str]) -> str:
  """One line of metrics; of those named `own`, the first four that are one number."""
  metrics = scalars(all_metrics)
  parts = [f'loss {metrics["loss"]:.4f}']
  if 'accuracy' in metrics:
    parts.append(f'accuracy {metrics["accuracy"]:.3f}')
  parts += [f'{name} {metrics[name]:.4g}' for name in own if name in metrics][:_MAX_OWN]
  if 'steps_per_second' in metrics:
    parts.append(f'{metrics["steps_per_second"]:.2f} steps/s')
  if 'tokens_per_second' in metrics:
    parts.append(f'{metrics["tokens_per_second"]:,.0f} tokens/s')
  if 'examples_per_second' in metrics:
    parts.append(f'{metrics["examples_per_second"]:,.1f} examples/s')
  if 'mfu' in metrics:
    parts.append(f'MFU {100 * metrics["mfu"]:.1f}%')
  if metrics.get('num_skipped_steps'):
    parts.append(f'{metrics["num_skipped_steps"]:.0f} skipped')
  return '  '.join(parts)
