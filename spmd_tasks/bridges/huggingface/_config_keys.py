"""Keys of a config.json: each kind reads a setting into fields of a Decoder, and writes it back.

    Key('num_hidden_layers', 'num_layers', int, 32)   # one key, one field, the family's default
    Only('hidden_act', 'silu')                        # a key of which one value is understood here

A key may be absent: then it has the default of its family in `transformers`. null counts as absent where the default is
None. A key that no entry of the family reads is an error, unless it cannot change what the model computes.
"""

from collections.abc import Callable, Collection, Mapping
import dataclasses
import operator
from typing import Any, Protocol

from spmd_tasks.bridges.huggingface._decoder import Decoder
from spmd_tasks.errors import UserError

Values = dict[str, Any]

# Keys of every config.json that say nothing about what the model computes. Dropout acts in training only, and is not
# used here; auxiliary losses are the experiment's.
INERT = {
  *('model_type', 'architectures', 'transformers_version', '_name_or_path', 'auto_map', 'dtype', 'torch_dtype'),
  *('use_cache', 'initializer_range', 'bos_token_id', 'eos_token_id', 'pad_token_id', 'sep_token_id', 'unk_token_id'),
  *('dropout_rate', 'initializer_factor', 'router_z_loss_coef'),
  *('attention_dropout', 'resid_pdrop', 'embd_pdrop', 'attn_pdrop', 'hidden_dropout', 'classifier_dropout'),
  *('output_router_logits', 'router_aux_loss_coef', 'aux_loss_alpha', 'seq_aux', 'router_jitter_noise'),
  *('max_position_embeddings', 'pretraining_tp', '_attn_implementation', 'attn_implementation', 'use_return_dict'),
  *('return_dict', 'output_hidden_states', 'output_attentions', 'torchscript', 'use_bfloat16', 'pruned_heads'),
  *('chunk_size_feed_forward', 'is_decoder', 'cross_attention_hidden_size', 'decoder_start_token_id', 'prefix'),
  *('finetuning_task', 'id2label', 'label2id', 'task_specific_params', 'problem_type', 'tokenizer_class'),
  *('max_length', 'min_length', 'do_sample', 'early_stopping', 'num_beams', 'num_beam_groups', 'diversity_penalty'),
  *('temperature', 'top_k', 'top_p', 'typical_p', 'repetition_penalty', 'length_penalty', 'no_repeat_ngram_size'),
  *('encoder_no_repeat_ngram_size', 'bad_words_ids', 'num_return_sequences', 'output_scores', 'forced_bos_token_id'),
  *('return_dict_in_generate', 'forced_eos_token_id', 'remove_invalid_values', 'exponential_decay_length_penalty'),
  *('suppress_tokens', 'begin_suppress_tokens', 'tf_legacy_loss', 'cache_implementation', 'unsloth_version'),
  'sentence_transformers',
}
# Keys that change what is computed, where they have another value than this.
_NEUTRAL = {
  'is_encoder_decoder': False,
  'add_cross_attention': False,
  'tie_encoder_decoder': False,
  'per_layer_config': None,
}
_JSON_TYPES = (str, int, float, bool, list, dict)


class Config:
  """A config.json that remembers which of its keys were read."""

  def __init__(self, values: Mapping[str, Any], path: str):
    self.values = values
    self.path = path
    self._unread = set(values) - INERT

  def read(self, key: str, kind: Any, default: Any) -> Any:
    """Returns a value of the type `kind` (one or a tuple of them), or the default where the key is absent or null.

    Raises a UserError if the value is of another type.
    """
    self._unread.discard(key)
    value = self.values.get(key)
    if value is None:
      return default
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if float in kinds and type(value) is int:
      return float(value)
    if type(value) not in kinds:
      raise self.error(key, f'must be of type {" or ".join(each.__name__ for each in kinds)}')
    return value

  def error(self, key: str, reason: str) -> UserError:
    return UserError(f'{self.path} has {key} = {self.values.get(key)!r:.100}, but it {reason}.')

  def has(self, key: str) -> bool:
    return self.values.get(key) is not None

  def expect(self, key: str, value: Any) -> None:
    """Raises a UserError if a key is there and is not `value`, which other keys say."""
    if self.read(key, type(value), value) != value:
      raise self.error(key, f'follows from other keys and must be {value!r}')

  def finish(self, inert: Collection[str]) -> None:
    """Raises a UserError that names the keys that were not read, except those in `inert`."""
    for key, value in _NEUTRAL.items():
      if key in self._unread and self.values[key] != value:
        raise self.error(key, f'must be {value!r}, as nothing else is understood here')
    if unknown := sorted(self._unread - _NEUTRAL.keys() - set(inert)):
      values = ', '.join(f'{key} = {self.values[key]!r:.60}' for key in unknown)
      raise UserError(
        f'{self.path} has settings that are not known for this family, so that the outputs could be others: {values}.'
      )


MAX_LAYERS = 10_000


class Entry(Protocol):
  """One setting, in both directions."""

  def read(self, config: Config, known: Values) -> Values:
    """Returns fields of the Decoder. `known` are the fields that earlier entries have read."""

  def write(self, decoder: Decoder) -> Values:
    """Returns keys of config.json."""


@dataclasses.dataclass(frozen=True)
class Key:
  """A key that is a field of the Decoder, or several that are equal.

  Attributes:
    key, field, kind: its name, the field or fields, and the type of its values. `latent.kv_rank` is a field of a part.
    default: the family's, or a function of the fields that are known.
    aliases: other names of the key.
    names: where the values have other names here, of all that are known; of two that mean the same, the first is
      written.
    nullable: whether null means None, and not the default.
  """

  key: str
  field: str | tuple[str, ...]
  kind: Any
  default: Any = None
  aliases: tuple[str, ...] = ()
  names: Mapping[Any, Any] | None = None
  nullable: bool = False

  @property
  def _fields(self) -> tuple[str, ...]:
    return (self.field,) if isinstance(self.field, str) else self.field

  def read(self, config: Config, known: Values) -> Values:
    value = self.default(known) if callable(self.default) else self.default
    if self.nullable and self.key in config.values:
      value = None
    for key in (self.key, *self.aliases):
      value = config.read(key, self.kind, value)
    if self.names is not None:
      if value not in self.names:
        raise config.error(self.key, f'must be one of {", ".join(map(str, self.names))}')
      value = self.names[value]
    elif value is None and not self.nullable:
      raise UserError(f'{config.path} has no {self.key}, which its family needs.')
    if type(value) in (int, float) and not 0 < value < float('inf'):
      raise config.error(self.key, 'must be positive and finite')
    if str(self.field).endswith('num_layers') and value > MAX_LAYERS:  # each has entries in fields of the Decoder
      raise config.error(self.key, f'must be at most {MAX_LAYERS}')
    return dict.fromkeys(self._fields, value)

  def write(self, decoder: Decoder) -> Values:
    part = self._fields[0].rpartition('.')[0].partition('.')[0]
    if part and getattr(decoder, part) is None:
      raise UserError(f'the model has no {part}.')
    value = operator.attrgetter(self._fields[0])(decoder)
    if self.names is None:
      return {self.key: value}
    same = [name for name, each in self.names.items() if each == value]
    if not same:
      raise UserError(f'{self._fields[0]} = {value!r} has no name in transformers.')
    return {self.key: self.default if self.default in same else same[0]}


@dataclasses.dataclass(frozen=True)
class Only:
  """A key of which one value is understood; the first value is the family's default and what is written."""

  key: str
  value: Any
  also: tuple[Any, ...] = ()

  def read(self, config: Config, known: Values) -> Values:
    value = config.read(self.key, _JSON_TYPES, self.value)
    if value not in (self.value, *self.also):
      raise config.error(self.key, f'must be {self.value!r}: nothing else is understood here')
    return {}

  def write(self, decoder: Decoder) -> Values:
    return {} if self.value is None else {self.key: self.value}


ACTIVATIONS = {
  'silu': 'silu',
  'swish': 'silu',
  'gelu_pytorch_tanh': 'gelu',
  'gelu_new': 'gelu',
  'gelu_fast': 'gelu',
  'gelu': 'gelu_exact',
  'relu': 'relu',
  'relu2': 'squared_relu',
}


def activation(key: str = 'hidden_act', default: str = 'silu') -> Key:
  """The activation of the feed-forward sublayers, by the names of `transformers`."""
  return Key(key, 'activation', str, default, names=ACTIVATIONS)


def attention_bias(default: bool = False) -> Key:
  """`attention_bias`: of all four projections."""
  return Key('attention_bias', ('qkv_bias', 'out_bias'), bool, default)


@dataclasses.dataclass(frozen=True)
class AllWindowed:
  """`sliding_window` of every layer; null for none."""

  default: int | None = None

  def read(self, config: Config, known: Values) -> Values:
    absent = self.default if 'sliding_window' not in config.values else None
    window = config.read('sliding_window', int, absent)
    return {'window': window, 'windowed': (window is not None,) * known['num_layers']}

  def write(self, decoder: Decoder) -> Values:
    if len(set(decoder.windowed)) > 1:
      raise UserError('some layers have a window and others have none.')
    return {'sliding_window': decoder.window}


@dataclasses.dataclass(frozen=True)
class LayerTypes:
  """`layer_types`, or without it the pattern of the family: `is_windowed(layer, config)`.

  With `use_key`, the window counts only where `use_sliding_window` is true.
  """

  is_windowed: Callable[[int, Config], bool]
  default_window: int | None
  use_key: bool = False

  def read(self, config: Config, known: Values) -> Values:
    window = config.read('sliding_window', int, self.default_window)
    layers = range(known['num_layers'])
    is_used = config.read('use_sliding_window', bool, False) if self.use_key else True
    types = config.read('layer_types', list, None)
    windowed = tuple(self.is_windowed(layer, config) for layer in layers)
    if types is not None:
      if len(types) < len(layers) or set(types) - {'full_attention', 'sliding_attention'}:
        raise config.error('layer_types', f"must name 'full_attention' or 'sliding_attention' for {len(layers)} layers")
      windowed = tuple(types[layer] == 'sliding_attention' for layer in layers)
    if not is_used or window is None:
      windowed = (False,) * len(layers)
    return {'window': window if any(windowed) else None, 'windowed': windowed}

  def write(self, decoder: Decoder) -> Values:
    types = ['sliding_attention' if is_windowed else 'full_attention' for is_windowed in decoder.windowed]
    used = {'use_sliding_window': any(decoder.windowed)} if self.use_key else {}
    return {'sliding_window': decoder.window, 'layer_types': types, **used}
