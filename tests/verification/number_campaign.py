"""scripts/number_campaign: random experiments on random layouts, each compared with one device.

    scripts/number_campaign --cases 300 --seed 0             # exits with 1 if a number is wrong, or a refusal unknown
    scripts/number_campaign --seed 0 --only 17               # the layouts of one experiment again

Each layout is a case, with a line of JSON about its result. Experiment e of a seed, and each of its layouts, is a
function of (seed, e). spmd_tasks.verification compares metrics, gradients, weights and optimizer state, within rounding
errors of the reference. Refused layouts are counted by their error message, whose reason must be in REFUSALS. Every
experiment runs in a fork of this process, so that modules are imported once, and a program that aborts or hangs ends
only one experiment.
"""

import argparse
import collections
from collections.abc import Iterator, Mapping, Sequence
import contextlib
import json
import os
import random
import re
import select
import signal
import sys
import time
from typing import Any

import jax

from spmd_tasks.distributed import use_fake_devices
from spmd_tasks.errors import UserError
from spmd_tasks.verification import Bench, Setting, Source
from spmd_tasks.verification.mode import compile_quickly
from tests.verification.random_experiments import draw_settings, make_job
from tests.verification.random_layouts import MAX_DEVICES, Settings, draw_layout, mesh_of, reference_of

LAYOUTS_OF_AN_EXPERIMENT = 10
NUM_STEPS = 2
LIMIT_S = 900  # per layout; longer is a hang
BAD = ('wrong', 'crashed', 'hung')
COMPARED = ('same', *BAD)
# Error messages of layouts that may be refused, with N for every number, and the reasons. docs/verify.md has them too.
REFUSALS = {
  "group_size=N makes groups of N tokens, but each of the pipeline's N microbatches has N": (
    'experts drop tokens by group, so a group that several microbatches share would have other drops than one device'
  ),
}


def draw(seed: int, experiment: int) -> tuple[Settings, list[Settings]]:
  """Draws an experiment and its layouts."""
  settings = draw_settings(random.Random(f'{seed}/{experiment}'))
  return settings, [
    draw_layout(random.Random(f'{seed}/{experiment}/{layout}'), settings) for layout in range(LAYOUTS_OF_AN_EXPERIMENT)
  ]


def sentence_of(refusal: str) -> str:
  """Returns an error message with N for its numbers, so that equal refusals of different sizes count as one."""
  return re.sub(r'\d+(\.\d+)?', 'N', refusal)


def reason_of(refusal: str) -> str | None:
  """Returns the documented reason of a refusal; None if there is none, so that the refusal is a bug."""
  return next((why for sentence, why in REFUSALS.items() if sentence_of(refusal).startswith(sentence)), None)


def summarize(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
  """Returns the counts of verdicts, and the messages of refusals with their counts and reasons."""
  counts = collections.Counter(result['verdict'] for result in results)
  refused = [result['reason'] for result in results if result['verdict'] == 'refused']
  refusals = [
    {'sentence': sentence, 'count': count, 'reason': reason_of(sentence)}
    for sentence, count in collections.Counter(map(sentence_of, refused)).most_common()
  ]
  undocumented = sum(refusal['count'] for refusal in refusals if refusal['reason'] is None)
  return {
    'cases': sum(counts[name] for name in COMPARED),
    'bad': sum(counts[name] for name in BAD) + undocumented,
    **{name: counts[name] for name in ('same', *BAD, 'refused', 'not compared')},
    'refused without a reason': undocumented,
    'refusals': refusals,
  }


def compare_layouts(settings: Settings, layouts: list[Settings]) -> Iterator[dict[str, Any]]:
  """Yields the result of comparing each layout with its reference, usually one device: `verdict`, and what differs."""

  def resolve(overrides):
    number = next((int(text.removeprefix('layout=')) for text in overrides if text.startswith('layout=')), None)
    layout = {} if number is None else layouts[number]
    return make_job(settings, reference_of(layout, settings) if 'is_reference=True' in overrides else layout), {}

  bench = Bench(Source(flags=(), resolve=resolve), num_devices=MAX_DEVICES, num_steps=NUM_STEPS)
  with contextlib.closing(bench):
    for number, layout in enumerate(layouts):
      setting, reference = Setting(mesh=mesh_of(layout), overrides=(f'layout={number}',)), Setting()
      if pipeline := reference_of(layout, settings):
        reference = Setting(mesh=mesh_of(pipeline), overrides=(*setting.overrides, 'is_reference=True'))
      try:
        agreement = bench.agree(setting, reference)
      except UserError as error:
        yield {'verdict': 'refused', 'reason': str(error)}
        continue
      if agreement.first is not None:
        yield {'verdict': 'wrong', 'first': str(agreement.first)}
      elif not agreement.num_steps:
        yield {'verdict': 'not compared', 'reason': '; '.join(agreement.notes)}
      else:
        yield {'verdict': 'same', 'closest': str(agreement.closest), 'notes': agreement.notes}


def run_experiment(seed: int, experiment: int, num_layouts: int, stream: Any) -> None:
  """Compares the first layouts; writes a line to `stream` before and after each."""
  compile_quickly()
  use_fake_devices(MAX_DEVICES)
  jax.config.update('jax_numpy_rank_promotion', 'raise')
  settings, layouts = draw(seed, experiment)
  layouts = layouts[:num_layouts]
  results = compare_layouts(settings, layouts)
  for number, layout in enumerate(layouts):
    print(json.dumps({'started': number}), file=stream, flush=True)
    started = time.process_time()
    try:
      result = next(results)
    except Exception as error:
      result = {'verdict': 'crashed', 'reason': f'{type(error).__name__}: {error}'[:500]}
      results = compare_layouts(settings, layouts[number + 1 :])
    result |= {'cpu_seconds': round(time.process_time() - started, 1), 'layout': layout}
    if result['verdict'] != 'same':
      result['settings'] = settings
    print(json.dumps(result), file=stream, flush=True)


def fork_experiment(seed: int, experiment: int, num_layouts: int) -> Iterator[dict[str, Any]]:
  """Runs an experiment in a child process. Yields the results of its first layouts."""
  read_end, write_end = os.pipe()
  pid = os.fork()
  if not pid:
    os.close(read_end)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # XLA's stack traces
    code = 1
    try:
      with os.fdopen(write_end, 'w') as stream:
        run_experiment(seed, experiment, num_layouts, stream)
      code = 0
    finally:
      os._exit(code)
  os.close(write_end)
  number, ended = None, 'crashed'
  with os.fdopen(read_end) as stream:
    while True:
      if not select.select([stream], [], [], LIMIT_S)[0]:
        os.kill(pid, signal.SIGKILL)
        ended = 'hung'
      line = stream.readline()
      if not line:
        break
      result = json.loads(line)
      if 'started' in result:
        number = result['started']
      else:
        yield {'number': number, **result}
        number = None
  _, status = os.waitpid(pid, 0)
  if number is not None or status:
    settings, layouts = draw(seed, experiment)
    reason = f'the process ended with {os.waitstatus_to_exitcode(status)}'
    yield {'number': number, 'verdict': ended, 'reason': reason, 'layout': layouts[number or 0], 'settings': settings}


def main(argv: list[str] | None = None) -> int:
  """Prints a line per case and the summary; returns the exit code."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--cases', type=int, default=20, help='number of layouts to compare; refused ones do not count')
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument('--first', type=int, default=0, metavar='E', help='start with this experiment')
  parser.add_argument('--only', type=int, metavar='E', help='only this experiment')
  args = parser.parse_args(argv)
  results: list[dict[str, Any]] = []
  started = time.monotonic()
  experiment = args.first if args.only is None else args.only
  while args.only in (None, experiment) and (missing := args.cases - summarize(results)['cases']) > 0:
    for result in fork_experiment(args.seed, experiment, min(missing, LAYOUTS_OF_AN_EXPERIMENT)):
      results.append(result)
      again = f'scripts/number_campaign --seed {args.seed} --only {experiment}'
      print(json.dumps({'experiment': experiment, **result, 'again': again}), flush=True)
    experiment += 1
  summary = summarize(results)
  print(json.dumps(summary | {'next': experiment, 'seconds': round(time.monotonic() - started)}), flush=True)
  return 1 if summary['bad'] else 0


if __name__ == '__main__':
  sys.exit(main())
