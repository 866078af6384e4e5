"""BlockReader: a source's blocks as tokens. Whatever goes wrong, however long it takes, the error names the block."""

from collections.abc import Callable
import queue
import threading
from typing import Any

from spmd_tasks.errors import JobError, UserError
from spmd_tasks.inputs.packing import TokenBlock, tokenize_documents
from spmd_tasks.inputs.text import OpenSource
from spmd_tasks.inputs.tokenizers import Tokenizer


class BlockReader:
  """Random access to the token blocks of an opened source.

  Reading happens in a thread of its own, so that a file system that hangs becomes an error after `timeout_s` seconds.
  """

  def __init__(self, source: OpenSource, tokenizer: Tokenizer, timeout_s: float):
    self._source = source
    self._tokenizer = tokenizer
    self._timeout_s = timeout_s
    self._thread: _Worker | None = None

  def __len__(self) -> int:
    return len(self._source)

  def __getitem__(self, index: int) -> TokenBlock:
    """Reads and tokenizes block `index`.

    Raises:
      UserError: its content is damaged.
      RuntimeError: it could not be read, or not in time.
    """
    if self._thread is None:
      self._thread = _Worker(self._read)
    try:
      return self._thread.call(index, self._timeout_s)
    except queue.Empty:
      self._thread = None  # it is stuck; another attempt needs another thread
      raise JobError(
        f'reading {self._source.block_name(index)} has not ended within {self._timeout_s:g} s: the file system may '
        'hang. If it is only slow, raise read_timeout_s.'
      ) from None

  def _read(self, index: int) -> TokenBlock:
    try:
      return tokenize_documents(self._source[index].documents, self._tokenizer)
    except ValueError as e:
      name = self._source.block_name(index)
      raise UserError(f'damaged input in {name}: {e}') from e
    except Exception as e:
      name = self._source.block_name(index)
      raise JobError(f'reading {name} failed: {type(e).__name__}: {e}') from e

  def close(self) -> None:
    if self._thread is not None:
      self._thread.stop()
      self._thread = None


class _Worker:
  """A daemon thread that calls one function; concurrent.futures would wait for a stuck thread when Python exits."""

  def __init__(self, function: Callable[[int], Any]):
    self._function = function
    self._requests: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    self._results: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
    threading.Thread(target=self._run, name='input-block-reader', daemon=True).start()

  def _run(self) -> None:
    while (request := self._requests.get()) is not None:
      try:
        result, error = self._function(request), None
      except BaseException as e:
        result, error = None, e
      self._results.put((result, error))

  def call(self, request: int, timeout_s: float) -> Any:
    self._requests.put(request)
    result, error = self._results.get(timeout=timeout_s)
    if error is not None:
      raise error
    return result

  def stop(self) -> None:
    self._requests.put(None)
