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

_NUMBER = (int, float)
# rope_type -> our class, and its keys: name in files -> (our field, types, what its absence implies). _LENGTH is the
# greatest length (max_position_embeddings), and _FACTOR that divided by the original one.
_REQUIRED, _LENGTH, _FACTOR = object(), object(), object()
_SCALINGS: dict[str, tuple[type[RotaryScaling], dict[str, tuple[str, Any, Any]]]] = {
  'linear': (LinearScaling, {'factor': ('factor', _NUMBER, _REQUIRED)}),
  'llama3': (
    Llama3Scaling,
    {
      'original_max_position_embeddings': ('original_length', (int,), _LENGTH),
      'factor': ('factor', _NUMBER, _REQUIRED),
      'low_freq_factor': ('low_frequency_factor', _NUMBER, _REQUIRED),
      'high_freq_factor': ('high_frequency_factor', _NUMBER, _REQUIRED),
    },
  ),
  'yarn': (
    YarnScaling,
    {
      'original_max_position_embeddings': ('original_length', (int,), _LENGTH),
      'factor': ('factor', _NUMBER, _FACTOR),
      'beta_fast': ('beta_fast', _NUMBER, 32.0),
      'beta_slow': ('beta_slow', _NUMBER, 1.0),
      'truncate': ('truncate', (bool,), True),
      'mscale': ('mscale', _NUMBER, None),
      'mscale_all_dim': ('mscale_all_dim', _NUMBER, None),
      'attention_factor': ('attention_factor', _NUMBER, None),
    },
  ),
  'longrope': (
    LongRopeScaling,
    {
      'original_max_position_embeddings': ('original_length', (int,), _LENGTH),
      'factor': ('factor', _NUMBER, _FACTOR),
      'short_factor': ('short_factors', (list,), _REQUIRED),
      'long_factor': ('long_factors', (list,), _REQUIRED),
      'attention_factor': ('attention_factor', _NUMBER, None),
    },
  ),
}


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
    theta = config.read('rope_theta', float, self.theta)
    implied = {
      'rope_theta': theta,
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

  Args:
    given: the dict.
    head_dim: K, or of the part of a head that may rotate.
    lengths: the original length, if the config says it outside of the dict, and the greatest one.
    config: for messages.

  Raises:
    UserError: its type is not known, or it has a setting that is not.
  """
  values = dict(given)
  kind = values.pop('rope_type', None) or values.get('type') or 'default'
  values.pop('type', None)
  theta, partial = values.pop('rope_theta'), values.pop('partial_rotary_factor')
  if not 0 < theta < float('inf'):
    raise UserError(
      f'{config.path} has rotary positions with rope_theta = {theta!r}, which must be positive and finite.'
    )
  num_features = int(head_dim * partial)
  scaling = None
  if kind != 'default':
    if kind not in _SCALINGS:
      raise UserError(f'{config.path} has rotary positions of type {kind!r}: known here are {", ".join(_SCALINGS)}.')
    cls, keys = _SCALINGS[kind]
    if lengths[0] is not None and 'original_max_position_embeddings' in keys:
      values['original_max_position_embeddings'] = lengths[0]
    fields: dict[str, Any] = {}
    for key, (field, kinds, absent) in keys.items():
      value = values.pop(key, None)
      if value is None and absent is _REQUIRED:
        raise UserError(f'{config.path} has rotary positions of type {kind!r} without {key}.')
      if value is None:
        value = {_LENGTH: lengths[1], _FACTOR: lengths[1] / fields.get('original_length', 1)}.get(absent, absent)
      elif type(value) not in kinds:
        raise UserError(f'{config.path} has rotary positions with {key} = {value!r}, which is of another type.')
      if kinds is _NUMBER and value is not None:
        value = float(value)
      fields[field] = tuple(map(float, value)) if isinstance(value, list) else value
    scaling = cls(**fields)
  else:
    values.pop('original_max_position_embeddings', None)  # which says nothing without a scaling
  if values:
    raise UserError(f'{config.path} has rotary positions of type {kind!r} with {values}, which are not known here.')
  return Rotary(
    max_wavelength=float(theta), num_features=None if num_features == head_dim else num_features, scaling=scaling
  )


def write_rotary(rotary: Rotary | None, decoder: Decoder) -> dict[str, Any]:
  """Returns the dict of `rope_parameters`."""
  if rotary is None:
    raise UserError('the model has no rotary positions.')
  written: dict[str, Any] = {'rope_type': 'default', 'rope_theta': rotary.max_wavelength}
  if rotary.num_features is not None:
    written['partial_rotary_factor'] = rotary.num_features / decoder.head_dim
  for kind, (cls, keys) in _SCALINGS.items():
    if type(rotary.scaling) is cls:
      values = {key: getattr(rotary.scaling, field) for key, (field, _, _) in keys.items()}
      written |= {'rope_type': kind}
      written |= {
        key: list(value) if isinstance(value, tuple) else value for key, value in values.items() if value is not None
      }
  if rotary.scaling is not None and written['rope_type'] == 'default':
    raise UserError(f'{type(rotary.scaling).__name__} has no name in transformers.')
  return written
