"""A job on a mixture reports each source's loss, tokens, rows and epochs, and resumes with every bit of them."""

from pathlib import Path

import fiddle as fdl
import numpy as np
import pytest

from spmd_tasks.inputs import ByteTokenizer, JsonLines, Mixture, SyntheticText, TextInput
from tests import binary
from tests.programs.small_jobs import Small
from tests.programs.small_runs import train

NAME = f'{__name__}.Mixed'
BATCH_SIZE = 8
SOURCES = ('made_up', 'texts')


class Mixed(Small):
  """Small on made-up tokens and a few texts that are repeated, in two microbatches; weights change at step 6."""

  num_train_steps = 16
  eval_every_steps = None

  def task(self):
    task = super().task()
    task.learner.num_microbatches = 2
    return task

  def train_input(self):
    return fdl.Config(
      Mixture,
      sources={'made_up': self._made_up(), 'texts': self._texts()},
      weights={'made_up': 0.7, 'texts': 0.3},
      weight_changes=((6, {'made_up': 0.2, 'texts': 0.8}),),
      seed=self.seed,
    )

  def eval_inputs(self):
    mixture = fdl.Config(
      Mixture,
      sources={'made_up': self._made_up(stream=1), 'texts': self._texts(num_epochs=3)},
      weights={'made_up': 1, 'texts': 1},
    )
    return {'both': mixture}

  def _made_up(self, **settings):
    return fdl.Config(
      SyntheticText, batch_size=self.batch_size, seq_len=self.seq_len, vocab_size=self.vocab_size, **settings
    )

  def _texts(self, **settings):
    return fdl.Config(
      TextInput,
      source=fdl.Config(JsonLines, pattern=str(Path(__file__).parent / 'ragged.jsonl'), block_bytes=64),
      tokenizer=fdl.Config(ByteTokenizer),
      batch_size=self.batch_size,
      seq_len=self.seq_len,
      **settings,
    )


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
  """The directory of an undisturbed job, its metrics by step, and those of its evaluation."""
  directory = tmp_path_factory.mktemp('mixture') / 'whole'
  assert train(directory, exp=NAME) == 0
  [evaluation] = binary.metric_lines(directory / 'eval' / 'both')
  return directory, {line['step']: line for line in binary.metric_lines(directory)}, evaluation


def test_every_source_has_its_loss_and_tokens(whole):
  _, lines, evaluation = whole
  for line in lines.values():
    weights = [line[f'loss_weight/{name}'] for name in SOURCES]
    losses = [line.get(f'loss/{name}', 0.0) for name in SOURCES]
    assert sum(weights) == line['loss_weight']
    np.testing.assert_allclose(np.dot(losses, weights) / sum(weights), line['loss'], rtol=1e-5)
  assert lines[16]['loss/made_up'] != lines[16]['loss/texts']
  assert {'loss/made_up', 'loss/texts'} <= evaluation.keys()


def test_rows_follow_the_weights_and_epochs_are_counted(whole):
  _, lines, _ = whole
  for step, line in lines.items():
    texts = 0.3 * BATCH_SIZE * min(step, 6) + 0.8 * BATCH_SIZE * max(step - 6, 0)
    assert line['rows/texts'] + line['rows/made_up'] == step * BATCH_SIZE
    assert abs(line['rows/texts'] - texts) < (1 if step <= 6 else 2)
  epochs = [line['epochs/texts'] for line in lines.values()]
  assert epochs == sorted(epochs)
  assert epochs[-1] > 0


def test_resumed_it_goes_on_with_every_bit(whole, tmp_path):
  directory, lines, evaluation = whole
  assert train(binary.copy_at(directory, 4, tmp_path / 'job'), exp=NAME) == 0
  resumed = binary.metric_lines(tmp_path / 'job')
  assert [line['step'] for line in resumed] == list(range(1, 17))
  for line in resumed:
    wanted = lines[line['step']]
    for name in (key for key in wanted if key.startswith(('loss', 'rows/', 'epochs/', 'grad_norm', 'weight_norm'))):
      assert line[name] == wanted[name], (name, line['step'])
  assert binary.metric_lines(tmp_path / 'job' / 'eval' / 'both')[-1]['loss/texts'] == evaluation['loss/texts']
