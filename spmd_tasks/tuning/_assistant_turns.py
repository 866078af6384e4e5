"""Finds the characters and the tokens of a rendered conversation that the assistant wrote.

A template may mark the assistant's text by `{% generation %}` blocks, as for transformers'
`apply_chat_template(..., return_assistant_tokens_mask=True)`. With any other template, the text of an assistant's turn
is what rendering this turn adds to rendering the messages before it with the generation prompt:

    render([user])               <|user|>Hi<|end|><|assistant|>
    render([user, assistant])    <|user|>Hi<|end|><|assistant|>Hello<|end|>
                                                              ~~~~~~~~~~~~~

This requires that the second text begins with the first, and the whole conversation with both, which is checked for
every conversation. A template that renders a turn differently once other messages follow it, for example without its
reasoning, is refused.

As in OpenAI's files for fine-tuning, a turn with `"weight": 0` is context: its text is not learned.
"""

from collections.abc import Mapping, Sequence
import datetime
import difflib
import itertools
from typing import Any

import numpy as np

from spmd_tasks.errors import UserError
from spmd_tasks.inputs import ChatTemplate

Spans = list[tuple[int, int]]
_ASSISTANT = 'assistant'
_ROLES = ('system', 'developer', 'user', _ASSISTANT, 'tool')  # those that the server accepts
_SAME_ROLES = {'human': 'user', 'gpt': _ASSISTANT, 'bot': _ASSISTANT, 'model': _ASSISTANT, 'function': 'tool'}
_MAX_RENDERED = 4_000_000  # messages rendered in total, for some 2,800 turns: the time is quadratic
_REMEDY = "mark the assistant's text by {% generation %} blocks in the template (chat_template_file=FILE)."


def render_turns(
  template: ChatTemplate,
  messages: Sequence[Mapping[str, Any]],
  tools: Sequence[Mapping[str, Any]] | None,
  variables: Mapping[str, Any],
  now: datetime.datetime | None,
) -> tuple[str, Spans]:
  """Renders a conversation; returns the text, and the (start, end) characters of the assistant's turns, in order.

  Turns of weight 0 are left out.

  Raises a UserError if there is no assistant's turn, a role is unknown, or the template does not tell which text is the
  assistant's.
  """
  if not any(message['role'] == _ASSISTANT for message in messages):
    roles = ', '.join(dict.fromkeys(message['role'] for message in messages))
    raise UserError(
      f"the conversation has no message with the role 'assistant', only {roles}: correct the roles, or remove the "
      'conversation.'
    )
  check_roles(template, messages)
  turns = [(index, index + 1) for index, message in enumerate(messages) if message['role'] == _ASSISTANT]
  is_learned = [messages[index].get('weight', 1) != 0 for index, _ in turns]
  if not template.marks_generation(tools):
    return render_spans(template, messages, list(itertools.compress(turns, is_learned)), tools, variables, now)
  ((text, spans),) = template.render_each([(messages, False)], tools=tools, variables=variables, now=now)
  if not spans:
    raise UserError('the {% generation %} blocks of the chat template are empty for this conversation: correct them.')
  if all(is_learned):
    return text, spans
  if len(spans) != len(turns):
    raise UserError(
      f'a message of the assistant has the weight 0, but the {{% generation %}} blocks of the chat template write '
      f'{len(spans)} texts for {len(turns)} messages: use one block for each message, or remove the weight.'
    )
  return text, list(itertools.compress(spans, is_learned))


def check_roles(template: ChatTemplate, messages: Sequence[Mapping[str, Any]]) -> None:
  """Raises a UserError for a role that is neither OpenAI's nor in the template, which might leave its message out."""
  for index, message in enumerate(messages):
    role = message['role']
    if role not in _ROLES and not template.mentions(role):
      near = _SAME_ROLES.get(role) or next(iter(difflib.get_close_matches(role, _ROLES, n=1)), None)
      raise UserError(
        f'messages[{index}] has the role {role!r}, which is not one of {", ".join(_ROLES)}, and not in the chat '
        f'template: correct it{f" to {near!r}" if near else ""}, or give the template a rule for it.'
      )


def render_spans(
  template: ChatTemplate,
  messages: Sequence[Mapping[str, Any]],
  turns: Spans,
  tools: Sequence[Mapping[str, Any]] | None,
  variables: Mapping[str, Any],
  now: datetime.datetime | None,
) -> tuple[str, Spans]:
  """Renders a conversation; returns the text, and the (start, end) characters of some of its turns.

  Args:
    turns: (start, end) ranges of messages. The characters of a range are those that rendering messages[:end] adds to
      rendering messages[:start] with the generation prompt.

  Raises a UserError if one of these texts does not begin with the one before.
  """
  num_rendered = sum(start + end for start, end in turns)
  if num_rendered > _MAX_RENDERED:
    raise UserError(
      f'the conversation has {len(messages):,} messages; rendering it up to each turn of the assistant would render '
      f'{num_rendered:,} messages, more than {_MAX_RENDERED:,}: split it, or {_REMEDY}'
    )

  def render(messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
    conversation = (messages, add_generation_prompt)
    ((text, _),) = template.render_each([conversation], tools=tools, variables=variables, now=now)
    return text

  whole, spans = render(messages, False), []
  for start, end in turns:
    prompt, text = render(messages[:start], True), render(messages[:end], False)
    when = 'after its generation prompt' if not text.startswith(prompt) else 'once other messages follow'
    expected, actual = (prompt, text) if not text.startswith(prompt) else (text, whole)
    if not actual.startswith(expected):
      raise UserError(
        f'the chat template renders message {start} differently {when}, {_difference(expected, actual)}, so that the '
        f"assistant's text is unknown: {_REMEDY}"
      )
    spans.append((len(prompt), len(text)))
  return whole, spans


def _difference(expected: str, actual: str) -> str:
  """Returns the texts at their first difference."""
  same = next((i for i, (a, b) in enumerate(zip(expected, actual, strict=False)) if a != b), len(actual))
  return f'{actual[same : same + 30]!r} instead of {expected[same : same + 30]!r}'


def tokens_of_spans(offsets: np.ndarray, spans: Sequence[tuple[int, int]]) -> np.ndarray:
  """Returns which tokens are in a span, from its first character's token to its last one's: bool [N].

  If the last character of a span is several tokens, such as an emoji in bytes, the span has all of them; in
  transformers it has only the first.

  Args:
    offsets: int [N, 2], the characters [start, end) of each token; start == end is whitespace that the tokenizer
      excludes from its offsets.
    spans: characters [start, end), in order.
  """
  starts, ends = offsets[:, 0], offsets[:, 1]
  mask = np.zeros(len(offsets), bool)
  for start, end in spans:
    within = np.where(starts == ends, (start < ends) & (ends <= end), (starts < end) & (ends > start))
    tokens = np.flatnonzero(within)
    if tokens.size:
      mask[tokens[0] : tokens[-1] + 1] = True
  return mask
