"""From prompts to the requests of a decoding job: tokens, and every setting that the line left to its default."""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

from spmd_tasks.decoding import Completion, Prompt, Request
from spmd_tasks.errors import UserError
from spmd_tasks.experiment import Job
from spmd_tasks.inputs.tokenizers import Tokenizer
from spmd_tasks.runtime.decode_settings import SAMPLING_FIELDS, DecodeSettings


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptTokenizer:
  """How prompts become requests that fit the compiled steps.

  Attributes:
    tokenizer: None where the experiment has none: prompts are then tokens, and so is what is generated.
    settings, max_len, vocab_size: of the steps.
    seed: of prompts that name none.
  """

  tokenizer: Tokenizer | None
  settings: DecodeSettings
  max_len: int
  vocab_size: int
  seed: int

  def decode(self, ids: Sequence[int]) -> str:
    """Tokens to text; what lies beyond the tokenizer's vocabulary, as models may have it, gives nothing."""
    if self.tokenizer is None:
      return ''
    return self.tokenizer.decode([token for token in ids if token < self.tokenizer.vocab_size])

  def request(self, prompt: Prompt, where: str) -> tuple[Request, int]:
    """(the first request of a prompt, how many samples or beams are wanted).

    Raises:
      UserError: the prompt does not fit the model or the settings; the message begins with `where`.
    """
    ids = self._ids(prompt, where)
    room = self.max_len - len(ids)
    # The last token is not read again, but a prompt must leave room for one.
    if room < (0 if prompt.max_tokens == 0 else 1):
      raise UserError(
        f'{where}: the prompt has {len(ids)} tokens and max_len is {self.max_len}: shorten it, or raise '
        'task.decode.max_len.'
      )
    max_tokens = prompt.max_tokens
    if max_tokens is None:
      max_tokens = min(room, self.settings.max_tokens or room)
    elif max_tokens > room:
      raise UserError(
        f'{where}: {len(ids)} tokens of prompt and max_tokens={max_tokens} exceed max_len {self.max_len}: lower '
        'max_tokens, or raise task.decode.max_len.'
      )
    end = () if self.tokenizer is None else (self.tokenizer.eos_id,)
    stop_ids = tuple(dict.fromkeys((*end, *prompt.stop_ids)))
    if len(stop_ids) > self.settings.max_stop_ids:
      raise UserError(
        f'{where}: {len(stop_ids)} stop tokens, the end of text included, are more than max_stop_ids='
        f'{self.settings.max_stop_ids}: name fewer, or raise task.decode.max_stop_ids.'
      )
    given = {name: getattr(prompt, name) for name in SAMPLING_FIELDS}
    given = {name: value for name, value in given.items() if value is not None}
    try:
      sampling = dataclasses.replace(self.settings.sampling, **given)
    except UserError as error:
      raise UserError(f'{where}: {error}') from error
    num_beams = self.settings.num_beams
    num_outputs = prompt.n or num_beams
    if num_beams > 1:
      if num_outputs > num_beams:
        raise UserError(f'{where}: n={num_outputs} is more than task.decode.num_beams={num_beams}.')
      if max_tokens == 0 or prompt.score_prompt:
        raise UserError(f'{where}: beam search scores no prompts: set task.decode.num_beams to 1.')
    request = Request(
      ids=ids,
      max_tokens=max_tokens,
      seed=self.seed if prompt.seed is None else prompt.seed,
      stop_ids=stop_ids,
      stop=prompt.stop,
      score_prompt=prompt.score_prompt or max_tokens == 0,
      sampling=sampling,
    )
    return request, num_outputs

  def _ids(self, prompt: Prompt, where: str) -> tuple[int, ...]:
    if prompt.prompt_ids is not None:
      beyond = [token for token in prompt.prompt_ids if token >= self.vocab_size]
      if beyond:
        raise UserError(f'{where}: token {beyond[0]} is outside the vocabulary of {self.vocab_size}.')
      return prompt.prompt_ids
    if self.tokenizer is None:
      raise UserError(
        f"{where}: the prompt is text, but the experiment's inputs have no tokenizer: give 'prompt_ids' instead."
      )
    assert prompt.prompt is not None
    begin = () if self.tokenizer.bos_id is None else (self.tokenizer.bos_id,)
    ids = (*begin, *self.tokenizer.encode(prompt.prompt))
    if not ids:
      raise UserError(f'{where}: the prompt is empty, and the tokenizer has no token for the beginning of text.')
    return ids


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
