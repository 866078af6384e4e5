"""Pieces of text: together the whole, never half a character, never part of a stop string."""

import numpy as np
import pytest

from spmd_tasks.decoding.generated_sequence import IncrementalText

WORDS = 'añ😀 b\n日本語, so it is'


def decode(tokens) -> str:
  """Tokens are bytes."""
  return bytes(tokens).decode('utf-8', errors='replace')


def _pieces(data: bytes, stop=()):
  text = IncrementalText(decode, stop)
  return [text.push(byte) for byte in data] + [text.finish()], text


def test_pieces_are_characters_and_together_the_text():
  data = (WORDS * 10).encode()  # longer than the window
  pieces, text = _pieces(data)
  assert ''.join(pieces) == text.text == WORDS * 10
  assert '\ufffd' not in text.text


def test_broken_bytes_are_replaced_as_in_the_whole(rng):
  for _ in range(200):
    data = bytes(rng.choice(np.frombuffer('é😀日x'.encode() + b'\x80\xf0\xe2', np.uint8), 50))
    pieces, _ = _pieces(data)
    assert ''.join(pieces) == decode(data)


@pytest.mark.parametrize(
  'text, stop, expected, found',
  [
    ('one two three', ('two',), 'one ', 'two'),
    ('one two three', ('three', ' tw'), 'one', ' tw'),
    ('aaab', ('aab',), 'a', 'aab'),
    ('one tw', ('two',), 'one tw', None),
    ('日本語', ('本',), '日', '本'),
    ('ab', ('b', 'ab'), '', 'ab'),
  ],
)
def test_stop_strings(text, stop, expected, found):
  pieces, done = _pieces(text.encode(), stop)
  assert (''.join(pieces), done.text, done.stop) == (expected, expected, found)


@pytest.mark.parametrize(
  'text, min_tokens, kept, expected',
  [
    ('stop, stop.', 4, (), 'stop, '),  # the first one ends with the fourth token
    ('stop, stop.', 3, (), ''),
    ('stop, stop.', 4, ('stop',), 'stop, stop'),
    ('sstop', 0, ('stop',), 'sstop'),
    ('aaaa', 2, (), 'a'),  # the stop 'aa' may begin before
  ],
)
def test_stop_strings_end_a_text_after_its_least_number_of_tokens_and_may_stay(text, min_tokens, kept, expected):
  incremental = IncrementalText(decode, ('stop', 'aa'), kept_stops=kept)
  pieces = [incremental.push(byte, may_stop=number > min_tokens) for number, byte in enumerate(text.encode(), 1)]
  assert ''.join(pieces) + incremental.finish() == incremental.text == expected


def test_the_beginning_of_a_stop_string_is_held_back():
  text = IncrementalText(decode, ('stop',))
  assert [text.push(byte) for byte in b'a sto-'] == ['a', ' ', '', '', '', 'sto-']


@pytest.mark.parametrize('num_before', [0, 1, 40])
def test_decoders_that_join_tokens(num_before):
  """The first token of what is decoded loses its space, as with SentencePiece; each ninth token is special."""
  words = ['' if i % 9 == 8 else f' w{i}' for i in range(200)]

  def join(tokens):
    return ''.join(words[token] for token in tokens).removeprefix(' ')

  text = IncrementalText(join, before=range(num_before))
  for token in range(num_before, 200):
    text.push(token)
  assert join(range(num_before)) + text.text == join(range(200))


def test_a_continuation_does_not_complete_half_a_character_of_the_prompt():
  text = IncrementalText(decode, before='a日'.encode()[:-1])
  assert text.push('日'.encode()[-1]) + text.push(ord('b')) + text.finish() == '\ufffdb'
