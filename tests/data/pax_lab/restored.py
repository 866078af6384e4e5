"""DecodeLm with an eval set of the batch on which Paxml evaluated its checkpoint."""

import pathlib

import numpy as np
from praxis import base_input, pax_fiddle, py_utils

from pax_lab import decode_lm

BATCH = pathlib.Path(__file__).parents[1] / 'paxml_1_4_0' / 'batch.npz'


class OneBatch(base_input.BaseInput):
  """Repeats the batch of the file."""

  def get_next(self):
    with np.load(BATCH) as batch:
      return py_utils.NestedMap(**batch)


class Restored(decode_lm.DecodeLm):
  """The experiment that wrote the checkpoint, DenseLmEma, with the decoder of DecodeLm."""

  def datasets(self):
    return [super().datasets()[0], pax_fiddle.Config(OneBatch, name='given', batch_size=16)]
