"""Constrained output: which tokens may come next, by a grammar (with the library llguidance) or a request's fields.

    grammars = Grammars(tokenizer, vocab_size=steps.vocab_size, end_ids=(2,))
    form = wanted_form(prompt)       # from `response_format` (OpenAI) or `structured_outputs` (vLLM); None: any text
    matcher = form.compile(grammars) # FormError('response_format cannot be used: ...')
    matcher.mask                     # uint32 [W]: bit v % 32 of word v // 32 says whether token v may come next
    matcher.take(token)              # after each token
    matcher.is_over                  # whether only the end of text may follow

    TokenLimits(vocab_size=V, min_tokens=5, end_ids=(2,), form=matcher)     # further limits by fields of a request

Masks are computed on the host, between the steps.

Shapes: V vocabulary, W = ceil(V / 32) words.
"""

import bisect
from collections.abc import Iterator, Mapping, Sequence
import copy
import dataclasses
import functools
import json
import re
import threading
from typing import Any, Literal

import numpy as np

from spmd_tasks.decoding.json_schemas import rewrite
from spmd_tasks.errors import UserError
from spmd_tasks.extensions import require
from spmd_tasks.inputs import BpeTokenizer, ByteTokenizer, FolderTokenizer, Tokenizer

Kind = Literal['json_schema', 'regex', 'grammar', 'choice']
_KINDS: dict[str, Kind] = {'json': 'json_schema', 'regex': 'regex', 'choice': 'choice', 'grammar': 'grammar'}
_ANY_OBJECT = {'type': 'object'}
_MAX_CHARS = 100_000
_NUM_TRIED = 3  # tokens
# Between the tokens of JSON. llguidance's own pattern is unbounded, so that a small model may never leave it.
_WHITE_SPACE = r'[ \t]{1,2}|\r?\n[ \t]{0,40}'


def num_words(vocab_size: int) -> int:
  """Returns W."""
  return (vocab_size + 31) // 32


def mask_rows(masks: Mapping[int, np.ndarray], num_rows: int, vocab_size: int) -> np.ndarray:
  """Returns masks uint32 [num_rows, W] with these rows; the other rows may take any token."""
  array = np.full((num_rows, num_words(vocab_size)), 0xFFFFFFFF, np.uint32)
  for row, mask in masks.items():
    array[row] = mask
  return array


class Grammars:
  """Compiles grammars for one tokenizer."""

  def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, end_ids: Sequence[int]):
    """Reads nothing yet.

    Args:
      tokenizer: the tokenizer.
      vocab_size: V, at least the tokenizer's.
      end_ids: tokens that may end a text that the grammar accepts.
    """
    self._tokenizer = tokenizer
    self._vocab_size = vocab_size
    self._end_ids = tuple(end_ids)
    self._lock = threading.Lock()

  def compile(self, kind: Kind, text: str, *, end_ids: Sequence[int] | None = None) -> 'Matcher':
    """Returns the matcher of a sequence before its first token.

    Args:
      kind: the language of `text`: a JSON schema, a regular expression, a grammar in Lark's notation, or a JSON array
        of texts to choose from.
      text: what the whole generated text must match.
      end_ids: tokens that end the sequence; None takes the model's.

    Raises:
      UserError: `text` is invalid, too large, or uses what llguidance does not have; the message is a clause.
    """
    require('serve', 'llguidance', wants='a fixed form of the output')
    import llguidance

    if len(text) > _MAX_CHARS:
      raise UserError(f'it has {len(text)} characters, more than {_MAX_CHARS}')
    try:
      if kind == 'json_schema':
        rules: Any = {} if '"whitespace_flexible"' in text else {'whitespace_pattern': _WHITE_SPACE}
        schema = '{}' if text.strip() == 'true' else _rewritten(text)  # only an object takes options
        grammar = llguidance.LLMatcher.grammar_from_json_schema(schema, defaults=rules)
      elif kind == 'regex':
        grammar = llguidance.LLMatcher.grammar_from_regex(text)
      else:
        choices = json.loads(text) if kind == 'choice' else ()
        choices = ' | '.join(json.dumps(choice, ensure_ascii=False) for choice in choices)
        grammar = llguidance.LLMatcher.grammar_from_lark(f'start: {choices}' if choices else text)
    except ValueError as error:
      raise UserError(_clause(str(error))) from error
    with self._lock:  # the first call builds the table of tokens
      tokenizer = self._table
    limits = llguidance.LLParserLimits(verbose_errors=False)
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if matcher.is_error():
      raise UserError(_clause(matcher.get_error()))
    end_ids = self._end_ids if end_ids is None else end_ids
    first = Matcher(matcher, self._vocab_size, end_ids, all_ends=[*tokenizer.eos_tokens, *end_ids])
    if first.is_over:
      cannot_begin = first.failure is None or first.failure.startswith('NoExtension')
      raise UserError('no token of this model can begin it' if cannot_begin else first.failure)
    trial = first.copy()  # a grammar that is too complex for llguidance's limits mostly fails at once
    for _ in range(_NUM_TRIED):
      allowed = np.flatnonzero(np.unpackbits(trial.mask.view(np.uint8), bitorder='little'))
      others = np.setdiff1d(allowed, [*tokenizer.eos_tokens, *end_ids])
      if not others.size:
        break
      trial.take(int(others[0]))
    if trial.failure:
      raise UserError(trial.failure)
    return first

  @functools.cached_property
  def _table(self) -> Any:
    """The tokenizer as an LLTokenizer."""
    import llguidance

    if isinstance(self._tokenizer, ByteTokenizer):
      return llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes(self._tokenizer)))
    if isinstance(self._tokenizer, BpeTokenizer | FolderTokenizer):
      ends = list(self._end_ids or (self._tokenizer.eos_id,))
      return llguidance.LLTokenizer(self._tokenizer.to_json(), n_vocab=self._vocab_size, eos_token=ends)
    raise UserError(f'there are no grammars for tokens of a {type(self._tokenizer).__name__}')


class Matcher:
  """The state of one sequence in its grammar.

  Attributes:
    mask: uint32 [W], the tokens that may come next.
    is_over: whether only the end of text may follow.
    failure: why the grammar became too complex for llguidance's limits, a clause; None if it has not.
  """

  is_free = False  # any token may come from now on

  def __init__(self, matcher: Any, vocab_size: int, end_ids: Sequence[int], all_ends: Sequence[int]):
    """Wraps a matcher of llguidance, which ends texts with any of `all_ends`; only `end_ids` are allowed."""
    self._matcher = matcher
    self._vocab_size = vocab_size
    self._end_ids = tuple(end_ids)
    self._all_ends = frozenset(all_ends)
    self._update()

  def copy(self) -> 'Matcher':
    """Returns a matcher for another sequence with the same tokens so far."""
    return Matcher(self._matcher.deep_copy(), self._vocab_size, self._end_ids, tuple(self._all_ends))

  def take(self, token: int) -> None:
    """Adds a token that the mask allows and that does not end the text."""
    self._matcher.consume_token(token)  # an error shows in is_over and failure
    self._update()

  def _update(self) -> None:
    self.mask = np.zeros(num_words(self._vocab_size), np.uint32)
    self.is_over = self._matcher.is_stopped()
    words = np.frombuffer(b'' if self.is_over else self._matcher.compute_bitmask(), np.uint32)
    self.failure = _clause(self._matcher.get_error()) if self._matcher.is_error() else None
    if self.is_over or self.failure:
      self.is_over = True
      return
    size = min(len(words), len(self.mask))
    self.mask[:size] = words[:size]
    ends = self._end_ids if self._matcher.is_accepting() else ()
    for token in self._all_ends:
      bit = np.uint32(1 << token % 32)
      self.mask[token // 32] &= ~bit
      if token in ends:
        self.mask[token // 32] |= bit
    self.is_over = not self.mask.any()


class Vocabulary:
  """The bytes of all tokens, to look up the tokens that begin with some bytes or contain them."""

  def __init__(self, tokens: Sequence[bytes]):
    """Takes the bytes of each token; empty for tokens without text."""
    self.tokens = tokens
    order = sorted(range(len(tokens)), key=tokens.__getitem__)
    self._ids = np.array(order, np.int64)
    self._sorted = [tokens[token] for token in order]
    self._joined = b''.join(self._sorted)
    self._ends = np.cumsum([len(token) for token in self._sorted])

  def beginning(self, text: bytes) -> np.ndarray:
    """Returns the tokens that begin with `text`."""
    cut = lambda token: token[: len(text)]
    return self._ids[bisect.bisect_left(self._sorted, text, key=cut) : bisect.bisect_right(self._sorted, text, key=cut)]

  def containing(self, text: bytes) -> np.ndarray:
    """Returns the tokens that contain `text`."""
    places, place = [], self._joined.find(text)
    while place >= 0:
      number = int(np.searchsorted(self._ends, place, side='right'))
      is_inside = place + len(text) <= self._ends[number]
      places += [number] if is_inside else []
      place = self._joined.find(text, int(self._ends[number]) if is_inside else place + 1)
    return self._ids[places]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BadWords:
  """Texts that may not appear: excludes each token that would complete one of `words`, however it is tokenized."""

  words: tuple[bytes, ...]
  vocabulary: Vocabulary

  @functools.cached_property
  def _whole(self) -> np.ndarray:
    return np.unique(np.concatenate([self.vocabulary.containing(word) for word in self.words]))

  @property
  def longest(self) -> int:
    return max(map(len, self.words))

  def tokens_after(self, text: bytes) -> Iterator[np.ndarray]:
    """Yields the tokens that may not follow `text`."""
    yield self._whole
    for word in self.words:
      for size in range(1, min(len(word), len(text) + 1)):
        if text.endswith(word[:size]):
          yield self.vocabulary.beginning(word[size:])


class TokenLimits:
  """The tokens that both the fields of a request and its form allow, with the interface of a Matcher.

  Attributes:
    mask, is_over, failure: as in Matcher. If only the end of text may follow the form, `min_tokens` does not prevent
      it.
    is_free: whether any token may come from now on, so that no mask is needed.
  """

  def __init__(
    self,
    *,
    vocab_size: int,
    min_tokens: int = 0,
    end_ids: Sequence[int] = (),
    allowed_ids: Sequence[int] | None = None,
    bad_words: BadWords | None = None,
    form: Matcher | None = None,
  ):
    """Begins a sequence.

    Args:
      vocab_size: V.
      min_tokens: how many tokens must precede one of `end_ids`.
      end_ids: tokens that end the sequence.
      allowed_ids: the only tokens that may come; None allows all.
      bad_words: what the text may not contain.
      form: the matcher of the text's form.
    """
    self._vocab_size = vocab_size
    self._min_tokens = min_tokens
    self._end_ids = np.array(end_ids, np.int64)
    self._allowed_ids = allowed_ids
    self._bad_words = bad_words
    self._form = form
    self._text = b''  # the end of the text that may begin a bad word
    self._num_taken = 0
    allowed = np.zeros(num_words(vocab_size), np.uint32)
    ids = np.arange(vocab_size) if allowed_ids is None else np.array(allowed_ids, np.int64)
    np.bitwise_or.at(allowed, ids // 32, _bits(ids))
    self._allowed = allowed
    self._update()

  def copy(self) -> 'TokenLimits':
    """Returns the limits of another sequence with the same tokens so far."""
    other = copy.copy(self)
    other._form = None if self._form is None else self._form.copy()
    return other

  def take(self, token: int) -> None:
    """Adds a token that the mask allows and that does not end the text."""
    self._num_taken += 1
    if self._form is not None:
      self._form.take(token)
    if self._bad_words is not None:
      tokens = self._bad_words.vocabulary.tokens
      added = tokens[token] if token < len(tokens) else b''
      self._text = (self._text + added)[-self._bad_words.longest :]
    self._update()

  def _update(self) -> None:
    form, may_end = self._form, self._num_taken >= self._min_tokens
    self.is_free = may_end and form is None and self._bad_words is None and self._allowed_ids is None
    self.mask = self._allowed.copy() if form is None else self._allowed & form.mask
    if self._bad_words is not None:
      for ids in self._bad_words.tokens_after(self._text):
        np.bitwise_and.at(self.mask, ids // 32, ~_bits(ids))
    can_end = self.mask.any()
    if not may_end:
      np.bitwise_and.at(self.mask, self._end_ids // 32, ~_bits(self._end_ids))
    self.failure = None if form is None else form.failure
    self.is_over = not self.mask.any() or (form is not None and form.is_over)
    if self.is_over and (form is None or not (form.is_over or can_end)):
      self.failure = self.failure or 'allowed_token_ids, bad_words and min_tokens leave no token that may come next'


def _bits(ids: np.ndarray) -> np.ndarray:
  """Returns the bit of each token in its word of a mask."""
  return np.left_shift(np.uint32(1), (ids % 32).astype(np.uint32))


class _Bytes:
  """A ByteTokenizer with the interface that llguidance's TokenizerWrapper needs."""

  def __init__(self, tokenizer: ByteTokenizer):
    self.eos_token_id, self.bos_token_id = tokenizer.eos_id, tokenizer.bos_id
    self.special_token_ids = list(range(tokenizer.num_special))
    self.tokens = [b'<pad>', b'<bos>', b'<eos>', *(bytes([byte]) for byte in range(256))]

  def __call__(self, text: bytes) -> list[int]:
    return [byte + len(self.special_token_ids) for byte in text]


def _rewritten(schema: str) -> str:
  """Rewrites a JSON schema with the keywords that llguidance has."""
  try:
    return json.dumps(rewrite(json.loads(schema)))
  except (ValueError, RecursionError):
    return schema  # llguidance refuses it


_NO_KEYWORDS = re.compile(r'.*Unimplemented keys: \[(.*?)\]')
_PLACE = re.compile(r'^at \d+\(\d+\): (failed to compile JSON schema: )?')


def _clause(message: str) -> str:
  """Returns an error of llguidance on one line, without the excerpt of the grammar."""
  if keywords := _NO_KEYWORDS.match(message):
    named = keywords[1].replace('"', '')
    return f'grammars have no {named}: leave it out, or let "x-guidance": {{"lenient": true}} in the schema ignore it'
  first, *rest = _PLACE.sub('', message.strip()).splitlines() or ['it is not valid']
  return ' '.join([first, *(line for line in rest if line.startswith('error:'))]).rstrip('.')[:300]


class FormError(UserError):
  """A form of the output that cannot be used; `field` is the request's field that asks for it."""

  def __init__(self, message: str, field: str):
    super().__init__(message)
    self.field = field


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputForm:
  """A grammar that a whole text must match: `value` in the language `kind`, from the request's field `field`."""

  field: str
  kind: Kind
  value: Any

  def compile(self, grammars: Grammars, end_ids: Sequence[int] | None = None) -> Matcher:
    """Returns the matcher of a text, see Grammars.compile; raises a FormError if the form cannot be used."""
    field, value = self.field, self.value
    if self.kind in ('regex', 'grammar'):
      text = value if isinstance(value, str) and value else None
    elif self.kind == 'choice':
      is_choice = isinstance(value, list) and value and all(isinstance(text, str) and text for text in value)
      text = json.dumps(value) if is_choice else None
    else:
      text = value if isinstance(value, str) else json.dumps(value) if isinstance(value, dict | bool) else None
    if text is None:
      expected = {'choice': 'an array of strings', 'json_schema': 'a JSON schema'}.get(self.kind, 'a string')
      raise FormError(f'{field} must be {expected}, and not empty.', field)
    try:
      return grammars.compile(self.kind, text, end_ids=end_ids)
    except UserError as error:
      raise FormError(f'{field} cannot be used: {error}.', field) from error


def wanted_form(request: Any, *others: OutputForm) -> OutputForm | None:
  """Returns the form that a request asks for; None if it asks for none.

  Args:
    request: an object with the field `structured_outputs` and perhaps `response_format`.
    others: forms that follow from other fields.

  Raises:
    FormError: the request asks for several forms, or for an unknown kind.
  """
  wanted = list[OutputForm]()
  for name, value in (request.structured_outputs or {}).items():
    field = f'structured_outputs.{name}'
    if name == 'json_object' and value is True:
      wanted.append(OutputForm(field=field, kind='json_schema', value=_ANY_OBJECT))
    elif name in _KINDS and value is not None:
      wanted.append(OutputForm(field=field, kind=_KINDS[name], value=value))
    elif value not in (None, False):
      raise FormError(f'{field} is not supported here: leave it out.', field)
  response = getattr(request, 'response_format', None) or {'type': 'text'}
  if response.get('type') == 'json_object':
    wanted.append(OutputForm(field='response_format', kind='json_schema', value=_ANY_OBJECT))
  elif response.get('type') == 'json_schema':
    named = response.get('json_schema')
    schema = named.get('schema') if isinstance(named, dict) else None
    wanted.append(OutputForm(field='response_format.json_schema.schema', kind='json_schema', value=schema))
  elif response.get('type') != 'text':
    raise FormError("response_format must have the type 'text', 'json_object' or 'json_schema'.", 'response_format')
  wanted += others
  if len(wanted) > 1:
    fields = ', '.join(form.field for form in wanted)
    raise FormError(f'the output can have one form, not several: {fields}.', wanted[1].field)
  return wanted[0] if wanted else None
