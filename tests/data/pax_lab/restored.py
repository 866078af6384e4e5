"""DenseLmEma with the batch on which the real Paxml evaluated its checkpoint, as an eval set."""

import pathlib

import numpy as np
from pax_lab import dense_lm
from praxis import base_input
from praxis import pax_fiddle
from praxis import py_utils

BATCH = pathlib.Path(__file__).parents[1] / 'paxml_1_4_0' / 'batch.npz'


class OneBatch(base_input.BaseInput):
  """The batch of the file, again and again."""

  def get_next(self):
    with np.load(BATCH) as batch:
      return py_utils.NestedMap(**batch)


class Restored(dense_lm.DenseLmEma):
  """The experiment that wrote the checkpoint."""

  def datasets(self):
    return [super().datasets()[0], pax_fiddle.Config(OneBatch, name='given', batch_size=16)]
