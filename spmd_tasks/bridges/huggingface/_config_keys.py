"""Keys of a config.json: each kind of entry reads a setting into fields of a Decoder, and writes it back.

    Key('num_hidden_layers', 'num_layers', int, 32)   # one key, one field, the family's default
    FixedKey('hidden_act', 'silu')                    # a key with only one supported value

An absent key has the default of its family in `transformers`. null counts as absent if this default is None, and is an
error otherwise, as in `transformers`. The entries of a family cover every key that `transformers` reads to compute
logits. Published folders have further keys: keys that do not affect the computation, or have a neutral value, are
ignored; any other unknown key is an error, unless the user accepts it.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
import dataclasses
import math
import operator
import re
from typing import Any, Protocol

from spmd_tasks.bridges.huggingface._decoder import Decoder
from spmd_tasks.errors import UserError

Values = dict[str, Any]

# Keys that do not affect what the model computes: files and versions, tokens, training, generation, implementations.
# Dropout acts only in training and is not imported; the experiment sets auxiliary losses.
_INERT_NAMES = {
  *('model_type', 'architectures', 'auto_map', 'dtype', 'torch_dtype', 'prefix', 'finetuning_task', 'processor_class'),
  *('id2label', 'label2id', 'num_labels', 'problem_type', 'task_specific_params', 'sentence_transformers'),
  *('use_cache', 'use_return_dict', 'return_dict', 'is_decoder', 'use_bfloat16', 'torchscript', 'is_llama_config'),
  *('pruned_heads', 'chunk_size_feed_forward', 'tf_legacy_loss', 'cross_attention_hidden_size', 'model_parallel'),
  *('pretraining_tp', 'ep_size', 'tp_size', 'fsdp', 'seq_aux', 'learning_rate', 'weight_decay', 'generation_config'),
  *('do_sample', 'early_stopping', 'num_beams', 'num_beam_groups', 'diversity_penalty', 'temperature', 'top_k'),
  *('top_p', 'min_p', 'typical_p', 'epsilon_cutoff', 'eta_cutoff', 'repetition_penalty', 'length_penalty'),
  *('encoder_repetition_penalty', 'no_repeat_ngram_size', 'encoder_no_repeat_ngram_size', 'bad_words_ids'),
  *('num_return_sequences', 'return_dict_in_generate', 'remove_invalid_values', 'exponential_decay_length_penalty'),
  *('suppress_tokens', 'begin_suppress_tokens', 'cache_implementation', 'num_assistant_tokens', 'chat_template'),
  *('num_assistant_tokens_schedule', 'assistant_confidence_threshold', 'assistant_lookbehind', 'target_lookbehind'),
  *('min_length', 'max_length', 'max_new_tokens', 'min_new_tokens', 'seq_length', 'context_length', 'n_ctx'),
  *('max_position_embeddings', 'max_seq_len', 'max_seq_length', 'max_sequence_length', 'max_model_len'),
  'model_max_length',
}
_INERT = re.compile(
  '|'.join(
    (
      r'_.*|.*name_or_path',  # keys with a leading _ are private to transformers
      r'(.*_)?token(_ids?|_index)?|.*_token_ids|tokenizer_.*|.*_version|transformers\.js_config',
      r'.*dropout.*|.*_pdrop|drop_path.*|(.*_)?loss(_.*)?|aux_loss.*|.*jitter.*|neftune_.*|unsloth_.*',
      r'(.*_)?initializer_.*|init_(std|range|method|device)|.*_init_std|gradient_checkpointing.*|train(ing)?_.*|warmup.*',
      r'(use_)?(flash_att|fused|liger|xformers|sdpa).*|(attn|experts)_implementation',
      r'output_(attentions|hidden_states|scores|(router_)?logits|past)',
    )
  )
)
# Keys that affect the computation unless they have this value.
_NEUTRAL = {
  'is_encoder_decoder': False,
  'add_cross_attention': False,
  'tie_encoder_decoder': False,
  'per_layer_config': None,
  'is_causal': True,
}
_JSON_TYPES = (str, int, float, bool, list, dict)


def is_inert(key: str) -> bool:
  """Whether a key of config.json never affects what the model computes."""
  return key in _INERT_NAMES or _INERT.fullmatch(key) is not None


def is_neutral(value: Any) -> bool:
  """Whether a value leaves a feature off for any key: null, false, 0, 1 or empty."""
  return not value or (type(value) in (int, float) and value == 1)


class Config:
  """A config.json that records which of its keys were read."""

  def __init__(self, values: Mapping[str, Any], path: str, accepted: Collection[str] = ()):
    """Wraps the values of a config.json; unknown keys in `accepted` are ignored, as the user asked."""
    self.values = values
    self.path = path
    self.keys_read: set[str] = set()
    self._accepted = accepted

  def read(self, key: str, kind: Any, default: Any) -> Any:
    """Returns the value of a key, or the default if the key is absent or null.

    Raises a UserError if the value is not of type `kind`, a type or a tuple of types.
    """
    self.keys_read.add(key)
    value = self.values.get(key)
    if value is None:
      return default
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if float in kinds and type(value) is int:
      return float(value)
    if type(value) not in kinds:
      raise self.error(key, f'must be of type {" or ".join(kind.__name__ for kind in kinds)}')
    return value

  def error(self, key: str, reason: str) -> UserError:
    return UserError(f'{self.path} has {key} = {self.values.get(key)!r:.100}, but it {reason}.')

  def has(self, key: str) -> bool:
    return self.values.get(key) is not None

  def is_null(self, key: str) -> bool:
    return key in self.values and self.values[key] is None

  def expect(self, key: str, value: Any) -> None:
    """Raises a UserError if a key is present and differs from `value`, which follows from other keys."""
    if self.read(key, type(value), value) != value:
      raise self.error(key, f'follows from other keys and must be {value!r}')

  def finish(self, inert: Collection[str]) -> None:
    """Raises a UserError if unread keys may affect what the model computes; the message lists them.

    Args:
      inert: keys of the family that never affect the computation.
    """
    unread = {key: self.values[key] for key in self.values.keys() - self.keys_read - set(inert) if not is_inert(key)}
    for key, value in _NEUTRAL.items():
      if unread.pop(key, None) not in (value, None):
        raise self.error(key, f'must be {value!r}; other values are not supported')
    if set(unread.get('layer_types') or ()) == {'full_attention'} and not self.has('sliding_window'):
      del unread['layer_types']
    may_matter = {key for key, value in unread.items() if not is_neutral(value) and not self._is_repeated(key)}
    if unknown := sorted(may_matter - set(self._accepted)):
      values = ', '.join(f'{key} = {unread[key]!r:.60}' for key in unknown)
      accept = f'accept_config_keys={",".join(unknown)}'
      raise UserError(
        f'{self.path} has unknown settings that may change the outputs: {values}. If they do not, accept them with '
        f'--set {accept}, or in init_from and draft_model with FOLDER?{accept}.'
      )

  def _is_repeated(self, key: str) -> bool:
    """Whether a key repeats the value of a key that was read and that it extends: `sliding_window_size`."""
    others = (
      name for name in self.keys_read & self.values.keys() if key.startswith(f'{name}_') or key.endswith(f'_{name}')
    )
    return any(self.values[name] == self.values[key] for name in others)


MAX_LAYERS = 10_000
LayerFlag = Callable[[int, Config], bool]  # from the number of a layer and the config


class Entry(Protocol):
  """One setting, convertible in both directions."""

  def read(self, config: Config, known: Values) -> Values:
    """Returns fields of the Decoder; `known` has the fields that earlier entries have read."""

  def write(self, decoder: Decoder) -> Values:
    """Returns keys of config.json."""


@dataclasses.dataclass(frozen=True)
class Key:
  """A key that sets a field of the Decoder, or several fields to the same value.

  Attributes:
    key: the name of the key.
    field: the field or fields; `latent.kv_rank` is a field of a nested dataclass.
    kind: the type of the values.
    default: the family's default, or a function that computes it from the known fields.
    aliases: alternative names of the key.
    names: maps each supported value to the Decoder's; if several mean the same, the first is written.
    nullable: whether null means None.
    null: computes the meaning of null from the known fields, if it is neither None nor the default.
  """

  key: str
  field: str | tuple[str, ...]
  kind: Any
  default: Any = None
  aliases: tuple[str, ...] = ()
  names: Mapping[Any, Any] | None = None
  nullable: bool = False
  null: Callable[[Values], Any] | None = None

  @property
  def _fields(self) -> tuple[str, ...]:
    return (self.field,) if isinstance(self.field, str) else self.field

  def read(self, config: Config, known: Values) -> Values:
    default = self.null if self.null is not None and self.key in config.values else self.default
    value = default(known) if callable(default) else default
    if self.nullable and self.key in config.values:
      value = None
    elif value is not None and not callable(default) and config.is_null(self.key):
      raise config.error(self.key, f'must have a value, such as {value!r}, the default of its family')
    for key in (self.key, *self.aliases):
      value = config.read(key, self.kind, value)
    if self.names is not None:
      if value not in self.names:
        raise config.error(self.key, f'must be one of {", ".join(map(str, self.names))}')
      value = self.names[value]
    elif value is None and not self.nullable:
      raise UserError(f'{config.path} has no {self.key}, which its family requires.')
    if type(value) in (int, float) and not 0 < value < float('inf'):
      raise config.error(self.key, 'must be positive and finite')
    if str(self.field).endswith('num_layers') and value > MAX_LAYERS:  # bounds the tuples of the Decoder
      raise config.error(self.key, f'must be at most {MAX_LAYERS}')
    return dict.fromkeys(self._fields, value)

  def write(self, decoder: Decoder) -> Values:
    part = self._fields[0].rpartition('.')[0].partition('.')[0]
    if part and getattr(decoder, part) is None:
      raise UserError(f'the model has no {part}.')
    value = operator.attrgetter(self._fields[0])(decoder)
    if self.names is None:
      return {self.key: value}
    synonyms = [name for name, field_value in self.names.items() if field_value == value]
    if not synonyms:
      raise UserError(f'{self._fields[0]} = {value!r} has no name in transformers.')
    return {self.key: self.default if self.default in synonyms else synonyms[0]}


@dataclasses.dataclass(frozen=True)
class FixedKey:
  """A key with one supported value, which is the family's default and is written; values in `also` mean the same."""

  key: str
  value: Any
  also: tuple[Any, ...] = ()

  def read(self, config: Config, known: Values) -> Values:
    value = config.read(self.key, _JSON_TYPES, self.value)
    if value not in (self.value, *self.also):
      raise config.error(self.key, f'must be {self.value!r}; other values are not supported')
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


def activation(key: str = 'hidden_act', default: str = 'silu', **special: str) -> Key:
  """Returns the key of the activation of the feed-forward sublayers; `special` are names of this family alone."""
  return Key(key, 'activation', str, default, names=ACTIVATIONS | special)


def attention_bias(default: bool = False) -> Key:
  """Returns the key `attention_bias`, which covers all four projections."""
  return Key('attention_bias', ('qkv_bias', 'out_bias'), bool, default)


@dataclasses.dataclass(frozen=True)
class DivisorKey:
  """A key whose value divides what a field of the Decoder multiplies."""

  key: str
  field: str

  def read(self, config: Config, known: Values) -> Values:
    divisor = config.read(self.key, float, 1.0)
    if not 0 < divisor < float('inf'):
      raise config.error(self.key, 'must be positive and finite')
    return {self.field: 1.0 / divisor}

  def write(self, decoder: Decoder) -> Values:
    factor = getattr(decoder, self.field)
    divisor = 1.0 / factor
    near = (round(divisor, 9), divisor, math.nextafter(divisor, 0.0), math.nextafter(divisor, math.inf))
    return {self.key: next((number for number in near if number and 1.0 / number == factor), divisor)}


@dataclasses.dataclass(frozen=True)
class AllWindowed:
  """`sliding_window` of all layers; null for none. With `use_key`, it applies only if `use_sliding_window` is true."""

  default: int | None = None
  use_key: bool = False

  def read(self, config: Config, known: Values) -> Values:
    window = config.read('sliding_window', int, None if config.is_null('sliding_window') else self.default)
    if self.use_key and not config.read('use_sliding_window', bool, False):
      window = None
    return {'window': window, 'windowed': (window is not None,) * known['num_layers']}

  def write(self, decoder: Decoder) -> Values:
    if len(set(decoder.windowed)) > 1:
      raise UserError('some layers have a window and others do not.')
    used = {'use_sliding_window': any(decoder.windowed)} if self.use_key else {}
    return {'sliding_window': decoder.window, **used}


@dataclasses.dataclass(frozen=True)
class LayerTypes:
  """`layer_types`; if absent, the family's pattern `is_windowed(layer, config)`.

  With `use_key`, the window applies only if `use_sliding_window` is true. `windowed_type` is the type of layers with a
  window, whose length is `window_key`. With `windowed_if_rotated` true or false, the family's pattern is instead that
  layers with or without rotary positions have the window.
  """

  is_windowed: LayerFlag
  default_window: int | None
  use_key: bool = False
  windowed_type: str = 'sliding_attention'
  window_key: str = 'sliding_window'
  windowed_if_rotated: bool | None = None

  def read(self, config: Config, known: Values) -> Values:
    key, kind = self.window_key, self.windowed_type
    window = config.read(key, int, None if config.is_null(key) else self.default_window)
    layers = range(known['num_layers'])
    is_used = config.read('use_sliding_window', bool, False) if self.use_key else True
    types = config.read('layer_types', list, None)
    windowed = tuple(self.is_windowed(layer, config) for layer in layers)
    if self.windowed_if_rotated is not None:
      windowed = tuple(is_unrotated != self.windowed_if_rotated for is_unrotated in known['unrotated'])
    if types is not None:
      if len(types) < len(layers) or set(types) - {'full_attention', kind}:
        raise config.error('layer_types', f"must name 'full_attention' or {kind!r} for {len(layers)} layers")
      windowed = tuple(types[layer] == kind for layer in layers)
    if not is_used or (window is None and self.use_key and types is None):
      windowed = (False,) * len(layers)
    if window is None and any(windowed):
      raise config.error(key, 'must have a value, because some layers have a window')
    return {'window': window if any(windowed) else None, 'windowed': windowed}

  def write(self, decoder: Decoder) -> Values:
    types = [self.windowed_type if is_windowed else 'full_attention' for is_windowed in decoder.windowed]
    used = {'use_sliding_window': any(decoder.windowed)} if self.use_key else {}
    return {self.window_key: decoder.window, 'layer_types': types, **used}


# From the config and the number of layers to one flag, or number, per layer.
ReadFlags = Callable[[Config, int], Sequence[Any]]


@dataclasses.dataclass(frozen=True)
class PerLayer:
  """Keys that set a field of the Decoder with one flag per layer, or one number.

  Attributes:
    field: the field.
    read_flags: returns the flags.
    write_flags: returns the keys for the flags.
    kind: the type of the flags.
  """

  field: str
  read_flags: ReadFlags
  write_flags: Callable[[tuple[Any, ...]], Values]
  kind: type = bool

  def read(self, config: Config, known: Values) -> Values:
    return {self.field: tuple(map(self.kind, self.read_flags(config, known['num_layers'])))}

  def write(self, decoder: Decoder) -> Values:
    return self.write_flags(getattr(decoder, self.field))


def read_list(config: Config, key: str, kind: type, length: int) -> list[Any] | None:
  """Returns the first `length` entries of a list, or None if it is absent. Raises a UserError for another list."""
  values = config.read(key, list, None)
  if values is not None and (len(values) < length or any(type(value) is not kind for value in values)):
    raise config.error(key, f'must list {length} values of type {kind.__name__}, one per layer')
  return None if values is None else values[:length]
