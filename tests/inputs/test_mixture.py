"""A mixture reads the same examples in the same order on any number of hosts, even if it is killed and resumed.

Invalid settings, and positions that another mixture saved, are refused in one sentence.
"""

import collections
import dataclasses
import itertools
import json
import random
import zlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spmd_tasks.inputs import (
  ByteTokenizer,
  ChatTemplate,
  InputIterator,
  JsonLines,
  Mixture,
  Parquet,
  SyntheticText,
  TextInput,
  as_input,
  base,
)
from spmd_tasks.tuning import ConversationInput, Conversations, PreferenceInput, Preferences

B, T = 12, 16


def text(source, **settings) -> TextInput:
  return TextInput(source=source, tokenizer=ByteTokenizer(), batch_size=B, seq_len=T, **settings)


def synthetic(**settings) -> SyntheticText:
  return SyntheticText(batch_size=B, seq_len=T, **settings)


def shards(settings: Mixture, count: int) -> list[InputIterator]:
  return [settings.make_iterator(i, count) for i in range(count)]


def identities(batches) -> list[tuple[int, ...]]:
  """Returns a hash of each row of a step, over all its arrays, from the batches of all shards."""
  whole = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
  return [tuple(zlib.crc32(b''.join(whole[name][row].tobytes() for name in sorted(whole))) for row in range(B))]


def read(iterators, count=None) -> list[tuple[int, ...]]:
  """Returns the identities of the next `count` steps, fewer if the mixture ends; all shards must end together."""
  steps = []
  while count is None or len(steps) < count:
    batches = [next(iterator, None) for iterator in iterators]
    assert len({batch is None for batch in batches}) == 1
    if batches[0] is None:
      break
    steps += identities(batches)
  return steps


def close(iterators):
  for iterator in iterators:
    iterator.close()


def undisturbed(settings: Mixture, count=40) -> list[tuple[int, ...]]:
  iterators = shards(settings, 1)
  steps = read(iterators, count)
  close(iterators)
  return steps


TEMPLATE = (
  '{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}'
)


@pytest.fixture
def write(tmp_path):
  """Returns a function that writes `count` documents without common pieces as a file, and returns its source."""

  def write(name, count, kind='jsonl'):
    texts = [f'{name}{i}:' + ''.join(f'{name}{i},{j};' for j in range(i % 9)) for i in range(count)]
    path = tmp_path / f'{name}.{kind}'
    if kind == 'parquet':
      pq.write_table(pa.table({'text': texts}), path)
      return Parquet(pattern=str(path), block_rows=3)
    path.write_text(''.join(json.dumps({'text': text}) + '\n' for text in texts))
    return JsonLines(pattern=str(path), block_bytes=150)

  return write


@pytest.fixture
def write_records(tmp_path):
  """Returns a function that writes `count` conversations or pairs, some longer than a row, and returns the file."""

  def write_records(kind, count):
    if kind == 'pairs':
      lines = [{'prompt': f'{i}', 'chosen': 'c' * (i % 5 + 1), 'rejected': 'r' * (i % 3 + 1)} for i in range(count)]
    else:
      chats = [[('user', f'{i}?'), ('assistant', str(i) * (i % 6 + 1))] for i in range(count)]
      lines = [{'messages': [{'role': role, 'content': content} for role, content in chat]} for chat in chats]
    path = tmp_path / f'{kind}{count}.jsonl'
    path.write_text(''.join(json.dumps(line) + '\n' for line in lines))
    return str(path)

  return write_records


@pytest.fixture
def mixtures(write, write_records):
  """Mixtures of every kind of source."""
  web, code, chat = write('w', 300), write('c', 120, 'parquet'), write('i', 25)
  examples = {'tokenizer': ByteTokenizer(), 'batch_size': B, 'seq_len': T, 'too_long': 'skip'}
  examples['template'] = ChatTemplate(template=TEMPLATE)
  pairs = examples | {'reference_free': True}
  made_up = synthetic(seed=7)
  return {
    'endless': Mixture(
      sources={'web': text(web, seed=1), 'code': text(code, seed=2), 'made_up': made_up},
      weights={'web': 0.61, 'code': 0.3, 'made_up': 0.09},
    ),
    'changing': Mixture(
      sources={'web': text(web), 'code': text(code, packing=False), 'made_up': made_up},
      weights={'web': 1, 'code': 1, 'made_up': 0},
      weight_changes=((7, {'web': 0.2, 'code': 0, 'made_up': 0.8}), (19, {'web': 3, 'code': 2, 'made_up': 1})),
      seed=5,
    ),
    'ending': Mixture(
      sources={'web': text(web), 'chat': text(chat, num_epochs=3, packing=False), 'made_up': made_up},
      weights={'web': 0.5, 'chat': 0.2, 'made_up': 0.3},
    ),
    'nested': Mixture(
      sources={
        'texts': Mixture(sources={'web': text(web), 'code': text(code)}, weights={'web': 2, 'code': 1}),
        'made_up': made_up,
      },
      weights={'texts': 0.75, 'made_up': 0.25},
    ),
    'conversations': Mixture(
      sources={
        'chats': ConversationInput(source=Conversations(pattern=write_records('chats', 80)), seed=1, **examples),
        'few': ConversationInput(source=Conversations(pattern=write_records('chats', 7)), packing=False, **examples),
        'code': text(code),
      },
      weights={'chats': 0.5, 'few': 0.2, 'code': 0.3},
    ),
    'pairs': Mixture(
      sources={
        'most': PreferenceInput(source=Preferences(pattern=write_records('pairs', 60)), **pairs),
        'few': PreferenceInput(source=Preferences(pattern=write_records('pairs', 9)), **pairs),
      },
      weights={'most': 0.7, 'few': 0.3},
      weight_changes=((9, {'most': 0.4, 'few': 0.6}),),
    ),
  }


KINDS = ('endless', 'changing', 'ending', 'nested', 'conversations', 'pairs')


def run_with_kills(settings: Mixture, seed: int, count: int, counts: tuple[int, ...]) -> list[tuple[int, ...]]:
  """Reads steps, saves, reads on, is killed, and resumes from the saved position on another number of hosts."""
  rng = random.Random(seed)
  steps: list[tuple[int, ...]] = []
  states: list = []
  while len(steps) < count:
    num_hosts = rng.choice(counts)
    iterators = shards(settings, num_hosts)
    if states:
      for iterator, state in zip(iterators, settings.reshard_states(states, num_hosts)):
        iterator.set_state(state)
    steps += read(iterators, rng.choice((0, 1, 2, 5, 9)))
    states = json.loads(json.dumps([iterator.get_state() for iterator in iterators]))
    ended = not read(iterators, rng.choice((1, 3)))  # not saved, and therefore read again
    close(iterators)
    if ended:
      break
  return steps


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('seed', [0, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(1, 9))])
def test_killed_and_resumed_on_other_hosts_it_reads_the_same_examples(mixtures, kind, seed):
  counts = (1, 2, 3) if kind in ('conversations', 'pairs') else (1, 2, 3, 4, 6, 12)  # each host renders every record
  steps = run_with_kills(mixtures[kind], seed, 30, counts)
  assert steps == undisturbed(mixtures[kind], max(30, len(steps)))[: len(steps)]
  assert len(steps) > 12


@pytest.mark.parametrize('kind', ['endless', 'changing'])
def test_every_row_of_a_source_is_used_once_and_in_order(mixtures, kind):
  settings = mixtures[kind]
  names = list(settings.sources)
  used = collections.defaultdict(list)  # source -> (row of the batch, its ids), in order
  for batch in itertools.islice(settings.make_iterator(), 30):
    for row, source in enumerate(batch['row_sources'].argmax(axis=1)):
      used[names[source]].append((row, batch['ids'][row]))
  for name, source in settings.sources.items():
    iterator = source.make_iterator()
    assert base.reads_rows(iterator) == isinstance(source, TextInput)
    alone = np.array([batch['ids'] for batch in itertools.islice(iterator, 30)])  # [30, B, T]
    numbers = collections.Counter()
    for number, (row, ids) in enumerate(used[name]):
      expected = alone.reshape(-1, T)[number] if isinstance(source, TextInput) else alone[numbers[row], row]
      np.testing.assert_array_equal(ids, expected)
      numbers[row] += 1


def source_counts(settings, count=None) -> np.ndarray:
  """How many rows of each batch each source gives: [steps, sources]."""
  iterator = settings.make_iterator()
  counts = [batch['row_sources'].sum(axis=0) for batch in itertools.islice(iterator, count)]
  iterator.close()
  return np.array(counts)


@pytest.mark.parametrize('batch_size', [1, 6, 64])
@pytest.mark.parametrize(
  'weights', [(1, 1), (99, 1), (0.6180339, 0.2360679, 0.1458982), (1000, 1, 1, 1, 1), tuple(range(1, 13))]
)
def test_sources_match_their_weights_within_one_row_and_all_rows_keep_pace(weights, batch_size):
  names = [f'source_{i}' for i in range(len(weights))]
  sources = {name: SyntheticText(batch_size=batch_size, seq_len=1, seed=i) for i, name in enumerate(names)}
  iterator = Mixture(sources=sources, weights=dict(zip(names, weights)), seed=3).make_iterator()
  row_sources = np.array([batch['row_sources'] for batch in itertools.islice(iterator, 100)])
  read = row_sources.cumsum(axis=0)  # [steps, rows, sources]
  wanted = np.outer(np.arange(1, 101) * batch_size, np.array(weights) / sum(weights))
  assert np.abs(read.sum(axis=1) - wanted).max() < 1 + 1e-6
  assert (read.max(axis=1) - read.min(axis=1)).max() <= 2


def test_it_ends_before_the_first_batch_that_a_source_cannot_fill():
  settings = Mixture(
    sources={'long': synthetic(), 'short': synthetic(num_batches=3, seed=1)}, weights={'long': 3, 'short': 1}
  )
  counts = source_counts(settings)
  assert len(counts) == 12  # the short source has 3 batches of 12 rows, and gets 3 rows of each batch
  iterator = settings.make_iterator()
  assert len(list(iterator)) == 12
  assert next(iterator, None) is None
  again = settings.make_iterator()
  again.set_state(json.loads(json.dumps(iterator.get_state())))
  assert next(again, None) is None


def test_progress_counts_rows_and_epochs_per_source(mixtures):
  settings = mixtures['endless']
  iterator = settings.make_iterator()
  for _ in range(40):
    next(iterator)
  progress = settings.progress(json.loads(json.dumps(iterator.get_state())))
  assert progress['rows/web'] + progress['rows/code'] + progress['rows/made_up'] == 40 * B
  assert 'epochs/made_up' not in progress
  web = settings.sources['web']
  num_rows_of_epoch = B * sum(1 for _ in dataclasses.replace(web, num_epochs=1, shuffle=False).make_iterator())
  assert progress['epochs/web'] == pytest.approx(progress['rows/web'] / num_rows_of_epoch, rel=0.02)
  assert progress['epochs/web'] > 0.2


def test_numbers_beyond_the_dtype_of_the_spec_are_not_truncated():
  sources = {name: [{'x': np.full(4, number)}] for name, number in {'a': 1, 'b': 2**40}.items()}
  mixture = Mixture(sources=sources, weights={'a': 1, 'b': 1})
  assert mixture.element_spec()['x'].dtype == np.int32
  assert sorted(next(mixture.make_iterator())['x']) == [1, 1, 2**40, 2**40]


def test_rows_of_another_size_are_refused():
  data = [{'x': np.ones((4, 3))}, {'x': np.ones((4, 1))}]
  for source, message in (
    (
      as_input('a', data, repeats=False),
      r"source 'a' of the mixture .* \[1\] in 'x', .* \[3\]: give all rows one shape",
    ),
    (data, r"batch 2 of source 'a' has 'x' \[4, 1\], the first one \[4, 3\]"),
  ):
    ragged = Mixture(sources={'a': source}, weights={'a': 1}).make_iterator()
    next(ragged)
    with pytest.raises(ValueError, match=message):
      next(ragged)


SOURCES = {'a': synthetic(), 'b': synthetic(seed=1)}
EVEN = {'a': 1, 'b': 1}


@pytest.mark.parametrize(
  'settings, message',
  [
    ({'sources': {}, 'weights': {}}, r'sources = \{\} of the mixture must be a dict'),
    ({'sources': {'a/b': synthetic()}, 'weights': {'a/b': 1}}, "source name 'a/b'.*only letters"),
    ({'weights': {'a': 1, 'c': 1}}, r"weights = \{'a': 1, 'c': 1\} must .* weight for each source, \['a', 'b'\]"),
    ({'weights': 3}, r"weights = 3 must be a dict .* \['a', 'b'\]"),
    ({'weights': {'a': 1, 'b': -1}}, "weights = {'a': 1, 'b': -1} must be finite and at least 0"),
    ({'weights': {'a': 0, 'b': 0}}, 'one of them positive'),
    ({'weight_changes': ((5, {'a': 1}),)}, r"the weights after 5 batches = \{'a': 1\} must be a dict"),
    ({'weight_changes': ((5, EVEN), (5, EVEN))}, 'a number of at least 6: list the changes in ascending order'),
    ({'seed': -1}, 'seed -1 of the mixture must be an integer of at least 0'),
  ],
)
def test_invalid_settings_are_refused_in_one_sentence(settings, message):
  with pytest.raises(ValueError, match=message) as caught:
    Mixture(**{'sources': SOURCES, 'weights': EVEN, **settings})
  assert '\n' not in str(caught.value)


@pytest.mark.parametrize(
  'other, message',
  [
    (
      dataclasses.replace(synthetic(), batch_size=6),
      r"differ in 'ids', int32\[12, 16\] and int32\[6, 16\]",
    ),
    (dataclasses.replace(synthetic(), seq_len=8), r"differ in 'ids', int32\[12, 16\] and int32\[12, 8\]"),
  ],
)
def test_different_specs_are_refused_in_one_sentence(other, message):
  with pytest.raises(ValueError, match=message) as caught:
    Mixture(sources={'a': synthetic(), 'b': other}, weights=EVEN).element_spec()
  assert '\n' not in str(caught.value)


@pytest.mark.parametrize(
  'change, message',
  [
    ({'seed': 1}, 'seed = 0, but this input has seed = 1'),
    ({'weights': {'a': 1, 'b': 2}}, 'has weights = '),
    ({'weight_changes': ((4, {'a': 1, 'b': 2}),)}, 'has weights = '),
    ({'sources': {'a': synthetic(), 'c': synthetic()}, 'weights': {'a': 1, 'c': 1}}, 'has names = '),
    ({'sources': {'a': synthetic(), 'b': synthetic(seed=2)}}, "source 'b' of the mixture: .*seed = 1"),
  ],
)
def test_a_position_of_another_mixture_is_refused(change, message):
  settings = Mixture(sources=SOURCES, weights=EVEN)
  [iterator] = shards(settings, 1)
  read([iterator], 5)
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(settings, **change).make_iterator().set_state(iterator.get_state())


def test_weights_of_the_future_may_change():
  settings = Mixture(sources=SOURCES, weights=EVEN)
  changed = dataclasses.replace(settings, weight_changes=((5, {'a': 0, 'b': 1}),))
  [iterator] = shards(settings, 1)
  first = read([iterator], 5)
  [resumed] = shards(changed, 1)
  resumed.set_state(iterator.get_state())
  assert first + read([resumed], 5) == undisturbed(changed, 10)
