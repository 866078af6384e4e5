"""SeqIO tasks as inputs: batches equal SeqIO's feature converters, and states are exact."""

import dataclasses

import numpy as np
import pytest

from spmd_tasks.bridges.t5x import SeqIoInput, T5xExperiment
from spmd_tasks.bridges.t5x._seqio import contract_batch, import_seqio
from spmd_tasks.errors import UserError
from tests.inputs.batches import check_positions

LENGTHS = {'inputs': 24, 'targets': 10}
CONVERTERS = {'encoder_decoder': 'EncDec', 'prefix_lm': 'PrefixLM', 'decoder_only': 'LM'}


@pytest.fixture(scope='module')
def seqio():
  """Imports SeqIO and registers a task `sums`, and a mixture of it and another task."""
  seqio = import_seqio()
  import tensorflow as tf

  def sums(first):
    def make_dataset(split, shuffle_files, seed=None):
      del shuffle_files, seed
      rows = [f'{a} + {a % 7}={a + a % 7}'.split('=') for a in range(first, first + (60 if split == 'train' else 21))]
      return tf.data.Dataset.from_tensor_slices({'inputs': [a for a, _ in rows], 'targets': [b for _, b in rows]})

    return make_dataset

  vocabulary = seqio.ByteVocabulary()
  for name, first in (('sums', 90), ('large_sums', 1000)):
    seqio.TaskRegistry.add(
      name,
      source=seqio.FunctionDataSource(dataset_fn=sums(first), splits=('train', 'validation')),
      preprocessors=[seqio.preprocessors.tokenize, seqio.preprocessors.append_eos],
      output_features={key: seqio.Feature(vocabulary) for key in ('inputs', 'targets')},
      metric_fns=[],
    )
  seqio.MixtureRegistry.add('both', [('sums', 1), ('large_sums', 3)])
  yield seqio
  for name in ('sums', 'large_sums'):
    seqio.TaskRegistry.remove(name)
  seqio.MixtureRegistry.remove('both')


def an_input(architecture='encoder_decoder', **settings):
  lengths = {'targets': 10} if architecture == 'decoder_only' else LENGTHS
  return SeqIoInput(
    architecture=architecture, **{'task': 'sums', 'lengths': lengths, 'batch_size': 4, 'seed': 7} | settings
  )


def of_seqio(seqio, settings, num_batches, shard=0, num_shards=1, **of_converter):
  """Returns batches with SeqIO's names, created as in T5X's `get_dataset`."""
  converter = getattr(seqio, f'{CONVERTERS[settings.architecture]}FeatureConverter')
  dataset = seqio.get_dataset(
    settings.task,
    settings.lengths,
    converter(pack=settings.packing, **of_converter),
    dataset_split=settings.split,
    shuffle=settings.shuffle,
    num_epochs=settings.num_epochs,
    shard_info=seqio.ShardInfo(index=shard, num_shards=num_shards),
    seed=settings.seed,
    batch_size=settings.batch_size // num_shards,
  )
  return list(dataset.take(num_batches).as_numpy_iterator())


@pytest.mark.parametrize(
  'architecture, packing, own',
  [
    ('encoder_decoder', True, {}),
    pytest.param('encoder_decoder', False, {}, marks=pytest.mark.exhaustive),
    pytest.param('prefix_lm', True, {}, marks=pytest.mark.exhaustive),
    pytest.param('prefix_lm', False, {'loss_on_targets_only': False}, marks=pytest.mark.exhaustive),
    ('decoder_only', False, {}),
  ],
)
def test_batches_equal_seqio(seqio, architecture, packing, own):
  settings = an_input(architecture, packing=packing, task='both', **own)
  iterator = settings.make_iterator()
  for features in of_seqio(seqio, settings, 5, **own):
    batch = next(iterator)
    wanted = {'labels': features['decoder_target_tokens'], 'ids': features['decoder_input_tokens']}
    wanted |= {'weights': features['decoder_loss_weights']}
    wanted['segment_ids'] = features['decoder_segment_ids'] if packing else wanted['labels'] > 0
    if architecture == 'prefix_lm':
      wanted['prefix_mask'] = features['decoder_causal_attention']
      has_loss = batch['weights'][:, 0] > 0  # the first token of the inputs
      assert (has_loss == bool(own)).all()
    if architecture == 'encoder_decoder':
      wanted['encoder_ids'] = tokens = features['encoder_input_tokens']
      wanted['encoder_segment_ids'] = features['encoder_segment_ids'] if packing else tokens > 0
    for name, rows in wanted.items():
      np.testing.assert_array_equal(batch[name], rows, name)
    assert {name: (rows.shape, rows.dtype) for name, rows in batch.items()} == {
      name: (spec.shape, spec.dtype) for name, spec in settings.element_spec().items()
    }
  if architecture == 'prefix_lm':
    causal = dataclasses.replace(settings, prefix_is_causal=True)
    names = settings.element_spec().keys() - {'prefix_mask'}
    assert next(causal.make_iterator()).keys() == causal.element_spec().keys() == names


def test_segments_of_unpacked_rows_end_with_the_tokens():
  batch = contract_batch(
    {'decoder_target_tokens': np.array([[5, 6, 1, 0]]), 'encoder_input_tokens': np.array([[4, 1]])}
  )
  assert batch['segment_ids'].tolist() == [[1, 1, 1, 0]]
  assert batch['segment_pos'].tolist() == [[0, 1, 2, 0]]
  assert batch['encoder_segment_ids'].tolist() == [[1, 1]]


def test_states_are_exact_and_independent_of_the_processes(seqio):
  settings = an_input(packing=False)  # faster in TensorFlow
  following = check_positions(settings)
  skipping = an_input(packing=False, skip_batches=3).make_iterator()
  assert (next(skipping)['labels'] == following['labels']).all()


def test_shards_have_the_batches_of_hosts_in_t5x(seqio):
  settings = an_input(packing=False, num_shards=2)
  theirs = [of_seqio(seqio, settings, 3, shard, 2) for shard in range(2)]
  ours, second = settings.make_iterator(), settings.make_iterator(1, 2)
  for parts in zip(*theirs):
    wanted = np.concatenate([part['decoder_target_tokens'] for part in parts])
    assert (next(ours)['labels'] == wanted).all()
    assert (next(second)['labels'] == wanted[2:]).all()
  [state] = settings.reshard_states([second.get_state(), ours.get_state()], 1)
  settings.make_iterator().set_state(state)


def test_an_eval_set_has_each_example_once(seqio):
  settings = an_input(split='validation', packing=False, num_epochs=1, shuffle=False, lengths=None)
  batches = list(settings.make_iterator())
  assert settings.feature_lengths == {'inputs': 8, 'targets': 4}
  assert [batch['weights'].shape for batch in batches] == [(4, 4)] * 6
  assert sum(int((batch['weights'].sum(axis=1) > 0).sum()) for batch in batches) == 21
  texts = [settings.tokenizer.decode(row) for row in batches[0]['labels']]
  assert texts == ['96', '91', '93', '95']


def test_states_of_other_settings_or_data_are_refused(seqio):
  iterator = an_input(packing=False).make_iterator()
  next(iterator)
  state = iterator.get_state()
  with pytest.raises(ValueError, match='seed = 7'):
    an_input(packing=False, seed=8).make_iterator().set_state(state)
  with pytest.raises(ValueError, match='batch 0 of SeqIO task sums differs'):
    an_input(packing=False).make_iterator().set_state({**state, 'digests': {'0': 1}})


@pytest.mark.parametrize(
  'settings, words',
  [
    ({'task': 'summs'}, "no task or mixture 'summs'"),
    ({'split': 'test'}, "has no split 'test': choose one of"),
    ({'lengths': {'targets': 10}}, 'must have inputs and targets'),
    ({'lengths': {'inputs': -1, 'targets': 10}}, 'must be positive integers'),
    ({'num_shards': 2, 'num_epochs': 1}, 'num_shards = 2 must be 1'),
  ],
)
def test_invalid_settings_raise_user_errors(seqio, settings, words):
  with pytest.raises(ValueError, match=words):
    next(an_input(**settings).make_iterator())


@pytest.mark.parametrize(
  'task, row, words',
  [
    ('broken', {'inputs': 'a'}, 'cannot make the dataset of broken .*missing .* feature .*targets.*: correct the data'),
    ('broken', {'inputs': 5, 'targets': 'a'}, 'cannot make the dataset of broken .*int32.*: correct the data'),
    (
      'mixed',
      {'inputs': 'a', 'targets': 'a'},
      "split 'train' of SeqIO task mixed ended after 0 batches, .*no examples",
    ),
  ],
)
def test_data_that_seqio_cannot_use_raise_user_errors(seqio, task, row, words):
  import tensorflow as tf

  def add(name, num_rows):
    rows = tf.data.Dataset.from_tensor_slices({name: [value] * 2 for name, value in row.items()}).take(num_rows)
    seqio.TaskRegistry.add(
      name,
      source=seqio.FunctionDataSource(dataset_fn=lambda split, shuffle_files, seed=None: rows, splits=('train',)),
      preprocessors=[seqio.preprocessors.tokenize],
      output_features={key: seqio.Feature(seqio.ByteVocabulary()) for key in ('inputs', 'targets')},
    )

  add('broken', 2)
  add('empty', 0)
  seqio.MixtureRegistry.add('mixed', [('broken', 1), ('empty', 1)])
  try:
    with pytest.raises(UserError, match=words):
      next(an_input(task=task).make_iterator())
  finally:
    for name in ('broken', 'empty'):
      seqio.TaskRegistry.remove(name)
    seqio.MixtureRegistry.remove('mixed')


def test_a_training_without_the_split_of_its_evals_warns(seqio, caplog):
  data = {'task': 'sums', 'lengths': LENGTHS, 'batch_size': 4, 'split': 'test', 'num_epochs': 1}
  experiment = T5xExperiment(train_data=data | {'split': 'train'}, eval_data=data | {'max_batches': 2}, infer_data=data)
  assert experiment.eval_inputs() == {}
  assert "sums has no split 'test', only train, validation: training continues" in caplog.text
  with pytest.raises(UserError, match="no split 'test', only train, validation: choose one"):
    T5xExperiment(train_data=data, eval_data=data).eval_inputs()
