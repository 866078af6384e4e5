"""Resolves an experiment and `path=value` overrides to a config, builds the Job, and saves the config as JSON.

    resolved = resolve('lm.StdlibTiny', ['num_layers=4', 'task.learner.clip_global_norm=0.5'])
    job = resolved.build()
    saved = to_json(resolved)                    # every field by path: the content of config.json

Read in this order:
  registry.py      finds experiment classes by name; listing.py: --list
  resolution.py    applies overrides; refusals.py: the errors about wrong overrides
  from_saved.py    resolves a saved config, and decides which modules it may import
  values.py        parses the text of an override by the type of its field (pydantic)
  tree.py          configs, dataclasses and Linen modules as one tree of fields
  encoding.py, saved_config.py    encode values as JSON, and check the file
  changes.py       checks that a resumed job computes the same numbers

The names below are imported on first use, because --list must not import JAX or Fiddle.
"""

from spmd_tasks.lazy_exports import lazy_exports

with lazy_exports(globals()):
  from spmd_tasks.config.registry import register
  from spmd_tasks.config.resolution import resolve, to_json
