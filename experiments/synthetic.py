"""Experiments on made-up tokens, for tests and benchmarks: no file is read; the seed decides everything.

spmd-tasks --exp synthetic.Tiny --mode train --job_log_dir runs/synthetic --num_train_steps 20
"""

from spmd_tasks import register
from spmd_tasks.recipes import SyntheticLanguageModel


@register
class Tiny(SyntheticLanguageModel):
  """A model of width 32 on one device: the smallest job that does everything."""

  vocab_size = 64
  model_dims = 32
  num_layers = 2
  num_heads = 2
  hidden_dims = 64
  seq_len = 16
  batch_size = 8
  eval_batches = 2
  num_train_steps = 20
  log_every_steps = 1
  checkpoint_every = 10


@register
class Uneven(Tiny):
  """Width 30, 3 heads, 90 hidden, vocabulary 257 on data 2 x mdl 4: every matrix is padded."""

  ici_mesh_shape = (1, 2, 4)
  vocab_size = 257
  model_dims = 30
  num_heads = 3
  hidden_dims = 90
