"""Packing neither drops nor repeats a token: it agrees with a reference that packs token by token in plain Python."""

import dataclasses
import itertools

import numpy as np
import pytest

from spmd_tasks.inputs import Block, ByteTokenizer
from spmd_tasks.inputs.packing import Lane, TextEncoder, pack_batch

BYTES = ByteTokenizer()
NAMES = ('ids', 'labels', 'weights', 'segment_ids', 'segment_pos')


@dataclasses.dataclass(frozen=True)
class NoBos(ByteTokenizer):
  bos_id: None = dataclasses.field(default=None, init=False)


def make_blocks(rng, num_blocks=7):
  """Makes blocks of 0 to 4 documents of 0 to 30 characters, some of which continue in another block."""
  return [
    [
      (''.join(chr(c) for c in rng.integers(97, 123, size=rng.integers(31))), bool(rng.integers(2)))
      for _ in range(rng.integers(5))
    ]
    for _ in range(num_blocks)
  ]


def reference_rows(blocks, tokenizer, seq_len, packing):
  """Packs blocks into rows, one token at a time."""
  rows, row, segment = [], [], 0

  def end_row():
    nonlocal row, segment
    if row:
      rows.append(row + [(tokenizer.pad_id, tokenizer.pad_id, 0.0, 0, 0)] * (seq_len - len(row)))
    row, segment = [], 0

  for block in blocks:
    for text, is_end in block:
      if not text:
        continue
      tokens = [b + 3 for b in text.encode()]
      sequence = ([1] if tokenizer.bos_id is not None else []) + tokens + ([2] if is_end else [])
      position = 0
      if row and not packing:
        end_row()
      segment += 1
      for token, label in itertools.pairwise(sequence):
        if len(row) == seq_len:
          end_row()
          segment, position = 1, 0
        row.append((token, label, 1.0, segment, position))
        position += 1
      if len(sequence) < 2:
        segment -= 1
      if len(row) == seq_len:
        end_row()
  end_row()
  return rows


def lane_over(blocks, tokenizer, packing=True):
  def read_block(index):
    return TextEncoder(tokenizer).encode(Block('', blocks[index])) if index < len(blocks) else None

  return Lane(read_block, 1000, lambda: None, packing=packing)


@pytest.mark.parametrize('packing', [True, False])
@pytest.mark.parametrize('tokenizer', [BYTES, NoBos()], ids=['bos', 'no_bos'])
@pytest.mark.parametrize('seed, seq_len', [(0, 16), (1, 5), (2, 1), (3, 200)])
def test_rows_equal_the_reference(seed, seq_len, tokenizer, packing):
  blocks = make_blocks(np.random.default_rng(seed))
  expected = reference_rows(blocks, tokenizer, seq_len, packing)
  lane = lane_over(blocks, tokenizer, packing=packing)
  rows = []
  while (batch := pack_batch([lane], seq_len, tokenizer.pad_id)) is not None:
    rows.append(list(zip(*(batch[name][0].tolist() for name in NAMES))))
  assert rows == expected


@pytest.mark.parametrize('packing', [True, False])
def test_a_lane_continues_at_every_position(packing):
  blocks = make_blocks(np.random.default_rng(6))
  lane = lane_over(blocks, BYTES, packing=packing)
  rows, positions = [], [lane.position]
  while (batch := pack_batch([lane], 7)) is not None:
    rows.append(batch)
    positions.append(lane.position)
  assert len(rows) > 10
  for i, position in enumerate(positions):
    resumed = lane_over(blocks, BYTES, packing=packing)
    resumed.seek(*position)
    assert resumed.position == position
    for expected in rows[i : i + 3]:
      batch = pack_batch([resumed], 7)
      for name in NAMES:
        np.testing.assert_array_equal(batch[name], expected[name])
  assert pack_batch([resumed], 7) is None


@pytest.mark.parametrize('position', [(0, 100, 0), (9, 1, 0), (0, 1, 12345)])
def test_a_position_that_does_not_exist_is_refused(position):
  with pytest.raises(ValueError, match='has changed'):
    lane_over([[('abc', True)]], BYTES).seek(*position)


def test_a_lane_without_text_yields_padding_and_keeps_its_position():
  block, empty = (TextEncoder(BYTES).encode(Block('', [(text, True)])) for text in ('abc', ''))
  lanes = [Lane(lambda index, own=own: own, 2, lambda: None) for own in (block, empty)]
  for _ in range(3):
    batch = pack_batch(lanes, 8)
    np.testing.assert_array_equal(batch['weights'].all(axis=1), [True, False])
    assert lanes[1].position == (0, 0, 0)
