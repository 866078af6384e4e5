"""--mode=serve: a checkpoint's weights behind an HTTP interface, until a signal ends it."""

from collections.abc import Callable
import dataclasses
from pathlib import Path
import time
from typing import Any

import jax

from spmd_tasks.decoding.engine import ModelEngine
from spmd_tasks.experiment import Job
from spmd_tasks.inputs.tokenizers import Tokenizer
from spmd_tasks.runtime.decode_steps import DecodeSteps
from spmd_tasks.runtime.partition import PartitionedModel
from spmd_tasks.serving.generation_request import ServedModel
from spmd_tasks.serving.server import listen, serve
from spmd_tasks.serving.settings import ServerSettings

# Clients of OpenAI's API may ask for so many likeliest tokens; an experiment may have more compiled in.
_MIN_TOP_LOGPROBS = 5


def serve_job(
  job: Job,
  tokenizer: Tokenizer | None,
  settings: ServerSettings,
  *,
  checkpoint_step: int | None,
  partition: Callable[[], PartitionedModel],
  restore: Callable[[PartitionedModel, int | None], tuple[Any, int]],
) -> int:
  """Serves the job's model; returns an exit code.

  Args:
    job: the built experiment.
    tokenizer: of its inputs.
    settings: of the server.
    checkpoint_step: what is served first; None is the newest checkpoint.
    partition: makes the model.
    restore: gives padded weights of a checkpoint, and its step.

  Raises:
    ValueError: this job cannot be served, or there is nowhere to listen.
    CheckpointError: there is no checkpoint, or it is damaged.
  """
  if jax.process_count() > 1:
    raise ValueError(
      f'--mode serve runs in one process, and this job has {jax.process_count()}: start it on one host, without a '
      'launcher or with --cluster none.'
    )
  if tokenizer is None:
    raise ValueError(f'experiment {job.name} has no tokenizer in its inputs, so that it cannot be served as text.')
  sock = listen(settings)  # first: what is wrong with it shall not show only after the weights are loaded
  with sock:
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
    announce = lambda line: print(line, flush=True)
    engine = ModelEngine(steps, weights, score_prompts=True)
    del weights  # which the engine may give up
    restore_other = lambda step: restore(model, step)
    return serve(engine, served, settings, sock, restore=restore_other, announce=announce)


def read_api_key(path: str) -> str:
  """The key in a file: its only line.

  Raises:
    ValueError: there is no such file, or no key in it.
  """
  try:
    text = Path(path).read_text(encoding='utf-8').strip()
  except (OSError, UnicodeDecodeError) as error:
    raise ValueError(f'--api_key_file {path} cannot be read: {error}.') from error
  if len(text.split()) != 1 or not text.isascii():
    raise ValueError(f'--api_key_file {path} must hold one key: ASCII characters without spaces, on one line.')
  return text
