"""DecodedFile: a checkpoint's outputs for one set of prompts, one JSON line per prompt in their order.

A line has the prompt's `index`, the checkpoint's `step`, the `request` (request_record) and its `outputs`
(outputs_record); if the weights come from no checkpoint of the job, also `weights_from`, their place. Until the last
line is written the file's name ends in `.partial`; a job that is started again keeps the whole lines and continues
after them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import fcntl
import io
import json
import os
from typing import Any

from absl import logging
from etils import epath

from spmd_tasks import append_objects
from spmd_tasks.decoding import Prompt, Request
from spmd_tasks.decoding.generation import Completion
from spmd_tasks.errors import UserError
from spmd_tasks.files import (
  append,
  is_remote,
  make_directory,
  open_descriptor,
  read_bytes,
  storage_errors,
  sync_path,
  write_durably,
)
from spmd_tasks.runtime import DecodeSettings
from spmd_tasks.runtime.metrics import PLACE_KEY
from spmd_tasks.store_files import read_appended, replace_appended


class DecodedFile:
  """The outputs file of `num_lines`, which begin with what `begin` makes; only process 0 reads and writes it."""

  def __init__(self, path: epath.Path, num_lines: int, begin: Callable[[], Iterable[Mapping[str, Any]]]):
    self._path = path
    self._partial = path.parent / f'{path.name}.partial'
    self._num_lines, self._begin = num_lines, begin
    self._lock: io.FileIO | None = None

  def close(self) -> None:
    """Lets another job write the file."""
    if self._lock is not None:
      self._lock.close()

  def num_done(self) -> int:
    """Counts the requests, from the first on, that have a line already; cuts off an unfinished last line.

    Raises:
      UserError: the file holds outputs of other prompts, config or step, or another job is writing it.
      StorageError: the file cannot be read or written; as `append` and `finish`.
    """
    with storage_errors(self._path):
      if self._path.exists():
        return self._check(self._path, read_bytes(self._path), is_complete=True)
      self._claim()
      try:
        content = read_appended(self._partial)
      except FileNotFoundError:
        return 0
      whole = content[: content.rfind(b'\n') + 1]
      num_done = self._check(self._partial, whole, is_complete=False)
      if whole != content:
        replace_appended(self._partial, whole)
        self._claim()  # the new file
      return num_done

  def _claim(self) -> None:
    """Locks the unfinished file on a disk; the end of the process frees it, kill -9 included."""
    if is_remote(self._path):
      return
    self.close()
    make_directory(self._partial.parent)
    self._lock = io.FileIO(open_descriptor(self._partial, os.O_WRONLY | os.O_CREAT), 'w')
    try:
      fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      self.close()
      raise UserError(
        f'{self._partial} is being written by another job: wait for its end, or name another file by --decode_output.'
      ) from None
    except OSError as error:
      logging.warning('%s: a second job that writes it will not be noticed (%s).', self._partial, error)
    if os.fstat(self._lock.fileno()).st_nlink > 1:  # of a copy by hard links
      write_durably(self._partial, read_bytes(self._partial))
      self._claim()

  def _check(self, path: epath.Path, content: bytes, *, is_complete: bool) -> int:
    lines = content.splitlines()
    is_same = len(lines) == self._num_lines if is_complete else len(lines) <= self._num_lines
    try:
      is_same = is_same and all(
        begin.items() <= (done := json.loads(line)).items() and begin.get(PLACE_KEY) == done.get(PLACE_KEY)
        for line, begin in zip(lines, self._begin(), strict=False)
      )
    except (ValueError, AttributeError, RecursionError):
      is_same = False
    if not is_same:
      self.close()
      raise UserError(
        f'{path} holds outputs of other prompts or another config, or of another step or place of the weights: move it '
        'away, give the prompts another name, or name another file by --decode_output.'
      )
    return len(lines)

  def append(self, record: Mapping[str, Any]) -> None:
    """Writes the next line. A kill of the process loses no line on a disk, and the last second's lines in a store."""
    line = json.dumps(record, ensure_ascii=False) + '\n'
    with storage_errors(self._partial):
      make_directory(self._partial.parent)
      append(self._partial, line.encode())

  def finish(self) -> None:
    """Gives the file its final name; call it when all requests have a line."""
    with storage_errors(self._path):
      if is_remote(self._path):
        write_durably(self._path, read_appended(self._partial))

        append_objects.remove(self._partial)
        return
      sync_path(self._partial)
      os.replace(self._partial, self._path)
      sync_path(self._path.parent)


def request_record(prompt: Prompt, request: Request, num_outputs: int, settings: DecodeSettings) -> dict[str, Any]:
  """Makes the JSON object of a request: everything, beside the weights, that its outputs depend on."""
  record: dict[str, Any] = {'prompt': prompt.prompt} if prompt.prompt is not None else {}
  if request.encoder_ids:
    record |= {'prompt_ids': list(request.encoder_ids), 'decoder_ids': list(request.ids)}
  else:
    record['prompt_ids'] = list(request.ids)
  record |= {'n': num_outputs, 'max_tokens': request.max_tokens}
  record |= {'stop_ids': list(request.stop_ids), 'stop': list(request.stop)}
  more = {name: getattr(prompt, name) for name in ('response_format', 'structured_outputs', 'adapter')}
  more['logit_bias'] = {str(token): value for token, value in request.logit_bias} or None
  record |= {name: value for name, value in more.items() if value is not None}
  if settings.num_beams > 1:
    rule = {} if settings.beam_rule == 'exact' else {'beam_rule': settings.beam_rule}
    return record | {'num_beams': settings.num_beams, 'length_penalty': settings.length_penalty} | rule
  sampling = dataclasses.asdict(request.sampling)
  return record | {'seed': request.seed, 'score_prompt': request.score_prompt, **sampling}


def outputs_record(completions: Sequence[Completion], *, has_text: bool) -> dict[str, Any]:
  """Makes the JSON object of a prompt's outputs, and of the prompt's log-probabilities if it was scored."""
  scores = completions[0].prompt_logprobs
  record: dict[str, Any] = {} if scores is None else {'prompt_logprobs': scores}
  return record | {'outputs': [_output_record(completion, has_text) for completion in completions]}


def _output_record(completion: Completion, has_text: bool) -> dict[str, Any]:
  """`logprob` is the whole text's; `score` is the number by which beam search ranks texts."""
  record: dict[str, Any] = {'text': completion.text} if has_text else {}
  record |= {'ids': completion.ids, 'finish_reason': completion.finish_reason}
  if completion.score is not None:
    return record | {'logprob': completion.logprob, 'score': completion.score}
  record |= {'logprob': sum(completion.logprobs), 'logprobs': completion.logprobs}
  if completion.top_logprobs:
    record['top_logprobs'] = [[[token, value] for token, value in top.items()] for top in completion.top_logprobs]
  return record
