"""Several low-rank adapters beside the model of a folder, which requests choose by name: `adapters` of an experiment.

    spmd-tasks --exp hf.Model --set model=FOLDER --mode serve --set 'adapters={"french": "peft/fr", "law": "runs/lora"}'

An adapter is a folder of `peft`, or the directory of a job that trains adapters of the same folder.
"""

from collections.abc import Mapping
import dataclasses
import re
from typing import Any

from etils import epath
import fiddle as fdl

from spmd_tasks.bridges.huggingface import Folder, open_adapter
from spmd_tasks.config.resolution import from_json
from spmd_tasks.config.saved_config import read_saved_config
from spmd_tasks.errors import UserError
from spmd_tasks.files import absolute_path
from spmd_tasks.tuning.adapted_weights import adaptable_weights, add_adapters
from spmd_tasks.tuning.adapter_choices import AdapterChoices
from spmd_tasks.tuning.adapter_stacks import AdapterSource
from spmd_tasks.tuning.adapters import LowRankAdapter

_NAME = re.compile(r'[A-Za-z0-9][A-Za-z0-9._:/-]{0,99}')


def open_sources(adapters: Mapping[str, str], folder: Folder) -> dict[str, AdapterSource]:
  """Finds out what each adapter is, by name.

  Args:
    adapters: name -> a folder of `peft`, or the directory of a job.
    folder: of the base.

  Raises:
    UserError: a name or a place cannot be used.
  """
  sources = {}
  for name, path in adapters.items():
    if not _NAME.fullmatch(name):
      raise UserError(f'adapters has the name {name!r}: use letters, digits and . _ : / - only, at most 100.')
    place = absolute_path(path)
    if (place / 'adapter_config.json').exists():
      sources[name] = AdapterSource(path=str(place), is_job=False, adapters=open_adapter(place).adapters(folder))
    elif (place / 'config.json').exists():
      sources[name] = _source_of_job(place, folder)
    else:
      raise UserError(
        f'adapters has {name!r} in {place}, where there is neither an adapter_config.json of peft nor the config.json '
        'of a job: correct the path.'
      )
  return sources


def add_choices(model: fdl.Config, sources: Mapping[str, AdapterSource]) -> None:
  """Makes room beside each kernel of a model's config for the adapters of all sources.

  Raises:
    UserError: a source adapts what the model does not have.
  """
  known = adaptable_weights(model)
  for name, source in sources.items():
    for kernel in source.adapters:
      if kernel not in known:
        raise UserError(f'the adapter {name!r} in {source.path} adapts {kernel}, which this model does not have.')
  for kernel in sorted({kernel for source in sources.values() for kernel in source.adapters}):
    own = [source.adapters[kernel] for source in sources.values() if kernel in source.adapters]
    choice = AdapterChoices(
      rank=max(adapter.rank for adapter in own),
      choices=tuple(sources),
      use_dora=any(adapter.use_dora for adapter in own),
    )
    add_adapters(model, [f'^{re.escape(kernel)}$'], choice, setting='adapters')


def _source_of_job(directory: epath.Path, folder: Folder) -> AdapterSource:
  saved = read_saved_config(directory / 'config.json')
  # The digest of the folder says whether it is the same; its path need not be.
  overrides = [f'model={folder.path}'] if 'model' in saved['config'] else []
  try:
    task = from_json(saved, overrides).parts['task']
  except UserError as error:  # as where the job's experiment is a class of the user's own, which a file cannot import
    raise UserError(
      f'the job in {directory} cannot be read: {error} A folder of peft needs no experiment: --mode export '
      '--format peft.'
    ) from error
  found: dict[str, LowRankAdapter] = {}
  for name, (layer, projection) in adaptable_weights(task.model).items():
    for each in _built(layer.adapters):
      if isinstance(each, LowRankAdapter) and projection in each.names:
        found[name] = dataclasses.replace(each, names=())
  if not found:
    raise UserError(f'the job in {directory} has no low-rank adapters: serve it alone (--job_log_dir {directory}).')
  return AdapterSource(path=str(directory), is_job=True, adapters=found, is_averaged=task.eval_with_ema)


def _built(adapters: Any) -> list[LowRankAdapter]:
  return [fdl.build(each) if isinstance(each, fdl.Buildable) else each for each in adapters]
