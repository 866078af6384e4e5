"""--mode preview: prints the first examples of the training input as the model will read them.

Each example is the text of one packed segment. Tokens that the loss counts are in colour; without colours (if the
output is not a terminal, or NO_COLOR is set) they are between « and ». Nothing is compiled, and no weight is read.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
import contextlib
import os
import sys
from typing import Any, TextIO

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
_LEARNT, _READ, _TITLE, _OFF = '\x1b[1;32m', '\x1b[2m', '\x1b[36m', '\x1b[0m'


def run(command: Any) -> int:
  """Runs the mode preview of a Command (command.py)."""
  set_activity('reading the training input')
  command.use_fake_devices()
  job = prepare_job(command.resolve().build(), 'preview', None)
  return preview(job, command.flags.num_examples or DEFAULT_NUM_EXAMPLES)


def preview(job: Job, num_examples: int = DEFAULT_NUM_EXAMPLES, out: TextIO | None = None) -> int:
  """Prints examples of a job's training input to `out`, by default stdout; returns the exit code OK.

  Raises a UserError: the input has no tokenizer or no such arrays, or its data cannot be used.
  """
  out, spec = out or unescaped(sys.stdout), job.train_input.element_spec()
  names = ('rejected', 'chosen') if 'reference_log_probs' in spec else ()
  missing = sorted(set(BATCH_DTYPES) - set(spec))
  if job.tokenizer is None or missing:
    lacks = f'has {", ".join(sorted(spec))} and no {missing[0]}' if missing else 'has no tokenizer'
    raise UserError(f'the training input {lacks}, so that its examples cannot be shown as text.')
  is_coloured = out.isatty() and 'NO_COLOR' not in os.environ
  shown = 0
  with contextlib.closing(job.train_input.make_iterator()) as batches:
    for batch in batches:
      for title, pieces in examples_of(job.train_input, batch, job.tokenizer, names):
        if shown == num_examples:
          return exit_codes.OK
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
