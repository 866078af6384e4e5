"""Paxml's GPT-3 on C4, on an input that needs no SeqIO; it ends at `TARGET_LOG_PPLX` by Paxml's own function."""

from paxml.tasks.lm.params import c4
from praxis import pax_fiddle

from pax_lab import dense_lm


class SmallGpt3(c4.C4SpmdGpt3AdamOrgHP):
  """C4SpmdGpt3AdamOrgHP of two small layers."""

  PERCORE_BATCH_SIZE = 2
  MAX_SEQ_LEN = 16
  NUM_LAYERS = 2
  NUM_HEADS = 2
  MODEL_DIMS = 16
  HIDDEN_DIMS = 32
  VOCAB_SIZE = 40
  TRAINABLE_PE_MAX_SEQ_LEN = 16
  ICI_MESH_SHAPE = [1, 2, 2]
  LEARNING_RATE = 1e-2
  LR_COS_WARMUP = 2
  LR_COS_DECAY_START = 3
  EVAL_INTERVAL_STEPS = 2
  CHECKPOINT_EVERY_N_STEPS = 4
  TARGET_LOG_PPLX = 3.6

  def datasets(self):
    common = dict(batch_size=8, seq_len=self.MAX_SEQ_LEN, vocab_size=self.VOCAB_SIZE)
    return [
      pax_fiddle.Config(dense_lm.ToyLmInput, name='C4Train', is_training=True, seed=1, **common),
      pax_fiddle.Config(
        dense_lm.ToyLmInput, name='C4Validation', is_training=False, seed=2, num_batches=2, reset_for_eval=True,
        eval_loop_num_batches=-1, **common
      ),
    ]
