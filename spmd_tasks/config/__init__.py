"""Configuration: from an experiment's name and `path=value` overrides to a built Job, and to JSON and back.

    resolved = resolve('lm.StdlibTiny', ['num_layers=4', 'task.learner.clip_global_norm=0.5'])
    job = resolved.build()
    saved = to_json(resolved)                    # every field by path, as config.json has it

Read in this order:
  registry.py      names to experiment classes; listing.py: --list
  resolution.py    overrides and defaults to one resolved config; refusals.py: what is said about a wrong one
  from_saved.py    the same of a saved config, and which modules it may have imported
  values.py        the type of a field, and the value of a text (pydantic)
  tree.py          configs, dataclasses and Linen modules as one tree of fields
  encoding.py, saved_config.py    values as JSON, the file's form
  changes.py       whether a resumed job computes the same numbers

A name below is imported when it is first used, because --list must wait for neither JAX nor Fiddle.
"""

from spmd_tasks.lazy_exports import lazy_exports

with lazy_exports(globals()):
  from spmd_tasks.config.registry import register
  from spmd_tasks.config.resolution import resolve, to_json
