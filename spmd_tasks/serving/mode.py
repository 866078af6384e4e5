"""--mode=serve: serves the weights of a checkpoint over HTTP until a signal stops the server.

With several processes, each has its shards of the weights; process 0 answers HTTP and the others follow it
(multi_process.py).
"""

from collections.abc import Callable
import contextlib
import dataclasses
import functools
import math
from pathlib import Path
import socket
import time
from typing import Any

from etils import epath
import jax

from spmd_tasks.command import Command
from spmd_tasks.decoding import DecodeSteps
from spmd_tasks.decoding.constraints import Grammars
from spmd_tasks.decoding.decode_model import check_reads_tokens
from spmd_tasks.decoding.engine import ModelEngine
from spmd_tasks.decoding.text_scorer import TextScorer, text_reading
from spmd_tasks.distributed import EmergencyExit, barrier, is_primary
from spmd_tasks.distributed.agreement import PrimaryError, primary_decides
from spmd_tasks.distributed.emergency_exit import Position
from spmd_tasks.errors import UserError
from spmd_tasks.experiment import Job, partition_job
from spmd_tasks.inputs import Tokenizer
from spmd_tasks.loading import load_draft
from spmd_tasks.programs.job_directory import CheckpointRecord
from spmd_tasks.programs.restore import LOOK_LIMIT_S
from spmd_tasks.programs.restored_weights import restore_evaluation_variables
from spmd_tasks.runtime import DecodeSettings, PartitionedModel
from spmd_tasks.runtime.origin import Base
from spmd_tasks.serving.links import connect_to_primary
from spmd_tasks.serving.multi_process import follow, lead
from spmd_tasks.serving.requests import ServedModel, check_adapter_names
from spmd_tasks.serving.scoring import ScoringEngine
from spmd_tasks.serving.server import listen, run_server
from spmd_tasks.serving.settings import ClientKey, ServerSettings
from spmd_tasks.serving.tracing import open_tracer
from spmd_tasks.sigterm import leave_on_signals

# OpenAI's API allows requests for this many top log-probabilities; an experiment may compile more.
_MIN_TOP_LOGPROBS = 5
# Less than JAX's heartbeat timeout (30 s by default), after which JAX kills a process without telling its clients.
_SILENCE_LIMIT_S = 20.0
_MAX_SCORED = 4096  # default of max_queued for models that score texts
_END_LIMIT_S = 30  # for all processes to reach the end


def run(command: Command) -> int:
  """Runs --mode serve; returns an exit code."""
  flags = command.flags
  with command.open_job() as opened:
    limits = {name: getattr(flags, name) for name in ('host', 'port', 'max_queued', 'max_connections', 'drain_s')}
    if flags.max_queued is None and text_reading(opened.job):
      limits['max_queued'] = _MAX_SCORED
    return serve(
      opened.job,
      opened.directory,
      server_settings(api_key_file=flags.api_key_file, **limits),
      emergency=opened.emergency,
      step=flags.checkpoint_step,
      bind_address=flags.coordinator_bind_address,
    )


def serve(
  job: Job,
  job_log_dir: epath.Path,
  settings: ServerSettings,
  *,
  emergency: EmergencyExit,
  step: int | None = None,
  bind_address: str | None = None,
) -> int:
  """Serves the job's model until a signal stops the server; returns an exit code.

  Args:
    job: the built experiment.
    job_log_dir: the directory of a training job, which may be running; only compiled programs are written to it.
    settings: the server's address and limits.
    emergency: exits this process if another process has failed.
    step: the step of the checkpoint to serve first; None serves the newest.
    bind_address: HOST:PORT; process 0 listens on HOST for the other processes. None uses the coordinator's address.

  Raises:
    UserError: the job has no tokenizer, an adapter has the model's name, the model cannot be served on this mesh, or
      process 0 cannot listen.
    CheckpointError: the checkpoint does not exist or is damaged.
  """
  task = job.task.as_task('--mode serve')
  tokenizer = job.tokenizer
  check_reads_tokens(job.train_input.element_spec(), task.decode)
  if tokenizer is None:
    raise UserError(
      f'experiment {job.name} cannot be served without a tokenizer: set the tokenizer of its training input.'
    )
  limit_s = math.ceil(job.experiment.first_step_timeout_s)
  if jax.process_count() > 1:
    # JAX's handler would make all processes save a checkpoint. Until the server runs, exiting at once loses nothing.
    leave_on_signals()
  announce: Callable[[str], None] = functools.partial(print, flush=True) if is_primary() else lambda line: None
  tracer = open_tracer() if is_primary() else None
  # Listen before loading the weights, to report a wrong address at once.
  with _listen_on_primary(settings, limit_s) as sock:
    model = partition_job(job)
    if 'encoder_ids' in model.input_layout.spec:
      raise UserError(
        f'experiment {job.name} is an encoder-decoder, which cannot be served: use --mode decode on files of prompts.'
      )
    reading = text_reading(job)
    if reading is not None and jax.process_count() > 1:
      raise UserError(
        f'{jax.process_count()} processes cannot serve a model that scores texts: start a single process.'
      )
    steps = _decode_steps(job, model, tokenizer, announce) if reading is None else None
    storage, part = (None, None) if steps is None else (steps.storage, model.task.decoding_variables)

    def restore(step: int | None) -> tuple[Any, int]:
      with contextlib.closing(CheckpointRecord(job_log_dir).open_checkpoints(read_only=True)) as checkpointer:
        variables, restored, _ = restore_evaluation_variables(
          model, checkpointer, step, part, experiment=job.experiment, storage=storage
        )
      return variables if storage is None else storage.store(variables), restored

    folder = _served_folder(job, job_log_dir, step)
    adapter_names = () if steps is None else steps.adapter_names
    name = job.name if folder is None else Path(folder).name or job.name
    check_adapter_names((name, job.name), adapter_names)
    source = f'{"the newest checkpoint" if step is None else f"step {step}"} of {job_log_dir}'
    announce(f'Restoring {source}.' if folder is None else f'Loading the weights of {folder}.')
    began = time.monotonic()
    weights, restored = restore(step)
    action = f'Restored step {restored}' if folder is None else 'Loaded the weights'
    announce(f'{action} in {time.monotonic() - began:.1f} s. Compiling.')
    if steps is not None:
      layout = steps.layout
      num_slots, num_texts = steps.settings.num_slots, layout.num_blocks // layout.table_len
      size = f'{layout.num_blocks} blocks of {layout.block_tokens} tokens'
      size += f' and {layout.num_snapshots} snapshots of states' if layout.num_snapshots else ''
      shorter = f', or up to {num_slots} shorter ones' if num_texts < num_slots else ''
      alone = '' if layout.can_reuse else ' Prompts that begin alike share none, and are read whole.'
      texts = f'{min(num_texts, num_slots)} texts of {steps.max_len} tokens at once{shorter}'
      announce(f'The KV cache has {size}: {texts}.{alone}')
    served_settings = job.task.decode or DecodeSettings() if steps is None else steps.settings
    vocab_size = job.task.model.embedding.vocab_size if steps is None else steps.vocab_size
    served = ServedModel(
      name=name,
      alias=None if folder is None else job.name,
      adapters=adapter_names,
      created=int(time.time()),
      step=restored,
      tokenizer=tokenizer,
      chat_template=job.experiment.chat_template(),
      settings=served_settings,
      max_len=model.input_layout.spec['ids'].shape[1] if steps is None else steps.max_len,
      vocab_size=vocab_size,
      grammars=Grammars(tokenizer, vocab_size=vocab_size, end_ids=served_settings.end_ids(tokenizer.eos_id)),
      reading=reading,
    )
    engine: ModelEngine | ScoringEngine
    if steps is not None:
      engine = ModelEngine(steps, weights, score_prompts=True, constrain=True)
    else:
      assert reading is not None
      engine = ScoringEngine(TextScorer(model, reading, max_len=served.max_len), weights)
    del weights  # only the engine refers to them, so that it can free them
    run = functools.partial(run_server, model=served, settings=settings, announce=announce, tracer=tracer)
    if jax.process_count() == 1:
      assert sock is not None
      return run(engine, sock=sock, restore=restore)
    emergency.set_position_source(lambda: Position(step=restored, activity='serve'))
    return _serve_together(engine, run, sock, restore, emergency, limit_s, bind_address)


def _decode_steps(
  job: Job, model: PartitionedModel, tokenizer: Tokenizer, announce: Callable[[str], None]
) -> DecodeSteps:
  decode = job.task.as_task('--mode serve').decode
  num_top = max(decode.num_top_logprobs, min(_MIN_TOP_LOGPROBS, tokenizer.vocab_size))
  if decode.draft_model:
    announce(f'Loading the draft model {decode.draft_model}.')
  settings = dataclasses.replace(decode, num_beams=1, num_top_logprobs=num_top)
  return DecodeSteps(model, settings, draft=load_draft(job, model))


def _serve_together(
  engine: Any,
  run: Callable[..., int],
  sock: socket.socket | None,
  restore: Callable[[int | None], tuple[Any, int]],
  emergency: EmergencyExit,
  limit_s: int,
  bind_address: str | None,
) -> int:
  """Serves with several processes; `run` runs the server on process 0, the only one with a socket."""
  links = connect_to_primary(limit_s=limit_s, bind_address=bind_address, silence_limit_s=_SILENCE_LIMIT_S)
  emergency.attach(None)  # from here on, links detect lost processes
  leave = functools.partial(emergency.leave, has_stacks=False, is_cause=False)
  if sock is None:
    code = follow(engine, links[0], restore=restore, leave=leave)
  else:
    with lead(engine, links, restore=restore, leave=leave) as leader:
      code = run(leader, sock=sock, restore=leader.restore, restore_pauses=True, stop=leader.stop, leave=leader.leave)
      leader.end(code)
  barrier('serve_end', limit_s=_END_LIMIT_S)
  return code


def _served_folder(job: Job, job_log_dir: epath.Path, step: int | None) -> str | None:
  """Returns the Hugging Face folder to load weights from; None if a checkpoint is served."""
  origin = job.experiment.origin()
  if step is not None or not isinstance(origin, Base):
    return None
  with contextlib.closing(CheckpointRecord(job_log_dir).open_checkpoints(read_only=True)) as checkpointer:
    is_fresh = primary_decides(checkpointer.is_fresh, 'has_checkpoints', limit_s=LOOK_LIMIT_S)
  return origin.path if is_fresh else None


def server_settings(*, api_key_file: str | None, **flags: Any) -> ServerSettings:
  """Builds ServerSettings from command-line flags; a flag that is None keeps its default.

  Raises a UserError if a flag is out of range, or if the key file cannot be read.
  """
  keys = {} if api_key_file is None else _read_api_keys(api_key_file)
  return ServerSettings(**keys, **{name: value for name, value in flags.items() if value is not None})


def _read_api_keys(path: str) -> dict[str, Any]:
  try:
    text = Path(path).read_text(encoding='utf-8').strip()
  except (OSError, UnicodeDecodeError) as error:
    raise UserError(f'--api_key_file {path} cannot be read: {error}.') from error
  first, *others = text.splitlines() or ['']
  if len(first.split()) != 1 or not text.isascii():
    raise UserError(f'the first line of --api_key_file {path} must be a key: ASCII characters without spaces.')
  clients = tuple(ClientKey.from_line(line) for line in others if line.strip())
  if len({*(client.key for client in clients), first}) <= len(clients):
    raise UserError(f'--api_key_file {path} has the same key twice: use a different key on each line.')
  if len({client.name for client in clients}) < len(clients):
    raise UserError(f'--api_key_file {path} has the same name twice: use a different name on each line.')
  return {'api_key': first.strip(), 'client_keys': clients}


def _listen_on_primary(settings: ServerSettings, limit_s: int) -> contextlib.AbstractContextManager[Any]:
  """Opens the server's socket on process 0, None elsewhere; raises a UserError on all processes if that fails."""
  opened: list[socket.socket] = []
  try:
    primary_decides(lambda: opened.append(listen(settings)), 'serve_listen', limit_s=limit_s)
  except PrimaryError as error:
    raise UserError(str(error)) from error
  return opened[0] if opened else contextlib.nullcontext()
