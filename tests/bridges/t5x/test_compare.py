"""scripts/t5x_compare on a small case, which it reads, computes on 1 and on 8 devices, and judges.

The numbers of the case are ours, on one device: that they are T5X's, the cases outside of the project say.
"""

import json
from pathlib import Path
import sys

from flax import traverse_util
import jax
import numpy as np
import pytest

from spmd_tasks.bridges.t5x._weights import Layout
from spmd_tasks.bridges.t5x.origin import write_state
from tests.shared_models import Shared

sys.path.insert(0, str(Path(__file__).parents[3] / 'scripts'))

import t5x_compare

CONFIG = {
  'kind': 'decoder',
  'vocab': 64,
  'emb': 16,
  'heads': 2,
  'head_dim': 8,
  'mlp': 32,
  'dec': 2,
  'lengths': [0, 8],
  'activations': ['relu'],
  'z_loss': 1e-4,
  'label_smoothing': 0.1,
  'learning_rate': 'constant * rsqrt_decay, 0.1, warmup 10',
}


def make(directory):
  case = t5x_compare.Case(directory)
  case.initial = {'decoder/logits_dense': None}
  one = t5x_compare.Comparison(case, 1, {})
  layout = Layout(decoder_only=True)

  def theirs(tree):
    flat = traverse_util.flatten_dict(tree, sep='/')
    table = layout.weights(one.shapes).inverse()
    names = {slot.name: jax.ShapeDtypeStruct((), 'f4') for rule in table.rules for slot in rule.target}
    return table.convert(flat, names)

  state, step = one.model.init(3), one.model.train_step
  np.savez(directory / 'initial_weights.npz', **theirs(one.model.to_canonical(state).weights))
  logits = one.model.forward_step(one.spec)
  found = logits(state.variables, logits.place(case.batch))['logits']
  np.savez(directory / 'initial_logits.npz', logits=np.asarray(found))
  curve = []
  for _ in range(3):
    state, metrics = step(state, step.place(case.batch))
    curve.append({'loss': float(metrics['loss'])})
  (directory / 'curves.json').write_text(json.dumps({'1 device': {'curve': curve}}))
  canonical = one.model.to_canonical(state)
  np.savez(directory / 'final_weights.npz', **theirs(canonical.weights))
  write_state(directory, canonical, layout)


@pytest.mark.slow
@pytest.mark.exhaustive  # of a script
def test_a_case_is_compared_on_1_and_8_devices(tmp_path, monkeypatch, capsys, rng):
  partition = Shared(t5x_compare.partition_spmd_model, max_kept=2)  # what is compiled serves all three
  monkeypatch.setattr(t5x_compare, 'partition_spmd_model', partition)
  case = tmp_path / 'case'
  case.mkdir()
  (case / 'config.json').write_text(json.dumps(CONFIG))
  tokens = rng.integers(2, 64, (8, 8)).astype(np.int32)
  tokens[:, 6:] = 0
  inputs = np.pad(tokens, ((0, 0), (1, 0)))[:, :-1]
  weights = (tokens > 0).astype(np.int32)
  np.savez(case / 'batch.npz', decoder_target_tokens=tokens, decoder_input_tokens=inputs, decoder_loss_weights=weights)

  def compare():
    monkeypatch.setattr(sys, 'argv', ['t5x_compare', str(case)])
    code = t5x_compare.main()
    return code, json.loads(capsys.readouterr().out.splitlines()[-1])

  make(case)
  code, found = compare()
  assert code == 0, found
  assert max(found[name] for name in ('logits', 'losses', 'final_weights')) < 1e-5
  assert found['checkpoint'] == 1
  assert [found[name] for name in ('gradients', 'scores', 'greedy', 'beam')] == [None] * 4
  curves = json.loads((case / 'curves.json').read_text())
  curves['1 device']['curve'][2]['loss'] *= 1.0001
  (case / 'curves.json').write_text(json.dumps(curves))
  (case / 'config.json').write_text(json.dumps(CONFIG | {'dropout': 0.1, 'tied': False, 'note': ''}))
  code, found = compare()
  assert code == 1
  assert 5e-5 < found['losses'] < 2e-4
  assert found['unknown'] == ['dropout']
