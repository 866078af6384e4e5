"""Whatever is drawn from the allowed tokens matches the grammar, for any tokenizer, and ends where it may."""

import json
import re

import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tasks.decoding.constraints import BadWords, Grammars, TokenLimits, Vocabulary, mask_rows
from spmd_tasks.decoding.sampling import mask_logits
from spmd_tasks.inputs import ByteTokenizer, FolderTokenizer
from spmd_tasks.inputs.tokenizers import bytes_of_tokens
from tests.model_folders import write_tokenizer

SCHEMA = {
  'type': 'object',
  'properties': {'name': {'enum': ['cat', 'été']}, 'age': {'type': 'integer', 'minimum': 3, 'maximum': 120}},
  'required': ['name', 'age'],
  'additionalProperties': False,
}
NUM_BEYOND = 45  # rows of the vocabulary that the tokenizer lacks


@pytest.fixture(scope='module', params=['bytes', 'byte_level', 'metaspace'])
def tokenizer(request, tmp_path_factory):
  if request.param == 'bytes':
    return ByteTokenizer()
  return FolderTokenizer(path=str(write_tokenizer(tmp_path_factory.mktemp('folder'), request.param)))


def allowed_ids(matcher) -> np.ndarray:
  return np.flatnonzero(np.unpackbits(matcher.mask.view(np.uint8), bitorder='little'))


def draw(matcher, ends, rng, most=60) -> tuple[list[int], bool]:
  """Tokens drawn from the masks, and whether the text is complete."""
  ids = []
  while not matcher.is_over and len(ids) < most:
    token = int(rng.choice(allowed_ids(matcher)))
    if token in ends:
      return ids, True
    ids.append(token)
    matcher.take(token)
  return ids, matcher.is_over


def matches_schema(text):
  value = json.loads(text)
  return value['name'] in ('cat', 'été') and 3 <= value['age'] <= 120 and len(value) == 2


@pytest.mark.parametrize(
  'kind, grammar, matches',
  [
    ('regex', '[a-c]{2}(x|été)?[0-9]+', lambda text: re.fullmatch('[a-c]{2}(x|été)?[0-9]+', text)),
    ('json_schema', json.dumps(SCHEMA), matches_schema),
    ('json_schema', 'true', lambda text: [json.loads(text)]),
    ('choice', '["the cat", "the\\n\\"mat\\"", "été"]', lambda text: text in ('the cat', 'the\n"mat"', 'été')),
    ('grammar', 'start: pair ("," pair)*\npair: /[a-z]/ "=" /[0-9]/', lambda text: re.fullmatch(
      '[a-z]=[0-9](,[a-z]=[0-9])*', text)),
  ],
)  # fmt: skip
def test_what_is_drawn_matches(tokenizer, rng, kind, grammar, matches):
  ends = (tokenizer.eos_id, tokenizer.encode('<|im_end|>')[0])
  grammars = Grammars(tokenizer, vocab_size=tokenizer.vocab_size + NUM_BEYOND, end_ids=ends)
  matcher = grammars.compile(kind, grammar)
  num_complete = 0
  for _ in range(20):
    ids, is_complete = draw(matcher.copy(), ends, rng)
    num_complete += is_complete
    assert max(ids) < tokenizer.vocab_size
    if is_complete:
      assert matches(tokenizer.decode(ids)), tokenizer.decode(ids)
  assert num_complete >= 15


def test_the_end_is_allowed_only_where_the_grammar_accepts_it(tokenizer):
  eos = tokenizer.eos_id
  other = tokenizer.encode('z')[-1]
  (a,) = set(tokenizer.encode('aa')[-1:])
  grammars = Grammars(tokenizer, vocab_size=tokenizer.vocab_size, end_ids=(eos,))
  for ends in [(eos,), (eos, other), ()]:
    matcher = grammars.compile('regex', '(aa)+', end_ids=ends)
    assert not {eos, other} & set(allowed_ids(matcher).tolist())
    for token in tokenizer.encode('aa') if a != tokenizer.encode('a')[-1] else [a, a]:
      matcher.take(token)
    assert {eos, other} & set(allowed_ids(matcher).tolist()) == set(ends)


@pytest.mark.parametrize(
  'kind, grammar, message',
  [
    ('regex', '(', 'unclosed group'),
    ('json_schema', '{"type": "foo"}', 'Invalid type'),
    ('json_schema', '{"type": "string", "not": {"const": "x"}}', 'no not: leave it out'),
    ('regex', 'a' * 100_001, '100001 characters'),
    ('grammar', 'start: a\na: a', 'no token of this model can begin it'),
    # What is too complex for llguidance once a token has come.
    ('choice', json.dumps([f'choice {number}' for number in range(2000)]), 'Current row has 2001 items; max is 2000'),
  ],
)
def test_wrong_grammars_are_refused(kind, grammar, message):
  grammars = Grammars(ByteTokenizer(), vocab_size=259, end_ids=(2,))
  with pytest.raises(ValueError, match=message) as refused:
    grammars.compile(kind, grammar)
  assert '\n' not in str(refused.value)


@pytest.mark.parametrize(
  'text, num_allowed',
  [
    ('{"name": "cat", "age": 3}', 25),
    ('{\n  "name": "cat",\n  "age": 3\n}', 31),
    ('{"name":   ', 10),  # the third space
    ('{\n\n', 2),
    ('{\r\n' + ' ' * 41, 43),
  ],
)
def test_white_space_in_json_has_an_end(text, num_allowed):
  tokenizer = ByteTokenizer()
  matcher = Grammars(tokenizer, vocab_size=259, end_ids=(2,)).compile('json_schema', json.dumps(SCHEMA))
  ids = tokenizer.encode(text)
  assert matcher._matcher.validate_tokens(ids) == num_allowed


def test_masks_of_rows_leave_other_rows_as_they_are(rng):
  logits = jnp.asarray(rng.normal(size=(3, 70)), jnp.float32)
  mask = np.array([0b101, 0, 1 << 5], np.uint32)
  masked = np.asarray(mask_logits(logits, mask_rows({1: mask}, 3, 70)))
  np.testing.assert_array_equal(masked[[0, 2]], np.asarray(logits)[[0, 2]])
  assert np.flatnonzero(masked[1] > -np.inf).tolist() == [0, 2, 69]


@pytest.fixture(scope='module')
def vocabulary(tokenizer):
  return Vocabulary(bytes_of_tokens(tokenizer, range(tokenizer.vocab_size + NUM_BEYOND)))


def test_bad_words_leave_out_each_token_that_would_complete_one(tokenizer, vocabulary, rng):
  """By the definition: the text with the token contains the word; tokens split words in any way."""
  words = tuple(word.encode() for word in ('cat', 'at t', 'e', 'aa', '漢'))
  bad_words = BadWords(words=words, vocabulary=vocabulary)
  size = len(vocabulary.tokens)
  prone = [token for token in range(size) if {*vocabulary.tokens[token]} & {*b'cat' + '漢'.encode()}]
  num_left_out = 0
  for _ in range(5):
    limits, text = TokenLimits(vocab_size=size, bad_words=bad_words), b''
    for _ in range(12):
      right = [t for t in range(size) if not any(word in text + vocabulary.tokens[t] for word in words)]
      assert allowed_ids(limits).tolist() == right
      num_left_out += size - len(right)
      token = int(rng.choice(np.intersect1d(right, prone)))
      limits.take(token)
      text += vocabulary.tokens[token]
    assert not any(word.decode() in text.decode(errors='replace') for word in words)
  assert num_left_out > 12 * 5


def test_an_end_comes_after_the_least_number_of_tokens_and_limits_join_a_form(tokenizer, vocabulary):
  eos, size = tokenizer.eos_id, len(vocabulary.tokens)
  limits = TokenLimits(vocab_size=size, min_tokens=2, end_ids=(eos,))
  copied = limits.copy()
  for _ in range(2):
    assert not limits.is_free
    assert np.setdiff1d(np.arange(size), allowed_ids(limits)).tolist() == [eos]
    limits.take(size - 1)
  assert limits.is_free
  assert eos not in allowed_ids(copied)

  a = tokenizer.encode('a')[-1]
  form = Grammars(tokenizer, vocab_size=size, end_ids=(eos,)).compile('regex', 'a?a?a?')
  limits = TokenLimits(vocab_size=size, min_tokens=2, end_ids=(eos,), allowed_ids=[a, eos, size - 1], form=form)
  for ends in ([], [], [eos]):
    assert np.setdiff1d(allowed_ids(limits), [a]).tolist() == ends
    limits.take(a)
  assert limits.is_over or allowed_ids(limits).tolist() == [eos]
  assert limits.failure is None


@pytest.mark.parametrize(
  'form, fields, failure',
  [
    (None, {'allowed_ids': [2], 'min_tokens': 1}, 'leave no token'),
    ('b*', {'allowed_ids': [ord('a') + 3]}, 'leave no token'),
    ('(ab)?', {'allowed_ids': [ord('a') + 3, 2], 'min_tokens': 1}, 'leave no token'),  # after the a
    ('a', {'min_tokens': 9}, None),  # the form is whole
  ],
)
def test_limits_that_leave_no_token_fail_where_the_form_is_not_whole(form, fields, failure):
  matcher = form and Grammars(ByteTokenizer(), vocab_size=259, end_ids=(2,)).compile('regex', form)
  limits = TokenLimits(vocab_size=259, end_ids=(2,), form=matcher, **fields)
  if not limits.is_over:
    limits.take(ord('a') + 3)
  assert limits.is_over
  assert limits.failure is None if failure is None else failure in limits.failure
