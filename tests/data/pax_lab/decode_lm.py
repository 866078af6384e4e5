"""DenseLm with averaged weights and prompts to decode."""

import numpy as np
from praxis import decoder_hparams, pax_fiddle, py_utils

from pax_lab import dense_lm


class ToyPrompts(dense_lm.ToyLmInput):
  """Prompts of 1 to `seq_len` tokens, named by a string each; the last row of a batch has weight 0."""

  def get_next(self):
    batch = super().get_next()
    rows = np.arange(self.batch_size)
    lengths = (rows % self.seq_len + 1).astype(np.int32)
    paddings = (np.arange(self.seq_len)[None] >= lengths[:, None]).astype(np.float32)
    return py_utils.NestedMap(
      ids=np.where(paddings > 0, 0, batch.ids),
      paddings=paddings,
      prefix_lengths=lengths,
      eval_sample_weights=(rows < self.batch_size - 1).astype(np.float32),
      name=np.array([f'row {row}' for row in rows]),
    )

  def ids_to_strings(self, ids, lengths, key=None):
    return [' '.join(map(str, row[:length])) for row, length in zip(ids, lengths, strict=True)]


class DecodeLm(dense_lm.DenseLmEma):
  """Decodes two batches of a finite dataset, and one of an infinite dataset."""

  DECODER = 'GreedyDecoderHParams'

  def decode_datasets(self):
    common = {'batch_size': 8, 'seq_len': 6}
    return [
      pax_fiddle.Config(ToyPrompts, name='prompts', seed=5, num_batches=2, reset_for_eval=True, **common),
      pax_fiddle.Config(ToyPrompts, name='first', seed=6, **common),
    ]

  def task(self):
    task = super().task()
    task.model.decoder_tpl = pax_fiddle.Config(
      getattr(decoder_hparams, self.DECODER), seqlen=14, max_decode_steps=8, eos_id=63, fprop_for_prefix=True
    )
    return task
