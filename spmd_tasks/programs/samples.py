"""Writes texts that a model in training generates, for people to read; the hook Sample (hooks.py) calls it.

They go to `<job_log_dir>/samples/samples.txt`, and to event files beside it:

    --- step 200, 2026-11-22 22:10:05
    > def area(
    | self, width, height):
    |   return width * height
    --- end of step 200

Lines of prompts begin with `> `, lines of generated text with `| `; nothing generated can be taken for a mark. Each
step is appended by one write. A resumed job cuts off what later steps have written, because it repeats them; so each
step is there once. Event files keep both, as they do for metrics.
"""

from collections.abc import Callable, Sequence
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
from spmd_tasks.experiment import Experiment, Job
from spmd_tasks.files import append, make_directory, storage_errors
from spmd_tasks.inputs import Tokenizer
from spmd_tasks.programs.restore import LOOK_LIMIT_S
from spmd_tasks.runtime import PartitionedModel
from spmd_tasks.runtime.metrics import TensorBoardWriter, can_write_events
from spmd_tasks.runtime.task import Variables
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


class SampleWriter:
  """Generates texts from an experiment's sample prompts, and writes them to `<job_log_dir>/samples`."""

  def __init__(self, job: Job, model: PartitionedModel, job_log_dir: epath.Path):
    """Raises a UserError if the model cannot generate text, there is no tokenizer, or a prompt does not fit."""
    experiment = job.experiment
    self._prompts, self._writes_events = experiment.sample_prompts, 'tensorboard' in experiment.trackers
    self.path = job_log_dir / SAMPLES_DIRECTORY / SAMPLES_FILE
    self._events: TensorBoardWriter | None = None
    if job.task.decode is None or job.tokenizer is None:
      lacks = 'a tokenizer in its inputs' if job.tokenizer is None else 'a model that continues prompts'
      raise UserError(f'sample_every_steps = {experiment.sample_every_steps} needs {lacks}: set it to None.')
    num_prompts, decode = len(self._prompts), job.task.decode
    settings = dataclasses.replace(
      decode,
      num_slots=min(decode.num_slots, num_prompts),
      prefill_rows=decode.prefill_rows and min(decode.prefill_rows, num_prompts),
      num_top_logprobs=0,
    )
    self._steps = DecodeSteps(model, settings)
    self._tokenizer = PromptTokenizer(steps=self._steps, tokenizer=job.tokenizer, seed=experiment.seed)
    self._requests: list[Request] = []
    for number, text in enumerate(self._prompts, 1):
      where = f'sample_prompts, text {number}'
      request, _ = self._tokenizer.request(_prompt(experiment, job.tokenizer, text), where, number - 1)
      max_tokens = min(request.max_tokens, experiment.sample_max_tokens)
      self._requests.append(dataclasses.replace(request, max_tokens=max_tokens))

  def open(self, step: int) -> None:
    """Cuts off what steps after `step` have written, which the job repeats. A collective call."""
    if self._writes_events and is_primary() and can_write_events():
      self._events = TensorBoardWriter(self.path.parent)
    cut = functools.partial(_cut_off, self.path, step)
    self.newest_step: int | None = primary_decides(cut, 'samples', limit_s=LOOK_LIMIT_S)  # the step of the last samples

  def close(self) -> None:
    """Closes the event file."""
    if self._events is not None:
      self._events.close()

  def compile(self) -> None:
    """Compiles the steps that generate texts."""
    self._steps.compile(num_texts=len(self._requests), longest=max(len(request.ids) for request in self._requests))

  def sample(self, variables: Variables, step: int, on_step: Callable[[], None]) -> None:
    """Generates the texts of a train step and writes them; calls `on_step` after each step of the generation."""
    stored = self._steps.storage.store(variables, free=False)
    decode = self._tokenizer.decode
    completions = complete_all(self._steps, stored, self._requests, decode=decode, on_step=on_step)
    if is_primary():
      self._write(step, [completion.text for completion in completions])
    self.newest_step = step

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
