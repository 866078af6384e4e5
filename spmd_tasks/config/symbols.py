"""Names classes and functions in saved configs, and reads the names that older versions saved.

    symbol_of(Dropless)                                           # 'spmd_tasks.layers.moe:Dropless'
    current_symbol('spmd_tasks.layers.moe.dropless:Dropless')     # 'spmd_tasks.layers.moe:Dropless'

A saved name is `package:QualName` of the nearest package that exports the object, so files can move inside a package.
"""

import sys
import types
from typing import Any

# Public package of today -> the modules whose classes it exports, as versions up to e2bba1f (November 2026) saved them.
# All names are without `spmd_tasks.`; a package that has the name of the old module needs no row.
_OLD_MODULES = {
  'decoding': ('inputs.prompts',),
  'inputs': (
    'decoding.chat_template',
    'inputs.base',
    'inputs.chat_template',
    'inputs.grain_input',
    'inputs.packing',
    'inputs.records',
    'inputs.synthetic',
    'inputs.text',
    'inputs.tfdata_input',
    'inputs.tokenizers',
  ),
  'layers': (
    'layers.block_group',
    'layers.embedding',
    'layers.feed_forward',
    'layers.initializers',
    'layers.language_model',
    'layers.linear',
    'layers.losses',
    'layers.norm',
    'layers.transformer',
  ),
  'layers.attention': ('layers.positions',),
  'layers.moe': (
    'layers.moe.capacity_computation',
    'layers.moe.capacity_einsum',
    'layers.moe.capacity_gather',
    'layers.moe.dropless',
    'layers.moe.expert_choice',
    'layers.moe.experts',
    'layers.moe.layer',
    'layers.moe.router',
  ),
  'layers.pipeline': ('layers.pipeline_schedule',),
  'learning': ('learning.learner', 'learning.optimizers', 'learning.schedules'),
  'runtime': ('decoding.settings', 'runtime.task'),
  'sharding': ('sharding.expert_axes', 'sharding.mesh', 'sharding.weights'),
}
_PACKAGE_OF_OLD_MODULE = {
  f'spmd_tasks.{module}': f'spmd_tasks.{package}' for package, modules in _OLD_MODULES.items() for module in modules
}
_OLD_EXPERIMENTS = {
  'lm.DenseLanguageModel': 'spmd_tasks.recipes.DenseLanguageModel',
  'moe.MoeLanguageModel': 'spmd_tasks.recipes.MoeLanguageModel',
  'pipeline.PipelinedLanguageModel': 'spmd_tasks.recipes.PipelinedLanguageModel',
  'synthetic.SyntheticLanguageModel': 'spmd_tasks.recipes.SyntheticLanguageModel',
}


def symbol_of(value: Any) -> str:
  """The name of a class or function as `package:QualName`.

  The package is the nearest one around the object's module that exports the object by its own name. Without such a
  package it is the module, up to its first private part: `jax:relu` for `jax._src.nn.functions.relu`.
  """
  return f'{public_module_of(value)}:{value.__qualname__}'


def public_module_of(value: Any) -> str:
  """The nearest package that exports a class or function, else its module up to the first private part."""
  module = value.__module__ or 'builtins'
  name = value.__qualname__.partition('.')[0]
  public = module.partition('._')[0]
  outermost = _loaded(module).get(name)
  packages = public.split('.') if public != module else public.split('.')[:-1]
  for end in range(len(packages), 0, -1):
    package = '.'.join(packages[:end])
    if outermost is not None and _exports(package, name, outermost):
      return package
  return public


def current_symbol(saved: str) -> str:
  """The name that `symbol_of` gives today to what an older version saved as `saved`.

  Nothing is imported for a name in a file: call this when the objects to compare with have been made.
  """
  module, colon, qualname = saved.partition(':')
  name = qualname.partition('.')[0]
  found = _loaded(module).get(name)
  if isinstance(found, type | types.FunctionType) and (found.__module__, found.__qualname__) == (module, name):
    module = public_module_of(found)  # its package exports it today
  else:
    module = _PACKAGE_OF_OLD_MODULE.get(module, module)
  return f'{module}{colon}{qualname}'


def current_names(encoded: Any) -> Any:
  """An encoded value with every symbol in it as it is called today."""
  if isinstance(encoded, list):
    return [current_names(item) for item in encoded]
  if not isinstance(encoded, dict):
    return encoded
  renamed: dict[str, Any] = {}
  for key, item in encoded.items():
    if key in ('symbol', 'enum', 'object') and isinstance(item, str):
      renamed[key] = current_symbol(item)
    elif key in ('dict', 'closure', 'partial') and isinstance(item, dict):  # values by name
      renamed[key] = {name: current_names(value) for name, value in item.items()}
    else:
      renamed[key] = current_names(item) if key == 'list' else item
  return renamed


def current_experiment(saved: str) -> str:
  """The name of an experiment that an older version saved."""
  return _OLD_EXPERIMENTS.get(saved, saved)


def _exports(package: str, name: str, value: Any) -> bool:
  found = _loaded(package)
  if name in found:
    return found[name] is value
  return name in found.get('__all__', ()) and getattr(sys.modules[package], name, None) is value  # a lazy face


def _loaded(module: str) -> dict[str, Any]:
  """The names in a module that was imported already; nothing is imported."""
  return vars(sys.modules[module]) if module in sys.modules else {}
