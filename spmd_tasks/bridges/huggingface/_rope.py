"""Rotary positions in a config.json: `rope_parameters` (transformers 5), or `rope_theta` with `rope_scaling` (before).

Both styles are read, and the new one is written. Gemma 3 has one dict per type of layer; in the old style it had
`rope_local_base_freq` for the layers with a window.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any

from spmd_tasks.bridges.huggingface._config_keys import Config, Values
from spmd_tasks.bridges.huggingface._decoder import Decoder
from spmd_tasks.errors import UserError
from spmd_tasks.layers.attention import (
  LinearScaling,
  Llama3Scaling,
  LongRopeScaling,
  Rotary,
  RotaryScaling,
  YarnScaling,
)

_SCALINGS: dict[str, type[RotaryScaling]] = {
  'linear': LinearScaling,
  'llama3': Llama3Scaling,
  'yarn': YarnScaling,
  'longrope': LongRopeScaling,
}
_ORIGINAL = 'original_max_position_embeddings'
# Fields of these that have another name in files.
_KEYS = {
  'original_length': _ORIGINAL,
  'low_frequency_factor': 'low_freq_factor',
  'high_frequency_factor': 'high_freq_factor',
  'short_factors': 'short_factor',
  'long_factors': 'long_factor',
}
_REQUIRED = ('low_freq_factor', 'high_freq_factor')  # by transformers, although they have defaults here
_NUMBER = (int, float)
_TYPES: dict[str, Any] = {_ORIGINAL: (int,), 'truncate': (bool,), 'short_factor': (list,), 'long_factor': (list,)}


def _fields(cls: type[RotaryScaling]) -> dict[str, dataclasses.Field[Any]]:
  """Returns the fields of a scaling that files have, by their keys."""
  return {_KEYS.get(field.name, field.name): field for field in dataclasses.fields(cls) if field.name != 'is_long'}


@dataclasses.dataclass(frozen=True)
class Rope:
  """The rotary positions.

  Attributes:
    theta: the family's default.
    local_theta: its default for layers with a window; None: they have the same positions as the others.
    partial: the part of a head that rotates, where no key says it; None: all of it, as `transformers` ignores the key.
    default: the `rope_parameters` of a config.json that has none.
    max_length: the family's default of `max_position_embeddings`.
  """

  theta: float = 10_000.0
  local_theta: float | None = None
  partial: float | None = None
  default: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  max_length: int = 131_072

  def read(self, config: Config, known: Values) -> Values:
    given = config.read('rope_parameters', dict, {})
    old = config.read('rope_scaling', dict, {})
    implied = {
      'rope_theta': config.read('rope_theta', float, self.theta),
      'partial_rotary_factor': config.read('partial_rotary_factor', float, self.partial or 1.0),
    }
    own_length = config.read('original_max_position_embeddings', int, None)  # Phi-3's, which comes first
    lengths = (own_length, config.read('max_position_embeddings', int, self.max_length))
    head_dim = known.get('latent.rope_head_dim') or known['head_dim']
    if self.local_theta is None:
      if not given and not old and not config.has('rope_theta'):
        given = self.default
      rotary = read_rotary(implied | (old or given), head_dim, lengths, config)
      if self.partial is None and rotary.num_features is not None:
        raise UserError(f'{config.path} has a partial_rotary_factor, which transformers ignores in this family.')
      return {'rotary': rotary}
    nested = given if {'full_attention', 'sliding_attention'} <= given.keys() else {}
    if given and not nested:
      raise config.error('rope_parameters', "must have the keys 'full_attention' and 'sliding_attention'")
    local = implied | {'rope_theta': config.read('rope_local_base_freq', float, self.local_theta)}
    return {
      'rotary': read_rotary(implied | (nested.get('full_attention') or old), head_dim, lengths, config),
      'local_rotary': read_rotary(local | (nested.get('sliding_attention') or {}), head_dim, lengths, config),
    }

  def write(self, decoder: Decoder) -> Values:
    if self.partial is None and decoder.rotary is not None and decoder.rotary.num_features is not None:
      raise UserError('only a part of each head has rotary positions.')
    if self.local_theta is None:
      return {'rope_parameters': write_rotary(decoder.rotary, decoder)}
    return {
      'rope_parameters': {
        'full_attention': write_rotary(decoder.rotary, decoder),
        'sliding_attention': write_rotary(decoder.local_rotary or decoder.rotary, decoder),
      }
    }


def read_rotary(given: Mapping[str, Any], head_dim: int, lengths: tuple[int | None, int], config: Config) -> Rotary:
  """Returns the rotary positions that a dict of `rope_parameters` says.

  `head_dim` is K, or the part of a head that may rotate; `lengths` are the original one, if the config says it outside
  of the dict, and the greatest one. Raises a UserError if the type or a setting is not known.
  """
  values = dict(given)
  kind = values.pop('rope_type', None) or values.get('type') or 'default'
  values.pop('type', None)
  theta, partial = values.pop('rope_theta'), values.pop('partial_rotary_factor')
  where = f'{config.path} has rotary positions'
  if not 0 < theta < float('inf'):
    raise UserError(f'{where} with rope_theta = {theta!r}, which must be positive and finite.')
  if kind not in ('default', *_SCALINGS):
    raise UserError(f'{where} of type {kind!r}: known here are {", ".join(_SCALINGS)}.')
  scaling = None if kind == 'default' else _read_scaling(kind, values, lengths, where)
  if kind == 'default':
    values.pop(_ORIGINAL, None)  # which says nothing without a scaling
  if values:
    raise UserError(f'{where} of type {kind!r} with {values}, which are not known here.')
  num_features = None if int(head_dim * partial) == head_dim else int(head_dim * partial)
  return Rotary(max_wavelength=float(theta), num_features=num_features, scaling=scaling)


def _read_scaling(kind: str, values: dict[str, Any], lengths: tuple[int | None, int], where: str) -> RotaryScaling:
  """Takes the settings of a scaling out of the values."""
  fields, (own_length, max_length) = _fields(_SCALINGS[kind]), lengths
  if own_length is not None and _ORIGINAL in fields:
    values[_ORIGINAL] = own_length
  implied: dict[str, Any] = {_ORIGINAL: max_length, **dict.fromkeys(_REQUIRED, dataclasses.MISSING)}
  if kind in ('yarn', 'longrope'):
    implied['factor'] = max_length / (values.get(_ORIGINAL) or max_length)
  found: dict[str, Any] = {}
  for key, field in fields.items():
    value, types = values.pop(key, None), _TYPES.get(key, _NUMBER)
    if value is None:
      value = implied.get(key, field.default)
    elif type(value) not in types:
      raise UserError(f'{where} with {key} = {value!r}, which is of another type.')
    elif types is _NUMBER:
      value = float(value)
    if value is dataclasses.MISSING:
      raise UserError(f'{where} of type {kind!r} without {key}.')
    found[field.name] = tuple(map(float, value)) if isinstance(value, list) else value
  return _SCALINGS[kind](**found)


def write_rotary(rotary: Rotary | None, decoder: Decoder) -> dict[str, Any]:
  """Returns the dict of `rope_parameters`."""
  if rotary is None:
    raise UserError('the model has no rotary positions.')
  written: dict[str, Any] = {'rope_type': 'default', 'rope_theta': rotary.max_wavelength}
  if rotary.num_features is not None:
    written['partial_rotary_factor'] = rotary.num_features / decoder.head_dim
  if rotary.scaling is not None:
    kind = next((kind for kind, cls in _SCALINGS.items() if type(rotary.scaling) is cls), None)
    if kind is None:
      raise UserError(f'{type(rotary.scaling).__name__} has no name in transformers.')
    values = {key: getattr(rotary.scaling, field.name) for key, field in _fields(_SCALINGS[kind]).items()}
    values = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
    written |= {'rope_type': kind, **{key: value for key, value in values.items() if value is not None}}
  return written
