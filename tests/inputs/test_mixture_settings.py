"""Wrong settings of a mixture get one sentence; so does a position that another mixture saved."""

import dataclasses

import pytest

from spmd_tasks.inputs import Mixture
from tests.inputs.mixed import read, shards, synthetic, undisturbed

SOURCES = {'a': synthetic(), 'b': synthetic(seed=1)}
EVEN = {'a': 1, 'b': 1}


@pytest.mark.parametrize(
  'settings, message',
  [
    ({'sources': {}, 'weights': {}}, r'sources = \{\} of the mixture must be a dict of at least one'),
    ({'sources': {'a/b': synthetic()}, 'weights': {'a/b': 1}}, "source name 'a/b'.*use letters"),
    ({'weights': {'a': 1, 'c': 1}}, r"weights = \{'a': 1, 'c': 1\} must be a dict .* sources \['a', 'b'\]"),
    ({'weights': {'a': 1, 'b': -1}}, "weight -1 of source 'b' in weights must be a finite number of at least 0"),
    ({'weight_changes': ((5, {'a': 1}),)}, r"the weights after 5 batches = \{'a': 1\} must be a dict"),
  ],
)
def test_wrong_settings_get_one_sentence(settings, message):
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
def test_ragged_specs_get_one_sentence(other, message):
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
