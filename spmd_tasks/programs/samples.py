"""Sample: the hook of training jobs that generate texts at intervals, for people to read.

    sampler = make_sampler(job, model, job_log_dir)
    sampler.resume(first_step)                             # forgets the samples of steps that are made again
    sampler.sample(variables, step)

They are written to `<job_log_dir>/samples/samples.txt`, and to event files beside it:

    --- step 200, 2026-11-22 22:10:05
    > def area(
    | self, width, height):
    |   return width * height
    --- end of step 200

Lines of prompts begin with `> `, lines of generated text with `| `; nothing generated can be taken for a mark. Each
step is appended by one write. A resumed job cuts off what later steps have written, because it makes these steps again;
so each step stands there once. Event files keep both, as those of metrics do.
"""

from collections.abc import Callable, Sequence
import dataclasses
import re
import time

from etils import epath

from spmd_tasks.decoding import DecodeSteps, Request
from spmd_tasks.decoding.generation import complete_all
from spmd_tasks.decoding.prompts import Prompt, PromptTokenizer
from spmd_tasks.distributed import is_primary
from spmd_tasks.distributed.agreement import primary_decides
from spmd_tasks.errors import UserError
from spmd_tasks.experiment import Experiment, Job
from spmd_tasks.files import append, make_directory, storage_errors
from spmd_tasks.inputs import Tokenizer
from spmd_tasks.programs.hooks import PreemptedError, TrainHook, TrainRun
from spmd_tasks.programs.interval_hooks import is_multiple
from spmd_tasks.programs.restore import LOOK_LIMIT_S
from spmd_tasks.programs.training_loop import Outcome
from spmd_tasks.runtime import PartitionedModel
from spmd_tasks.runtime.metrics import TensorBoardWriter, can_write_events
from spmd_tasks.runtime.optional_methods import DecodesBatches
from spmd_tasks.runtime.task import Variables
from spmd_tasks.store_files import read_growing, replace_growing

SAMPLES_DIRECTORY = 'samples'
SAMPLES_FILE = 'samples.txt'
_BLOCK = re.compile(rb'--- step (\d+), [^\n]*\n(?:[>|][^\n]*\n)*--- end of step \1\n')


class _StoppedError(Exception):
  """The job is to end before the samples are finished."""


def make_sampler(job: Job, model: PartitionedModel, job_log_dir: epath.Path) -> 'Sampler':
  """Makes the sampler of a job that has `sample_every_steps`. Nothing is compiled or written.

  Raises:
    UserError: the model cannot generate text, the job has no tokenizer, or a prompt does not fit the model.
  """
  experiment = job.experiment
  if isinstance(job.task, DecodesBatches) or job.tokenizer is None:
    lacks = 'a tokenizer in its inputs' if job.tokenizer is None else 'a model that continues prompts'
    raise UserError(f'sample_every_steps = {experiment.sample_every_steps} needs {lacks}: set it to None.')
  num_prompts, decode = len(experiment.sample_prompts), job.task.decode
  settings = dataclasses.replace(
    decode,
    num_slots=min(decode.num_slots, num_prompts),
    prefill_rows=decode.prefill_rows and min(decode.prefill_rows, num_prompts),
    num_top_logprobs=0,
  )
  steps = DecodeSteps(model, settings)
  tokenizer = PromptTokenizer.for_steps(steps, job.tokenizer, experiment.seed)
  requests = []
  for number, text in enumerate(experiment.sample_prompts, 1):
    request, _ = tokenizer.request(_prompt(experiment, job.tokenizer, text), f'sample_prompts, text {number}')
    requests.append(dataclasses.replace(request, max_tokens=min(request.max_tokens, experiment.sample_max_tokens)))
  return Sampler(
    steps,
    tokenizer,
    experiment.sample_prompts,
    requests,
    job_log_dir / SAMPLES_DIRECTORY,
    tensorboard=experiment.tensorboard,
  )


def _prompt(experiment: Experiment, tokenizer: Tokenizer, text: str) -> Prompt:
  """The prompt of a text, or of a conversation that begins with it."""
  if not experiment.sample_as_chat:
    return Prompt(prompt=text)
  template = experiment.chat_template()
  rendered = template.render([{'role': 'user', 'content': text}])
  if template.writes_bos:
    return Prompt(prompt_ids=tuple(tokenizer.encode(rendered)), stop=template.stop)
  return Prompt(prompt=rendered, stop=template.stop)


class Sampler:
  """Generates texts with the weights of a step, and writes them; `make_sampler` makes it.

  Attributes:
    path: of the text file.
  """

  def __init__(
    self,
    steps: DecodeSteps,
    tokenizer: PromptTokenizer,
    prompts: Sequence[str],
    requests: Sequence[Request],
    directory: epath.Path,
    *,
    tensorboard: bool,
  ):
    self._steps = steps
    self._tokenizer = tokenizer
    self._prompts = prompts
    self._requests = requests
    self.path = directory / SAMPLES_FILE
    has_events = tensorboard and is_primary() and can_write_events()
    self._events = TensorBoardWriter(directory) if has_events else None
    self._newest: int | None = None

  def compile(self) -> None:
    """Compiles what generates texts now instead of at the first interval."""
    self._steps.compile()

  def resume(self, first_step: int) -> None:
    """Cuts off the samples of steps after `first_step`, and what a kill left of a step. A collective call."""

    def cut() -> int | None:
      with storage_errors(self.path):
        try:
          content = read_growing(self.path)
        except FileNotFoundError:
          return None
        end, newest = 0, None
        while (block := _BLOCK.match(content, end)) and int(block[1]) <= first_step:
          end, newest = block.end(), int(block[1])
        if end < len(content):
          replace_growing(self.path, content[:end])
        return newest

    self._newest = primary_decides(cut, 'samples', limit_s=LOOK_LIMIT_S)

  def is_recorded(self, step: int) -> bool:
    """Whether the file has the samples of `step`, the newest one."""
    return self._newest == step

  def sample(self, variables: Variables, step: int, should_stop: Callable[[], bool] = lambda: False) -> bool:
    """Generates the texts and writes them; returns False, with nothing written, if `should_stop` came first.

    Args:
      variables: of the model, padded, on the mesh; they are left as they are.
      step: their train step.
      should_stop: asked after each step of the generation.
    """

    def on_step() -> None:
      if should_stop():
        raise _StoppedError

    try:
      stored = self._steps.storage.store(variables, free=False)
      decode = self._tokenizer.decode
      texts = [each.text for each in complete_all(self._steps, stored, self._requests, decode=decode, on_step=on_step)]
    except _StoppedError:
      return False
    if is_primary():
      self._write(step, texts)
    self._newest = step
    return True

  def close(self) -> None:
    """Closes the event files."""
    if self._events is not None:
      self._events.close()

  def _write(self, step: int, texts: Sequence[str]) -> None:
    lines = [f'--- step {step}, {time.strftime("%Y-%m-%d %H:%M:%S")}']
    for prompt, text in zip(self._prompts, texts, strict=True):
      lines += [f'> {line}' for line in prompt.split('\n')] + [f'| {line}' for line in text.split('\n')]
    lines.append(f'--- end of step {step}')
    with storage_errors(self.path):
      make_directory(self.path.parent)
      append(self.path, '\n'.join([*lines, '']).encode(errors='replace'))
    if self._events is not None:
      pairs = enumerate(zip(self._prompts, texts, strict=True), 1)
      self._events.write_texts(step, {f'sample_{i:02d}': _markdown(prompt, text) for i, (prompt, text) in pairs})


def _markdown(prompt: str, text: str) -> str:
  """Both texts as blocks of code: by indents, which no text can end."""
  blocks = ['\n'.join(f'    {line}' for line in part.split('\n')) for part in (prompt, text)]
  return f'prompt\n\n{blocks[0]}\n\nsample\n\n{blocks[1]}\n'


class Sample(TrainHook):
  """Writes texts that the model generates from the sample prompts, every `sample_every_steps`."""

  def prepare(self, run: TrainRun) -> None:
    self._every_steps = run.experiment.sample_every_steps
    self._sampler = make_sampler(run.job, run.model, run.job_log_dir)

  def start(self, run: TrainRun) -> None:
    run.stack.callback(self._sampler.close)
    self._sampler.resume(run.first_step)

  def before_loop(self, run: TrainRun) -> None:
    self._make_up_for_samples(run)

  def needs_state(self, step: int) -> bool:
    return is_multiple(step, self._every_steps)

  def after_first_step(self, run: TrainRun) -> None:
    with run.compiling():
      self._sampler.compile()

  def after_step(self, run: TrainRun, outcome: Outcome) -> None:
    self._sample_if_due(run)

  def finish(self, run: TrainRun) -> None:
    self._make_up_for_samples(run)

  def _make_up_for_samples(self, run: TrainRun) -> None:
    if not self._sample_if_due(run):
      raise PreemptedError

  def _sample_if_due(self, run: TrainRun) -> bool:
    """Writes the texts of the step unless they are written; returns False if SIGTERM came first."""
    step, sampler = run.step, self._sampler
    if not is_multiple(step, self._every_steps) or sampler.is_recorded(step):
      return True
    with run.timed('sample', 'evaluation'):
      is_done = sampler.sample(run.model.task.decoding_variables(run.state), step, run.should_stop)
    if is_done:
      run.message(f'step {step}  samples: in {sampler.path}')
    return is_done
