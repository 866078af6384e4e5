"""Experiments that start from a Hugging Face model folder: base classes of the registered `hf` experiments."""

from collections.abc import Iterable, Mapping
import dataclasses
import functools
import os
from typing import Any

from absl import logging
import fiddle as fdl
from flax.core import FrozenDict
import flax.linen as nn
import numpy as np

from spmd_tasks.bridges.huggingface._folder import Folder, open_folder
from spmd_tasks.bridges.huggingface.adapter_stacks import AdapterSource, add_choices, open_sources
from spmd_tasks.bridges.huggingface.origin import FolderOrigin
from spmd_tasks.errors import UserError
from spmd_tasks.inputs import ChatTemplate, FolderTokenizer, IdTokenizer, SpanCorruption, span_corruption_lengths
from spmd_tasks.inputs.tokenizer_files import FileTokenizer, read_json_object
from spmd_tasks.recipes import TextTraining
from spmd_tasks.recipes.pipelined import Pipelined
from spmd_tasks.runtime import DecodeSettings, Origin, Task
from spmd_tasks.store_files import local_folder


class PretrainedLanguageModel(TextTraining):
  """Continues training the model of a folder on packed text from `source`.

  An encoder-decoder is trained on span corruption of the text. A job without checkpoints evaluates, decodes and serves
  the folder's weights.
  """

  # A folder with config.json, safetensors and tokenizer.json.
  model: str = ''
  # Unknown keys of config.json to ignore, because they do not affect what the model computes. They also apply to the
  # folders of a teacher or a reward model.
  accept_config_keys: tuple[str, ...] = ()
  dtype: str | None = None  # of the computation; None for the folder's. Weights are float32 in training.
  remat_policy: str = 'elementwise'
  # Number of the folder's multi-token prediction heads (DeepSeek-V3, GLM-4-MoE) that the model has; None for all. They
  # are trained, and draft tokens in generation (task.decode.num_drafts). Exports copy the other heads.
  num_nextn_predict_layers: int | None = 0
  encoder_len: int = 512  # tokens that the encoder of an encoder-decoder reads; seq_len is the decoder's
  # Low-rank adapters that requests choose by name: name -> a folder of `peft`, or the directory of a job that trained
  # adapters of this folder, such as {'french': 'peft/french', 'legal': 'runs/lora'}.
  adapters: Mapping[str, str] = FrozenDict()

  learning_rate = 1e-5

  def __post_init__(self):
    positions = self._num_positions()
    if positions is not None and positions < self.seq_len and self.setter_rank('seq_len') > 0:
      logging.info('seq_len = %s, the positions of %s, instead of %s.', positions, self.model, self.seq_len)
      object.__setattr__(self, 'seq_len', positions)
    super().__post_init__()

  def _num_positions(self) -> int | None:
    """Returns the number of positions if the folder's model has an embedding for each."""
    try:
      return self.open_folder().decoder.positions if self.model else None
    except UserError:  # raised again when the model is built
      return None

  def origin(self) -> Origin | None:
    """Returns the folder of `init_from`, or else `model`, with the adapters."""
    origin = super().origin() if self.init_from else FolderOrigin(path=str(local_folder(self.model)))
    if not isinstance(origin, FolderOrigin):
      return origin
    keys = (*origin.accept_config_keys, *self.accept_config_keys)
    return dataclasses.replace(origin, accept_config_keys=keys, sources=lambda: self.adapter_sources)

  @functools.cached_property
  def folder(self) -> Folder:
    """The folder of a language model. Raises a UserError if it is a reward or embedding model."""
    folder = self.open_folder()
    if folder.decoder.num_labels is not None:
      raise UserError(
        f'{self.model} is a reward or embedding model without logits: use hf.Scorer or finetune.FullReward, or use it '
        'as a reward.'
      )
    return folder

  def open_folder(self) -> Folder:
    """Returns the folder of any model."""
    if not self.model:
      raise UserError('model is not set: --set model=FOLDER, a Hugging Face model folder, or hf://org/name.')
    return self._opened_folder

  @functools.cached_property
  def _opened_folder(self) -> Folder:
    return open_folder(local_folder(self.model), accept_config_keys=self.accept_config_keys)

  def language_model(self) -> fdl.Config:
    """Returns the config of the folder's model, in which every field can be overridden."""
    folder, num = self.folder, self.num_nextn_predict_layers
    max_num = folder.decoder.num_nextn
    if num is not None and not 0 <= num <= max_num:
      raise UserError(f'num_nextn_predict_layers = {num} must be from 0 to {max_num}, the heads of {self.model}.')
    model = _config_of(folder.with_nextn_heads(max_num if num is None else num).build_model(dtype=self.dtype))
    heads = (model.nextn_head.stack,) if hasattr(model, 'nextn_head') else ()
    for stack in (*stacks_of(model), *heads):
      stack.remat_policy = self.remat_policy
    if self.adapters:
      add_choices(model, self.adapter_sources)
    return model

  @functools.cached_property
  def adapter_sources(self) -> Mapping[str, AdapterSource]:
    """The adapters by name; requests number them from 1 on."""
    return open_sources(self.adapters, self.folder) if self.adapters else {}

  def task(self) -> fdl.Config[Task]:
    return fdl.copy_with(super().task(), decode=self.decode())

  def decode(self) -> fdl.Config[DecodeSettings]:
    """Returns the generation settings of the folder.

    Weights are stored in bfloat16 if the model computes in bfloat16. Generation stops at the folder's end-of-text
    tokens, and at the token by which the chat template ends the assistant's turn.
    """
    defaults = generation_defaults(str(self.folder.path))
    if self.folder.decoder.num_encoder_layers:
      defaults['max_len'] = self.seq_len + 1
    elif ends := self._turn_ends:
      eos_ids = defaults['eos_ids'] if 'eos_ids' in defaults else (fdl.build(self.tokenizer()).eos_id,)
      defaults |= _end_settings((*eos_ids, *ends))
    weights_dtype = 'bfloat16' if (self.dtype or self.folder.dtype) == 'bfloat16' else None
    return fdl.Config(DecodeSettings, weights_dtype=weights_dtype, **defaults)

  @functools.cached_property
  def _turn_ends(self) -> tuple[int, ...]:
    """The tokens by which the chat template ends the assistant's turn."""
    tokenizer = fdl.build(self.tokenizer())
    if not isinstance(tokenizer, FileTokenizer):
      return ()
    try:
      template = self.chat_template()
      return () if template == ChatTemplate() else template.turn_ends(tokenizer)
    except UserError as error:
      remedy = 'end turns with a token in the template, such as {{ eos_token }}, or set task.decode.eos_ids'
      text = '%s: %s Generation stops only at the end-of-text token: %s.'
      logging.log_first_n(logging.WARNING, text, 1, self.model, error, remedy)
      return ()

  def _packed_text(self, split: str, **settings: Any) -> fdl.Config:
    text = super()._packed_text(split, **settings)
    if not self.folder.decoder.num_encoder_layers:
      return text
    text.seq_len, targets = span_corruption_lengths(self.encoder_len)
    lengths = {'inputs_length': self.encoder_len, 'targets_length': max(targets, self.seq_len)}
    return fdl.Config(SpanCorruption, text=text, seed=self.seed, **lengths)

  def chat_template(self) -> ChatTemplate:
    """Returns the folder's chat template, or else a plain transcript."""
    return ChatTemplate.from_folder(str(self.folder.path)) or super().chat_template()

  def tokenizer(self) -> fdl.Config:
    """Returns the folder's tokenizer; without tokenizer.json, texts are ids written as numbers."""
    if (self.folder.path / 'tokenizer.json').exists():
      return fdl.Config(FolderTokenizer, path=str(self.folder.path))
    eos_id = self.folder.config.get('eos_token_id')
    eos_id = eos_id[0] if isinstance(eos_id, list) else eos_id
    return fdl.Config(IdTokenizer, vocab_size=self.folder.decoder.vocab_size, eos_id=eos_id or 0)


class PipelinedPretrainedModel(Pipelined, PretrainedLanguageModel):
  """PretrainedLanguageModel with pipeline stages."""

  def language_model(self) -> fdl.Config:
    model = super().language_model()
    model.stack = self.pipelined(model.stack)
    return model


def stacks_of(model: fdl.Config) -> tuple[fdl.Config, ...]:
  """Returns the configs of all stacks of a model, the encoder's last."""
  sides = [model.stack, *([model.encoder_stack] if hasattr(model, 'encoder_stack') else [])]
  return tuple(stack for side in sides for stack in getattr(side, 'stacks', None) or (side,))


def _config_of(value: Any) -> Any:
  """Returns the config that builds an unbound module or a frozen dataclass."""
  if isinstance(value, tuple):
    return tuple(map(_config_of, value))
  if not dataclasses.is_dataclass(value):
    return value
  changed = {}
  for field in dataclasses.fields(value):
    setting = getattr(value, field.name)
    is_changed = isinstance(setting, nn.Module) or setting != field.default
    if field.init and field.name not in ('parent', 'name') and is_changed:
      changed[field.name] = _config_of(setting)
  return fdl.Config(type(value), **changed)


# Unsupported fields of generation_config.json -> values with which they have no effect.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
  **dict.fromkeys(('num_beams', 'typical_p', 'encoder_repetition_penalty', 'guidance_scale'), (1,)),
  **dict.fromkeys(('epsilon_cutoff', 'eta_cutoff', 'penalty_alpha', 'diversity_penalty'), (0,)),
  **dict.fromkeys(('no_repeat_ngram_size', 'min_length', 'min_new_tokens'), (0,)),
  **dict.fromkeys(('bad_words_ids', 'suppress_tokens', 'begin_suppress_tokens'), ([],)),
  'sequence_bias': ({},),
  **dict.fromkeys(('top_h', 'forced_bos_token_id', 'forced_eos_token_id', 'watermarking_config'), ()),
}
_TOP_K = 50  # the default in transformers if do_sample is true
_MIN_STOP_IDS = 8  # so that requests can add stop tokens


def generation_defaults(folder: str) -> dict[str, Any]:
  """Returns the fields of DecodeSettings that a folder sets.

  Without `do_sample`, requests are greedy unless they set a temperature. `eos_token_id` is read from
  generation_config.json, or else from config.json. Unsupported settings are ignored with a warning.

  Raises a UserError if a file is not JSON, or a field has an invalid value.
  """
  path = os.path.join(os.path.expanduser(folder), 'generation_config.json')
  config = {name: value for name, value in read_json_object(path).items() if value is not None}
  model = read_json_object(os.path.join(os.path.dirname(path), 'config.json'))
  eos_token_id = config.get('eos_token_id', model.get('eos_token_id'))
  if unsupported := {name: value for name, value in config.items() if value not in _UNSUPPORTED.get(name, (value,))}:
    logging.warning('%s: these settings are not supported and ignored: %s', path, unsupported)

  names = [name for name in ('repetition_penalty', 'top_p', 'min_p') if name in config]
  defaults: dict[str, Any] = {name: float(_number(config, name, path)) for name in names}
  if 'top_k' in config or config.get('do_sample'):
    defaults['top_k'] = int(_number(config, 'top_k', path) if 'top_k' in config else _TOP_K)
  if config.get('do_sample'):
    defaults['temperature'] = float(_number(config, 'temperature', path)) if 'temperature' in config else 1.0
  if model.get('is_encoder_decoder'):
    starts = config.get('decoder_start_token_id'), model.get('decoder_start_token_id'), model.get('pad_token_id'), 0
    defaults['start_id'] = next(start for start in starts if start is not None)
  if 'max_new_tokens' in config:
    defaults['max_tokens'] = int(_number(config, 'max_new_tokens', path))
  if eos_token_id is not None:
    ids = np.atleast_1d(eos_token_id).tolist()
    if not all(type(token) is int and token >= 0 for token in ids):
      raise UserError(f'{path}: eos_token_id = {eos_token_id!r} must be a token id or a list of token ids.')
    defaults |= _end_settings(ids)
  return defaults


def _end_settings(tokens: Iterable[int]) -> dict[str, Any]:
  """Returns the fields of DecodeSettings with which generation stops at these tokens."""
  ids = tuple(dict.fromkeys(tokens))
  return {'eos_ids': ids, 'max_stop_ids': max(_MIN_STOP_IDS, len(ids) + 4)}


def _number(config: dict[str, Any], name: str, path: str) -> int | float:
  value = config[name]
  if isinstance(value, bool) or not isinstance(value, int | float):
    raise UserError(f'{path}: {name} = {value!r} must be a number.')
  return value
