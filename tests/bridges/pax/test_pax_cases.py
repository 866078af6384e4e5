"""Experiments of Pax of many kinds (tests/data/pax_cases), from the seed alone: the losses and evals of the real Paxml.

tests/data/pax_cases/paxml_losses.json is by Paxml 1.4.0 on jax 0.10.2.
"""

import json

import numpy as np
import pytest

from tests import binary
from tests.bridges.pax.conftest import PAX_EXPERIMENTS

EXPECTED = json.loads((PAX_EXPERIMENTS / 'pax_cases' / 'paxml_losses.json').read_text())
# It has much of what the others have one by one.
ALWAYS = ('pipelines.PipelinedStreams',)
FLAGS = ('--mode', 'train', '--set', 'log_every_steps=1', '--set', 'tensorboard=false')

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
  'name',
  [
    name if name in ALWAYS else pytest.param(name, marks=pytest.mark.exhaustive)
    for name, expected in EXPECTED.items()
    if 'error' not in expected
  ],
)
def test_the_losses_and_evals_are_those_of_paxml(run_pax, name, tmp_path):
  finished = run_pax('--exp', f'pax_cases.{name}', *FLAGS, '--job_log_dir', tmp_path, '--num_fake_devices', 4)
  assert finished.returncode == 0, finished.stderr
  expected = EXPECTED[name]
  np.testing.assert_allclose(list(binary.column(tmp_path, 'loss').values()), expected['losses'], rtol=1e-6)
  for dataset, losses in expected['evals'].items():
    lines = {line['step']: line for line in binary.metric_lines(tmp_path / 'eval' / dataset)}
    ours = [lines[int(step)].get('total_loss', lines[int(step)]['loss']) for step in losses]
    np.testing.assert_allclose(ours, list(losses.values()), rtol=1e-6)
