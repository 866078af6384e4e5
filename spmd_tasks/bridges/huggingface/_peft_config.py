"""Reads the config of a folder of `peft`: which keys count, and whether its numbers and patterns can be used."""

from collections.abc import Mapping
from pathlib import Path
import re
from typing import Any

from spmd_tasks.bridges.huggingface._folder import read_config
from spmd_tasks.errors import UserError

CONFIG_FILE = 'adapter_config.json'
_MAX_NUMBER = 1_000_000
# Keys of the config that are read, and those that change nothing that is computed from the saved tensors. Any other key
# must be null, false or empty.
_READ = (
  'peft_type',
  'r',
  'rank_pattern',
  'lora_alpha',
  'lora_dropout',
  'use_rslora',
  'use_dora',
  'alpha_pattern',
  'bias',
  'target_parameters',
)
_INERT = (
  *('auto_mapping', 'base_model_name_or_path', 'revision', 'task_type', 'inference_mode', 'peft_version'),
  *('target_modules', 'exclude_modules', 'layers_to_transform', 'layers_pattern'),
  *('init_lora_weights', 'megatron_config', 'megatron_core', 'loftq_config', 'eva_config', 'corda_config'),
  *('runtime_config', 'qalora_group_size', 'base_model_class', 'fan_in_fan_out'),
)


def read_adapter_config(file: Path) -> dict[str, Any]:
  """Returns the content of an adapter_config.json.

  Raises:
    UserError: there is none, it is no LoRA, it has a setting that is not known here, a number that is none, or a
      pattern that is none or could take for ever to match.
  """
  config = read_config(file, 'give a folder that save_pretrained of `peft` has written')
  if config.get('peft_type') != 'LORA' or config.get('bias', 'none') != 'none':
    raise UserError(
      f"{file} has peft_type {config.get('peft_type')!r} and bias {config.get('bias')!r}: only 'LORA' without trained "
      'biases is read.'
    )
  unknown = sorted(key for key, value in config.items() if value and key not in (*_READ, *_INERT))
  if unknown:
    raise UserError(f'{file} has {unknown[0]} = {config[unknown[0]]!r}, which is not known here.')
  numbers = {key: config.get(key) or 0 for key in ('r', 'lora_alpha', 'lora_dropout')}
  for name in ('rank_pattern', 'alpha_pattern'):
    patterns = config.get(name) or {}
    if not isinstance(patterns, dict):
      raise UserError(f'{file} has {name} = {patterns!r:.60}: an object with a number by pattern belongs there.')
    for pattern in patterns:
      try:
        re.compile(pattern)
      except re.error as error:
        raise UserError(f'{file} has {name} {pattern!r:.60}, which is no regular expression: {error}.') from error
      if re.search('[)][*+{]', pattern) or len(re.findall('[*+{]', pattern)) > 4:
        raise UserError(f'{file} has {name} {pattern!r:.60}, which repeats too much: name the modules.')
    numbers |= {f'{name} {pattern:.60}': value for pattern, value in patterns.items()}
  for key, value in numbers.items():
    if type(value) not in (int, float) or not 0 <= value <= _MAX_NUMBER:
      raise UserError(f'{file} has {key} = {value!r:.60}: a number up to {_MAX_NUMBER:,} belongs there.')
  return config


def setting_of(config: Mapping[str, Any], key: str, patterns: str, module: str) -> Any:
  """Returns the number of one module: of the first pattern that matches its name, or else of `key`."""
  found = (config.get(patterns) or {}).items()
  default = 8 if config.get(key) is None else config[key]  # that of `peft`
  return next((value for each, value in found if re.match(rf'(.*\.)?({each})$', module)), default)
