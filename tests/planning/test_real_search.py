"""The searches with a real compiler, the CPU's on fake devices: what they say fits was compiled, and fits."""

import pytest

from spmd_tasks.config import resolve as resolve_config
from spmd_tasks.config import to_json
from spmd_tasks.planning import make_plan, parse_target
from spmd_tasks.planning.search import changes_that_fit, search_plans

TINY = (
  'num_layers=2',
  'model_dims=32',
  'num_heads=2',
  'hidden_dims=64',
  'vocab_size=264',
  'seq_len=64',
  'batch_size=64',
)


class Compiled:
  """lm.StdlibTiny, made smaller, on 8 fake devices that have `limit` bytes each."""

  def __init__(self, limit):
    self.limit = limit
    self.plans = {}

  def resolve(self, overrides):
    resolved = resolve_config('lm.StdlibTiny', [*TINY, *overrides])
    return resolved.build(), to_json(resolved)['config']

  def plan_with(self, overrides):
    plan = make_plan(self.resolve(overrides)[0], parse_target('cpu:8'), show_progress=False).to_json()
    plan |= {'hbm_bytes': self.limit, 'fits': plan['peak_bytes'] <= self.limit}
    self.plans[frozenset(overrides)] = plan
    return plan


@pytest.fixture(scope='module')
def base():
  return Compiled(0).plan_with(())


def test_a_change_that_fits_is_found_by_compiling(base):
  compiled = Compiled(0.45 * base['peak_bytes'])
  trials = changes_that_fit(
    compiled.plan_with, compiled.resolve, base | {'hbm_bytes': compiled.limit, 'fits': False}, limit=4, wanted=1
  )
  assert trials[0].fits
  assert trials[0].peak_bytes <= compiled.limit
  for trial in trials:
    assert compiled.plans[frozenset(trial.setting)]['peak_bytes'] == trial.peak_bytes


def test_the_mesh_search_compiles_what_the_state_leaves_room_for(base):
  compiled = Compiled(base['peak_bytes'])
  found = search_plans(compiled.plan_with, compiled.resolve, num_devices=8, hbm_bytes=compiled.limit, limit=2)
  assert len(found.trials) == 2
  assert found.trials[0].fits
  assert any('ici_mesh_shape=1,4,2' in trial.setting for trial in found.trials)
