"""--mode=decode_once and --mode=decode: what a checkpoint's weights make of prompts, once or for each new checkpoint.

Outputs go to `<job_log_dir>/decode/<name>/step_<N>.jsonl`, one line per prompt, metrics beside them. A job that is
started again goes on behind the last whole line, and gives the same outputs: they follow from weights, prompt and seed.
"""

from collections.abc import Iterable, Iterator
import contextlib
import time
from typing import Any

from etils import epath

from spmd_tasks import exit_codes
from spmd_tasks.checkpoints.checkpointer import Checkpointer
from spmd_tasks.checkpoints.durable_files import absolute_path
from spmd_tasks.decoding import (
  Completion,
  DecodeSteps,
  PromptFile,
  PromptSource,
  PromptTokenizer,
  Request,
  generate,
  search,
)
from spmd_tasks.distributed.agreement import is_primary, primary_decides
from spmd_tasks.distributed.emergency_exit import EmergencyExit
from spmd_tasks.distributed.preemption import PreemptionGuard
from spmd_tasks.distributed.watchdog import watch_steps
from spmd_tasks.errors import UserError
from spmd_tasks.experiment import Job, partition_job
from spmd_tasks.programs.decode_requests import find_tokenizer, output_record, request_record
from spmd_tasks.programs.decoded_file import DecodedFile
from spmd_tasks.programs.progress import Progress, make_progress
from spmd_tasks.programs.restore import LOOK_LIMIT_S, PreemptedError, checkpoint_directory, checkpoints_to_use
from spmd_tasks.runtime import make_writer


def decode(
  job: Job,
  job_log_dir: epath.Path,
  *,
  emergency: EmergencyExit,
  input_path: str | None = None,
  output_path: str | None = None,
  step: int | None = None,
  watch: bool = False,
  poll_s: float = 10.0,
) -> int:
  """Decodes every decode input with one checkpoint (None: the newest); returns OK, or PREEMPTED after SIGTERM.

  Args:
    job: the built experiment.
    job_log_dir: a training job's directory, running or not; only `decode/` below it is written.
    emergency: the way out of a failure that other processes must hear of.
    input_path: prompts instead of the experiment's decode inputs; their name is the file's.
    output_path: where their outputs go instead of `decode/`.
    step: the checkpoint's step.
    watch: go on with every new checkpoint until that of `num_train_steps`.
    poll_s: seconds between two looks for a new checkpoint.

  Raises:
    CheckpointError: there is no such checkpoint, or it is damaged.
    UserError: there are no prompts, they do not fit the model, or outputs of others are in the way.
  """
  sources: dict[str, PromptSource] = dict(job.decode_inputs)
  if input_path is not None:
    sources = {epath.Path(input_path).stem: PromptFile(path=input_path)}
  if not sources:
    raise UserError(f'experiment {job.name} has no decode inputs: give --decode_input FILE, or decode_inputs().')
  model = partition_job(job)
  steps = DecodeSteps(model)
  with contextlib.ExitStack() as stack, emergency.on_failure():
    watchdog = stack.enter_context(
      watch_steps(
        job_log_dir / 'decode',
        emergency,
        timeout_s=job.experiment.step_timeout_s,
        first_step_timeout_s=job.experiment.first_step_timeout_s,
      )
    )
    guard = stack.enter_context(PreemptionGuard())

    restored = -1

    def on_step():
      watchdog.beat(restored, 'decode')
      if guard.should_stop():
        raise PreemptedError

    decoder = Decoder(job, steps, sources, on_step)
    checkpointer = Checkpointer(checkpoint_directory(job_log_dir), read_only=True)
    stack.callback(checkpointer.close)
    try:
      for weights, restored in checkpoints_to_use(
        model,
        checkpointer,
        step=step,
        watch=watch,
        last_step=job.experiment.num_train_steps,
        poll_s=poll_s,
        watchdog=watchdog,
        restore_limit_s=job.experiment.first_step_timeout_s,
        should_stop=guard.should_stop,
      ):
        with watchdog.allow('compile', job.experiment.first_step_timeout_s):
          decoder.compile()
        for name in sources:
          directory = job_log_dir / 'decode' / name
          path = directory / f'step_{restored}.jsonl' if output_path is None else absolute_path(output_path)
          decoder.run(name, weights, restored, path, directory)
      return exit_codes.OK
    except PreemptedError:
      if is_primary():
        print('Preempted: the same command goes on behind the last prompt that is done.', flush=True)
      return exit_codes.PREEMPTED


class Decoder:
  """Decodes sets of prompts, which are read and checked first."""

  def __init__(self, job: Job, steps: DecodeSteps, sources: dict[str, PromptSource], on_step: Any):
    self._steps = steps
    self._on_step = on_step
    self._tensorboard = job.experiment.tensorboard
    self._tokenizer = PromptTokenizer(
      tokenizer=find_tokenizer(job),
      settings=steps.settings,
      max_len=steps.max_len,
      vocab_size=steps.vocab_size,
      seed=job.experiment.seed,
    )
    self._prompts = {name: source.read() for name, source in sources.items()}
    self._requests = {
      name: [self._tokenizer.request(prompt, f'{name}, prompt {number}') for number, prompt in enumerate(prompts, 1)]
      for name, prompts in self._prompts.items()
    }

  def compile(self) -> None:
    """Compiles, the first time, what these prompts need."""
    requests = [request for pairs in self._requests.values() for request, _ in pairs]
    self._steps.compile(score_prompts=any(request.score_prompt for request in requests))

  def run(self, name: str, weights: Any, step: int, path: epath.Path, directory: epath.Path) -> None:
    """Decodes the prompts that have no line in `path` yet; metrics of `step` go to `directory`."""
    prompts, pairs = self._prompts[name], self._requests[name]
    records = [
      request_record(prompt, request, num_outputs, self._steps.settings)
      for prompt, (request, num_outputs) in zip(prompts, pairs, strict=True)
    ]
    file = DecodedFile(path, records)
    first = primary_decides(file.num_done, 'num_decoded', limit_s=LOOK_LIMIT_S)
    progress = make_progress(len(prompts), first, primary=is_primary())
    began, num_tokens, num_outputs = time.perf_counter(), 0, 0
    try:
      for number, completions in _in_order(self._complete(weights, pairs[first:])):
        index = first + number
        num_outputs += len(completions)
        num_tokens += sum(len(completion.ids) for completion in completions)
        if is_primary():
          file.append(self._record(index, step, prompts[index].id, records[index], completions))
        progress.step(index + 1)
      if is_primary() and not path.exists():
        file.finish()
      self._report(name, step, directory, progress, (first, len(prompts)), num_outputs, num_tokens, began)
    finally:
      file.close()
      progress.close()

  def _report(self, name, step, directory, progress: Progress, prompts, num_outputs, num_tokens, began) -> None:
    first, total = prompts
    if first == total:
      progress.message(f'step {step}  decode {name}: all {total} prompts are done already')
      return
    seconds = time.perf_counter() - began
    metrics = {
      'num_prompts': float(total - first),
      'num_tokens': float(num_tokens),
      'mean_length': num_tokens / num_outputs,
      'tokens_per_second': num_tokens / seconds,
      'seconds': seconds,
    }
    writer = make_writer(directory, tensorboard=self._tensorboard, primary=is_primary())
    writer.write(step, metrics)
    writer.close()
    again = f' ({first} were done already)' if first else ''
    progress.message(
      f'step {step}  decode {name}: {total - first} prompts, {num_tokens} tokens, '
      f'{metrics["tokens_per_second"]:.0f} tokens/s{again}'
    )

  def _record(self, index, step, prompt_id, request, completions: list[Completion]) -> dict[str, Any]:
    has_text = self._tokenizer.tokenizer is not None
    record = {'index': index, 'step': step, 'request': request}
    if prompt_id is not None:
      record['id'] = prompt_id
    if completions[0].prompt_logprobs is not None:
      record['prompt_logprobs'] = completions[0].prompt_logprobs
    decode = self._tokenizer.decode if has_text else None
    return record | {'outputs': [output_record(completion, decode) for completion in completions]}

  def _complete(self, weights: Any, pairs: list[tuple[Request, int]]) -> Iterator[tuple[int, list[Completion]]]:
    """(number of the prompt, its outputs), as they finish."""
    decode = self._tokenizer.decode
    if self._steps.settings.num_beams > 1:
      requests = [request for request, _ in pairs]
      for number, beams in search(self._steps, weights, requests, decode=decode, on_step=self._on_step):
        yield number, beams[: pairs[number][1]]
      return
    owners = [(number, sample) for number, (_, count) in enumerate(pairs) for sample in range(count)]
    samples = (pairs[number][0].as_sample(sample) for number, sample in owners)
    unfinished: dict[int, dict[int, Completion]] = {}
    for index, completion in generate(self._steps, weights, samples, decode=decode, on_step=self._on_step):
      number, sample = owners[index]
      done = unfinished.setdefault(number, {})
      done[sample] = completion
      if len(done) == pairs[number][1]:
        yield number, [done[i] for i in range(len(done))]
        del unfinished[number]


def _in_order(numbered: Iterable[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
  """The same pairs by their numbers, 0, 1, 2, ...; what is too early waits."""
  waiting: dict[int, Any] = {}
  following = 0
  for number, item in numbered:
    waiting[number] = item
    while following in waiting:
      yield following, waiting.pop(following)
      following += 1
