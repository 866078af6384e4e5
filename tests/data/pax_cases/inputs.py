"""Inputs with shards per host, a state, few rows, and evals of several kinds."""

import json

import jax
from pax_lab import dense_lm
from paxml.tasks.lm.params import lm_cloud
from praxis import pax_fiddle

from pax_cases import classifiers, transformers


class Sharded(classifiers.Images):
  """An input with a state; each host creates its rows of a global batch that is independent of the number of hosts."""

  def make_batch(self, number):
    hosts, host = max(self.num_infeed_hosts, 1), self.infeed_host_index
    whole = classifiers.draw_images(self.seed, number, self.batch_size * hosts)
    return whole.Transform(lambda rows: rows[host * self.batch_size : (host + 1) * self.batch_size])

  def _get_state_internal(self):
    return json.dumps(self._number).encode()

  def _set_state_internal(self, state):
    self._number = json.loads(state)


class Hosts(classifiers.Perceptron):
  """Eight rows distributed over processes by JAX's process index; with dropout, and resumed from the input's state."""

  ICI_MESH_SHAPE = [1, 2, 2]  # a sum over two devices is the same in any order

  def datasets(self):
    hosts = dict(num_infeed_hosts=jax.process_count(), infeed_host_index=jax.process_index())
    rows = 8 // jax.process_count()
    return [
      pax_fiddle.Config(Sharded, name='train', batch_size=rows, is_training=True, **hosts),
      pax_fiddle.Config(
        Sharded, name='valid', batch_size=rows, is_training=False, eval_loop_num_batches=2, reset_for_eval=True, **hosts
      ),
    ]

  def task(self):
    task = super().task()
    task.train.enable_input_checkpointing = True
    return task


class FewRows(transformers.SmallLm):
  """Three rows on four devices; evals of one batch without a reset, of two batches, and of all."""

  BATCH_SIZE = 3
  EVAL_INTERVAL_STEPS = 3

  def datasets(self):
    common = dict(seq_len=self.SEQ_LEN, vocab_size=self.VOCAB_SIZE, is_training=False, batch_size=3)
    two, to_end = dict(seed=2, eval_loop_num_batches=2), dict(seed=3, eval_loop_num_batches=None, num_batches=3)
    return [
      super().datasets()[0],
      pax_fiddle.Config(dense_lm.ToyLmInput, name='two', reset_for_eval=True, **two, **common),
      pax_fiddle.Config(dense_lm.ToyLmInput, name='all', reset_for_eval=True, **to_end, **common),
    ]


class Remainder(dense_lm.ToyLmInput):
  """An input whose last batch has half of the rows."""

  def get_next(self):
    batch = super().get_next()
    return batch.Transform(lambda rows: rows[: len(rows) // 2]) if self._number == self.num_batches else batch


class LastRows(transformers.SmallLm):
  """An eval of a whole dataset, including the remainder."""

  EVAL_INTERVAL_STEPS = 3

  def datasets(self):
    train, valid = super().datasets()
    return [train, pax_fiddle.Config(Remainder, **{**valid.__arguments__, 'num_batches': 3})]


class Cloud(lm_cloud.LmCloudSpmdTest):
  """Paxml's experiment for CPU tests, scaled down further; its input is Lingvo's."""

  PERCORE_BATCH_SIZE = 2
  MAX_SEQ_LEN = 16
  VOCAB_SIZE = 64
  MODEL_DIMS = 16
  HIDDEN_DIMS = 32
  EVAL_INTERVAL_STEPS = 3
  ICI_MESH_SHAPE = [1, 2, 2]

  def task(self):
    task = super().task()
    task.train.num_train_steps = 6
    return task
