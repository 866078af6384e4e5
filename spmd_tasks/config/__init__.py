"""Configuration: from an experiment's name and `path=value` overrides to a built Job, and to JSON and back.

    resolved = resolve('lm.StdlibTiny', ['num_layers=4', 'task.learner.clip_global_norm=0.5'])
    job = resolved.build()
    saved = to_json(resolved)                    # every field by path, as config.json has it
    resolved = from_json(saved, ['seed=1'])

Read in this order:
  registry.py      names to experiment classes; listing.py: --list
  resolution.py    overrides and defaults to one resolved config
  from_saved.py    the same of a saved config, with search_path.py: which modules it may have imported
  overrides.py     one `path=value`, with the nearest names where a path does not exist
  values.py        the type of a field, and the value of a text (pydantic)
  tree.py          configs, dataclasses and Linen modules as one tree of fields
  encoding.py, saved_config.py    values as JSON, the file's form
  changes.py       whether a resumed job computes the same numbers

A name below is imported when it is first used, because --list must wait for neither JAX nor Fiddle.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from spmd_tasks.config.registry import register
  from spmd_tasks.config.resolution import resolve, to_json

__all__ = [
  'register',
  'resolve',
  'to_json',
]

_MODULES = {
  'changes': ('diff', 'refuse_changed_config'),
  'from_saved': ('from_json',),
  'listing': ('list_experiments',),
  'registry': ('UnknownExperimentError', 'add_to_search_path', 'register', 'symbol_of'),
  'resolution': ('ResolvedConfig', 'resolve', 'to_json'),
  'saved_config': ('format_config', 'read_saved_config'),
}


def __getattr__(name: str) -> Any:
  for module, names in _MODULES.items():
    if name in names:
      value = getattr(importlib.import_module(f'spmd_tasks.config.{module}'), name)
      globals()[name] = value
      return value
  raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
