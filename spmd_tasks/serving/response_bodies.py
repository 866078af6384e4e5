"""Formats the answers of /v1/completions and /v1/chat/completions as OpenAI's API does.

    bodies = CompletionBodies(model, parsed)
    bodies.whole(answer.sequences, deltas)     # one JSON body
    bodies.event(delta)                        # or one server-sent event per delta, as bytes

routes.py sends them.
"""

from collections.abc import Iterable
import json
import secrets
import time
from typing import Any, NamedTuple

from spmd_tasks.decoding.generated_sequence import Delta, GeneratedSequence, TokenLogprob
from spmd_tasks.serving.answer_parsers import MessageDelta
from spmd_tasks.serving.errors import RequestError
from spmd_tasks.serving.requests import GenerationRequest, ServedModel


class CompletionBodies:
  """Formats the body or the events of one answer, which share an id and a creation time."""

  def __init__(self, model: ServedModel, parsed: GenerationRequest):
    self._model = model
    self._parsed = parsed
    self._is_chat = parsed.kind == 'chat'
    self._id = f'{"chatcmpl" if self._is_chat else "cmpl"}-{parsed.id or secrets.token_hex(12)}'
    self._created = int(time.time())
    settings = parsed.parser_settings
    self._parsers = {} if settings is None else {i: settings.parser() for i in range(len(parsed.requests))}
    self._one_call = settings is not None and settings.one_call
    self._head = f'data: {_encode(self._body([], is_chunk=True))}'.removesuffix(']}')

  def whole(self, sequences: Iterable[GeneratedSequence], deltas: Iterable[Delta]) -> dict[str, Any]:
    """Formats the body of an answer that is not streamed."""
    sequences = list(sequences)
    texts = list(self._parsed.echoes)
    logprobs: list[list[TokenLogprob]] = [[] for _ in sequences]
    tokens: list[list[int]] = [[] for _ in sequences]
    for delta in deltas:
      texts[delta.sequence.index] += delta.text
      logprobs[delta.sequence.index] += delta.logprobs
      tokens[delta.sequence.index] += delta.tokens
    choices = []
    chat_prompt_fields: dict[str, Any] = {}  # on the body for a chat, which has one prompt; otherwise on each choice
    for sequence in sequences:
      text, entries = texts[sequence.index], logprobs[sequence.index]
      prompt_fields: dict[str, Any] = {}
      if self._parsed.num_prompt_logprobs is not None:
        num_prompt = len(sequence.request.ids)
        prompt_fields['prompt_logprobs'] = [self._prompt_entry(entry) for entry in entries[:num_prompt]]
        if self._is_chat or not self._parsed.echoes[sequence.index]:
          entries = entries[num_prompt:]
      if self._parsed.returns_ids:
        prompt_fields['prompt_token_ids'] = list(sequence.request.ids)
      choice: dict[str, Any] = {'index': sequence.index, 'logprobs': self._logprobs(entries, sequence.index)}
      if self._parsed.returns_ids:
        choice['token_ids'] = tokens[sequence.index]
      if self._is_chat:
        chat_prompt_fields = prompt_fields
        message: dict[str, Any] = {'role': 'assistant', 'content': text}
        if self._parsers:
          parts = self._parse(sequence.index, text, is_last=True)
          message['content'] = parts.content
          if parts.reasoning:
            message |= _reasoning(parts.reasoning)
          if parts.calls:
            message |= {'content': parts.content or None, 'tool_calls': [call.as_json() for call in parts.calls]}
        choice['message'] = message
      else:
        choice |= prompt_fields
        choice['text'] = text
      choice['finish_reason'] = self._finish_reason(sequence.index, sequence.finish_reason)
      choices.append(choice)
    return self._body(choices, is_chunk=False) | {'usage': self.usage(sequences)} | chat_prompt_fields

  def opening(self) -> list[dict[str, Any]]:
    """Formats the chunks before the first token: the role of a chat, or the echo of a completion."""
    bodies = []
    for index, (echo, request) in enumerate(zip(self._parsed.echoes, self._parsed.requests, strict=True)):
      ids = {'prompt_token_ids': list(request.ids)} if self._parsed.returns_ids else {}
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
    """Formats one delta as a server-sent event; empty if the parser buffers all of its text."""
    choice: dict[str, Any] = {
      'index': delta.sequence.index,
      'logprobs': self._logprobs(delta.logprobs, delta.sequence.index) if delta.logprobs else None,
      'finish_reason': delta.finish_reason,
    }
    choice |= {'delta': self.chat_delta(delta)} if self._is_chat else {'text': delta.text}
    choice |= {'token_ids': list(delta.tokens)} if self._parsed.returns_ids else {}
    if self._parsers:
      choice['finish_reason'] = self._finish_reason(delta.sequence.index, delta.finish_reason)
      if not (choice['delta'] or choice['logprobs'] or choice.get('token_ids')) and choice['finish_reason'] is None:
        return b''
    # This runs for every token, so the prefix that all chunks share is encoded only once.
    return f'{self._head}{_encode(choice)}]}}\n\n'.encode()

  def chat_delta(self, delta: Delta) -> dict[str, Any]:
    """Returns what a delta adds to a message: `content`, `reasoning_content` and `tool_calls`, if not empty."""
    index = delta.sequence.index
    if index not in self._parsers:
      return {'content': delta.text} if delta.text else {}
    first = self._parsers[index].num_calls
    parts = self._parse(index, delta.text, is_last=delta.finish_reason is not None)
    added: dict[str, Any] = {'content': parts.content} if parts.content else {}
    if parts.reasoning:
      added |= _reasoning(parts.reasoning)
    if parts.calls:
      added['tool_calls'] = [{'index': number} | call.as_json() for number, call in enumerate(parts.calls, first)]
    return added

  def may_hold_content(self, index: int) -> bool:
    """Whether buffered text of a choice may become content."""
    return index in self._parsers and self._parsers[index].may_hold_content

  def _parse(self, index: int, text: str, *, is_last: bool) -> MessageDelta:
    """Parses more text of a choice; drops everything after the first call if only one is allowed."""
    parser = self._parsers[index]
    had_calls = parser.num_calls > 0
    parts = parser.push(text, is_last=is_last)
    if not self._one_call:
      return parts
    return MessageDelta('') if had_calls else parts._replace(calls=parts.calls[:1])

  def _finish_reason(self, index: int, reason: str | None) -> str | None:
    has_calls = index in self._parsers and self._parsers[index].num_calls > 0
    is_over = reason == 'stop' or (self._one_call and reason == 'length')
    return 'tool_calls' if has_calls and is_over else reason

  def usage_chunk(self, sequences: Iterable[GeneratedSequence]) -> dict[str, Any]:
    """Formats the chunk with the token counts."""
    return self._body([], is_chunk=True) | {'usage': self.usage(sequences)}

  def failed(self, error: RequestError) -> dict[str, Any]:
    """Formats the event of an answer that failed."""
    return error.body

  def _body(self, choices: list[dict[str, Any]], *, is_chunk: bool) -> dict[str, Any]:
    kind = 'text_completion' if not self._is_chat else 'chat.completion.chunk' if is_chunk else 'chat.completion'
    return {
      'id': self._id,
      'object': kind,
      'created': self._created,
      'model': self._parsed.model,
      'choices': choices,
    }

  def chat_logprobs(self, delta: Delta) -> list[dict[str, Any]]:
    """Returns the log-probabilities of a delta's tokens; empty if the request did not ask for them."""
    return [] if self._parsed.num_logprobs is None else [self._chat_entry(entry) for entry in delta.logprobs]

  def usage(self, sequences: Iterable[GeneratedSequence]) -> dict[str, Any]:
    """Counts tokens."""
    sequences = list(sequences)
    num_generated = sum(sequence.num_tokens for sequence in sequences)
    num_prompt = self._parsed.num_prompt_tokens
    # Count each prompt once: later samples reuse the tokens of the first.
    num_reused = sum(sequence.num_reused for sequence in sequences if sequence.request.sample == 0)
    num_drafted = sum(sequence.num_drafted for sequence in sequences)
    num_accepted = sum(sequence.num_accepted for sequence in sequences)
    predicted = {'accepted_prediction_tokens': num_accepted, 'rejected_prediction_tokens': num_drafted - num_accepted}
    return {
      'prompt_tokens': num_prompt,
      'completion_tokens': num_generated,
      'total_tokens': num_prompt + num_generated,
      'prompt_tokens_details': {'cached_tokens': num_reused},
      **({'completion_tokens_details': predicted} if num_drafted else {}),
    }

  def _logprobs(self, entries: Iterable[TokenLogprob], index: int) -> dict[str, Any] | None:
    if self._parsed.num_logprobs is None:
      return None
    entries = list(entries)
    if self._is_chat:
      return {'content': [self._chat_entry(entry) for entry in entries]}
    base = len(self._parsed.echoes[index])
    named = [self._named(entry, self._parsed.num_logprobs) for entry in entries]
    return {
      'tokens': [own.text for own, _ in named],
      'token_logprobs': [entry.logprob for entry in entries],
      'top_logprobs': [{other.text: logprob for other, logprob in top} or None for _, top in named],
      'text_offset': [base + entry.offset for entry in entries],
    }

  def _chat_entry(self, entry: TokenLogprob) -> dict[str, Any]:
    own, top = self._named(entry, self._parsed.num_logprobs)
    return own.as_json(entry.logprob) | {'top_logprobs': [other.as_json(logprob) for other, logprob in top]}

  def _prompt_entry(self, entry: TokenLogprob) -> dict[str, Any] | None:
    """Formats a token of the prompt and its top alternatives as vLLM does.

    The rank is null if the token is not among the top alternatives. Returns None for the first token, which has no
    log-probability.
    """
    if entry.logprob is None:
      return None
    own, top = self._named(entry, self._parsed.num_prompt_logprobs)
    alternatives = {
      str(token): {'logprob': logprob, 'rank': rank, 'decoded_token': other.text}
      for rank, ((token, _), (other, logprob)) in enumerate(zip(entry.top, top, strict=False), 1)
    }
    rank = next((rank for rank, (token, _) in enumerate(entry.top, 1) if token == entry.token), None)
    return {str(entry.token): {'logprob': entry.logprob, 'rank': rank, 'decoded_token': own.text}} | alternatives

  def _named(self, entry: TokenLogprob, num_top: int | None) -> tuple['_Token', list[tuple['_Token', float]]]:
    """Returns an entry's token, and its top alternatives with their log-probabilities; names are unique.

    The token is named by the text that it adds, so that the names concatenate to the answer. An alternative is named by
    its own text, or by its id if it has no text, is part of a character, or shares its text with a more likely one.
    """
    top = entry.top[:num_top]
    own, *others = self._model.bytes_of_tokens([entry.token, *(token for token, _ in top)])
    chosen_name = f'{_NUMBER}{entry.token}' if self._parsed.names_by_id else entry.text
    chosen, names = _Token(chosen_name, _bytes_in_text(own, entry.text)), {chosen_name}
    named = []
    for (token, logprob), content in zip(top, others, strict=True):
      if token == entry.token:
        named.append((chosen, logprob))
        continue
      name = _whole_text(content) or ''
      if not name or name in names or self._parsed.names_by_id:
        name = f'{_NUMBER}{token}'
      names.add(name)
      named.append((_Token(name, content), logprob))
    return chosen, named


def _reasoning(text: str) -> dict[str, str]:
  """Returns the reasoning under both names that clients read."""
  return {'reasoning_content': text, 'reasoning': text}


class _Token(NamedTuple):
  """The name of a token, and the bytes that it adds to the text."""

  text: str
  content: bytes

  def as_json(self, logprob: float | None) -> dict[str, Any]:
    return {'token': self.text, 'logprob': logprob, 'bytes': list(self.content)}


def _whole_text(content: bytes) -> str | None:
  """Decodes a token's bytes; None if they are part of a character."""
  try:
    return content.decode()
  except UnicodeDecodeError:
    return None


def _bytes_in_text(content: bytes, text: str) -> bytes:
  """Returns the bytes of a token that adds `text`: its own if they are part of a character, else the text's.

  The two differ if the decoder drops the leading space of the answer, or if a stop string cuts the token.
  """
  return content if _whole_text(content) is None or '\ufffd' in text else text.encode()


_NUMBER = 'token_id:'
_encode = json.JSONEncoder().encode
