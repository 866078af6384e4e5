"""Plain data as an input: lists, functions, Grain and tf.data resume exactly at a saved position."""

import json
import re

import grain
import jax
import numpy as np
import pytest

from spmd_tasks.errors import UserError
from spmd_tasks.inputs import BatchRamp, as_input
from spmd_tasks.runtime.input_layout import make_input_layout
from tests.inputs.batches import assert_same

NUM_BATCHES, NUM_ROWS = 5, 6


def batch(number, num_rows=NUM_ROWS):
  return {'x': np.random.default_rng(number).normal(size=(num_rows, 3)), 'row': number * NUM_ROWS + np.arange(num_rows)}


LIST = [batch(number) for number in range(NUM_BATCHES)]
BFLOAT16 = [{'x': batch['x'].astype(jax.numpy.bfloat16)} for batch in LIST]


def generator():
  yield from LIST


def rows_of_a_shard(shard_index, shard_count):
  size = NUM_ROWS // shard_count
  for batch in LIST:
    yield {name: rows[shard_index * size : (shard_index + 1) * size] for name, rows in batch.items()}


def shuffled(epoch):
  for number in np.random.default_rng(epoch).permutation(NUM_BATCHES):
    yield LIST[number]


def shuffled_rows_of_a_shard(shard_index, shard_count, epoch):
  return rows_of_a_shard(shard_index, shard_count) if epoch % 2 == 0 else reversed([*rows_of_a_shard(0, 1)])


def random_access():
  rows = [{'x': row} for batch in LIST for row in batch['x']]
  return grain.MapDataset.source(rows).seed(3).shuffle().batch(NUM_ROWS)


def stream():
  return random_access().to_iter_dataset().map(lambda batch: batch | {'y': 2 * batch['x']})


def data_loader():
  return grain.load([{'x': row} for batch in LIST for row in batch['x']], num_epochs=1, batch_size=NUM_ROWS)


def tf_data():
  tf = pytest.importorskip('tensorflow')
  return tf.data.Dataset.from_generator(
    generator, output_signature={'x': tf.TensorSpec((None, 3), tf.float64), 'row': tf.TensorSpec((None,), tf.int64)}
  )


SOURCES = [
  LIST,
  BFLOAT16,
  generator,
  rows_of_a_shard,
  shuffled,
  shuffled_rows_of_a_shard,
  random_access(),
  stream(),
  random_access,
  data_loader(),
  tf_data,
]


def take(iterator, num):
  return [next(iterator) for _ in range(num)]


@pytest.mark.parametrize('source', SOURCES, ids=lambda source: getattr(source, '__name__', type(source).__name__))
@pytest.mark.parametrize('num_before', [1, 7])
def test_an_iterator_resumes_exactly_in_any_epoch(source, num_before):
  data = as_input('train_input', source, repeats=True)
  first = data.make_iterator()
  take(first, num_before)
  state = json.loads(json.dumps(first.get_state()))
  expected = take(first, 6)
  resumed = as_input('train_input', source, repeats=True).make_iterator()
  take(resumed, 2)
  resumed.set_state(state)
  assert_same(take(resumed, 6), expected)


def test_a_function_of_the_epoch_gives_another_order_in_each():
  iterator = as_input('train_input', shuffled, repeats=True).make_iterator()
  epochs = [[batch['row'][0] // NUM_ROWS for batch in take(iterator, NUM_BATCHES)] for _ in range(3)]
  assert epochs == [np.random.default_rng(epoch).permutation(NUM_BATCHES).tolist() for epoch in range(3)]


@pytest.mark.parametrize('source', [generator, rows_of_a_shard])
@pytest.mark.parametrize('shard_count', [1, 2, 3])
def test_shards_have_rows_of_the_same_batches(source, shard_count):
  data = as_input('train_input', source, repeats=True)
  shards = [data.make_iterator(index, shard_count) for index in range(shard_count)]
  for whole in LIST:
    parts = [next(shard) for shard in shards]
    np.testing.assert_array_equal(np.concatenate([part['row'] for part in parts]), whole['row'])
  assert {name: (spec.shape, spec.dtype) for name, spec in data.element_spec().items()} == {
    'x': ((NUM_ROWS, 3), np.float32),
    'row': ((NUM_ROWS,), np.int32),
  }


def test_global_batches_resume_on_another_number_of_processes():
  data = as_input('train_input', generator, repeats=True)
  shards = [data.make_iterator(index, 2) for index in range(2)]
  for shard in shards:
    take(shard, 2)
  (state,) = data.reshard_states([shard.get_state() for shard in shards], 1)
  one = data.make_iterator()
  one.set_state(state)
  assert_same([next(one)], [LIST[2]])
  own_rows = as_input('train_input', rows_of_a_shard, repeats=True)
  with pytest.raises(ValueError, match='saved by 2 processes, not 1: resume with 2'):
    own_rows.reshard_states([{}, {}], 1)


def test_an_eval_set_is_read_once_with_its_smaller_last_batch():
  for source in (generator, random_access()):
    assert len(list(as_input('eval_inputs.valid', source, repeats=False).make_iterator())) == NUM_BATCHES
  small = [*LIST, batch(9, num_rows=2)]
  eval_set = as_input('eval_inputs.valid', small, repeats=False)
  assert [len(read['row']) for read in eval_set.make_iterator()] == [NUM_ROWS] * NUM_BATCHES + [2]
  assert eval_set.spec_of(small[-1])['row'] == jax.ShapeDtypeStruct((2,), np.int32)
  other = as_input('eval_inputs.valid', [LIST[0], {'x': LIST[1]['x']}], repeats=False).make_iterator()
  with pytest.raises(ValueError, match=r"eval_inputs.valid has the arrays \['x'\], .* \['row', 'x'\].*same names"):
    list(other)


def numbered(*sizes):
  """Returns batches of these sizes, with consecutive row numbers."""
  ends = np.cumsum(sizes)
  return [{'row': np.arange(end - size, end), 'half': np.arange(end - size, end) / 2} for size, end in zip(sizes, ends)]


RAGGED = numbered(4, 7, 3, 13, 0, 1)  # 28 rows


def ragged_generator():
  yield from RAGGED


def ragged_grain():
  return grain.MapDataset.source(RAGGED)


def ragged_tf_data():
  tf = pytest.importorskip('tensorflow')
  signature = {'row': tf.TensorSpec((None,), tf.int64), 'half': tf.TensorSpec((None,), tf.float64)}
  return tf.data.Dataset.from_generator(ragged_generator, output_signature=signature)


RAGGED_SOURCES = [RAGGED, ragged_generator, ragged_grain, ragged_tf_data]


@pytest.mark.parametrize('source', RAGGED_SOURCES, ids=lambda source: getattr(source, '__name__', 'list'))
def test_every_row_of_batches_of_any_size_is_read(source, caplog):
  """Training regroups the rows of all batches and epochs; an eval set keeps its batches."""
  eval_set = as_input('eval_inputs.valid', source, repeats=False)
  read = list(eval_set.make_iterator())
  assert [len(batch['row']) for batch in read] == [4, 7, 3, 13, 1]
  np.testing.assert_array_equal(np.concatenate([batch['row'] for batch in read]), np.arange(28))
  train = as_input('train_input', source, repeats=True)
  rows = np.arange(3 * 28).reshape(-1, 4) % 28
  batches = take(train.make_iterator(), len(rows))
  np.testing.assert_array_equal([batch['row'] for batch in batches], rows)
  np.testing.assert_array_equal([batch['half'] for batch in batches], rows / 2)
  (warning,) = [record.getMessage() for record in caplog.records if 'regroups' in record.getMessage()]
  assert 'Batch 2 of train_input has 7 rows, but the first has 4' in warning
  for num_before in (1, 2, 3, 5, 7, 12):
    hosts = [train.make_iterator(index, 2) for index in range(2)]
    for host in hosts:
      take(host, num_before)
    (state,) = train.reshard_states(json.loads(json.dumps([host.get_state() for host in hosts])), 1)
    resumed = as_input('train_input', source, repeats=True).make_iterator()
    resumed.set_state(state)
    assert_same(take(resumed, 4), batches[num_before : num_before + 4])


def test_each_row_has_its_place_in_the_data():
  iterator = as_input('train_input', RAGGED, repeats=True).make_iterator(1, 2)
  for _ in range(15):  # more than two epochs
    rows, origins = next(iterator)['row'], iterator.origins()
    places = [re.fullmatch(r'epoch (\d+), batches\[(\d+)\], row (\d+)', *origin).groups() for origin in origins]
    assert [RAGGED[int(index)]['row'][int(row)] for _, index, row in places] == rows.tolist()
  assert {epoch for epoch, _, _ in places} == {'2'}


def test_each_process_reads_all_its_own_rows():
  def rows_of_a_process(shard_index, shard_count):
    for batch in RAGGED:
      yield {'row': 100 * shard_index + batch['row']}

  data = as_input('train_input', rows_of_a_process, repeats=True)
  data._spec = {'row': jax.ShapeDtypeStruct((8,), np.int32)}  # as in a job of two processes
  for index in range(2):
    batches = take(data.make_iterator(index, 2), 14)
    np.testing.assert_array_equal([batch['row'] for batch in batches], 100 * index + np.arange(56).reshape(14, 4) % 28)


@pytest.mark.parametrize(
  'second, message',
  [
    ({'x': np.ones((3, 5)), 'scale': 1.0}, r"batch 2 of train_input has 'x' \[3, 5\], the first one \[2, 2\]"),
    ({'x': np.ones(()), 'scale': np.ones(3)}, r"batch 2 of train_input has 'x' \[\], the first one \[2, 2\]"),
    ({'x': np.ones((3, 2), complex), 'scale': 1.0}, r"'x' \[3, 2\], .* dtype complex128 and not float32"),
    ({'x': np.ones((3, 2)), 'scale': 2.0}, r"'scale' .* \[2.0, 1.0\].* batches of 2 rows"),
  ],
)
def test_rows_that_cannot_be_regrouped_are_refused(second, message):
  data = [{'x': np.ones((2, 2)), 'scale': 1.0}, second]
  iterator = as_input('train_input', data, repeats=True).make_iterator()
  next(iterator)
  with pytest.raises(UserError, match=message):
    take(iterator, 2)  # the first of them needs only rows of `second`
  eval_set = as_input('eval_inputs.valid', data, repeats=False).make_iterator()
  assert len(list(eval_set)) == 2


def test_numbers_in_another_byte_order_are_the_same_numbers():
  x, row = np.linspace(0, 1, 24, dtype='>f8').reshape(8, 3), np.arange(8, dtype='>i2')
  data = as_input('train_input', [{'x': x, 'row': row}], repeats=True)
  layout = make_input_layout(data.element_spec(), jax.make_mesh((1,), ('data',)), None, ())
  placed = layout.place(next(data.make_iterator()))
  assert (placed['x'].dtype, placed['row'].dtype) == (np.float32, np.int16)
  np.testing.assert_array_equal(placed['x'], x.astype(np.float32))
  np.testing.assert_array_equal(placed['row'], row)


def test_changed_data_are_refused():
  rng = np.random.default_rng(0)
  data = as_input('train_input', lambda: iter([{'x': rng.normal(size=4)} for _ in range(9)]), repeats=True)
  iterator = data.make_iterator()
  take(iterator, 3)
  with pytest.raises(ValueError, match=r'batch 3 of train_input has changed.*seed'):
    data.make_iterator().set_state(iterator.get_state())


def test_another_batch_size_is_told_from_changed_data():
  rows = np.arange(24)
  data = {
    size: as_input('train_input', [{'row': part} for part in rows.reshape(-1, size)], repeats=True) for size in (4, 8)
  }
  iterators = {size: source.make_iterator() for size, source in data.items()}
  for iterator in iterators.values():
    next(iterator)
  small, large = (iterators[size].get_state() for size in (4, 8))
  with pytest.raises(ValueError, match=r'had 4 rows, and have 8\. Give .* 4 rows, and join them in a BatchRamp.*0, 8'):
    data[8].make_iterator().set_state(small)
  with pytest.raises(ValueError, match=r'had 8 rows, and have 4\. Give batches of 8 rows, or start in another'):
    data[4].make_iterator().set_state(large)
  ramp = BatchRamp(source=data[4], sizes=((0, 8),)).make_iterator()  # as the first message says
  ramp.set_state(small)
  assert sorted(next(ramp)['row']) == list(range(4, 12))


@pytest.mark.parametrize(
  'source, message',
  [
    ([], 'train_input is empty'),
    ([{'x': np.array(['a'])}], "'x' in a batch of train_input has dtype <U1"),
    ([{'x': np.ones(3), 'y': np.ones(4)}], r"have \{'x': 3, 'y': 4\} rows"),
  ],
)
def test_invalid_batches_are_refused(source, message):
  with pytest.raises(ValueError, match=message):
    as_input('train_input', source, repeats=True).element_spec()
