"""Keywords of JSON schemas that llguidance lacks: what a grammar then allows, or which keyword it refuses."""

import json

import pytest

from spmd_tasks.decoding.constraints import FormError, Grammars, OutputForm
from spmd_tasks.decoding.json_schemas import moved
from spmd_tasks.inputs import ByteTokenizer

TOKENIZER = ByteTokenizer()
GRAMMARS = Grammars(TOKENIZER, vocab_size=TOKENIZER.vocab_size, end_ids=(TOKENIZER.eos_id,))


def allows(schema, value) -> bool:
  matcher = OutputForm(field='form', kind='json_schema', value=schema).compile(GRAMMARS)
  for token in (*TOKENIZER.encode(json.dumps(value)), TOKENIZER.eos_id):
    if matcher.is_over and token == TOKENIZER.eos_id:
      return True
    if not int(matcher.mask[token // 32]) >> token % 32 & 1:
      return False
    if token != TOKENIZER.eos_id:
      matcher.take(token)
  return True


NAMES = {'type': 'object', 'additionalProperties': {'type': 'integer'}}
ARRAY = {'type': 'array', 'items': {'enum': ['a', 'b', 7]}}


@pytest.mark.parametrize(
  'schema, allowed, refused',
  [
    ({**ARRAY, 'uniqueItems': True}, [[], ['a'], [7, 'b', 'a']], [['a', 'a'], ['c']]),
    ({**ARRAY, 'uniqueItems': True, 'minItems': 1, 'maxItems': 2}, [['a'], [7, 'b']], [[], [7, 'b', 'a']]),
    ({**ARRAY, 'uniqueItems': False}, [['a', 'a']], [['c']]),
    ({'type': 'array', 'uniqueItems': True, 'maxItems': 1}, [[], [1]], [[1, 2]]),
    ({'not': {'type': ['string', 'null']}}, [1, [], {}], ['x', None]),
    ({'enum': ['a', 'b', 1], 'not': {'enum': ['b', True]}}, ['a', 1], ['b']),
    ({'enum': ['a', 'b', 1], 'not': {'anyOf': [{'const': 'a'}, {'const': 1}]}}, ['b'], ['a', 1]),
    ({'type': 'object', 'not': {'required': ['a']}}, [{}, {'b': 1}], [{'a': 1}]),
    ({'type': 'string', 'not': False}, ['a'], [1]),
    ({**NAMES, 'propertyNames': {'enum': ['a', 'b']}}, [{}, {'a': 1, 'b': 2}], [{'c': 1}, {'a': 'x'}]),
    ({**NAMES, 'propertyNames': {'$ref': '#/$defs/K'}, '$defs': {'K': {'const': 'a'}}}, [{'a': 1}], [{'b': 1}]),
    ({**NAMES, 'propertyNames': {'type': 'string', 'pattern': '^a+$'}}, [{'aa': 1}], [{'b': 1}]),
    ({**NAMES, 'propertyNames': {'maxLength': 2}}, [{'ab': 1}], [{'abc': 1}]),
    ({**NAMES, 'propertyNames': {'type': 'string'}}, [{'abc': 1}], [{'abc': 'x'}]),
    # Names of properties are no keywords.
    ({'type': 'object', 'properties': {'not': {'type': 'integer'}}, 'required': ['not']}, [{'not': 1}], [{'not': 'x'}]),
    ({'const': {'not': {}, 'uniqueItems': True}}, [{'not': {}, 'uniqueItems': True}], [{'not': {}}]),
  ],
)
def test_a_keyword_that_can_be_written_otherwise_holds(schema, allowed, refused):
  assert [value for value in allowed if not allows(schema, value)] == []
  assert [value for value in refused if allows(schema, value)] == []


@pytest.mark.parametrize(
  'schema, keyword',
  [
    ({'type': 'array', 'items': {'type': 'string'}, 'uniqueItems': True}, 'uniqueItems'),
    ({'type': 'string', 'not': {'const': 'x'}}, 'not'),
    ({'type': 'number', 'not': {'type': 'integer'}}, 'not'),
    ({'type': 'object', 'properties': {'a': {}}, 'propertyNames': {'pattern': 'a'}}, 'propertyNames'),
    ({'not': {'type': [{}]}}, 'not'),
    ({'not': {}}, 'not'),
  ],
)
def test_a_keyword_that_cannot_is_refused_by_name(schema, keyword):
  with pytest.raises(FormError, match=rf'grammars have no {keyword}: leave it out, or let .*lenient'):
    allows(schema, None)


def test_a_schema_may_have_a_keyword_ignored():
  schema = {**ARRAY, 'items': {'type': 'string'}, 'uniqueItems': True, 'x-guidance': {'lenient': True}}
  assert allows(schema, ['a', 'a'])


def test_nested_copies_do_not_multiply():
  schema = {'type': 'integer'}
  for _ in range(40):
    schema = {'type': 'object', 'propertyNames': {'enum': ['a', 'b', 'c']}, 'additionalProperties': schema}
  with pytest.raises(FormError, match='no propertyNames'):
    allows(schema, {})


def test_references_move_with_their_schema():
  ref = {'$ref': '#/$defs/City'}
  schema = {'$id': 'x', 'properties': {'enum': ref, 'me': {'$ref': '#'}}, 'default': ref, '$defs': {'City': {}}}
  assert moved(schema, '#/$defs/t') == {
    'properties': {'enum': {'$ref': '#/$defs/t/$defs/City'}, 'me': {'$ref': '#/$defs/t'}},
    'default': ref,
    '$defs': {'City': {}},
  }
