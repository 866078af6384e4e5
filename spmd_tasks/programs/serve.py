"""--mode=serve: a checkpoint's weights behind an HTTP interface, until a signal ends it.

Of several processes each holds its part of the weights; process 0 answers, and the others follow (leading_engine.py).
"""

from collections.abc import Callable
import contextlib
import dataclasses
import functools
import math
from pathlib import Path
import signal
import socket
import time
from typing import Any

import jax

from spmd_tasks.decoding import DecodeSteps, Engine, ModelEngine
from spmd_tasks.distributed.agreement import PrimaryError, meet, primary_decides
from spmd_tasks.distributed.emergency_exit import EmergencyExit
from spmd_tasks.distributed.rank_records import Position
from spmd_tasks.errors import UserError
from spmd_tasks.experiment import Job
from spmd_tasks.inputs.tokenizers import Tokenizer
from spmd_tasks.runtime.partition import PartitionedModel
from spmd_tasks.serving.following import follow
from spmd_tasks.serving.generation_request import ServedModel
from spmd_tasks.serving.leading_engine import lead
from spmd_tasks.serving.process_link import connect_processes
from spmd_tasks.serving.server import listen, serve
from spmd_tasks.serving.settings import ServerSettings

# Clients of OpenAI's API may ask for so many likeliest tokens; an experiment may have more compiled in.
_MIN_TOP_LOGPROBS = 5
_END_LIMIT_S = 30  # for the last process to come to the end


def serve_job(
  job: Job,
  tokenizer: Tokenizer | None,
  settings: ServerSettings,
  *,
  emergency: EmergencyExit,
  bind_host: str | None,
  checkpoint_step: int | None,
  partition: Callable[[], PartitionedModel],
  restore: Callable[[PartitionedModel, int | None], tuple[Any, int]],
) -> int:
  """Serves the job's model; returns an exit code.

  Args:
    job: the built experiment.
    tokenizer: of its inputs.
    settings: of the server.
    emergency: the way out where another process has failed.
    bind_host: where process 0 listens for the others; None is the coordinator's address.
    checkpoint_step: what is served first; None is the newest checkpoint.
    partition: makes the model.
    restore: gives padded weights of a checkpoint, and its step.

  Raises:
    UserError: this job cannot be served, or there is nowhere to listen.
    CheckpointError: there is no checkpoint, or it is damaged.
  """
  if tokenizer is None:
    raise UserError(f'experiment {job.name} has no tokenizer in its inputs, so that it cannot be served as text.')
  limit_s = math.ceil(job.experiment.first_step_timeout_s)
  if jax.process_count() > 1:
    # JAX has taken the signal to have all processes save a step. Until it serves, nothing is lost by an end at once.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
  sock = _listen(settings, limit_s)  # first: what is wrong with it shall not show only after the weights are loaded
  with sock or contextlib.nullcontext():
    model = partition()
    decode = job.task.decode
    num_top = max(decode.num_top_logprobs, min(_MIN_TOP_LOGPROBS, tokenizer.vocab_size))
    steps = DecodeSteps(model, dataclasses.replace(decode, num_beams=1, num_top_logprobs=num_top))
    weights, step = restore(model, checkpoint_step)
    served = ServedModel(
      name=job.name,
      created=int(time.time()),
      step=step,
      tokenizer=tokenizer,
      chat_template=job.experiment.chat_template(),
      settings=steps.settings,
      max_len=steps.max_len,
      vocab_size=steps.vocab_size,
    )
    engine = ModelEngine(steps, weights, score_prompts=True)
    del weights  # which the engine may give up
    announce = lambda line: print(line, flush=True)

    def serve_engine(engine: Engine, **others: Any) -> int:
      assert sock is not None  # this is process 0
      return serve(engine, served, settings, sock, announce=announce, **others)

    restore_other = lambda step: restore(model, step)
    if jax.process_count() == 1:
      return serve_engine(engine, restore=restore_other)
    links = connect_processes(limit_s=limit_s, bind_host=bind_host)
    emergency.set_position_source(lambda: Position(step=step, activity='serve'))
    leave = functools.partial(emergency.leave, has_stacks=False, is_own=False)
    if jax.process_index() == 0:
      code = lead(engine, links, serve_engine, restore=restore_other, leave=leave)
    else:
      code = follow(engine, links[0], restore=restore_other, leave=leave)
    meet('serve_end', limit_s=_END_LIMIT_S)
    return code


def _listen(settings: ServerSettings, limit_s: int) -> socket.socket | None:
  """The socket of the server, on process 0; every process raises what is wrong with it."""
  sock = None

  def listen_here() -> None:
    nonlocal sock
    sock = listen(settings)

  try:
    primary_decides(listen_here, 'serve_listen', limit_s=limit_s)
  except PrimaryError as error:
    raise UserError(str(error)) from error
  return sock


def read_api_key(path: str) -> str:
  """The key in a file: its only line.

  Raises:
    UserError: there is no such file, or no key in it.
  """
  try:
    text = Path(path).read_text(encoding='utf-8').strip()
  except (OSError, UnicodeDecodeError) as error:
    raise UserError(f'--api_key_file {path} cannot be read: {error}.') from error
  if len(text.split()) != 1 or not text.isascii():
    raise UserError(f'--api_key_file {path} must hold one key: ASCII characters without spaces, on one line.')
  return text
