"""Folders of `peft`: low-rank adapters beside a model of Hugging Face's format, read and written.

    adapter = open_adapter('adapters/notes')
    adapter.adapters(folder)                             # kernel -> LowRankAdapter, to build the model with
    adapter.read_weights(partitioned_model, folder)      # the adapters' weights on the mesh
    export_adapter(Path('out'), model, weights, base=folder)

`peft` adds B . A to the weight [out, in] of a Linear; ours are A [in..., R] and B [R, out...], of kernels whose dims
the family's rules make. The same rules, applied to the numbers of rows and columns, say where each of them goes.

Shapes: R rank.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
import dataclasses
import functools
import json
import os
from pathlib import Path
import re
import shutil
from typing import Any

from flax import traverse_util
import numpy as np

from spmd_tasks.bridges._lazy_arrays import LazyArray, lazy_array
from spmd_tasks.bridges._operations import Operation
from spmd_tasks.bridges._rules import Rule, Slot
from spmd_tasks.bridges.huggingface._describe import layer_places
from spmd_tasks.bridges.huggingface._folder import Folder, place_on_mesh, read_config
from spmd_tasks.bridges.huggingface._safetensors import SINGLE_FILE, read_file, write_tensors
from spmd_tasks.bridges.huggingface._tensors import llama_rules
from spmd_tasks.errors import UserError
from spmd_tasks.layers import AdapterNames, LowRankAdapter, adaptable_weights, adapters_of
from spmd_tasks.runtime import PartitionedModel

CONFIG_FILE, TENSORS_FILE, BASE_FILE = 'adapter_config.json', 'adapter_model.safetensors', 'base.json'
_PREFIX = 'base_model.model.'
_TENSOR = re.compile(r'base_model\.model\.(.+)\.(?:(lora_A|lora_B)\.weight|(lora_magnitude_vector)(?:\.weight)?)')
# Keys of the config that are read, and those that change nothing that is computed from the saved tensors. Any other key
# must be null, false or empty.
_READ = ('peft_type', 'lora_alpha', 'lora_dropout', 'use_rslora', 'use_dora', 'alpha_pattern', 'bias')
_INERT = (
  *('auto_mapping', 'base_model_name_or_path', 'revision', 'task_type', 'inference_mode', 'peft_version'),
  *('r', 'rank_pattern', 'target_modules', 'exclude_modules', 'layers_to_transform', 'layers_pattern'),
  *('init_lora_weights', 'megatron_config', 'megatron_core', 'loftq_config', 'eva_config', 'corda_config'),
  *('runtime_config', 'qalora_group_size', 'base_model_class'),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Module:
  """A Linear of the family, called `name` there, and our kernel of it."""

  name: str
  slot: Slot
  operations: tuple[Operation, ...]


def _modules(folder: Folder) -> list[_Module]:
  """Returns the Linears of a folder's model whose kernels are each a kernel of ours that can have an adapter."""
  if folder.family.rule_maker is not llama_rules:
    raise UserError(f'{folder.family.architecture} has no Linears: use --format hf, which merges the adapters.')
  model = folder.build_model()
  adaptable = adaptable_weights(model)
  found = []
  for rule in folder.family.rules(folder.decoder, layer_places(model.stack)):
    if len(rule.source) == len(rule.target) == 1 and rule.target[0].name in adaptable:
      name = rule.source[0].name.removesuffix('.weight')
      found.append(_Module(name=name, slot=rule.target[0], operations=rule.operations))
  return found


@functools.lru_cache(maxsize=256)
def _orders(operations: tuple[Operation, ...], num_out: int, num_in: int, num_input_dims: int) -> Any:
  """Returns the row [out...] and the column [in...] of a weight [out, in] that each place of our kernel is from."""
  rows, columns = np.ogrid[:num_out, :num_in]
  numbers = (np.broadcast_to(each, (num_out, num_in)).astype(np.int32) for each in (rows, columns))
  row_of, column_of = (Rule([], [], *operations).apply((each,))[0] for each in numbers)
  return row_of[(0,) * num_input_dims], column_of[(..., *[0] * (column_of.ndim - num_input_dims))]


def open_adapter(path: os.PathLike | str) -> 'AdapterFolder':
  """Reads the config of a folder of `peft`, and the headers of its tensors.

  Raises:
    UserError: there is none, it is no LoRA, or it has a setting that is not known here.
  """
  path = Path(path).expanduser()
  file = path / CONFIG_FILE
  config = read_config(file, 'give a folder that save_pretrained of `peft` has written')
  if config.get('peft_type') != 'LORA' or config.get('bias', 'none') != 'none':
    raise UserError(
      f"{file} has peft_type {config.get('peft_type')!r} and bias {config.get('bias')!r}: only 'LORA' without trained "
      'biases is read.'
    )
  unknown = sorted(key for key, value in config.items() if value and key not in (*_READ, *_INERT))
  if unknown:
    raise UserError(f'{file} has {unknown[0]} = {config[unknown[0]]!r}, which is not known here.')
  if not (path / TENSORS_FILE).is_file():
    raise UserError(f'{path} has no {TENSORS_FILE}: pickles are not read; save the adapter as safetensors.')
  return AdapterFolder(path=path, config=config)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class AdapterFolder:
  """A folder of `peft`; `open_adapter` makes it. `config` is the content of its adapter_config.json."""

  path: Path
  config: Mapping[str, Any]

  @functools.cached_property
  def _tensors(self) -> dict[str, dict[str, LazyArray]]:
    """Module of the family -> 'lora_A', 'lora_B' and with DoRA 'lora_magnitude_vector'."""
    found: dict[str, dict[str, LazyArray]] = {}
    for name, tensor in read_file(self.path / TENSORS_FILE).items():
      match = _TENSOR.fullmatch(name)
      if match is None:
        raise UserError(f'{self.path / TENSORS_FILE} has {name}, which is no adapter of a Linear.')
      found.setdefault(match[1], {})[match[2] or match[3]] = tensor
    wanted = {'lora_A', 'lora_B', *(('lora_magnitude_vector',) if self.config.get('use_dora') else ())}
    for name, parts in found.items():
      if parts.keys() != wanted or parts['lora_A'].shape[0] != parts['lora_B'].shape[1]:
        shapes = {part: list(tensor.shape) for part, tensor in parts.items()}
        raise UserError(
          f'{self.path / TENSORS_FILE} has {name} with {shapes}: {sorted(wanted)} of one rank belong there.'
        )
    return found

  def _found(self, base: Folder) -> Iterator[tuple[_Module, dict[str, LazyArray]]]:
    modules = {module.name: module for module in _modules(base)}
    for name, parts in self._tensors.items():
      known = base.family.full_name(f'{name}.weight').removesuffix('.weight')
      if known not in modules:
        raise UserError(f'{self.path} adapts {name}, which is no Linear of its own in {base.path}.')
      yield modules[known], parts

  def adapters(self, base: Folder) -> dict[str, LowRankAdapter]:
    """Returns the settings of the adapters by the names of our weights.

    Raises:
      UserError: the base has no such Linear; or layers that are scanned together have different settings.
    """
    found: dict[str, LowRankAdapter] = {}
    for module, parts in self._found(base):
      patterns = self.config.get('alpha_pattern') or {}
      alphas = [value for key, value in patterns.items() if re.match(rf'(.*\.)?({key})$', module.name)]
      adapter = LowRankAdapter(
        rank=parts['lora_A'].shape[0],
        alpha=float(alphas[0] if alphas else self.config.get('lora_alpha', 8)),
        dropout_rate=float(self.config.get('lora_dropout') or 0.0),
        use_rslora=bool(self.config.get('use_rslora')),
        use_dora=bool(self.config.get('use_dora')),
      )
      if found.setdefault(module.slot.name, adapter) != adapter:
        raise UserError(
          f'{self.path} gives {module.name} another rank or alpha than that Linear has in other layers, which are one '
          f'weight here ({module.slot.name}): give all layers the same.'
        )
    return found

  def read_weights(self, model: PartitionedModel, base: Folder) -> Any:
    """Reads the adapters onto the mesh: a tree like the weights, with None for all others.

    A layer for which the folder has none gets zeros, which change nothing.

    Args:
      model: of a task whose model has the adapters of `adapters(base)`.
      base: the folder of the model.

    Raises:
      UserError: the model has other adapters, or a shape does not fit.
    """
    wanted = {name: dataclasses.replace(adapter, names=()) for name, adapter in adapters_of(model.task.model).items()}
    if (own := self.adapters(base)) != wanted:
      different = sorted(name for name in {*own, *wanted} if own.get(name) != wanted.get(name))
      raise UserError(f'{self.path} and the model differ in the adapter of {different[0]}: let the folder decide.')
    canonical = traverse_util.flatten_dict(model.canonical_state.weights, sep='/')
    made = self.read_arrays({name: leaf.shape for name, leaf in canonical.items()}, base)
    true = traverse_util.flatten_dict(model.abstract_state.weights, sep='/')
    padded = traverse_util.flatten_dict(model.padded_state.weights, sep='/')
    weights: dict[str, Any] = dict.fromkeys(padded)
    for name, array in made.items():
      weights[name] = place_on_mesh(lazy_array(array).reshape(true[name].shape), padded[name])
    return traverse_util.unflatten_dict(weights, sep='/')

  def read_arrays(self, shapes: Mapping[str, tuple[int, ...]], base: Folder) -> dict[str, np.ndarray]:
    """Reads the adapters into arrays in the layout of checkpoints, float32, by the names of our weights.

    Args:
      shapes: of the weights of the adapters, and of any others. A layer for which the folder has none gets zeros.
      base: the folder of the model.

    Raises:
      UserError: a shape does not fit.
    """
    names = {name: AdapterNames(kernel=name) for name in self.adapters(base)}
    made = {
      part: np.zeros(shapes[part], np.float32)
      for each in names.values()
      for part in (each.a, each.b, each.magnitude)
      if part in shapes
    }
    for module, parts in self._found(base):
      each, place = names[module.slot.name], module.slot.index
      b, a = (np.asarray(parts[part]).astype(np.float32) for part in ('lora_B', 'lora_A'))
      row_of, column_of = _orders(module.operations, b.shape[0], a.shape[1], made[each.a][place].ndim - 1)
      if made[each.b][place].shape[1:] != row_of.shape or made[each.a][place].shape[:-1] != column_of.shape:
        raise UserError(
          f'{self.path} has {module.name} with {list(b.shape)} . {list(a.shape)}: it is of another model.'
        )
      made[each.a][place] = np.moveaxis(a[:, column_of], 0, -1)
      made[each.b][place] = np.moveaxis(b[row_of], -1, 0)
      if each.magnitude in made:
        made[each.magnitude][place] = np.asarray(parts['lora_magnitude_vector']).reshape(-1)[row_of]
    return made


def export_adapter(
  target: Path,
  model: Any,
  weights: Mapping[str, LazyArray],
  *,
  base: Folder,
  digest: str,
  is_writer: bool = True,
) -> int:
  """Writes the adapters of a model as a folder that `peft` loads; returns how many Linears have one.

  Args:
    target: of the folder; nothing is there yet.
    model: a LanguageModel with adapters.
    weights: its weights by name, as checkpoints have them; those of the base are not read.
    base: the folder of the model without adapters.
    digest: of that, which base.json beside the config keeps.
    is_writer: whether this process writes; reading the weights may need all processes.

  Raises:
    UserError: the model has no adapters, or one of a weight that is no Linear there.
  """
  adapters = adapters_of(model)
  if not adapters:
    raise UserError('the model has no adapters: --format peft is for a job with some, such as finetune.LoraText.')
  modules = _modules(base)
  tensors: dict[str, LazyArray] = {}
  settings: dict[str, LowRankAdapter] = {}
  for kernel, adapter in adapters.items():
    places = [module for module in modules if module.slot.name == kernel]
    if not places:
      raise UserError(f'{kernel} is no Linear of its own in {base.path}: use --format hf, which merges the adapters.')
    names = AdapterNames(kernel=kernel)
    a, b = (np.asarray(weights[name]) for name in (names.a, names.b))
    magnitude = np.asarray(weights[names.magnitude]) if adapter.use_dora else None
    for module in places:
      prefix, place = f'{_PREFIX}{module.name}', module.slot.index
      rank, out, inputs = adapter.rank, b[place][0].size, a[place][..., 0].size
      row_of, column_of = _orders(module.operations, out, inputs, a[place].ndim - 1)
      made_a, made_b = np.empty((rank, inputs), a.dtype), np.empty((out, rank), b.dtype)
      made_a[:, column_of.reshape(-1)] = a[place].reshape(-1, rank).T
      made_b[row_of.reshape(-1)] = b[place].reshape(rank, -1).T
      tensors[f'{prefix}.lora_A.weight'], tensors[f'{prefix}.lora_B.weight'] = lazy_array(made_a), lazy_array(made_b)
      if magnitude is not None:
        made = np.empty(out, magnitude.dtype)
        made[row_of.reshape(-1)] = magnitude[place].reshape(-1)
        tensors[f'{prefix}.lora_magnitude_vector'] = lazy_array(made)
      settings[module.name] = dataclasses.replace(adapter, names=())
  config = _config(settings, [module.name for module in modules]) | {'base_model_name_or_path': str(base.path)}
  if is_writer:
    _write(target, config, tensors, {'folder': str(base.path), 'sha256': digest})
  return len(settings)


def _config(settings: Mapping[str, LowRankAdapter], all_modules: list[str]) -> dict[str, Any]:
  """Returns the keys of adapter_config.json that follow from the adapters, by the names of their modules."""
  kinds = {(adapter.use_rslora, adapter.use_dora) for adapter in settings.values()}
  if len(kinds) > 1:
    raise UserError('some adapters have use_rslora or use_dora and others do not, which no config of `peft` says.')
  ((use_rslora, use_dora),) = kinds
  (rank, alpha), _ = Counter((adapter.rank, adapter.alpha) for adapter in settings.values()).most_common(1)[0]
  ends = {name.rpartition('.')[2] for name in settings}
  left_out = {name.rpartition('.')[2] for name in all_modules if name not in settings}
  return {
    'peft_type': 'LORA',
    'task_type': 'CAUSAL_LM',
    'r': rank,
    'lora_alpha': alpha,
    'lora_dropout': max(adapter.dropout_rate for adapter in settings.values()),
    'use_rslora': use_rslora,
    'use_dora': use_dora,
    'bias': 'none',
    'inference_mode': True,
    'target_modules': sorted(settings if ends & left_out else ends),
    'rank_pattern': {re.escape(name): each.rank for name, each in settings.items() if each.rank != rank},
    'alpha_pattern': {re.escape(name): each.alpha for name, each in settings.items() if each.alpha != alpha},
  }


def _write(target: Path, config: Any, tensors: Mapping[str, LazyArray], base: Mapping[str, str]) -> None:
  if target.exists():
    raise UserError(f'{target} exists: name a folder that does not, or move it away.')
  partial = target.parent / f'.{target.name}.partial'
  shutil.rmtree(partial, ignore_errors=True)
  partial.mkdir(parents=True)
  for name, values in ((CONFIG_FILE, config), (BASE_FILE, base)):
    (partial / name).write_text(json.dumps(values, indent=2, sort_keys=True) + '\n', encoding='utf-8')
  for _ in write_tensors(partial, tensors, max_shard_bytes=2**62):
    pass
  os.replace(partial / SINGLE_FILE, partial / TENSORS_FILE)
  os.replace(partial, target)
