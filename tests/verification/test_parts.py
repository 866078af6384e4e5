"""--mode verify shrinks experiments, scales meshes to the devices, and says what rounding keeps it from comparing."""

from typing import Any

from flax import struct
import numpy as np
import pytest

from spmd_tasks.config import resolve, to_json
from spmd_tasks.verification._agreement import Trajectory, agree
from spmd_tasks.verification._runner import StepResult
from spmd_tasks.verification._settings import scaled_mesh, shrink


def shrunk(name: str, *overrides: str) -> dict[str, str]:
  resolved = resolve(name, overrides)
  job = resolved.build()
  small = shrink(job, to_json(resolved)['config'], dict(scaled_mesh(job.experiment, 8)))
  # The shrunk experiment can be built.
  overrides = [f'{path}={value}' for path, value in small.items()]
  resolve(name, [*overrides, 'ici_mesh_shape=' + ','.join(['1'] * len(job.experiment.mesh_axis_names))]).build()
  return {path: str(value) for path, value in small.items()}


@pytest.mark.parametrize(
  'name, changes',
  [
    ('synthetic.Tiny', {}),
    ('lm.UnevenTiny', {'seq_len': '16', 'eval_batches': '2', 'num_train_steps': '40'}),
    ('lm.Dense1B', {'num_layers': '4', 'num_heads': '4', 'num_kv_heads': '2', 'vocab_size': '259', 'dtype': 'float32'}),
    ('moe.FineGrained16B', {'num_experts': '8', 'num_selected_experts': '2', 'shared_hidden_dims': '32'}),
    ('pipeline.OneForwardOneBackwardTiny', {'num_layers': '5', 'batch_size': '8', 'model_dims': '32'}),
    # seq_len does not shrink, because prompts and completions must fit.
    ('tests.tuning.reward_experiments.Policy', {'batch_size': '8', 'seq_len': None}),
  ],
)
def test_sizes_shrink_and_other_settings_do_not(name, changes):
  new_values = shrunk(name)
  assert {path: new_values.get(path) for path in changes} == changes
  if not changes:
    assert not new_values


@pytest.mark.parametrize(
  'name, mesh',
  [
    ('lm.UnevenTiny', {'replica': 1, 'data': 2, 'mdl': 4}),
    ('lm.Dense70B', {'replica': 2, 'data': 2, 'mdl': 2}),
    ('moe.DeepSeekV3Like', {'replica': 1, 'data': 2, 'expert': 4, 'mdl': 1}),
    ('synthetic.Tiny', {'replica': 1, 'data': 1, 'mdl': 1}),
  ],
)
def test_a_large_mesh_is_scaled_to_the_devices(name, mesh):
  assert dict(scaled_mesh(resolve(name).experiment, 8)) == mesh


class CoarseRunner:
  """Minimizes w^2 / 2 with w in some dtype. `factor` is an error of the gradient and the loss."""

  update_epsilon = 2.0**-23

  def __init__(self, epsilon, factor=1.0):
    self.epsilon, self._factor = epsilon, factor

  def step(self, state, batch):
    del batch
    w = state.weights['w'] * np.float32(self._factor)
    forward = {'loss': np.float32(w @ w / 2), 'gradients/w': w, 'loss_weight': np.float32(60)}
    state = State({'w': state.weights['w'] - w / 10}, LearnerState({'gradients': w}))
    return StepResult(forward=forward, state=state, updated={'weights/w': w}, nonzero_padding=())

  def learner_update(self, state, result):
    del state
    return {'weights/w': result.state.learner.opt_state['gradients']}

  def losses(self, state, batches):
    return np.array([float(result.forward['loss']) for result in self.steps(state, batches)])

  def steps(self, state, batches):
    for batch in batches:
      result = self.step(state, batch)
      yield result
      state = result.state


@struct.dataclass
class State:
  weights: Any
  learner: Any


@struct.dataclass
class LearnerState:
  opt_state: Any


@pytest.mark.parametrize('epsilon, num_steps', [(2.0**-23, 2), (2.0**-7, 0)])
def test_steps_whose_loss_and_gradients_are_lost_in_rounding_do_not_count_as_compared(epsilon, num_steps):
  start = State({'w': np.linspace(1, 2, 30, dtype=np.float32)}, None)
  reference = Trajectory(CoarseRunner(epsilon), start, [{}, {}])
  found = agree(CoarseRunner(epsilon), reference)
  assert (found.first, found.num_steps) == (None, num_steps)
  assert all('float32): 1, 2' in note for note in found.notes)
  assert bool(found.notes) == (not num_steps)
  wrong = agree(CoarseRunner(epsilon, factor=1.03), reference)
  assert (wrong.first is not None) == bool(num_steps)
