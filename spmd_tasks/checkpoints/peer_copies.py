"""PeerCopies: copies of the live state in the memory of two processes each, from which a restart in place goes on.

    with PeerCopies('/dev/shm', job_log_dir, model.padded_state, limit_s=600) as copies:
      restored = copies.restore(newest_checkpoint)          # None: read the store
      copies.copy(step, state, input_state, newest_checkpoint)

Every process writes its part of the state to its RAM disk, and sends it to the next process, which keeps it too. So the
loss of one process, or of one host, leaves every part somewhere. All processes agree on the newest step of which every
part is whole, made by one start of one job for the same mesh; a process that has lost its own part gets it from the one
that holds it. Else the checkpoints in the store are used, and one line says why.

A copy counts when all processes have it twice: the next copy asks that first, and only then deletes the one before. The
training waits while its own part is written to the RAM disk; digest and sending run in the background.

Every process calls every method, in the same order, with no step in flight (the state may be donated).
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
import dataclasses
import json
import os
from pathlib import Path
import secrets
import socket
import threading
from typing import Any, NamedTuple

from absl import logging
from etils import epath
import jax

from spmd_tasks.checkpoints.checkpoint_directory import PEER_COPIES_FILE
from spmd_tasks.checkpoints.memory_copies import (
  CopyHeader,
  DamagedCopyError,
  MemoryCopies,
  block_table,
  layout_of,
  local_num_bytes,
  read_state,
  verify,
)
from spmd_tasks.distributed import barrier
from spmd_tasks.distributed.agreement import all_agree, gather, primary_decides
from spmd_tasks.distributed.links import Link, LinkError, connect_pairs
from spmd_tasks.errors import UserError
from spmd_tasks.files import read_text, write_durably

RAM_DISK = '/dev/shm'  # of Linux
_CHUNK_BYTES = 1 << 24
_MAX_ROUNDS = 5  # a round fails for damage, which it removes


@dataclasses.dataclass(frozen=True, kw_only=True)
class RestoredCopy:
  """A state from memory: its step, the padded live state, this process's input position, and where it came from."""

  step: int
  state: Any
  input_state: dict[str, Any] | None
  origin: str


class Held(NamedTuple):
  """A copy that a process can read; the fields are those of CopyHeader."""

  attempt: str
  step: int
  owner: int
  newest_checkpoint: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
  """The copies to restore: `holders[i]` is the process that can read the part of process i."""

  attempt: str
  step: int
  holders: tuple[int, ...]


def choose(held: Sequence[Sequence[Held]], newest_checkpoint: int | None) -> Choice | str:
  """Chooses the newest copies of which every part is `held` by a process; or returns why there are none."""
  num_processes = len(held)
  parts: dict[tuple[int, str], dict[int, int]] = {}
  known: dict[tuple[int, str], int] = {}
  for process in range(num_processes):
    for copy in held[process]:
      holders = parts.setdefault((copy.step, copy.attempt), {})
      if copy.owner == process or copy.owner not in holders:
        holders[copy.owner] = process
      if copy.newest_checkpoint is not None:
        known[copy.step, copy.attempt] = copy.newest_checkpoint
  reason = 'there are none'
  for step, attempt in sorted(parts, reverse=True):
    holders = parts[step, attempt]
    missing = [owner for owner in range(num_processes) if owner not in holders]
    seen = known.get((step, attempt))
    if newest_checkpoint is not None and step < newest_checkpoint:
      return f'those of step {step} are older than the checkpoint of step {newest_checkpoint}'
    if missing:
      reason = f'of step {step}, no process has the part of process {", ".join(map(str, missing[:8]))}'
    elif seen is not None and (newest_checkpoint is None or newest_checkpoint < seen):
      # The user has moved checkpoints away to go back, or the store is not the one that it was.
      reason = f'when those of step {step} were made, there was a checkpoint of step {seen}, which is gone'
    else:
      return Choice(attempt=attempt, step=step, holders=tuple(holders[owner] for owner in range(num_processes)))
  return reason


class PeerCopies:
  """Makes and restores the copies of one job."""

  def __init__(self, directory: str, job_log_dir: epath.Path, abstract_state: Any, *, limit_s: int):
    """Connects each process with the next one.

    Args:
      directory: a RAM disk of each host.
      job_log_dir: shared by the processes; gets a file with the job's random name.
      abstract_state: the live state, as ShapeDtypeStructs with shardings.
      limit_s: how many seconds the processes wait for each other.

    Raises a UserError: the RAM disk cannot be used, or is too small; on every process.
    """
    self._own, self._num = jax.process_index(), jax.process_count()
    self._num_files = 2 if self._num == 1 else 4  # two generations: its own part, and that of its neighbour
    self._limit_s = limit_s
    self._abstract_state = abstract_state
    self._layout = layout_of(abstract_state)
    self._blocks = block_table(abstract_state)
    self._num_bytes = local_num_bytes(abstract_state)
    self._files = MemoryCopies(directory, os.fspath(job_log_dir), self._own)
    self._check_room(directory)
    self._job, self._attempt = primary_decides(lambda: _identify(job_log_dir), 'peer_copies', limit_s=limit_s)
    self._background = ThreadPoolExecutor(1, thread_name_prefix='peer-copy')
    self._pending: Future[None] | None = None
    self._last: int | None = None
    self._is_on = all_agree(True, 'peer_copies_on', limit_s=limit_s)  # compiled now, not at the first copy
    self._next: Link | None = None
    self._previous: Link | None = None
    if self._num > 1:
      ring = [(process, (process + 1) % self._num) for process in range(self._num)]
      joined, admitted = connect_pairs('peer_copies_ring', ring, limit_s=limit_s)
      (self._next,), (self._previous,) = joined.values(), admitted.values()
      threading.Thread(target=self._keep_from, args=(self._previous,), name='peer-copies', daemon=True).start()

  def __str__(self) -> str:
    size = f'{self._num_files} x {self._num_bytes / 1e6:,.1f} MB'
    return f'up to {size} of memory per process in {self._files.path.parent}'

  def __enter__(self) -> 'PeerCopies':
    return self

  def __exit__(self, kind: object, *error: object) -> None:
    """Ends the connections; a job that ends without an error needs its copies no longer."""
    if kind is None:
      self._is_last_done()
      barrier('peer_copies_end', limit_s=self._limit_s)  # the next process, too, has sent what it had
    for link in (self._next, self._previous):
      if link is not None:
        link.close()
    self._background.shutdown(wait=False, cancel_futures=True)
    if kind is None:
      self._files.remove()

  def restore(self, newest_checkpoint: int | None) -> RestoredCopy | None:
    """Restores the newest copies of this job that are whole; None: use the store, which may have a newer checkpoint."""
    reason = f'they were damaged {_MAX_ROUNDS} times'
    for _ in range(_MAX_ROUNDS):
      headers = self._files.headers()
      # Of several files of one part, the first is this process's own.
      found = {
        Held(header.attempt, header.step, header.owner, header.newest_checkpoint): path
        for path, header in reversed(headers.items())
        if (header.job, header.num_processes, header.layout) == (self._job, self._num, self._layout)
      }
      rows = gather([len(headers), *found], 'peer_copies_held', limit_s=self._limit_s)
      choice = choose([[Held(*copy) for copy in copies] for _, *copies in rows], newest_checkpoint)
      if isinstance(choice, str):
        has_others = any(count for count, *_ in rows) and not any(copies for _, *copies in rows)
        reason = 'they are those of another job, mesh or number of processes' if has_others else choice
        break
      own = self._get(choice, {(copy.attempt, copy.step, copy.owner): path for copy, path in found.items()})
      if all_agree(own is not None, 'peer_copies_whole', limit_s=self._limit_s):
        assert own is not None
        path, header = own
        state = read_state(path, self._abstract_state)
        chosen = choice.attempt, choice.step
        self._files.keep_only(lambda *copy, chosen=chosen: copy == chosen)
        return RestoredCopy(
          step=choice.step, state=state, input_state=header.input_state, origin=_describe(choice.holders)
        )
    if self._own == 0 and reason != 'there are none':
      logging.warning('the copies in memory are not used: %s.', reason)
    self._files.keep_only(lambda attempt, step: False)
    return None

  def copy(self, step: int, state: Any, input_state: Any, newest_checkpoint: int | None) -> None:
    """Begins a copy of the live state, which may be donated afterwards; `input_state` is JSON, this process's own.

    `newest_checkpoint` is the newest complete checkpoint of the store; process 0's counts.
    """
    if not self._is_on:
      return
    if not all_agree(self._is_last_done(), 'peer_copy', limit_s=self._limit_s):
      self._is_on = False
      logging.error('a copy in memory has failed: from now on only the checkpoints in the store count.')
      return
    if (last := self._last) is not None:  # complete everywhere, so the copies before it are not needed
      # Another process of this host may have finished its copy of this step already.
      self._files.keep_only(lambda attempt, step: attempt == self._attempt and step >= last)
    header = CopyHeader(
      job=self._job,
      attempt=self._attempt,
      step=step,
      owner=self._own,
      num_processes=self._num,
      layout=self._layout,
      newest_checkpoint=newest_checkpoint if self._own == 0 else None,
      input_state=input_state,
      blocks=self._blocks,
    )
    self._last = step
    try:
      partial = self._files.write(header, state)
    except OSError as error:
      self._pending = Future()
      self._pending.set_exception(error)
    else:
      self._pending = self._background.submit(self._complete, partial)

  def _complete(self, partial: Path) -> None:
    path = self._files.finish(partial)
    if self._next is not None:
      _send_file(self._next, path)
      answer = self._next.receive()
      if answer != b'kept':
        raise ConnectionError(f'process {self._next.process_index} has not kept the copy')

  def _is_last_done(self) -> bool:
    try:
      if self._pending is not None:
        self._pending.result(timeout=self._limit_s)
      return True
    except (OSError, LinkError) as error:
      logging.error('the copy of step %s in memory has failed: %s', self._last, error)
      return False

  def _keep_from(self, link: Link) -> None:
    """Runs in a thread: keeps what the process before this one sends."""
    try:
      while self._receive_file(link) is not None:
        link.send(b'kept')
    except (OSError, LinkError, ValueError) as error:
      logging.error('a copy for process %d cannot be kept: %s', link.process_index, error)
      link.close()

  def _get(self, choice: Choice, found: dict[tuple[str, int, int], Path]) -> tuple[Path, CopyHeader] | None:
    """Returns this process's own part, verified, fetched if another process holds it; None if it is not to be had."""
    fetches = [(owner, holder) for owner, holder in enumerate(choice.holders) if owner != holder]
    path = found.get((choice.attempt, choice.step, self._own))
    if fetches:
      joined, admitted = connect_pairs('peer_copies_fetch', fetches, limit_s=self._limit_s)
      try:
        # In threads: two processes may each send to the other.
        with ThreadPoolExecutor(max(1, len(admitted))) as pool:
          sources = {owner: found[choice.attempt, choice.step, owner] for owner in admitted}
          sent = [pool.submit(_send_verified, link, sources[owner]) for owner, link in admitted.items()]
          for link in joined.values():
            name = self._receive_file(link)
            path = self._files.path / name if name else None
        for each in sent:
          each.result()
      except (OSError, LinkError, ValueError) as error:
        logging.error('a copy could not be fetched: %s', error)
        path = None
      finally:
        for link in (*joined.values(), *admitted.values()):
          link.close()
    header = _verified(path) if path is not None else None
    return (path, header) if path is not None and header is not None else None

  def _receive_file(self, link: Link) -> str | None:
    """Keeps a file that `_send_file` sends; returns its name, or None if the other end has none or has closed."""
    request = json.loads(link.receive() or b'{}')
    if request.get('name') is None:
      return None

    def chunks() -> Iterator[bytes]:
      left = request['num_bytes']
      while left > 0:
        chunk = link.receive()
        if chunk is None:
          raise ConnectionError('the other process has closed the link')
        left -= len(chunk)
        yield chunk

    self._files.receive(request['name'], chunks())
    return request['name']

  def _check_room(self, directory: str) -> None:
    needed = self._num_bytes * self._num_files
    rows = gather([socket.gethostname(), needed, self._files.free_bytes()], 'peer_copies_room', limit_s=self._limit_s)
    for host in sorted({host for host, _, _ in rows}):
      total = sum(needed for name, needed, _ in rows if name == host)
      free = min(free for name, _, free in rows if name == host)
      if total > free:
        raise UserError(
          f'peer_copy_directory = {directory!r} has {free / 1e9:.3f} GB of room on host {host}, but the copies of the '
          f"state take up to {total / 1e9:.3f} GB there: enlarge it (mount -o remount,size=..., or a container's "
          'shared memory), name another RAM disk, or set peer_copy_every_steps=None.'
        )


def _identify(job_log_dir: epath.Path) -> tuple[str, str]:
  """Returns the random names of the job, which its directory keeps, and of this start."""
  path = job_log_dir / PEER_COPIES_FILE
  try:
    job = str(json.loads(read_text(path))['job'])
  except (FileNotFoundError, ValueError, TypeError, KeyError, RecursionError):
    # Without its name, earlier copies are not this job's.
    job = secrets.token_hex(16)
    write_durably(path, json.dumps({'job': job}) + '\n')
  return job, secrets.token_hex(8)


def _verified(path: Path) -> CopyHeader | None:
  """Returns the header of a copy that is whole; deletes one that is not."""
  try:
    return verify(path)
  except DamagedCopyError as error:
    logging.error('the copy %s is damaged and removed: %s', path, error)
    path.unlink(missing_ok=True)
    return None


def _send_verified(link: Link, path: Path) -> None:
  _send_file(link, path if _verified(path) else None)


def _send_file(link: Link, path: Path | None) -> None:
  """Sends a file in parts; None says that there is none."""
  num_bytes = path.stat().st_size if path is not None else 0
  link.send(json.dumps({'name': path.name if path is not None else None, 'num_bytes': num_bytes}).encode())
  if path is not None:
    with open(path, 'rb') as file:
      while chunk := file.read(_CHUNK_BYTES):
        link.send(chunk)


def _describe(holders: Sequence[int]) -> str:
  fetched = [
    f'that of process {owner} from process {holder}' for owner, holder in enumerate(holders) if owner != holder
  ]
  return 'the copies in memory' + (f' ({", ".join(fetched[:8])})' if fetched else '')
