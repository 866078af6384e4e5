"""Draws docs/pictures/same_losses.svg: one experiment in five ways, with one loss.

    .venv/bin/python scripts/draw_losses.py DIRECTORY

Runs each job of RUNS in DIRECTORY, unless its metrics are there already, and draws their losses. It takes five minutes
on two cores.
"""

import argparse
import json
import math
import os
from pathlib import Path
import signal
import subprocess
import sys
import time

import svg

PICTURES = Path(__file__).parents[1] / 'docs' / 'pictures'
NUM_STEPS, KILLED_AFTER = 100, 60
SIZES = ('model_dims=48', 'num_heads=6', 'hidden_dims=96', 'num_layers=6', 'seq_len=64')
SETTINGS = (
  *SIZES,
  f'num_train_steps={NUM_STEPS}',
  'log_every_steps=1',
  'checkpoint_every=25',
  'trackers=()',
)
# Directory: experiment, mesh, devices, what the picture calls it. pipeline.StdlibTiny is lm.StdlibTiny with stages.
RUNS = {
  'one': ('lm.StdlibTiny', '1,1,1', 1, '1 device'),
  'eight': ('lm.StdlibTiny', '1,4,2', 8, '8 devices: data 4 x mdl 2'),
  'seven': ('lm.StdlibTiny', '1,7,1', 7, '7 devices: width 48 stored as 49'),
  'pipe': ('pipeline.StdlibTiny', '1,4,2,1', 8, '8 devices: 6 layers in 4 pipeline stages'),
  'killed': ('lm.StdlibTiny', '1,4,2', 8, f'8 devices: kill -9 at step {KILLED_AFTER}, resumed'),
}
COLORS = ('#9aa3b2', '#3b6fc4', '#d9822b', '#3f9a5f', '#b0417a')


def run_job(directory: Path, name: str) -> None:
  """Trains one of RUNS to its end; kills the killed one once."""
  experiment, mesh, num_devices, _ = RUNS[name]
  command = [str(Path(sys.executable).with_name('spmd-tasks')), '--exp', experiment, '--mode', 'train']
  command += ['--job_log_dir', str(directory / name), '--ici_mesh_shape', mesh, '--num_fake_devices', str(num_devices)]
  command += [argument for setting in SETTINGS for argument in ('--set', setting)]
  if name == 'killed' and num_lines(directory / name) < KILLED_AFTER:
    process = subprocess.Popen(command)
    while num_lines(directory / name) < KILLED_AFTER:
      time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
  if num_lines(directory / name) < NUM_STEPS:
    subprocess.run(command, check=True)


def num_lines(job_log_dir: Path) -> int:
  """Returns the number of logged steps of a job."""
  path = job_log_dir / 'metrics.jsonl'
  return path.read_bytes().count(b'\n') if path.exists() else 0


def losses_of(job_log_dir: Path) -> list[float]:
  """Returns the loss of every step; for a repeated step, the last one."""
  lines = [json.loads(line) for line in (job_log_dir / 'metrics.jsonl').read_text().splitlines()]
  by_step = {line['step']: line['loss'] for line in lines}
  return [by_step[step] for step in sorted(by_step)]


def same_losses(directory: Path) -> str:
  """Draws the curves of RUNS on top of one another, and below them their differences on a log axis."""
  losses = {name: losses_of(directory / name) for name in RUNS}
  left, width, top, height, most = 64, 776, 64, 210, 7.0
  drawing = svg.Drawing(860, 712, 'One loss in five ways')
  drawing.text(20, 28, f'One experiment, five ways: the training loss of {NUM_STEPS} steps', size=16, bold=True)
  drawing.text(20, 48, 'Five curves on top of one another, each narrower than the one below.', size=13, color=svg.FAINT)

  def x_of(step: int) -> float:
    return round(left + width * step / NUM_STEPS, 1)

  for value in range(0, int(most) + 1, 2):
    y = top + height * (1 - value / most)
    drawing.line([(left, y), (left + width, y)], color=svg.PADDING, width=1)
    drawing.text(left - 10, y + 5, str(value), size=12, color=svg.FAINT, anchor='end')
  for i, curve in enumerate(losses.values()):
    points = [(x_of(step), round(top + height * (1 - loss / most), 1)) for step, loss in enumerate(curve, 1)]
    drawing.line(points, color=COLORS[i], width=14 - 3 * i)
  for i, name in enumerate(RUNS):
    y = top + 18 + 20 * i
    drawing.line([(500, y), (530, y)], color=COLORS[i], width=14 - 3 * i)
    drawing.text(540, y + 5, RUNS[name][3], size=13)

  lane_top, lane, low, high = 330, 88, -7.0, -5.0
  drawing.text(20, lane_top - 18, 'Differences between these losses', size=16, bold=True)
  for i, name in enumerate(list(RUNS)[1:], 1):
    other = 'eight' if name == 'killed' else 'one'
    differences = [abs(ours - theirs) for ours, theirs in zip(losses[name], losses[other], strict=True)]
    y = lane_top + lane * (i - 1)
    what = f'{RUNS[name][3]}, against {"the run without a kill" if name == "killed" else "1 device"}'
    largest = 'every bit is the same' if not any(differences) else f'at most {max(differences):.1e}'
    drawing.text(left, y + 14, what, size=13)
    drawing.text(left + width, y + 14, largest, size=13, bold=True, anchor='end')
    zero, span = y + 70, 32
    for label, at in (('0', zero), ('1e-7', zero - 12), ('1e-6', zero - 12 - span / 2), ('1e-5', zero - 12 - span)):
      drawing.line([(left, at), (left + width, at)], color=svg.PADDING, width=1)
      drawing.text(left - 8, at + 4, label, size=11, color=svg.FAINT, anchor='end')
    for step, difference in enumerate(differences, 1):
      at = zero if not difference else zero - 12 - span * (math.log10(difference) - low) / (high - low)
      drawing.rect(x_of(step) - 2.5, round(at - 2.5, 1), 5, 5, fill=COLORS[i], line=COLORS[i], radius=2)
    if name == 'killed':
      x = x_of(KILLED_AFTER)
      drawing.line([(x, zero - 12 - span), (x, zero)], color=svg.FAINT)
      drawing.text(x + 6, zero - span, 'killed here, resumed from the checkpoint of step 50', size=12, color=svg.FAINT)
  bottom = lane_top + lane * 4
  for step in range(0, NUM_STEPS + 1, 20):
    drawing.text(x_of(step), bottom + 4, str(step), size=12, color=svg.FAINT, anchor='middle')
  drawing.text(left + width / 2, bottom + 22, 'step', size=13, anchor='middle')
  return drawing.svg()


def main() -> None:
  """Runs the jobs and draws the picture."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('directory', type=Path, help='of the jobs')
  directory = parser.parse_args().directory
  for name in RUNS:
    run_job(directory, name)
  (PICTURES / 'same_losses.svg').write_text(same_losses(directory), encoding='utf-8')


if __name__ == '__main__':
  main()
