"""Sample: the hook of training jobs that generate texts at intervals, for people to read.

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

from collections.abc import Sequence
import contextlib
import dataclasses
import functools
import re
import time

from etils import epath

from spmd_tasks.decoding import DecodeSteps, Prompt, Request
from spmd_tasks.decoding.generation import complete_all
from spmd_tasks.decoding.prompts import PromptTokenizer, chat_prompt
from spmd_tasks.distributed import is_primary
from spmd_tasks.distributed.agreement import primary_decides
from spmd_tasks.errors import UserError
from spmd_tasks.experiment import Experiment
from spmd_tasks.files import append, make_directory, storage_errors
from spmd_tasks.inputs import Tokenizer
from spmd_tasks.programs.hooks import PreemptedError, TrainHook, TrainRun
from spmd_tasks.programs.interval_hooks import is_multiple
from spmd_tasks.programs.restore import LOOK_LIMIT_S
from spmd_tasks.programs.training_loop import Outcome
from spmd_tasks.runtime.metrics import TensorBoardWriter, can_write_events
from spmd_tasks.store_files import read_appended, replace_appended

SAMPLES_DIRECTORY = 'samples'
SAMPLES_FILE = 'samples.txt'
_BLOCK = re.compile(rb'--- step (\d+), [^\n]*\n(?:[>|][^\n]*\n)*--- end of step \1\n')


def _prompt(experiment: Experiment, tokenizer: Tokenizer, text: str) -> Prompt:
  """The prompt of a text, or of a conversation that begins with it."""
  if not experiment.sample_as_chat:
    return Prompt(prompt=text)
  return chat_prompt([{'role': 'user', 'content': text}], experiment.chat_template(), tokenizer)


def _markdown(prompt: str, text: str) -> str:
  """Both texts as blocks of code: by indents, which no text can end."""
  blocks = ['\n'.join(f'    {line}' for line in part.split('\n')) for part in (prompt, text)]
  return f'prompt\n\n{blocks[0]}\n\nsample\n\n{blocks[1]}\n'


class Sample(TrainHook):
  """Writes texts that the model generates from the sample prompts, every `sample_every_steps`."""

  def prepare(self, run: TrainRun) -> None:
    """Raises a UserError if the model cannot generate text, there is no tokenizer, or a prompt does not fit."""
    job, experiment = run.job, run.experiment
    self._every_steps, self._prompts = experiment.sample_every_steps, experiment.sample_prompts
    if hasattr(job.task, 'make_decoder') or job.tokenizer is None:
      lacks = 'a tokenizer in its inputs' if job.tokenizer is None else 'a model that continues prompts'
      raise UserError(f'sample_every_steps = {self._every_steps} needs {lacks}: set it to None.')
    num_prompts, decode = len(self._prompts), job.task.decode
    settings = dataclasses.replace(
      decode,
      num_slots=min(decode.num_slots, num_prompts),
      prefill_rows=decode.prefill_rows and min(decode.prefill_rows, num_prompts),
      num_top_logprobs=0,
    )
    self._steps = DecodeSteps(run.model, settings)
    self._tokenizer = PromptTokenizer(steps=self._steps, tokenizer=job.tokenizer, seed=experiment.seed)
    self._requests: list[Request] = []
    for number, text in enumerate(self._prompts, 1):
      where = f'sample_prompts, text {number}'
      request, _ = self._tokenizer.request(_prompt(experiment, job.tokenizer, text), where, number - 1)
      max_tokens = min(request.max_tokens, experiment.sample_max_tokens)
      self._requests.append(dataclasses.replace(request, max_tokens=max_tokens))

  def start(self, run: TrainRun) -> None:
    directory = run.job_log_dir / SAMPLES_DIRECTORY
    self._path, self._events = directory / SAMPLES_FILE, None
    if 'tensorboard' in run.experiment.trackers and is_primary() and can_write_events():
      self._events = TensorBoardWriter(directory)
      run.stack.callback(self._events.close)
    cut = functools.partial(_cut_off, self._path, run.first_step)
    self._newest = primary_decides(cut, 'samples', limit_s=LOOK_LIMIT_S)  # the step of the last samples

  def before_loop(self, run: TrainRun) -> None:
    self._sample_if_due(run)

  def needs_state(self, step: int) -> bool:
    return is_multiple(step, self._every_steps)

  def after_first_step(self, run: TrainRun) -> None:
    with run.compiling():
      self._steps.compile()

  def after_step(self, run: TrainRun, outcome: Outcome) -> None:
    with contextlib.suppress(PreemptedError):
      self._sample_if_due(run)

  def finish(self, run: TrainRun) -> None:
    self._sample_if_due(run)

  def _sample_if_due(self, run: TrainRun) -> None:
    """Writes the texts of the step unless they are written. Raises PreemptedError if SIGTERM came first."""
    if not is_multiple(run.step, self._every_steps) or self._newest == run.step:
      return

    def on_step() -> None:
      if run.should_stop():
        raise PreemptedError

    with run.timed('sample', 'evaluation'):
      variables = run.model.task.decoding_variables(run.state)
      stored = self._steps.storage.store(variables, free=False)
      decode = self._tokenizer.decode
      texts = [each.text for each in complete_all(self._steps, stored, self._requests, decode=decode, on_step=on_step)]
      if is_primary():
        self._write(run.step, texts)
      self._newest = run.step
    run.message(f'step {run.step}  samples: in {self._path}')

  def _write(self, step: int, texts: Sequence[str]) -> None:
    lines = [f'--- step {step}, {time.strftime("%Y-%m-%d %H:%M:%S")}']
    for prompt, text in zip(self._prompts, texts, strict=True):
      lines += [f'> {line}' for line in prompt.split('\n')] + [f'| {line}' for line in text.split('\n')]
    lines.append(f'--- end of step {step}')
    with storage_errors(self._path):
      make_directory(self._path.parent)
      append(self._path, '\n'.join([*lines, '']).encode(errors='replace'))
    if self._events is not None:
      pairs = enumerate(zip(self._prompts, texts, strict=True), 1)
      self._events.write_texts(step, {f'sample_{i:02d}': _markdown(prompt, text) for i, (prompt, text) in pairs})


def _cut_off(path: epath.Path, last_step: int) -> int | None:
  """Cuts off the samples of steps after `last_step`, and what a kill left of a step; returns the last one's step."""
  with storage_errors(path):
    try:
      content = read_appended(path)
    except FileNotFoundError:
      return None
    end, newest = 0, None
    while (block := _BLOCK.match(content, end)) and int(block[1]) <= last_step:
      end, newest = block.end(), int(block[1])
    if end < len(content):
      replace_appended(path, content[:end])
    return newest
