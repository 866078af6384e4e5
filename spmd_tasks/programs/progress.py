"""Progress: shows a job's steps on stderr, by a bar on terminals, by one line per logged step elsewhere.

progress = Progress(num_train_steps, first_step, primary=True)
progress.step(7)                      # every finished step
progress.log(7, metrics, own)         # every logged step; `own`: names of an own loss's metrics
progress.message('step 7  eval valid: ' + format_metrics(metrics))
"""

from collections.abc import Sequence
import sys
import time
from typing import TextIO

from tqdm import tqdm

from spmd_tasks.runtime.metrics import Metrics, scalars

_MAX_OWN = 4


class Progress:
  """Shows finished steps, the metrics of logged ones (a bar has the newest loss beside it), and messages above the bar.

  Processes other than process 0 show nothing.
  """

  def __init__(self, total: int, initial: int, *, primary: bool, stream: TextIO | None = None):
    self._total, self._is_shown, self._stream = total, primary, stream or sys.stderr
    self._bar: tqdm | None = None
    if primary and self._stream.isatty():
      settings = {'unit': 'step', 'dynamic_ncols': True, 'mininterval': 0.2}
      self._bar = tqdm(total=total, initial=initial, file=self._stream, **settings)

  def step(self, step: int) -> None:
    """Shows a finished step."""
    if self._bar is not None:
      self._bar.update(step - self._bar.n)

  def log(self, step: int, metrics: Metrics, own: Sequence[str] = ()) -> None:
    """Shows a logged step's metrics; `own` names the metrics that a loss of the user's own returned."""
    if self._bar is not None:
      self._bar.set_postfix_str(_summary(metrics, own), refresh=False)
    else:
      self.message(f'step {step}/{self._total}  {_summary(metrics, own)}')

  def message(self, text: str) -> None:
    """Shows a line, with the time of day if there is no bar."""
    if self._bar is not None:
      self._bar.write(text, file=self._stream)
    elif self._is_shown:
      print(time.strftime('%H:%M:%S'), text, file=self._stream, flush=True)

  def close(self) -> None:
    """Ends the bar."""
    if self._bar is not None:
      self._bar.close()


def format_metrics(metrics: Metrics) -> str:
  """Formats metrics for people: `loss 1.2345  accuracy 0.5000`. Metrics with one value per expert are left out."""
  return '  '.join(f'{name} {value:.4f}' for name, value in scalars(metrics).items() if name != 'num_batches')


def _summary(all_metrics: Metrics, own: Sequence[str]) -> str:
  """Returns one line of metrics, with the first four scalars of `own`."""
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
