"""pack: moves the texts of a rollout into as few rows as possible, so that an update computes little padding.

Most texts of a rollout are much shorter than the longest. Batches keep their shape: the last microbatches get the empty
rows, and `accumulate_gradients` skips them.

Shapes: B rows, T tokens of a row, M microbatches.
"""

import numpy as np

from spmd_tasks.inputs import Batch


def pack(batch: Batch, num_parts: int, pad_id: int) -> Batch:
  """Returns a batch with the same texts in other rows, which do not depend on the mesh.

  Args:
    batch: arrays [B, ...]; each row has one text, from its first column on, or none.
    num_parts: M, a divisor of B; microbatch m has the rows m, M + m, 2 M + m, ...
    pad_id: the id of padding.

  Returns the arrays, with `segment_ids` that number the texts of each row, and `completion_lengths` float32 [B, T], the
  number of tokens with a weight in each token's text. Arrays [B] become [B, T], with the text's value for each token.
  """
  is_text = (batch['segment_ids'] > 0) | (batch['weights'] > 0)  # so that padding with a weight is not lost
  (num_rows, seq_len), lengths = is_text.shape, is_text.sum(axis=1)
  rooms: list[list[int]] = [[] for _ in range(seq_len + 1)]  # the rows by their number of free tokens
  num_used, counts = 0, np.zeros(num_rows, np.int32)
  starts, numbers = np.zeros(num_rows, np.int64), np.zeros(num_rows, np.int32)
  longest_first = np.argsort(-lengths, kind='stable')[: np.count_nonzero(lengths)]
  for text in longest_first.tolist():  # best fit
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
  arrays = batch | {'completion_lengths': batch['weights'].sum(axis=1).astype(np.float32), 'segment_ids': numbers}

  def move(name: str, array: np.ndarray) -> np.ndarray:
    array = np.broadcast_to(array[:, None], is_text.shape) if array.ndim == 1 else array
    moved = np.full((num_rows * seq_len, *array.shape[2:]), pad_id if name == 'ids' else 0, array.dtype)
    moved[places] = array[is_text]
    return moved.reshape(array.shape)

  return {name: move(name, array) for name, array in arrays.items()}


def _row_of(number: int, num_rows: int, num_parts: int) -> int:
  """Returns the row of the batch for the row `number`, so that the first rows fill the first microbatches."""
  part, place = divmod(number, num_rows // num_parts)
  return place * num_parts + part
