"""One truth for numbers, for the blocks of published families: latent attention, stacks in sequence, router groups.

A row takes a minute, most of it XLA's: all are for `--all`. Every run has the tests of the layers, one by one.
"""

import pytest

from tests.runtime.family_experiments import Families
from tests.runtime.loss_curves import assert_same_run, reference, runner, table

CASES = [
  ('data 2 x mdl 4', (1, 1, 2, 4)),
  ('stage 2 x data 2 x mdl 2', (1, 2, 2, 2)),
  ('data 4 x mdl 2', (1, 1, 4, 2)),
  ('mdl 8', (1, 1, 1, 8)),
]


@pytest.mark.parametrize('name, shape', table((), CASES, fast=()))
def test_one_loss_curve_and_one_state(name, shape):
  assert_same_run(runner(Families, shape), reference(Families))
