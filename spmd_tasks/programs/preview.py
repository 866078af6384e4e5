"""--mode preview: prints the first examples of the training input as the model will read them.

Each example is the text of one packed segment. Tokens that the loss counts are in colour; without colours (if the
output is not a terminal, or NO_COLOR is set) they are between « and ». An input without a tokenizer or without such
arrays is shown as numbers: the shape, dtype and range of each array of the first batch, and the first values of its
rows. Nothing is compiled, and no weight is read.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
import contextlib
import functools
import itertools
import os
import sys
from typing import Any, TextIO

import jax.numpy as jnp
import numpy as np

from spmd_tasks import exit_codes
from spmd_tasks.activity import set_activity
from spmd_tasks.errors import UserError
from spmd_tasks.experiment import Job
from spmd_tasks.extensions import prepare_job
from spmd_tasks.inputs import Input, Tokenizer
from spmd_tasks.inputs.base import BATCH_DTYPES, source_of_rows
from spmd_tasks.inputs.tokenizers import decode_all
from spmd_tasks.streams import escape, unescaped

DEFAULT_NUM_EXAMPLES = 4
_SHOWN_VALUES = 8  # of a row of an array
_LEARNT, _READ, _TITLE, _OFF = '\x1b[1;32m', '\x1b[2m', '\x1b[36m', '\x1b[0m'


def run(command: Any) -> int:
  """Runs the mode preview of a Command (command.py)."""
  set_activity('reading the training input')
  command.use_fake_devices()
  job = prepare_job(command.resolve().build(), 'preview', None)
  return preview(job, command.flags.num_examples or DEFAULT_NUM_EXAMPLES)


def preview(job: Job, num_examples: int = DEFAULT_NUM_EXAMPLES, out: TextIO | None = None) -> int:
  """Prints examples of a job's training input to `out`, by default stdout; returns the exit code OK.

  Raises a UserError if the input's data cannot be used.
  """
  job.check_parts()
  out, spec = out or unescaped(sys.stdout), job.train_input.element_spec()
  names = ('rejected', 'chosen') if 'reference_log_probs' in spec else ()
  tokenizer = job.tokenizer if BATCH_DTYPES.keys() <= spec.keys() else None
  is_coloured = out.isatty() and 'NO_COLOR' not in os.environ
  shown = 0
  with contextlib.closing(job.train_input.make_iterator()) as batches:
    while shown < num_examples and (batch := next(batches, None)) is not None:
      if tokenizer is None and not shown:
        lines = [describe_array(name, np.asarray(rows), spec[name].dtype) for name, rows in batch.items()]
        out.write(f'the arrays of the first batch:\n{"".join(lines)}')
      examples = rows_of if tokenizer is None else functools.partial(examples_of, tokenizer=tokenizer, names=names)
      for title, pieces in itertools.islice(examples(job.train_input, batch), num_examples - shown):
        shown += 1
        out.write(format_example(f'{shown}: {title}', pieces, is_coloured) + '\n')
  if not shown:
    raise UserError('the training input has no examples: correct its source.')
  return exit_codes.OK


def examples_of(
  source: Input, batch: Mapping[str, np.ndarray], tokenizer: Tokenizer, names: Sequence[str] = ()
) -> Iterator[tuple[str, list[tuple[str, bool]]]]:
  """Yields the title of each segment of a batch, and its text in pieces (text, whether the loss counts it).

  With `names`, segment s is called names[s % len(names)].
  """
  sources = source_of_rows(source, batch)
  for row in range(batch['ids'].shape[0]):
    segment_ids = batch['segment_ids'][row]
    for segment in range(1, int(segment_ids.max(initial=0)) + 1):
      at = np.flatnonzero(segment_ids == segment)
      first = at[:0] if 'targets' in batch else at[:1]  # the labels of a text that is scored are the text itself
      ids = np.append(batch['ids'][row, first], batch['labels'][row, at])
      is_learnt = np.append(np.zeros(first.size, bool), batch['weights'][row, at] > 0)
      name = f'{names[segment % len(names)]}, ' if names else ''
      place = f'{sources[row]}, row {row}' if sources else f'row {row}'
      title = f'{name}{place}, segment {segment}, {at.size} tokens, the loss on {int(is_learnt.sum())}'
      yield title, list(_pieces(ids, is_learnt, tokenizer))


def describe_array(name: str, rows: np.ndarray, dtype: Any) -> str:
  """Returns a line with the shape of an array, the dtype that the model reads, and the range of its finite values."""
  values = rows.astype(np.float64) if jnp.issubdtype(rows.dtype, jnp.floating) else rows
  finite = values[np.isfinite(values)]
  parts = [f'{escape(name)}  {dtype}{list(rows.shape)}']
  parts += [f'{kind.__name__} {_format(kind(finite))}' for kind in (np.min, np.mean, np.max) if finite.size]
  parts += [f'{rows.size - finite.size} not finite'] if finite.size < rows.size else []
  return '  '.join(parts) + '\n'


def rows_of(source: Input, batch: Mapping[str, np.ndarray]) -> Iterator[tuple[str, list[tuple[str, bool]]]]:
  """Yields the title of each row of a batch, and the first values of its arrays, as `examples_of` yields texts."""
  sources = source_of_rows(source, batch)
  arrays = {name: rows for name, rows in batch.items() if np.ndim(rows)}
  for row in range(min(map(len, arrays.values()))):
    lines = []
    for name, rows in arrays.items():
      values = np.ravel(rows[row])
      more = ', ...' * (values.size > _SHOWN_VALUES)
      lines.append(f'{name}  {", ".join(map(_format, values[:_SHOWN_VALUES].tolist()))}{more}')
    yield f'{sources[row]}, row {row}' if sources else f'row {row}', [('\n'.join(lines), False)]


def _format(value: Any) -> str:
  return f'{value:.5g}' if isinstance(value, float | complex) else str(value)


def _pieces(ids: np.ndarray, is_learnt: np.ndarray, tokenizer: Tokenizer) -> Iterator[tuple[str, bool]]:
  """Yields the text of runs of tokens. A run is decoded together with all tokens before it, as decoders need."""
  ends = [*(np.flatnonzero(np.diff(is_learnt)) + 1).tolist(), ids.size]
  start, before = 0, ''
  for end in ends:
    text = decode_all(tokenizer, ids[:end].tolist())
    yield text[len(before) :], bool(is_learnt[start])
    start, before = end, text


def format_example(title: str, pieces: Iterable[tuple[str, bool]], is_coloured: bool) -> str:
  """Formats an example, in colours or between signs; characters that would control a terminal are escaped."""
  title, pieces = escape(title), [(escape(text), is_learnt) for text, is_learnt in pieces]
  if not is_coloured:
    return f'--- {title}\n' + ''.join(f'«{text}»' if is_learnt else text for text, is_learnt in pieces)
  # Each line has its own colour codes, so that a pager may start at any line.
  coloured = [_coloured(text, _LEARNT if is_learnt else _READ) for text, is_learnt in pieces]
  return f'{_TITLE}--- {title}{_OFF}\n' + ''.join(coloured)


def _coloured(text: str, colour: str) -> str:
  return '\n'.join(f'{colour}{line}{_OFF}' if line else '' for line in text.split('\n'))
