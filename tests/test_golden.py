"""Golden files: every registered experiment's config and parameter table, so that a changed default shows in review.

scripts/update_golden writes them anew; the diff is then part of the change. Models are partitioned over meshes of
their own size (1024 devices for lm.Dense70B) by abstract shapes: nothing is compiled or allocated.
"""

import difflib
import functools
import math
import os
from pathlib import Path
import platform
import re
import socket
import sys
import sysconfig

import jax
import pytest

from spmd_tasks.config import listing, resolve, to_json
from spmd_tasks.config.resolution import ResolvedConfig
from spmd_tasks.config.saved_config import format_config
from spmd_tasks.experiment import partition_job
from spmd_tasks.runtime import PartitionedModel, format_parameter_table
from tests.shapes import shapes_alone

GOLDEN = Path(__file__).parent / 'golden'
IS_UPDATING = os.environ.get('UPDATE_GOLDEN') == '1'
EXPERIMENTS = dict(listing.list_experiments())
# An experiment that takes its sizes from a folder.
OVERRIDES = {
  name: ('model=tests/data/huggingface/llama',)
  for name in EXPERIMENTS
  if name.startswith(('hf.', 'finetune.', 'tune.'))
}
OVERRIDES |= {
  name: (*overrides, 'data=examples.jsonl')
  for name, overrides in OVERRIDES.items()
  if not name.startswith('hf.') and not name.endswith('Text')
}
OVERRIDES |= {name: ('ici_mesh_shape=1,8,1',) for name in EXPERIMENTS if name.endswith('Ladder')}  # -1 there
OVERRIDES |= {name: (*overrides, 'teacher=models/large') for name, overrides in OVERRIDES.items() if 'Distill' in name}
OVERRIDES |= {name: (*overrides, 'reward=lab:score') for name, overrides in OVERRIDES.items() if 'Grpo' in name}


@functools.cache
def resolved(name: str) -> ResolvedConfig:
  return resolve(name, OVERRIDES.get(name, ()))


@functools.cache
def partitioned(name: str) -> PartitionedModel:
  """The experiment on its own mesh, without devices."""
  job = resolved(name).build()
  with shapes_alone():
    return partition_job(job, job.experiment.mesh_spec().build_abstract())


MADE = {
  'config': lambda name: format_config(to_json(resolved(name))),
  'parameters': lambda name: format_parameter_table(partitioned(name)),
}
# A recipe for other chips has the weights of the one for the first; what a chip holds of them its plan says.
CASES = [
  (name, kind) for name in EXPERIMENTS for kind in MADE if kind == 'config' or not re.search('On(H200|V6e)$', name)
]


def golden_path(name: str, kind: str) -> Path:
  return GOLDEN / f'{name}.{kind}.txt'


# Of experiments whose tables differ in numbers alone, one is partitioned by default: the sizes are in the configs.
PARTITIONED = [name for name, kind in CASES if kind == 'parameters']
FIRST = {
  re.sub(r'[ -]+|[\d.,]+', ' ', path.read_text(encoding='utf-8')): name
  for name in reversed(PARTITIONED)
  if (path := golden_path(name, 'parameters')).exists()
}
REPEATED = set() if IS_UPDATING else {*PARTITIONED} - {*FIRST.values()}


@pytest.mark.parametrize(
  'name, kind',
  [
    pytest.param(*case, marks=[pytest.mark.exhaustive] * (case[1] == 'parameters' and case[0] in REPEATED))
    for case in CASES
  ],
)
def test_the_experiment_equals_its_golden_file(name, kind):
  path, text = golden_path(name, kind), MADE[kind](name)
  if IS_UPDATING:
    path.write_text(text, encoding='utf-8')
  golden = path.read_text(encoding='utf-8') if path.exists() else ''
  diff = difflib.unified_diff(
    golden.splitlines(keepends=True), text.splitlines(keepends=True), f'golden/{path.name}', 'regenerated'
  )
  assert text == golden, (
    f'{name} has changed (its {kind}):\n{"".join(diff)}\nIf you mean it, run scripts/update_golden and commit the '
    'files with the change.'
  )


def test_every_golden_file_has_an_experiment():
  wanted = {golden_path(name, kind) for name, kind in CASES}
  stale = set(GOLDEN.glob('*.txt')) - wanted
  if IS_UPDATING:
    for path in stale:
      path.unlink()
    stale = set()
  assert not stale, f'{sorted(path.name for path in stale)} belong to no registered experiment: scripts/update_golden.'


def test_golden_files_are_the_same_on_every_machine():
  text = '\n'.join(golden_path(name, kind).read_text(encoding='utf-8') for name, kind in CASES)
  assert not re.search(r'(^|[\s\'"=(])(~|[A-Za-z]:)?[/\\][\w.-]+[/\\]', text), 'an absolute path'
  assert ' at 0x' not in text, 'an address'
  machine = (socket.gethostname(), sys.prefix, sysconfig.get_path('stdlib'), platform.python_version(), jax.__version__)
  assert [word for word in machine if word in text] == []


CLAIMED_SIZES = {
  name: float(match[1]) * {'M': 1e6, 'B': 1e9}[match[2]]
  for name, line in EXPERIMENTS.items()
  if (match := re.search(r'([\d.]+)([MB]) parameters', line))
}


@pytest.mark.parametrize('name', CLAIMED_SIZES)
def test_models_are_as_large_as_their_docstrings_say(name):
  table = golden_path(name, 'parameters')
  if table.exists():
    total = int(re.search(r'total: ([\d,]+) param', table.read_text(encoding='utf-8'))[1].replace(',', ''))
  else:
    total = partitioned(name).total_num_params
  assert total == pytest.approx(CLAIMED_SIZES[name], rel=0.1)


def test_large_recipes_fit_their_chips():
  """Weights and optimizer state of the recipe for pods take less than half of a 16 GiB chip, and need no padding."""
  model = partitioned('lm.Dense70B')
  assert model.mesh.size == 1024
  assert model.padding_waste == 0
  per_device = sum(
    math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    for leaf in jax.tree.leaves((model.padded_state.weights, model.padded_state.learner))
  )
  assert per_device < 8 * 2**30
