"""Inputs for mixtures, and what their examples are known by: a hash of everything that a row holds."""

import zlib

import numpy as np

from spmd_tasks.inputs import ByteTokenizer, InputIterator, Mixture, SyntheticText, TextInput

B, T = 12, 16


def text(source, **settings) -> TextInput:
  return TextInput(source=source, tokenizer=ByteTokenizer(), batch_size=B, seq_len=T, **settings)


def synthetic(**settings) -> SyntheticText:
  return SyntheticText(batch_size=B, seq_len=T, **settings)


def shards(settings: Mixture, count: int) -> list[InputIterator]:
  return [settings.make_iterator(i, count) for i in range(count)]


def identities(batches) -> list[tuple[int, ...]]:
  """A hash of every row of a step, from the batches of its shards: everything that the rows hold."""
  whole = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
  return [tuple(zlib.crc32(b''.join(whole[name][row].tobytes() for name in sorted(whole))) for row in range(B))]


def read(iterators, count=None) -> list[tuple[int, ...]]:
  """The identities of the next `count` steps; fewer where the mixture ends, on all shards at once."""
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
