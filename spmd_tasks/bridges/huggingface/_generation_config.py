"""Reads generation_config.json: how requests to a folder's model are sampled by default, and where texts end."""

import os
from typing import Any

from absl import logging
import numpy as np

from spmd_tasks.errors import UserError
from spmd_tasks.inputs.tokenizer_files import read_json_object

# Fields that change what is generated and have no counterpart here, and the values with which they change nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
  **dict.fromkeys(('num_beams', 'typical_p', 'encoder_repetition_penalty', 'guidance_scale'), (1,)),
  **dict.fromkeys(('epsilon_cutoff', 'eta_cutoff', 'penalty_alpha', 'diversity_penalty'), (0,)),
  **dict.fromkeys(('no_repeat_ngram_size', 'min_length', 'min_new_tokens'), (0,)),
  **dict.fromkeys(('bad_words_ids', 'suppress_tokens', 'begin_suppress_tokens'), ([],)),
  'sequence_bias': ({},),
  **dict.fromkeys(('top_h', 'forced_bos_token_id', 'forced_eos_token_id', 'watermarking_config'), ()),
}
_TOP_K = 50  # transformers' default, where sampling is on
_MIN_STOP_IDS = 8  # room for a request's own stop tokens beside the model's


def generation_defaults(folder: str) -> dict[str, Any]:
  """Returns the fields of DecodeSettings that a folder sets.

  Without `do_sample` requests are greedy unless they set a temperature. The ends of text are those of
  generation_config.json, or else of config.json. Settings that have no counterpart here are logged.

  Raises:
    UserError: a file is not JSON, or a field has an impossible value.
  """
  path = os.path.join(os.path.expanduser(folder), 'generation_config.json')
  config = {name: value for name, value in read_json_object(path).items() if value is not None}
  model = read_json_object(os.path.join(os.path.dirname(path), 'config.json'))
  ends = config.get('eos_token_id', model.get('eos_token_id'))
  if lost := {name: value for name, value in config.items() if value not in _UNSUPPORTED.get(name, (value,))}:
    logging.warning('%s: these settings have no counterpart here and are left out: %s', path, lost)

  given = [name for name in ('repetition_penalty', 'top_p', 'min_p') if name in config]
  defaults: dict[str, Any] = {name: float(_number(config, name, path)) for name in given}
  if 'top_k' in config or config.get('do_sample'):
    defaults['top_k'] = int(_number(config, 'top_k', path) if 'top_k' in config else _TOP_K)
  if config.get('do_sample'):
    defaults['temperature'] = float(_number(config, 'temperature', path)) if 'temperature' in config else 1.0
  if model.get('is_encoder_decoder'):
    starts = config.get('decoder_start_token_id'), model.get('decoder_start_token_id'), model.get('pad_token_id'), 0
    defaults['start_id'] = next(start for start in starts if start is not None)
  if 'max_new_tokens' in config:
    defaults['max_tokens'] = int(_number(config, 'max_new_tokens', path))
  if ends is not None:
    ids = np.atleast_1d(ends).tolist()
    if not all(type(token) is int and token >= 0 for token in ids):
      raise UserError(f'{path}: eos_token_id = {ends!r} must be a token or a list of tokens.')
    defaults['eos_ids'] = tuple(dict.fromkeys(ids))
    defaults['max_stop_ids'] = max(_MIN_STOP_IDS, len(ids) + 4)
  return defaults


def _number(config: dict[str, Any], name: str, path: str) -> int | float:
  value = config[name]
  if isinstance(value, bool) or not isinstance(value, int | float):
    raise UserError(f'{path}: {name} = {value!r} must be a number.')
  return value
