"""A device that computes other bits is found and named before the step; exchanged devices without a fault agree."""

import json
import re

import jax
import numpy as np
import pytest

from spmd_tasks import exit_codes
from spmd_tasks.errors import UserError, user_error_code
from spmd_tasks.replay import CheckDevices, CorruptionError
from tests.programs.small_jobs import SMALL
from tests.replay.faulty_devices import Fault, FaultyDevices, run_of

# scripts/bench_device_check.py has hundreds of faults in transformers, and experts on a pipeline too.
JOBS = ('tests.programs.own_experiments.Regression', 'task.model.dropout_rate=0.5', 'ici_mesh_shape=1,2,4'), (SMALL,)


@pytest.fixture(scope='module', params=[JOBS[0], pytest.param(JOBS[1], marks=pytest.mark.exhaustive)], ids=['2', 'lm'])
def checked(request):
  """A check that has found nothing, with what it saw."""
  run, batch = run_of(*request.param)
  hook = FaultyDevices(every_steps=2)
  hook.prepare(run)
  hook.before_step(run, batch)
  return hook, run, batch


@pytest.fixture
def hook(checked):
  hook = checked[0]
  yield hook
  hook.fault = hook.broken = None
  hook._stops = True


def named(error) -> set[int]:
  return {int(number) for number in re.findall(r'device (\d+) of', str(error.value))}


def test_devices_without_a_fault_agree_and_the_state_stays(checked):
  hook, run, batch = checked
  assert (hook.num_checks, hook.num_differences) == (1, 0)
  before = jax.device_get(run.state)
  hook.before_step(run, batch)
  jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(run.state))
  run.step = 2  # the step after it is not checked
  hook.before_step(run, batch)
  run.step = 1
  assert (hook.num_checks, hook.num_differences) == (2, 0)
  assert [step for step in range(6) if hook.needs_state(step)] == [1, 3, 5]


@pytest.mark.parametrize('numbers', [(0, 1, 2), (0,), (1,)], ids=['always', 'once', 'once elsewhere'])
@pytest.mark.parametrize('stage', ['inputs', 'gradients'])
def test_a_flipped_bit_names_its_device(checked, hook, stage, numbers, rng):
  _, run, batch = checked
  hook.fault = Fault.drawn(rng, stage, numbers)
  with pytest.raises(CorruptionError, match='before step 2, which is not taken: device') as error:
    hook.before_step(run, batch)
  assert named(error) == {hook.fault.device}
  assert stage in str(error.value)
  assert user_error_code(error.value) == exit_codes.CORRUPTED
  fault = json.loads((run.job_log_dir / 'device_faults' / 'round_000000_step_00000002.json').read_text())
  assert (fault['devices'], fault['processes']) == ([f'device {hook.fault.device} of process 0 (cpu)'], [0])
  assert fault['found'] in str(error.value)


def test_a_fault_inside_the_program_is_found_and_a_broken_device_named_by_its_products(checked, hook):
  """A weight that is wrong while the program runs changes gradients everywhere."""
  _, run, batch = checked
  leaves = [str(path) for path, _ in jax.tree_util.tree_flatten_with_path((run.state, batch))[0]]
  weight = next(i for i, path in enumerate(leaves) if 'final_norm' in path or "'up'" in path)
  hook.fault = Fault(device=5, stage='program', leaf=weight, element=3, bit=0)  # of the exponent of the first entry
  with pytest.raises(CorruptionError, match='have spread, so that no shard tells which of 8 was wrong') as error:
    hook.before_step(run, batch)
  assert not named(error)
  hook.broken = 5
  with pytest.raises(CorruptionError, match='computes other products') as error:
    hook.before_step(run, batch)
  assert named(error) == {5}


def test_a_job_may_go_on_where_the_devices_agree_the_second_time(checked, hook, rng):
  _, run, batch = checked
  hook._stops = False
  fault, calls = Fault.drawn(rng, 'gradients', (0,)), []

  def once(number, stage, arrays):
    calls.append(stage)
    return fault.flipped(arrays) if calls.count('gradients') == 1 and stage == 'gradients' else arrays

  hook.computed = once
  try:
    hook.before_step(run, batch)
  finally:
    del hook.computed
  assert f'device {fault.device} of' in run.messages[-1]
  assert run.messages[-1].endswith('Computed again, all devices agree, and the job goes on.')
  hook.fault = Fault.drawn(rng, 'gradients')
  with pytest.raises(CorruptionError):
    hook.before_step(run, batch)


@pytest.mark.parametrize(
  'settings, said', [({'every_steps': 0}, 'at least 1'), ({'num_parts': 3}, r'must divide the batch of 8 rows')]
)
def test_settings_that_cannot_be_are_refused(checked, settings, said):
  with pytest.raises(UserError, match=said):
    CheckDevices(**settings).prepare(checked[1])
