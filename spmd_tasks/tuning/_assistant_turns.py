"""Says which characters of a rendered conversation, and which of its tokens, the assistant wrote.

A template that marks the assistant's text by `{% generation %}` blocks says it itself, as for transformers'
`apply_chat_template(..., return_assistant_tokens_mask=True)`. For another template the text of an assistant's turn is
what rendering with that turn adds to rendering up to it, with the prompt for an answer at the end:

    render([user])               <|user|>Hi<|end|><|assistant|>
    render([user, assistant])    <|user|>Hi<|end|><|assistant|>Hello<|end|>
                                                              ~~~~~~~~~~~~~

That holds only if each text begins with the one before, and the whole conversation with all of them. It is checked for
every conversation; a template that writes a turn otherwise once others follow it (as those that drop the reasoning of
earlier turns) is refused.
"""

from collections.abc import Mapping, Sequence
import datetime
from typing import Any

import numpy as np

from spmd_tasks.errors import UserError
from spmd_tasks.inputs import ChatTemplate

Spans = list[tuple[int, int]]
_ASSISTANT = 'assistant'
_TURNS_AT_ONCE = 32  # in one round trip to the process that renders
_MAX_RENDERED = 4_000_000  # of some 2,800 turns: the time grows with the square
_REMEDY = 'mark what the assistant writes by {% generation %} blocks in the template (chat_template_file=FILE).'


def render_turns(
  template: ChatTemplate,
  messages: Sequence[Mapping[str, Any]],
  tools: Sequence[Mapping[str, Any]] | None,
  variables: Mapping[str, Any],
  now: datetime.datetime | None,
) -> tuple[str, Spans]:
  """Returns a conversation's text, and the (start, end) characters that the assistant wrote, in order.

  Raises:
    UserError: there is no assistant's turn, or the template does not tell what of the text is the assistant's.
  """
  if not any(message['role'] == _ASSISTANT for message in messages):
    roles = ', '.join(dict.fromkeys(message['role'] for message in messages))
    raise UserError(
      f'the conversation has no turn of the assistant (its roles are {roles}): name its role assistant, or remove the '
      'conversation.'
    )
  if template.marks_generation(tools):
    ((text, marked),) = template.render_each([(messages, False)], tools=tools, variables=variables, now=now)
    if not marked:
      raise UserError("the chat template marks nothing of this conversation as the assistant's: correct its marks.")
    return text, marked
  turns = [(number, number + 1) for number, message in enumerate(messages) if message['role'] == _ASSISTANT]
  return render_added(template, messages, turns, tools, variables, now)


def render_added(
  template: ChatTemplate,
  messages: Sequence[Mapping[str, Any]],
  turns: Spans,
  tools: Sequence[Mapping[str, Any]] | None,
  variables: Mapping[str, Any],
  now: datetime.datetime | None,
) -> tuple[str, Spans]:
  """Returns a conversation's text, and the (start, end) characters of some of its turns.

  Args:
    turns: the (start, end) messages whose characters are wanted: those that rendering up to the end adds to rendering
      up to the start, with the prompt for an answer.

  Raises:
    UserError: the whole text does not begin with the one up to an end, or that not with the one up to its start.
  """
  num_rendered = sum(start + end for start, end in turns)
  if num_rendered > _MAX_RENDERED:
    raise UserError(
      f'the conversation has {len(messages):,} messages; rendering it up to each turn of the assistant renders '
      f'{num_rendered:,}, more than {_MAX_RENDERED:,}: divide it, or {_REMEDY}'
    )
  whole, spans = '', []
  for first in range(0, len(turns), _TURNS_AT_ONCE):
    some = turns[first : first + _TURNS_AT_ONCE]
    beginnings = [each for start, end in some for each in ((messages[:start], True), (messages[:end], False))]
    rendered = template.render_each([(messages, False), *beginnings], tools=tools, variables=variables, now=now)
    whole, *texts = [text for text, _ in rendered]
    for (number, _), prompt, text in zip(some, texts[::2], texts[1::2], strict=True):
      if not text.startswith(prompt):
        raise UserError(
          f'the chat template writes message {number} not as what follows its prompt for an answer, '
          f'{_end_of(prompt, text)}, so that the text of the assistant is not known: {_REMEDY}'
        )
      if not whole.startswith(text):
        raise UserError(
          f'the chat template writes message {number} otherwise once messages follow it, {_end_of(text, whole)}, so '
          f'that the text of the assistant is not known: {_REMEDY}'
        )
      spans.append((len(prompt), len(text)))
  return whole, spans


def _end_of(expected: str, found: str) -> str:
  """The two texts where they begin to differ."""
  same = next((i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b), len(found))
  return f'{found[same : same + 30]!r} instead of {expected[same : same + 30]!r}'


def tokens_of_spans(offsets: np.ndarray, spans: Sequence[tuple[int, int]]) -> np.ndarray:
  """Marks the tokens that hold a character of a span, and those between them: bool [N].

  transformers takes the first token of a span's last character for its end. So where that character is several tokens
  (an emoji, in bytes), it leaves out all but one; here they belong to the span.

  Args:
    offsets: int [N, 2], the characters [start, end) of each token. A token with start == end is white space that
      a tokenizer left out of its offsets.
    spans: characters [start, end), in order.
  """
  starts, ends = offsets[:, 0], offsets[:, 1]
  mask = np.zeros(len(offsets), bool)
  for start, end in spans:
    within = np.where(starts == ends, (start < ends) & (ends <= end), (starts < end) & (ends > start))
    found = np.flatnonzero(within)
    if found.size:
      mask[found[0] : found[-1] + 1] = True
  return mask
