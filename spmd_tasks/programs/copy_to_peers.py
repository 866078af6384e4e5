"""CopyToPeers: the hook of jobs that copy their state to memory (checkpoints/peer_copies.py)."""

from spmd_tasks.checkpoints.peer_copies import RAM_DISK, PeerCopies, RestoredCopy
from spmd_tasks.distributed import is_primary
from spmd_tasks.programs.hooks import TrainHook, TrainRun
from spmd_tasks.programs.interval_hooks import is_multiple
from spmd_tasks.programs.training_loop import Outcome


class CopyToPeers(TrainHook):
  """Copies the state to the memory of two processes each, every `peer_copy_every_steps`; restores from the copies."""

  def prepare(self, run: TrainRun) -> None:
    self._every_steps = run.experiment.peer_copy_every_steps

  def open(self, run: TrainRun) -> None:
    directory = run.experiment.peer_copy_directory or RAM_DISK
    copies = PeerCopies(directory, run.job_log_dir, run.model.padded_state, limit_s=run.limit_s)
    self._copies = run.stack.enter_context(copies)

  def restore(self, run: TrainRun, newest_checkpoint: int) -> RestoredCopy | None:
    return self._copies.restore(newest_checkpoint if newest_checkpoint >= 0 else None)

  def start(self, run: TrainRun) -> None:
    run.message(f'every {self._every_steps} steps the state is copied to memory: {self._copies}')

  def needs_state(self, step: int) -> bool:
    return is_multiple(step, self._every_steps)

  def after_step(self, run: TrainRun, outcome: Outcome) -> None:
    if is_multiple(outcome.step, self._every_steps):
      newest = run.checkpointer.latest_step() if is_primary() else None
      with run.timed('copy', 'checkpoint_save'):
        self._copies.copy(run.step, run.state, run.loop.input_state, newest)
      run.goodput.mark(run.step)
