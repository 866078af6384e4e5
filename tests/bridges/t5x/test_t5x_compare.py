"""scripts/t5x_compare compares a folder with our numbers, and compares something where rounding decides the weights.

The logits are T5X's own (tests/data/t5x/networks.npz); losses and weights are ours, as no small folder of T5X has them.
"""

import json
from pathlib import Path
import sys

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / 'scripts'))

import t5x_compare

from tests.layers import t5x_networks
from tests.shared_models import Shared

CONFIG = {
  'kind': 'decoder',
  'vocab': t5x_networks.VOCAB_SIZE,
  'emb': t5x_networks.MODEL_DIM,
  'heads': t5x_networks.NUM_HEADS,
  'head_dim': t5x_networks.HEAD_DIM,
  'mlp': t5x_networks.HIDDEN_DIM,
  'enc': 0,
  'dec': t5x_networks.NUM_LAYERS,
  'activations': ['silu', 'linear'],
  'learning_rate': 'constant * rsqrt_decay, 0.1, warmup 10',
}
NUM_STEPS = 3


@pytest.fixture(scope='module', autouse=True)
def shared_model():
  """Compiles the model of all comparisons once."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(t5x_compare, 'partition_spmd_model', Shared(t5x_compare.partition_spmd_model, max_kept=1))
    yield


@pytest.fixture(scope='module')
def directory(tmp_path_factory):
  """Returns the directory of a case with a prefix language model of T5X."""
  directory, arrays = tmp_path_factory.mktemp('case'), t5x_networks.case('prefix')
  weights = {name.removeprefix('weights/'): x for name, x in arrays.items() if name.startswith('weights/')}
  batch = {name: x for name, x in arrays.items() if name.startswith('decoder_')}
  batch['decoder_loss_weights'] = (batch['decoder_target_tokens'] > 0).astype(np.float32)
  (directory / 'config.json').write_text(json.dumps(CONFIG))
  np.savez(directory / 'batch.npz', **batch)
  np.savez(directory / 'initial_weights.npz', **weights)
  np.savez(directory / 'initial_logits.npz', logits=arrays['logits'])
  case = t5x_compare.Case(directory)
  comparison = t5x_compare.Comparison(case, 1, {})
  state, step, losses = comparison.state_of(case.initial), comparison.model.train_step, []
  for number in range(1, NUM_STEPS + 1):
    state, metrics = step(state, step.place(case.batch))
    losses.append({'loss': float(metrics['loss'])})
    name = 'final_weights' if number == NUM_STEPS else f'weights_step_{number}'
    np.savez(directory / f'{name}.npz', **comparison.theirs(comparison.model.to_canonical(state).weights, weights))
  (directory / 'curves.json').write_text(json.dumps({'1 device': {'curve': losses}}))
  return directory


@pytest.fixture(autouse=True)
def own_gradients(monkeypatch):
  """Restores attention, which the script changes for the whole process."""
  monkeypatch.setattr(t5x_compare, 'pass_gradients_as_t5x', lambda: None)


def compare(directory, capsys):
  """Runs the script on one device; returns its exit code, the last line, and the output before."""
  code = t5x_compare.main([str(directory), '--num_devices', '1'])
  *said, last = capsys.readouterr().out.splitlines()
  return code, json.loads(last), '\n'.join(said)


def change(directory, tmp_path, name, factor):
  """Copies the case with other weights of a name."""
  for path in directory.iterdir():
    (tmp_path / path.name).write_bytes(path.read_bytes())
  with np.load(directory / f'{name}.npz') as weights:
    np.savez(tmp_path / f'{name}.npz', **{key: factor * x for key, x in weights.items()})
  return tmp_path


def test_a_case_holds(directory, capsys):
  code, errors, _ = compare(directory, capsys)
  assert code == 0
  assert max(errors[name] for name in ('logits', 'steps', 'losses', 'final_weights')) <= 1e-5


def test_steps_are_compared_if_rounding_decides_the_weights(directory, tmp_path, capsys, monkeypatch):
  """If one ulp changes the final weights more than the difference, earlier steps are compared."""
  undetermined = lambda self, differences, spread: [name for name in differences if 'loss' not in name]
  monkeypatch.setattr(t5x_compare.Comparison, 'undetermined', undetermined)
  code, errors, said = compare(change(directory, tmp_path, 'final_weights', 1.01), capsys)
  assert (code, errors['final_weights']) == (0, None)
  assert max(errors['steps'], errors['losses']) <= 1e-5
  assert 'float32 determines none of the' in said
  code, errors, _ = compare(change(directory, tmp_path, 'weights_step_1', 1.01), capsys)
  assert code == 1
  assert errors['steps'] == pytest.approx(0.01, rel=0.01)
