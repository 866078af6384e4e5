"""pack: puts the texts of a batch into as few rows as they need, so that an update computes little padding.

Texts of a rollout end where the model ends them, and most are much shorter than the longest. Batches keep their shape:
rows that are left over are empty, and lie in the last microbatches, which `accumulate_gradients` then leaves out.

Shapes: B rows, T tokens of a row, M microbatches.
"""

import numpy as np

from spmd_tasks.inputs import Batch


def pack(batch: Batch, num_parts: int, pad_id: int) -> Batch:
  """Returns a batch with the same texts in other rows; the same ones for the same batch, whatever the mesh.

  Args:
    batch: arrays [B, ...], one text a row from its first column on, or none.
    num_parts: M, which divides B; microbatch m has rows m, M + m, 2 M + m, ...
    pad_id: the id in padding.

  Returns:
    `segment_ids` that number the texts of each row, and `completion_lengths`, float32 [B, T], how many tokens of its
    text have a weight. Arrays [B] have become [B, T], each token having what its text had.
  """
  is_text = (batch['segment_ids'] > 0) | (batch['weights'] > 0)  # a fault that gives padding a weight stays visible
  (num_rows, seq_len), lengths = is_text.shape, is_text.sum(axis=1)
  rooms: list[list[int]] = [[] for _ in range(seq_len + 1)]  # by how many tokens are free: which rows
  num_used, counts = 0, np.zeros(num_rows, np.int32)
  starts, numbers = np.zeros(num_rows, np.int64), np.zeros(num_rows, np.int32)
  longest_first = np.argsort(-lengths, kind='stable')[: np.count_nonzero(lengths)]
  for text in longest_first.tolist():  # each where it fits best
    length = int(lengths[text])
    room = next((room for room in range(length, seq_len) if rooms[room]), seq_len)
    if room < seq_len:
      row = rooms[room].pop()
    else:
      row, num_used = num_used, num_used + 1
    rooms[room - length].append(row)
    counts[row] += 1
    starts[text], numbers[text] = _row_of(row, num_rows, num_parts) * seq_len + seq_len - room, counts[row]
  places = (starts[:, None] + np.arange(seq_len))[is_text]
  of_tokens = batch | {'completion_lengths': batch['weights'].sum(axis=1).astype(np.float32), 'segment_ids': numbers}

  def move(name: str, given: np.ndarray) -> np.ndarray:
    given = np.broadcast_to(given[:, None], is_text.shape) if given.ndim == 1 else given
    moved = np.full((num_rows * seq_len, *given.shape[2:]), pad_id if name == 'ids' else 0, given.dtype)
    moved[places] = given[is_text]
    return moved.reshape(given.shape)

  return {name: move(name, given) for name, given in of_tokens.items()}


def _row_of(number: int, num_rows: int, num_parts: int) -> int:
  """Where a row lies so that the first ones fill the first microbatches."""
  part, place = divmod(number, num_rows // num_parts)
  return place * num_parts + part
