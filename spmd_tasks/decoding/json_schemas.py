"""JSON schemas for grammars: replaces keywords that llguidance does not have, and moves references.

    rewrite({'not': {'type': 'string'}})     # {'type': ['null', 'boolean', 'object', 'array', 'number']}
    moved({'$ref': '#/$defs/City'}, '#/$defs/weather')

A keyword that cannot be replaced stays, and llguidance names it in its error.
"""

from collections.abc import Callable, Mapping, Sequence
import itertools
import json
from typing import Any

_ONE = (  # keywords whose value is a schema
  *('items', 'additionalItems', 'unevaluatedItems', 'additionalProperties', 'unevaluatedProperties', 'contains'),
  *('not', 'if', 'then', 'else', 'propertyNames'),
)
_LISTS = ('anyOf', 'oneOf', 'allOf', 'prefixItems')
_MAPS = ('properties', 'patternProperties', '$defs', 'definitions', 'dependentSchemas')
_TYPES = ('null', 'boolean', 'object', 'array', 'number', 'string')
_MAX_COPIED = 20_000  # characters of a schema that is copied for each name, as nested copies multiply
_MAX_UNIQUE = 4  # values, with 65 ordered selections


def map_schemas(schema: Any, function: Callable[[dict[str, Any]], Any]) -> Any:
  """Applies a function to every schema inside a schema, inner ones first, and then to the schema itself."""
  if not isinstance(schema, Mapping):
    return schema
  inner = dict(schema)
  for name, value in schema.items():
    if name in _ONE and isinstance(value, Mapping):
      inner[name] = map_schemas(value, function)
    elif name in (*_LISTS, 'items') and isinstance(value, list):
      inner[name] = [map_schemas(part, function) for part in value]
    elif name in _MAPS and isinstance(value, Mapping):
      inner[name] = {key: map_schemas(part, function) for key, part in value.items()}
  return function(inner)


def moved(schema: Mapping[str, Any], place: str) -> dict[str, Any]:
  """Returns a schema whose references to itself are valid when it is at `place` of another schema."""

  def move(part: dict[str, Any]) -> dict[str, Any]:
    reference = part.get('$ref')
    if not isinstance(reference, str) or not reference.startswith('#'):
      return part
    return {**part, '$ref': place + reference[1:]}

  return map_schemas(_without(schema, '$id', '$schema', 'x-guidance'), move)


def rewrite(schema: Any) -> Any:
  """Returns an equivalent schema without `uniqueItems`, `not` and `propertyNames`, as far as possible."""
  try:
    rewritten = map_schemas(schema, lambda part: _without_not(_without_names(_without_unique(part), schema)))
  except (TypeError, RecursionError):  # a keyword has an invalid value
    return schema
  return schema if isinstance(rewritten, bool) else rewritten


def resolve(reference: Any, root: Any) -> Any:
  """Returns the schema inside `root` that a `$ref` names; None if there is none."""
  if not isinstance(reference, str) or not reference.startswith('#'):
    return None
  part = root
  for name in reference[1:].split('/')[1:]:
    part = part.get(name.replace('~1', '/').replace('~0', '~')) if isinstance(part, Mapping) else None
  return part


def _without(schema: Mapping[str, Any], *names: str) -> dict[str, Any]:
  return {name: value for name, value in schema.items() if name not in names}


def _values(schema: Any) -> list[Any] | None:
  """Returns the values that a schema lists; None if it lists none."""
  if not isinstance(schema, Mapping):
    return None
  values = schema.get('enum', [schema['const']] if 'const' in schema else None)
  return values if isinstance(values, list) else None


def _without_unique(schema: dict[str, Any]) -> dict[str, Any]:
  if schema.get('uniqueItems') not in (True, False):
    return schema
  others = _without(schema, 'uniqueItems')
  least, most = schema.get('minItems', 0), schema.get('maxItems')
  if schema['uniqueItems'] is False or most in (0, 1):
    return others
  values = _values(schema.get('items'))
  if values is None or len(values) > _MAX_UNIQUE or schema.get('type') != 'array' or type(least) is not int:
    return schema
  sizes = range(least, 1 + min(len(values), most if type(most) is int else len(values)))
  orders = [order for size in sizes for order in itertools.permutations(values, size)]
  return {**_without(others, 'type', 'items', 'minItems', 'maxItems'), 'anyOf': [_tuple(order) for order in orders]}


def _tuple(values: Sequence[Any]) -> dict[str, Any]:
  """Returns the schema of an array of these values."""
  size = len(values)
  items = {'prefixItems': [{'const': value} for value in values]} if size else {}
  return {'type': 'array', **items, 'items': False, 'minItems': size, 'maxItems': size}


def _without_names(schema: dict[str, Any], root: Any) -> dict[str, Any]:
  rule = schema.get('propertyNames')
  if isinstance(rule, Mapping) and set(rule) == {'$ref'}:
    rule = resolve(rule['$ref'], root)
  others, rest = _without(schema, 'propertyNames'), schema.get('additionalProperties', {})
  if rule is True:
    return others
  if not isinstance(rule, Mapping) or 'patternProperties' in schema:
    return schema
  rule = _without(rule, 'title', 'description', 'type') if rule.get('type', 'string') == 'string' else rule
  if not rule:
    return others
  known = schema.get('properties', {})
  names = _values(rule)
  if names is not None and set(rule) <= {'enum', 'const'} and isinstance(known, Mapping):
    if len(names) * len(json.dumps(rest)) > _MAX_COPIED:
      return schema
    properties = {name: known.get(name, rest) for name in names if isinstance(name, str)}
    return {**others, 'properties': properties, 'additionalProperties': False}
  if set(rule) <= {'minLength', 'maxLength'}:
    rule = {'pattern': f'^[\\s\\S]{{{rule.get("minLength", 0)},{rule.get("maxLength", "")}}}$'}
  if set(rule) == {'pattern'} and not known:
    return {**others, 'patternProperties': {rule['pattern']: rest}, 'additionalProperties': False}
  return schema


def _without_not(schema: dict[str, Any]) -> Any:
  rule = schema.get('not')
  others = _without(schema, 'not')
  if rule is False:
    return others
  if rule is True or rule == {}:
    return False
  if not isinstance(rule, Mapping):
    return schema
  if set(rule) == {'anyOf'} and isinstance(rule['anyOf'], list):
    for part in rule['anyOf']:
      others = _without_not({**others, 'not': part}) if isinstance(others, dict) and 'not' not in others else others
    return schema if isinstance(others, dict) and 'not' in others else others
  if set(rule) == {'type'}:
    return _without_types(schema, others, rule['type'])
  excluded, values = _values(rule), _values(schema)
  if excluded is not None and values is not None and set(rule) <= {'enum', 'const', 'type'}:
    rest = [value for value in values if not any(value == other and type(value) is type(other) for other in excluded)]
    return {**_without(others, 'const'), 'enum': rest} if rest else False
  names = rule.get('required')
  if set(rule) == {'required'} and isinstance(names, list) and len(names) == 1 and schema.get('type') == 'object':
    known = schema.get('properties', {})
    return {**others, 'properties': {**known, names[0]: False}} if isinstance(known, Mapping) else schema
  return schema


def _without_types(schema: dict[str, Any], others: dict[str, Any], excluded: Any) -> Any:
  excluded = set(excluded if isinstance(excluded, list) else [excluded])
  types = schema.get('type', list(_TYPES))
  types = types if isinstance(types, list) else [types]
  if 'integer' in excluded and 'number' in types and 'number' not in excluded:
    return schema  # there is no type of numbers that are not integers
  rest = [kind for kind in types if kind not in excluded and not (kind == 'integer' and 'number' in excluded)]
  return {**others, 'type': rest} if rest else False
