"""Wrong settings of a mixture get one sentence; so does a position that another mixture saved."""

import dataclasses

import pytest

from spmd_tasks.inputs import ByteTokenizer, Mixture, StdlibText
from tests.inputs.mixed import read, shards, synthetic, text, undisturbed

SOURCES = {'a': synthetic(), 'b': synthetic(seed=1)}
EVEN = {'a': 1, 'b': 1}


@pytest.mark.parametrize(
  'settings, message',
  [
    ({'sources': {}, 'weights': {}}, r'sources = \{\} of the mixture must be a dict of at least one'),
    ({'sources': {'a/b': synthetic()}, 'weights': {'a/b': 1}}, "source name 'a/b'.*use letters"),
    ({'weights': {'a': 1}}, r"weights lacks \['b'\], but the sources are \['a', 'b'\]"),
    ({'weights': {'a': 1, 'c': 1}}, r"weights names \['c'\] and lacks \['b'\]"),
    ({'weights': 0.5}, 'weights = 0.5 must be a dict'),
    ({'weights': {'a': 1, 'b': -1}}, "weight -1 of source 'b' in weights must be a finite number of at least 0"),
    ({'weights': {'a': 1, 'b': float('nan')}}, "weight nan of source 'b'"),
    ({'weights': {'a': 1, 'b': '1'}}, "weight '1' of source 'b'"),
    ({'weights': {'a': 0, 'b': 0}}, 'are all 0'),
    ({'weight_changes': ((5, {'a': 1}),)}, r"the weights after 5 batches lacks \['b'\]"),
    ({'weight_changes': ((5, EVEN), (5, EVEN))}, 'a number of at least 6'),
    ({'weight_changes': ((0, EVEN),)}, 'a number of at least 1'),
    ({'weight_changes': {5: EVEN}}, 'weight_changes = .* must be'),
    ({'seed': -1}, 'seed -1'),
  ],
)
def test_wrong_settings_get_one_sentence(settings, message):
  with pytest.raises(ValueError, match=message) as caught:
    Mixture(**{'sources': SOURCES, 'weights': EVEN, **settings})
  assert '\n' not in str(caught.value)


@pytest.mark.parametrize(
  'other, message',
  [
    (dataclasses.replace(synthetic(), batch_size=6), "'a' and 'b' of the mixture have batch_size 12 and 6"),
    (dataclasses.replace(synthetic(), seq_len=8), r"differ in 'ids', int32\[12, 16\] and int32\[12, 8\]"),
  ],
)
def test_ragged_specs_get_one_sentence(other, message):
  with pytest.raises(ValueError, match=message) as caught:
    Mixture(sources={'a': synthetic(), 'b': other}, weights=EVEN).element_spec()
  assert '\n' not in str(caught.value)


class ShiftedTokenizer(ByteTokenizer):
  def fingerprint(self) -> str:
    return 'shifted'


def test_different_tokenizers_get_one_sentence():
  first = text(StdlibText())
  second = dataclasses.replace(first, tokenizer=ShiftedTokenizer())
  with pytest.raises(ValueError, match=r"sources \['a', 'b'\] of the mixture have different tokenizers"):
    Mixture(sources={'a': first, 'b': second}, weights=EVEN).make_iterator()


def test_an_empty_source_gets_one_sentence():
  settings = Mixture(sources={**SOURCES, 'b': synthetic(num_batches=0)}, weights=EVEN)
  with pytest.raises(ValueError, match="source 'b' of the mixture") as caught:
    next(settings.make_iterator())
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


def test_states_of_different_moments_are_not_merged():
  settings = Mixture(sources=SOURCES, weights=EVEN)
  ahead, behind = shards(settings, 2)
  next(ahead)
  with pytest.raises(ValueError, match=r'different batches, \[1, 0\]'):
    settings.reshard_states([ahead.get_state(), behind.get_state()], 1)
