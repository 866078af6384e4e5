"""--mode=decode_once and --mode=decode: continues prompts with a checkpoint's weights, once or for each new checkpoint.

Outputs go to `<job_log_dir>/decode/<name>/step_<N>.jsonl`, one line per prompt; metrics go to the same directory. A job
that is started again continues after the last whole line. It gives the same outputs, because an output depends only on
the weights, the prompt and the seed. A job without a checkpoint decodes with the weights that it would start from, such
as `init_from`; each line then says where they are from.
"""

import bisect
import collections
from collections.abc import Callable, Iterable, Iterator, Mapping
import contextlib
import itertools
import json
import time
from typing import Any, NamedTuple
import zlib

from etils import epath

from spmd_tasks import exit_codes
from spmd_tasks.activity import set_activity
from spmd_tasks.decoding import DecodeSteps, Prompt, Request, generate
from spmd_tasks.decoding.constraints import Matcher
from spmd_tasks.decoding.decode_model import check_reads_tokens
from spmd_tasks.decoding.draft_model import DraftModel
from spmd_tasks.decoding.generation import Completion, search
from spmd_tasks.decoding.prompts import PromptSource, PromptTokenizer
from spmd_tasks.distributed import EmergencyExit, is_primary
from spmd_tasks.distributed.agreement import primary_decides
from spmd_tasks.distributed.comparison import refuse_differences
from spmd_tasks.distributed.preemption import PreemptedError
from spmd_tasks.errors import UserError
from spmd_tasks.experiment import Job, partition_job
from spmd_tasks.extensions import call, kind_of
from spmd_tasks.files import StorageError, absolute_path
from spmd_tasks.programs.decoded_file import DecodedFile, outputs_record, request_record
from spmd_tasks.programs.progress import Progress
from spmd_tasks.programs.restore import LOOK_LIMIT_S
from spmd_tasks.programs.restored_weights import open_reader
from spmd_tasks.runtime import PartitionedModel
from spmd_tasks.runtime.metrics import PLACE_KEY, make_writer


def run(command: Any) -> int:
  """Runs the modes decode and decode_once of a Command (command.py)."""
  flags = command.flags
  with command.open_job() as opened:
    kind = kind_of(type(opened.job.experiment))
    if kind is not None and kind.decode is not None:
      return call(kind.decode, command, opened)
    return decode(
      opened.job,
      opened.directory,
      emergency=opened.emergency,
      input_path=flags.decode_input,
      output_path=flags.decode_output,
      step=flags.checkpoint_step,
      watch=command.mode == 'decode',
      load_draft=opened.load_draft,
    )


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
  load_draft: Callable[[PartitionedModel], DraftModel | None] = lambda model: None,
) -> int:
  """Decodes every decode input with one checkpoint (None: the newest); returns OK, or PreemptionGuard's exit code.

  Args:
    job: the built experiment.
    job_log_dir: the directory of a training job, which may still be running, or a new one; only `decode/` below it is
      written.
    emergency: ends this process after a failure that the other processes must learn of.
    input_path: a file of prompts (PromptFile), instead of the experiment's decode inputs; its name names the outputs.
    output_path: a file for the outputs, instead of one below `decode/`.
    step, watch, poll_s: see `CheckpointReader.checkpoints`.
    load_draft: loads the model that `task.decode.draft_model` names.

  Raises:
    CheckpointError: there is no such checkpoint, or it is damaged.
    UserError: there are no prompts, they do not fit the model, or a file holds the outputs of other prompts.
  """
  settings = job.task.decode
  if settings is None:
    raise UserError(f'task.decode is None, so the {type(job.task).__name__} continues no prompts: set task.decode.')
  check_reads_tokens(job.train_input.element_spec(), settings)
  sources = _sources(job, input_path)
  model = partition_job(job)
  with open_reader(job, model, job_log_dir, 'decode', emergency) as reader:
    restored = -1
    steps = DecodeSteps(model, draft=load_draft(model))
    on_step = lambda: reader.beat(restored, 'decode')
    decoder = Decoder(job, steps, sources, job_log_dir, output_path, on_step)
    try:
      for weights, restored, place in reader.checkpoints(
        decoder.compile,
        step=step,
        part=model.task.decoding_variables,
        storage=steps.storage,
        watch=watch,
        poll_s=poll_s,
      ):
        for name in sources:
          decoder.run(name, weights, restored, place)
      return exit_codes.OK
    except PreemptedError:
      if is_primary():
        print(f'{reader.guard.cause}: the same command continues after what is finished.', flush=True)
      return reader.guard.exit_code


def _sources(job: Job, input_path: str | None) -> dict[str, PromptSource]:
  """Returns the named sources of prompts. Raises a UserError if there are none."""
  if input_path is not None:
    return {epath.Path(input_path).stem: job.experiment.prompts_of_file(input_path, job.tokenizer)}
  if not job.decode_inputs:
    raise UserError(
      f'experiment {job.name} has no decode inputs: give --decode_input FILE, or return some from its decode_inputs().'
    )
  return dict(job.decode_inputs)


class _PromptRequest(NamedTuple):
  """One prompt to decode."""

  prompt: Prompt
  first_sample: Request
  num_outputs: int  # the number of samples or beams
  matcher: Matcher | None  # constrains the form of its outputs; None: free text


class Decoder:
  """Decodes sets of prompts; the constructor reads and checks all of them."""

  def __init__(
    self,
    job: Job,
    steps: DecodeSteps,
    sources: dict[str, PromptSource],
    job_log_dir: epath.Path,
    output_path: str | None,
    on_step: Callable[[], None],
  ):
    self._steps = steps
    self._directory = job_log_dir / 'decode'
    self._output_path = output_path
    self._on_step = on_step
    self._trackers = job.experiment.trackers
    self._tokenizer = PromptTokenizer(steps=steps, tokenizer=job.tokenizer, seed=job.experiment.seed)
    self._requests: dict[str, list[_PromptRequest]] = {}
    for name, source in sources.items():
      self._requests[name] = []
      for number, prompt in enumerate(source.read(), start=1):
        where = f'{name}, prompt {number}'
        first_sample, num_outputs = self._tokenizer.request(prompt, where, number - 1)
        matcher = self._tokenizer.matcher(prompt, where)
        self._requests[name].append(_PromptRequest(prompt, first_sample, num_outputs, matcher))
    digests = dict.fromkeys(self._requests, 0)
    for name, requests in self._requests.items():
      for request in requests:
        digests[name] = zlib.crc32(json.dumps(self._record(request)).encode(), digests[name])
    refuse_differences('prompts', digests, limit_s=LOOK_LIMIT_S)

  def _record(self, request: _PromptRequest) -> dict[str, Any]:
    """Returns what outputs depend on beside the weights, as JSON; not kept, as a million records take much memory."""
    return request_record(request.prompt, request.first_sample, request.num_outputs, self._steps.settings)

  def compile(self) -> None:
    """Compiles the programs that these prompts need; does nothing the second time."""
    requests = [*itertools.chain(*self._requests.values())]
    self._constrains = any(request.matcher is not None for request in requests)
    self._steps.compile(
      score_prompts=any(request.first_sample.score_prompt for request in requests),
      constrain=self._constrains,
      num_texts=sum(request.num_outputs for request in requests),
      longest=max((len(request.first_sample.ids) for request in requests), default=1),
    )

  def run(self, name: str, weights: Any, step: int, place: str | None = None) -> None:
    """Decodes the prompts that have no line in the file of outputs yet, and writes the metrics of `step`.

    `place` is where the weights are from; None for a checkpoint of this job.
    """
    directory, requests = self._directory / name, self._requests[name]
    path = directory / f'step_{step}.jsonl' if self._output_path is None else absolute_path(self._output_path)

    def begin(index: int) -> dict[str, Any]:
      from_place = {} if place is None else {PLACE_KEY: place}
      return {'index': index, 'step': step} | from_place | {'request': self._record(requests[index])}

    file = DecodedFile(path, len(requests), lambda: map(begin, range(len(requests))))
    set_activity(None)
    first = primary_decides(file.num_done, 'num_decoded', limit_s=LOOK_LIMIT_S)
    with contextlib.closing(file), contextlib.closing(Progress(len(requests), first, primary=is_primary())) as progress:
      title = f'step {step}{"" if place is None else f" of {place}"}  decode {name}:'
      progress.message(f'{title} {len(requests)} prompts to {path}')
      began, counts = time.perf_counter(), collections.Counter[str]()
      for number, completions in _in_order(self._complete(weights, requests[first:])):
        index, prompt = first + number, requests[first + number].prompt
        for text in completions:
          counts.update(outputs=1, tokens=len(text.ids), drafted=text.num_drafted, accepted=text.num_accepted)
        if is_primary():
          outputs = outputs_record(completions, has_text=self._tokenizer.tokenizer is not None)
          ids = {} if prompt.id is None else {'id': prompt.id}
          file.append(begin(index) | ids | outputs)
        progress.step(index + 1)
      if is_primary() and not path.exists():
        file.finish()
      if first == len(requests):
        progress.message(f'{title} all {first} prompts are done already, in {path}')
        return
      metrics = _metrics(len(requests) - first, counts, time.perf_counter() - began)
      lost = ''
      try:
        writer = make_writer(directory, trackers=self._trackers, primary=is_primary())
        writer.write(step, metrics, place)
        writer.close()
      except StorageError as error:  # the job belongs to another user; the outputs are in --decode_output
        if self._output_path is None:
          raise
        lost = f' (its metrics are not recorded: {error.__cause__})'
      again = f' ({first} were done already)' if first else ''
      share = metrics.get('accepted_draft_share')
      drafts = '' if share is None else f', {share:.0%} of drafts right'
      progress.message(
        f'{title} {len(requests) - first} prompts, {metrics["num_tokens"]:.0f} tokens, '
        f'{metrics["tokens_per_second"]:.0f} tokens/s{again}{drafts}, in {path}{lost}'
      )

  def _complete(self, weights: Any, requests: list[_PromptRequest]) -> Iterator[tuple[int, list[Completion]]]:
    """Yields (number of the prompt, its outputs), in the order in which prompts finish."""
    decode = self._tokenizer.decode
    if self._steps.settings.num_beams > 1:
      samples = [request.first_sample for request in requests]
      for number, beams in search(self._steps, weights, samples, decode=decode, on_step=self._on_step):
        yield number, beams[: requests[number].num_outputs]
      return
    ends = list(itertools.accumulate(request.num_outputs for request in requests))  # of each prompt's samples
    all_samples = (request.first_sample.as_sample(i) for request in requests for i in range(request.num_outputs))
    matchers = None
    if self._constrains:
      matchers = [
        request.matcher and request.matcher.copy() for request in requests for _ in range(request.num_outputs)
      ]
    unfinished: dict[int, dict[int, Completion]] = {}
    completions = generate(self._steps, weights, all_samples, decode=decode, matchers=matchers, on_step=self._on_step)
    for index, completion in completions:
      number = bisect.bisect_right(ends, index)
      done = unfinished.setdefault(number, {})
      done[index] = completion
      if len(done) == requests[number].num_outputs:
        yield number, [done[i] for i in sorted(done)]
        del unfinished[number]


def _metrics(num_prompts: int, counts: Mapping[str, int], seconds: float) -> dict[str, float]:
  """Returns the metrics of a finished set of prompts."""
  metrics = {
    'num_prompts': float(num_prompts),
    'num_tokens': float(counts['tokens']),
    'mean_length': counts['tokens'] / counts['outputs'],
    'tokens_per_second': counts['tokens'] / seconds,
    'seconds': seconds,
  }
  if counts['drafted']:
    share = counts['accepted'] / counts['drafted']
    metrics |= {'drafted_tokens': float(counts['drafted']), 'accepted_draft_share': share}
  return metrics


def _in_order(numbered: Iterable[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
  """Yields the same pairs in the order of their numbers, 0, 1, 2, ...; later pairs wait."""
  waiting: dict[int, Any] = {}
  following = 0
  for number, item in numbered:
    waiting[number] = item
    while following in waiting:
      yield following, waiting.pop(following)
      following += 1
