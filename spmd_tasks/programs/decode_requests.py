"""The tokenizer of a job, and what a decoding job writes of its requests and their outputs."""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

from spmd_tasks.decoding import Completion, Prompt, Request
from spmd_tasks.experiment import Job
from spmd_tasks.inputs import Tokenizer
from spmd_tasks.runtime.decode_settings import DecodeSettings


def find_tokenizer(job: Job) -> Tokenizer | None:
  """The tokenizer of the training input, else that of an eval set."""
  inputs = (job.train_input, *job.eval_inputs.values())
  tokenizers = (getattr(source, 'tokenizer', None) for source in inputs)
  return next((tokenizer for tokenizer in tokenizers if tokenizer is not None), None)


def request_record(prompt: Prompt, request: Request, num_outputs: int, settings: DecodeSettings) -> dict[str, Any]:
  """All that the outputs depend on beside the weights, as JSON."""
  record: dict[str, Any] = {'prompt': prompt.prompt} if prompt.prompt is not None else {}
  record |= {'prompt_ids': list(request.ids), 'n': num_outputs, 'max_tokens': request.max_tokens}
  record |= {'stop_ids': list(request.stop_ids), 'stop': list(request.stop)}
  if settings.num_beams > 1:
    return record | {'num_beams': settings.num_beams, 'length_penalty': settings.length_penalty}
  return record | {'seed': request.seed, 'score_prompt': request.score_prompt, **dataclasses.asdict(request.sampling)}


def output_record(completion: Completion, decode: Callable[[Sequence[int]], str] | None) -> dict[str, Any]:
  """One continuation as JSON: `logprob` is the whole text's, `score` what beam search ranks by."""
  record: dict[str, Any] = {} if decode is None else {'text': completion.text}
  record |= {'ids': completion.ids, 'finish_reason': completion.finish_reason}
  if completion.score is not None:
    return record | {'logprob': completion.logprob, 'score': completion.score}
  record |= {'logprob': sum(completion.logprobs), 'logprobs': completion.logprobs}
  if completion.top_logprobs:
    record['top_logprobs'] = [[[token, value] for token, value in top.items()] for top in completion.top_logprobs]
  return record
