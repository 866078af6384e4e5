"""Trains on synthetic tokens, for tests and benchmarks: experiments read no files and depend only on the seed.

spmd-tasks --exp synthetic.Tiny --mode train --job_log_dir runs/synthetic --num_train_steps 20
"""

from spmd_tasks import register
from spmd_tasks.recipes import SyntheticLanguageModel


@register
class Tiny(SyntheticLanguageModel):
  """A model of width 32 on one device: the smallest complete job."""

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
  """Width 30, 3 heads, 90 hidden dims, vocabulary 257 on mesh data 2 x mdl 4: every matrix is padded."""

  ici_mesh_shape = (1, 2, 4)
  vocab_size = 257
  model_dims = 30
  num_heads = 3
  hidden_dims = 90
