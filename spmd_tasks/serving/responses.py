"""ResponseBodies: the JSON bodies that answer a GenerationRequest, in the format of OpenAI's API.

    bodies = ResponseBodies(model, wanted)
    bodies.whole(answer.sequences, deltas)     # one body
    bodies.event(delta)                        # or one server-sent event per delta, as bytes

routes.py sends them.
"""

from collections.abc import Iterable
import json
import secrets
import time
from typing import Any, NamedTuple

from spmd_tasks.decoding.generated_sequence import Delta, GeneratedSequence, TokenLogprob
from spmd_tasks.serving.answer_parsers import Part
from spmd_tasks.serving.errors import RequestError
from spmd_tasks.serving.requests import GenerationRequest, ServedModel


class ResponseBodies:
  """The bodies of one answer, which share an id and a creation time."""

  def __init__(self, model: ServedModel, wanted: GenerationRequest):
    self._model = model
    self._wanted = wanted
    self._is_chat = wanted.kind == 'chat'
    self._id = f'{"chatcmpl" if self._is_chat else "cmpl"}-{wanted.id or secrets.token_hex(12)}'
    self._created = int(time.time())
    reading = wanted.reading
    self._parsers = {} if reading is None else {i: reading.parser() for i in range(len(wanted.requests))}
    self._one_call = reading is not None and reading.one_call
    self._head = f'data: {_encode(self._body([], is_chunk=True))}'.removesuffix(']}')

  def whole(self, sequences: Iterable[GeneratedSequence], deltas: Iterable[Delta]) -> dict[str, Any]:
    """Makes the body of an answer that is not streamed."""
    sequences = list(sequences)
    texts = list(self._wanted.echoes)
    logprobs: list[list[TokenLogprob]] = [[] for _ in sequences]
    tokens: list[list[int]] = [[] for _ in sequences]
    for delta in deltas:
      texts[delta.sequence.index] += delta.text
      logprobs[delta.sequence.index] += delta.logprobs
      tokens[delta.sequence.index] += delta.tokens
    choices = []
    of_prompts: dict[str, Any] = {}  # of a chat, which has one prompt
    for sequence in sequences:
      text, entries = texts[sequence.index], logprobs[sequence.index]
      of_prompt: dict[str, Any] = {}
      if self._wanted.num_prompt_logprobs is not None:
        num_prompt = len(sequence.request.ids)
        of_prompt['prompt_logprobs'] = [self._prompt_entry(entry) for entry in entries[:num_prompt]]
        if self._is_chat or not self._wanted.echoes[sequence.index]:
          entries = entries[num_prompt:]
      if self._wanted.returns_ids:
        of_prompt['prompt_token_ids'] = list(sequence.request.ids)
      choice: dict[str, Any] = {'index': sequence.index, 'logprobs': self._logprobs(entries, sequence.index)}
      if self._wanted.returns_ids:
        choice['token_ids'] = tokens[sequence.index]
      if self._is_chat:
        of_prompts = of_prompt
      else:
        choice |= of_prompt
      if self._is_chat:
        message: dict[str, Any] = {'role': 'assistant', 'content': text}
        if self._parsers:
          part = self._parse(sequence.index, text, is_last=True)
          message['content'] = part.content
          if part.reasoning:
            message |= _reasoning(part.reasoning)
          if part.calls:
            message |= {'content': part.content or None, 'tool_calls': [call.as_json() for call in part.calls]}
        choice['message'] = message
      else:
        choice['text'] = text
      choice['finish_reason'] = self._finish_reason(sequence.index, sequence.finish_reason)
      choices.append(choice)
    return self._body(choices, is_chunk=False) | {'usage': self.usage(sequences)} | of_prompts

  def opening(self) -> list[dict[str, Any]]:
    """Makes the chunks that come before the first token: the role of a chat, the echo of a completion."""
    bodies = []
    for index, (echo, request) in enumerate(zip(self._wanted.echoes, self._wanted.requests, strict=True)):
      ids = {'prompt_token_ids': list(request.ids)} if self._wanted.returns_ids else {}
      if self._is_chat:
        choice = {'index': index, 'delta': {'role': 'assistant', 'content': echo}}
      elif echo or ids:
        choice = {'index': index, 'text': echo} | ids
      else:
        continue
      body = self._body([choice | {'logprobs': None, 'finish_reason': None}], is_chunk=True)
      bodies.append(body | ids if self._is_chat else body)
    return bodies

  def event(self, delta: Delta) -> bytes:
    """Makes the server-sent event of one delta."""
    choice: dict[str, Any] = {
      'index': delta.sequence.index,
      'logprobs': self._logprobs(delta.logprobs, delta.sequence.index) if delta.logprobs else None,
      'finish_reason': delta.finish_reason,
    }
    choice |= {'delta': self.chat_delta(delta)} if self._is_chat else {'text': delta.text}
    choice |= {'token_ids': list(delta.tokens)} if self._wanted.returns_ids else {}
    if self._parsers:
      choice['finish_reason'] = self._finish_reason(delta.sequence.index, delta.finish_reason)
      if not (choice['delta'] or choice['logprobs'] or choice.get('token_ids')) and choice['finish_reason'] is None:
        return b''  # held back: it may become a call
    # This runs for every token, so the beginning that all chunks share is encoded only once.
    return f'{self._head}{_encode(choice)}]}}\n\n'.encode()

  def chat_delta(self, delta: Delta) -> dict[str, Any]:
    """What a delta adds to a message: `content`, `reasoning_content` and `tool_calls`, each if there is any."""
    index = delta.sequence.index
    if index not in self._parsers:
      return {'content': delta.text} if delta.text else {}
    first = self._parsers[index].num_calls
    part = self._parse(index, delta.text, is_last=delta.finish_reason is not None)
    added: dict[str, Any] = {'content': part.content} if part.content else {}
    if part.reasoning:
      added |= _reasoning(part.reasoning)
    if part.calls:
      added['tool_calls'] = [{'index': first + place} | call.as_json() for place, call in enumerate(part.calls)]
    return added

  def may_hold_content(self, index: int) -> bool:
    """Whether text of a choice that is held back may become content."""
    return index in self._parsers and self._parsers[index].may_hold_content

  def _parse(self, index: int, text: str, *, is_last: bool) -> Part:
    """What a text adds to a message; nothing behind its first call if it may have only one."""
    parser = self._parsers[index]
    had_calls = parser.num_calls > 0
    part = parser.push(text, is_last=is_last)
    if not self._one_call:
      return part
    return Part('') if had_calls else part._replace(calls=part.calls[:1])

  def _finish_reason(self, index: int, reason: str | None) -> str | None:
    has_calls = index in self._parsers and self._parsers[index].num_calls > 0
    is_over = reason == 'stop' or (self._one_call and reason == 'length')
    return 'tool_calls' if has_calls and is_over else reason

  def usage_chunk(self, sequences: Iterable[GeneratedSequence]) -> dict[str, Any]:
    """Makes the chunk that counts tokens."""
    return self._body([], is_chunk=True) | {'usage': self.usage(sequences)}

  def failed(self, error: RequestError) -> dict[str, Any]:
    """Makes the event of an answer that is cut."""
    return error.body

  def _body(self, choices: list[dict[str, Any]], *, is_chunk: bool) -> dict[str, Any]:
    kind = 'text_completion' if not self._is_chat else 'chat.completion.chunk' if is_chunk else 'chat.completion'
    return {
      'id': self._id,
      'object': kind,
      'created': self._created,
      'model': self._wanted.model,
      'choices': choices,
    }

  def chat_logprobs(self, delta: Delta) -> list[dict[str, Any]]:
    """The entries of a delta's tokens, where the request wants them."""
    return [] if self._wanted.num_logprobs is None else [self._chat_entry(entry) for entry in delta.logprobs]

  def usage(self, sequences: Iterable[GeneratedSequence]) -> dict[str, Any]:
    """Counts tokens."""
    sequences = list(sequences)
    num_generated = sum(sequence.num_tokens for sequence in sequences)
    num_prompt = self._wanted.num_prompt_tokens
    # Each prompt counts once: further samples reuse the first sample's tokens.
    num_reused = sum(sequence.num_reused for sequence in sequences if sequence.request.sample == 0)
    num_drafted, num_accepted = (sum(getattr(each, f'num_{n}') for each in sequences) for n in ('drafted', 'accepted'))
    predicted = {'accepted_prediction_tokens': num_accepted, 'rejected_prediction_tokens': num_drafted - num_accepted}
    return {
      'prompt_tokens': num_prompt,
      'completion_tokens': num_generated,
      'total_tokens': num_prompt + num_generated,
      'prompt_tokens_details': {'cached_tokens': num_reused},
      **({'completion_tokens_details': predicted} if num_drafted else {}),
    }

  def _logprobs(self, entries: Iterable[TokenLogprob], index: int) -> dict[str, Any] | None:
    if self._wanted.num_logprobs is None:
      return None
    entries = list(entries)
    if self._is_chat:
      return {'content': [self._chat_entry(entry) for entry in entries]}
    base = len(self._wanted.echoes[index])
    named = [self._named(entry, self._wanted.num_logprobs) for entry in entries]
    return {
      'tokens': [own.text for own, _ in named],
      'token_logprobs': [entry.logprob for entry in entries],
      'top_logprobs': [{other.text: logprob for other, logprob in top} or None for _, top in named],
      'text_offset': [base + entry.offset for entry in entries],
    }

  def _chat_entry(self, entry: TokenLogprob) -> dict[str, Any]:
    own, top = self._named(entry, self._wanted.num_logprobs)
    return own.as_json(entry.logprob) | {'top_logprobs': [other.as_json(logprob) for other, logprob in top]}

  def _prompt_entry(self, entry: TokenLogprob) -> dict[str, Any] | None:
    """A token of the prompt and the likeliest ones there, as vLLM has them; the rank of one that is not likely is null.

    None for the first token, which has no log-probability.
    """
    if entry.logprob is None:
      return None
    own, top = self._named(entry, self._wanted.num_prompt_logprobs)
    likely = {
      str(token): {'logprob': logprob, 'rank': rank, 'decoded_token': other.text}
      for rank, ((token, _), (other, logprob)) in enumerate(zip(entry.top, top, strict=False), 1)
    }
    rank = next((rank for rank, (token, _) in enumerate(entry.top, 1) if token == entry.token), None)
    return {str(entry.token): {'logprob': entry.logprob, 'rank': rank, 'decoded_token': own.text}} | likely

  def _named(self, entry: TokenLogprob, num_top: int | None) -> tuple['_Token', list[tuple['_Token', float]]]:
    """An entry's token, and the likeliest ones with their log-probabilities; no two have one name.

    The token is named by what it adds to the text, so that names join to the text; another one by its own text, or by
    its number where it has none, is a part of a character, or has a name that a likelier one has.
    """
    top = entry.top[:num_top]
    own, *others = self._model.bytes_of_tokens([entry.token, *(token for token, _ in top)])
    chosen_name = f'{_NUMBER}{entry.token}' if self._wanted.names_by_id else entry.text
    chosen, names = _Token(chosen_name, _bytes_in_text(own, entry.text)), {chosen_name}
    named = []
    for (token, logprob), content in zip(top, others, strict=True):
      if token == entry.token:
        named.append((chosen, logprob))
        continue
      name = _whole_text(content) or ''
      if not name or name in names or self._wanted.names_by_id:
        name = f'{_NUMBER}{token}'
      names.add(name)
      named.append((_Token(name, content), logprob))
    return chosen, named


def _reasoning(text: str) -> dict[str, str]:
  """Reasoning by both names that clients read."""
  return {'reasoning_content': text, 'reasoning': text}


class _Token(NamedTuple):
  """A token by its name, and the bytes that it adds to a text."""

  text: str
  content: bytes

  def as_json(self, logprob: float | None) -> dict[str, Any]:
    return {'token': self.text, 'logprob': logprob, 'bytes': list(self.content)}


def _whole_text(content: bytes) -> str | None:
  """The text of a token's bytes; None where they are a part of a character."""
  try:
    return content.decode()
  except UnicodeDecodeError:
    return None


def _bytes_in_text(content: bytes, text: str) -> bytes:
  """The bytes of a token that adds `text`: its own where they are parts of characters, else those of the text.

  These differ where a decoder drops the first space of a text, and where a stop string cuts a token.
  """
  return content if _whole_text(content) is None or '\ufffd' in text else text.encode()


_NUMBER = 'token_id:'
_encode = json.JSONEncoder().encode
