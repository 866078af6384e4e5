"""Folders of `peft`: low-rank adapters beside a model of Hugging Face's format, read and written.

    adapter = open_adapter('adapters/notes')
    adapter.adapters(folder)                             # kernel -> LowRankAdapter, to build the model with
    adapter.read_weights(partitioned_model, folder)      # the adapters' weights on the mesh
    export_adapter(Path('out'), model, weights, base=folder)

`peft` adds B . A to a weight [out, in]; ours are A [in..., R] and B [R, out...], of kernels whose dims the family's
rules make. A weight that holds several kernels, such as queries, keys and values, has one A there: each of our adapters
gets it whole, with its own rows of B. The other way, adapters with one A become one adapter again; with different ones,
an adapter of all their ranks: A is all of theirs, and each has its own columns of B, zero elsewhere.

A PeftModule is a Linear [out, in] (GPT-2: a Conv1D [in, out]), or a parameter with the kernels of all experts, as
transformers 5 holds them in memory, which `peft` adapts by `target_parameters`; older folders have a Linear for each
expert. The rules by which a family's tensors become kernels, applied to the numbers of rows and columns, say where each
of them goes.

Shapes: R rank, E experts.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import functools
import json
import os
from pathlib import Path
import re
from typing import Any

from flax import traverse_util
import numpy as np

from spmd_tasks.adapters import LowRankAdapter
from spmd_tasks.adapters.adapted_weights import AdapterNames, adaptable_weights, adapters_of
from spmd_tasks.bridges._lazy_arrays import LazyArray, lazy_array, place_on_mesh
from spmd_tasks.bridges._operations import Operation
from spmd_tasks.bridges._rules import Rule, Slot
from spmd_tasks.bridges.huggingface._describe import model_slots
from spmd_tasks.bridges.huggingface._folder import Folder, read_config
from spmd_tasks.bridges.huggingface._patterns import NumberByPattern
from spmd_tasks.bridges.huggingface._safetensors import SINGLE_FILE, new_folder, read_file, write_tensors
from spmd_tasks.bridges.huggingface._tensors import gpt2_rules
from spmd_tasks.errors import UserError
from spmd_tasks.runtime import PartitionedModel

_CONFIG_FILE = 'adapter_config.json'
_MAX_NUMBER = 1_000_000
_GATE_UP, _DOWN = 'gate_up_proj', 'down_proj'
# Keys of the config that are read, and those that change nothing that is computed from the saved tensors. Any other key
# must be null, false or empty.
_KNOWN = {
  *('peft_type', 'r', 'rank_pattern', 'lora_alpha', 'alpha_pattern', 'lora_dropout', 'use_rslora', 'use_dora', 'bias'),
  *('target_parameters', 'runtime_config', 'qalora_group_size', 'base_model_class', 'fan_in_fan_out'),
  *('auto_mapping', 'base_model_name_or_path', 'revision', 'task_type', 'inference_mode', 'peft_version'),
  *('target_modules', 'exclude_modules', 'layers_to_transform', 'layers_pattern'),
  *('init_lora_weights', 'megatron_config', 'megatron_core', 'loftq_config', 'eva_config', 'corda_config'),
}
# The values of `init_lora_weights` with which `peft` leaves the base as it is. With others (pissa, olora, corda, loftq,
# lora_ga) it changes the base whenever it loads the adapter.
_PLAIN_INITS = (True, False, None, 'gaussian', 'orthogonal', 'eva', 'mica')
TENSORS_FILE, BASE_FILE = 'adapter_model.safetensors', 'base.json'
_TENSOR = re.compile(r'base_model\.model\.(.+)\.(?:(lora_A|lora_B)\.weight|(lora_magnitude_vector)(?:\.weight)?)')


@dataclasses.dataclass(frozen=True, kw_only=True)
class PeftModule:
  """A module of a family's model that `peft` adapts by one A and one B.

  Attributes:
    name: as the family's model has it; of a parameter of experts, that of the parameter.
    slots: the kernels that it holds; of experts, the places have no expert.
    operations: of the rule that makes these kernels from the weight.
    is_transposed: whether the weight is [in, out].
    num_experts: E, if it is a parameter with all experts; else None.
    takes_turns: whether the columns of gate and up take turns in it (gpt-oss).
    is_old: whether only older versions of `peft` and transformers write it.
  """

  name: str
  slots: tuple[Slot, ...]
  operations: tuple[Operation, ...] = ()
  is_transposed: bool = False
  num_experts: int | None = None
  takes_turns: bool = False
  is_old: bool = False

  def places(self, num_out: int, num_in: int, num_input_dims: int) -> Sequence[tuple[np.ndarray, np.ndarray]]:
    """Returns for each kernel the row [O...] and the column [I...] of the weight that each of its places is from."""
    if self.num_experts is None:
      return _places(self.operations, self.is_transposed, num_out, num_in, num_input_dims)
    num, columns = len(self.slots), np.arange(num_in)
    rows = np.arange(num_out).reshape((-1, num) if self.takes_turns else (num, -1))
    return [(rows[:, each] if self.takes_turns else rows[each], columns) for each in range(num)]

  def per_expert(self, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns A [E, R, in] and B [E, out, R] of a parameter with all experts; of a Linear, [R, in] and [out, R]."""
    if self.num_experts is None:
      return a, b
    return a.reshape(self.num_experts, -1, a.shape[1]), np.moveaxis(b.reshape(len(b), -1, self.num_experts), -1, 0)

  def joined(self, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns A and B as `peft` saves them, two dims each: the inverse of `per_expert`."""
    if self.num_experts is None:
      return a, b
    return a.reshape(-1, a.shape[2]), np.moveaxis(b, 0, -1).reshape(b.shape[1], -1)

  def rank(self, num_rows: int) -> int:
    """Returns R for the number of A's rows."""
    return num_rows // (self.num_experts or 1)


def peft_modules(folder: Folder) -> list[PeftModule]:
  """Returns the modules of a folder's model whose kernels can all have adapters."""
  model = folder.with_nextn_heads(0).build_model()  # transformers, and so `peft`, knows no heads
  adaptable, places = adaptable_weights(model), model_slots(model)
  found = []
  for rule in folder.family.rules(folder.decoder, places):
    name = rule.source[0].name
    if len(rule.source) != 1 or not name.endswith('.weight') or not all(slot.name in adaptable for slot in rule.target):
      continue
    settings: dict[str, Any] = {'slots': rule.target, 'operations': rule.operations}
    settings |= {'is_transposed': folder.family.make_rules is gpt2_rules, 'is_old': '/experts/' in rule.target[0].name}
    found.append(PeftModule(name=name.removesuffix('.weight'), **settings))
  mixture = folder.decoder.mixture
  for i, place in enumerate(places):
    if mixture is None or folder.decoder.num_encoder_layers or not folder.decoder.mixed[i]:
      continue
    for name, kernels in ((_GATE_UP, ('gate', 'up')), (_DOWN, ('down',))):
      slots = tuple(Slot(f'{place.prefix}ffn/experts/{kernel}', place.index) for kernel in kernels)
      if all(slot.name in adaptable for slot in slots):
        parameter = f'{folder.family.names.layer.format(i)}mlp.experts.{name}'
        routing = mixture.routing
        found.append(
          PeftModule(name=parameter, slots=slots, num_experts=routing.num_experts, takes_turns=routing.use_bias)
        )
  return found


def saved_prefix(module: PeftModule, others: Sequence[PeftModule]) -> str:
  """Returns what the names of a module's tensors begin with, if a folder has `others` too.

  `peft` wraps the module of experts once for each parameter, the first one innermost.
  """
  if module.num_experts is None:
    return module.name
  experts, _, parameter = module.name.rpartition('.')
  is_inner = parameter == _GATE_UP and any(other.name == f'{experts}.{_DOWN}' for other in others)
  return f'{experts}.base_layer' if is_inner else experts


def names_of_parameters(prefixes: Sequence[str], targets: Sequence[str]) -> Iterator[tuple[str, str]]:
  """Yields (prefix of tensors, name of the module), where parameters of experts get the parameter's name.

  `prefixes` are all that tensors of a folder begin with, `targets` the `target_parameters` of its config.
  """
  for prefix in prefixes:
    experts = prefix.removesuffix('.base_layer')
    if experts.rpartition('.')[2] != 'experts':
      yield prefix, prefix
      continue
    is_alone = f'{experts}.base_layer' not in prefixes
    is_down = any(f'.{experts}.{_DOWN}'.endswith(f'.{target}') for target in targets)
    is_inner = prefix != experts or (is_alone and not is_down)
    yield prefix, f'{experts}.{_GATE_UP if is_inner else _DOWN}'


@functools.lru_cache(maxsize=256)
def _places(
  operations: tuple[Operation, ...], is_transposed: bool, num_out: int, num_in: int, num_input_dims: int
) -> list[tuple[Any, Any]]:
  rows, columns = np.ogrid[:num_out, :num_in]
  numbers = [np.broadcast_to(each, (num_out, num_in)).astype(np.int32) for each in (rows, columns)]
  row_of, column_of = (Rule([], [], *operations).apply((each.T if is_transposed else each,)) for each in numbers)
  return [
    (rows[(0,) * num_input_dims], columns[(..., *[0] * (columns.ndim - num_input_dims))])
    for rows, columns in zip(row_of, column_of)
  ]


def open_adapter(path: os.PathLike | str) -> 'AdapterFolder':
  """Reads the config of a folder of `peft`, and the headers of its tensors.

  Raises a UserError if there is none, it is no LoRA, or it has a setting that is not known here.
  """
  path = Path(path).expanduser()
  config = _read_config(path / _CONFIG_FILE)
  if not (path / TENSORS_FILE).is_file():
    raise UserError(f'{path} has no {TENSORS_FILE}: pickles are not read; save the adapter as safetensors.')
  return AdapterFolder(path=path, config=config)


def _read_config(file: Path) -> dict[str, Any]:
  """Returns the content of an adapter_config.json, whose numbers are numbers."""
  config = read_config(file, 'give a folder that save_pretrained of `peft` has written')
  if config.get('peft_type') != 'LORA' or config.get('bias', 'none') != 'none':
    raise UserError(
      f"{file} has peft_type {config.get('peft_type')!r} and bias {config.get('bias')!r}: only 'LORA' without trained "
      'biases is read.'
    )
  if unknown := sorted(key for key, value in config.items() if value and key not in _KNOWN):
    raise UserError(f'{file} has {unknown[0]:.60} = {config[unknown[0]]!r:.60}, which is not known here.')
  init = config.get('init_lora_weights')
  if (init.lower() if isinstance(init, str) else init) not in _PLAIN_INITS:
    raise UserError(
      f'{file} has init_lora_weights = {init!r:.60}, with which `peft` changes the base when it loads the adapter: '
      'merge them by PeftModel.from_pretrained(base, adapter).merge_and_unload().save_pretrained(folder), and use that '
      'folder as the model.'
    )
  numbers = {key: config.get(key) or 0 for key in ('r', 'lora_alpha', 'lora_dropout')}
  for name in ('rank_pattern', 'alpha_pattern'):
    patterns = config.get(name) or {}
    if not isinstance(patterns, dict):
      raise UserError(f'{file} has {name} = {patterns!r:.60}: an object with a number by pattern belongs there.')
    numbers |= {f'{name} {pattern!r}': value for pattern, value in patterns.items()}
  targets = config.get('target_parameters') or []
  if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
    raise UserError(f'{file} has target_parameters = {targets!r:.60}: a list of names belongs there.')
  for key in ('use_rslora', 'use_dora'):
    if not isinstance(config.get(key), bool | None):
      raise UserError(f'{file} has {key} = {config[key]!r:.60}: true or false belongs there.')
  for key, value in numbers.items():
    if type(value) not in (int, float) or not 0 <= value <= _MAX_NUMBER:
      raise UserError(f'{file} has {key:.80} = {value!r:.60}: a number up to {_MAX_NUMBER:,} belongs there.')
  return config


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class AdapterFolder:
  """A folder of `peft`; `open_adapter` makes it. `config` is the content of its adapter_config.json."""

  path: Path
  config: Mapping[str, Any]

  def base(self) -> dict[str, Any] | None:
    """Returns the 'folder' and the 'sha256' of the adapter's base as base.json has them; None without that file."""
    file = self.path / BASE_FILE
    return read_config(file, 'it was there') if file.exists() else None

  @functools.cached_property
  def _numbers(self) -> dict[str, NumberByPattern]:
    file, names = self.path / _CONFIG_FILE, ('rank_pattern', 'alpha_pattern')
    return {name: NumberByPattern(file, name, self.config.get(name) or {}) for name in names}

  def _setting_of(self, key: str, patterns: str, module: str) -> Any:
    """Returns the number of one module: of the first pattern that matches its name, or else of `key`."""
    default = 8 if self.config.get(key) is None else self.config[key]  # that of `peft`
    number = self._numbers[patterns].find(module)
    return default if number is None else number

  @functools.cached_property
  def _tensors(self) -> dict[str, dict[str, LazyArray]]:
    """Module of the family -> 'lora_A', 'lora_B' and with DoRA 'lora_magnitude_vector'."""
    by_prefix: dict[str, dict[str, LazyArray]] = {}
    for name, tensor in read_file(self.path / TENSORS_FILE).items():
      match = _TENSOR.fullmatch(name)
      if match is None or tensor.dtype.kind not in 'fV':  # V: bfloat16 and the like
        what = f'{name} in {tensor.dtype}'
        raise UserError(
          f'{self.path / TENSORS_FILE} has {what}: an adapter of a Linear or of experts has floats there.'
        )
      by_prefix.setdefault(match[1], {})[match[2] or match[3]] = tensor
    if not by_prefix:
      raise UserError(f'{self.path / TENSORS_FILE} has no tensors: save the adapter again.')
    targets = self.config.get('target_parameters') or ()
    found = {name: by_prefix[prefix] for prefix, name in names_of_parameters([*by_prefix], targets)}
    wanted = {'lora_A', 'lora_B', *(('lora_magnitude_vector',) if self.config.get('use_dora') else ())}
    for name, parts in found.items():
      shapes = [parts[each].shape for each in ('lora_A', 'lora_B') if each in parts]
      if parts.keys() != wanted or [*map(len, shapes)] != [2, 2] or shapes[0][0] != shapes[1][1]:
        has = f'{name} with { ({part: list(tensor.shape) for part, tensor in parts.items()}) }'
        raise UserError(f'{self.path / TENSORS_FILE} has {has}: {sorted(wanted)} of one rank belong there.')
    return found

  def _found(self, base: Folder) -> Iterator[tuple[PeftModule, dict[str, LazyArray]]]:
    modules = {module.name: module for module in peft_modules(base)}
    for name, parts in self._tensors.items():
      known = base.family.full_name(f'{name}.weight', base.decoder).removesuffix('.weight')
      if known not in modules:
        raise UserError(f'{self.path} adapts {name}, which {base.path} has no kernel for that can have an adapter.')
      yield modules[known], parts

  def adapters(self, base: Folder) -> dict[str, LowRankAdapter]:
    """Returns the settings of the adapters by the names of our weights.

    Raises a UserError if the base has no such Linear; or layers that are scanned together have different settings.
    """
    found: dict[str, LowRankAdapter] = {}
    for module, parts in self._found(base):
      rank = module.rank(parts['lora_A'].shape[0])
      if (said := self._setting_of('r', 'rank_pattern', module.name)) != rank:
        raise UserError(f'{self.path} has {module.name} of rank {rank}, but its {_CONFIG_FILE} says {said}.')
      adapter = LowRankAdapter(
        rank=rank,
        alpha=float(self._setting_of('lora_alpha', 'alpha_pattern', module.name)),
        dropout_rate=float(self.config.get('lora_dropout') or 0.0),
        use_rslora=bool(self.config.get('use_rslora')),
        use_dora=bool(self.config.get('use_dora')),
      )
      for slot in module.slots:
        if found.setdefault(slot.name, adapter) != adapter:
          raise UserError(
            f'{self.path} gives {module.name} another rank or alpha than it has in other layers, which are one weight '
            f'here ({slot.name}): give all layers the same.'
          )
    return found

  def lacks_layers(self, base: Folder) -> bool:
    """Whether some layers of an adapted weight have no adapter (`layers_to_transform` of `peft`)."""
    found = [module for module, _ in self._found(base)]
    names, adapted = {slot.name for module in found for slot in module.slots}, {module.name for module in found}
    others = (module for module in peft_modules(base) if module.name not in adapted)
    return any(slot.name in names for module in others for slot in module.slots)

  def read_weights(self, model: PartitionedModel, base: Folder) -> Any:
    """Reads the adapters onto the mesh of a model that has them: a tree like the weights, with None for all others.

    Raises a UserError if the model has other adapters than `adapters(base)`, or a shape does not fit.
    """
    wanted = {name: dataclasses.replace(adapter, names=()) for name, adapter in adapters_of(model.task.model).items()}
    if (own := self.adapters(base)) != wanted:
      different = sorted(name for name in {*own, *wanted} if own.get(name) != wanted.get(name))
      raise UserError(f'{self.path} and the model differ in the adapter of {different[0]}: let the folder decide.')
    canonical = traverse_util.flatten_dict(model.canonical_state.weights, sep='/')
    true = traverse_util.flatten_dict(model.abstract_state.weights, sep='/')
    padded = traverse_util.flatten_dict(model.padded_state.weights, sep='/')
    weights: dict[str, Any] = dict.fromkeys(padded)
    for name, array in self.read_arrays({name: leaf.shape for name, leaf in canonical.items()}, base).items():
      weights[name] = place_on_mesh(lazy_array(array).reshape(true[name].shape), padded[name])
    return traverse_util.unflatten_dict(weights, sep='/')

  def read_arrays(self, shapes: Mapping[str, tuple[int, ...]], base: Folder) -> dict[str, np.ndarray]:
    """Reads the adapters into arrays in the layout of checkpoints, float32, by the names of our weights.

    `shapes` has those of the adapters' weights, and of any others; a UserError is raised if one does not fit. A layer
    for which the folder has no adapter gets zeros, which change nothing.
    """
    names = {name: AdapterNames(kernel=name) for name in self.adapters(base)}
    made = {
      part: np.zeros(shapes[part], np.float32)
      for each in names.values()
      for part in (each.a, each.b, each.magnitude)
      if part in shapes
    }
    for module, parts in self._found(base):
      arrays = {part: np.asarray(tensor).astype(np.float32) for part, tensor in parts.items()}
      num_out, num_in = arrays['lora_B'].shape[0], arrays['lora_A'].shape[1]
      a, b = module.per_expert(arrays['lora_A'], arrays['lora_B'])
      first = 0 if module.num_experts is None else 1
      a_of_slot = made[names[module.slots[0].name].a][module.slots[0].index]
      try:
        places = module.places(num_out, num_in, a_of_slot.ndim - first - 1)
        for slot, (row_of, column_of) in zip(module.slots, places, strict=True):
          each, place = names[slot.name], slot.index
          _set(made[each.a], place, np.moveaxis(a[..., column_of], first, -1))
          _set(made[each.b], place, np.moveaxis(b[:, row_of] if first else b[row_of], -1, first))
          if each.magnitude in made:
            _set(made[each.magnitude], place, arrays['lora_magnitude_vector'].reshape(-1)[row_of])
      except ValueError as error:
        given = f'{list(b.shape)} . {list(a.shape)}'
        raise UserError(f'{self.path} has {module.name} with {given}: it is of another model.') from error
    return made


def export_adapter(
  target: Path, model: Any, weights: Mapping[str, LazyArray], *, base: Folder, digest: str, is_writer: bool = True
) -> int:
  """Writes the adapters of a model as a folder that `peft` loads; returns how many Linears have one.

  Args:
    target: nothing is there yet.
    model: a LanguageModel with adapters.
    weights: its weights by name, as checkpoints have them; those of the base are not read.
    base, digest: the folder of the model without adapters, and its digest, which base.json beside the config keeps.
    is_writer: whether this process writes; reading the weights may need all processes.

  Raises a UserError: the model has no adapters, or one of a weight that is no Linear there.
  """
  adapters = adapters_of(model)
  if not adapters:
    raise UserError('the model has no adapters: --format peft is for a job with some, such as finetune.LoraText.')
  modules = [module for module in peft_modules(base) if not module.is_old]
  held = {slot.name for module in modules for slot in module.slots}
  if unknown := sorted(adapters.keys() - held):
    where = f'no Linear and of no parameter of experts in {base.path}'
    raise UserError(f'{unknown[0]} is part of {where}: use --format hf, which merges the adapters.')
  adapted = [module for module in modules if any(slot.name in adapters for slot in module.slots)]
  read = {kernel: _Trained.read(weights, kernel, adapter) for kernel, adapter in adapters.items()}
  tensors: dict[str, LazyArray] = {}
  settings: dict[str, LowRankAdapter] = {}
  for module in adapted:
    settings[module.name], parts = _joined(module, read, base)
    prefix = f'base_model.model.{saved_prefix(module, adapted)}'
    tensors |= {f'{prefix}.{part}': lazy_array(array) for part, array in parts.items()}
  config = _config(settings, modules) | {'base_model_name_or_path': str(base.path)}
  if is_writer:
    with new_folder(target) as folder:
      for name, values in ((_CONFIG_FILE, config), (BASE_FILE, {'folder': str(base.path), 'sha256': digest})):
        (folder / name).write_text(json.dumps(values, indent=2, sort_keys=True) + '\n', encoding='utf-8')
      for _ in write_tensors(folder, tensors, max_shard_bytes=2**62):
        pass
      os.replace(folder / SINGLE_FILE, folder / TENSORS_FILE)
  return len(settings)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Trained:
  """The adapter of a kernel and its weights in all layers: a [L, E?, I..., R], b [L, E?, R, O...]."""

  adapter: LowRankAdapter
  a: np.ndarray
  b: np.ndarray
  magnitude: np.ndarray | None

  @classmethod
  def read(cls, weights: Mapping[str, LazyArray], kernel: str, adapter: LowRankAdapter) -> '_Trained':
    names = AdapterNames(kernel=kernel)
    magnitude = np.asarray(weights[names.magnitude]) if adapter.use_dora else None
    a, b = np.asarray(weights[names.a]), np.asarray(weights[names.b])
    return cls(adapter=dataclasses.replace(adapter, names=()), a=a, b=b, magnitude=magnitude)


def _joined(
  module: PeftModule, read: Mapping[str, _Trained], base: Folder
) -> tuple[LowRankAdapter, dict[str, np.ndarray]]:
  """Returns the adapter that a module has in `peft`, and its tensors, by the ends of their names."""
  present = [read.get(slot.name) for slot in module.slots]
  some = [trained for trained in present if trained is not None]
  adapter = some[0].adapter
  if adapter.use_dora and (len(some) < len(present) or module.num_experts is not None):
    what = 'of experts' if module.num_experts is not None else 'of one part of a Linear alone'
    raise UserError(f'{module.name}: `peft` has no adapter {what} with use_dora; use --format hf, which merges it.')
  first = 0 if module.num_experts is None else 1
  index = module.slots[0].index
  num_input_dims = some[0].a[index].ndim - first - 1
  num_in = some[0].a[index].size // some[0].a[index].shape[-1] // (module.num_experts or 1)
  num_out = len(module.slots) * some[0].b.shape[-1]  # of experts: their parts are [E, R, F]
  if module.num_experts is None:
    num_out = base.tensors[f'{module.name}.weight'].shape[1 if module.is_transposed else 0]
  first_a = some[0].a
  is_shared = all(each.adapter == adapter and np.array_equal(each.a.reshape(first_a.shape), first_a) for each in some)
  all_a, all_b, made_magnitude = [], [], np.empty(num_out, np.float32)
  places = module.places(num_out, num_in, num_input_dims)
  for slot, trained, (row_of, column_of) in zip(module.slots, present, places, strict=True):
    if trained is None:
      continue
    a, b = np.moveaxis(trained.a[slot.index], -1, first), np.moveaxis(trained.b[slot.index], first, -1)
    made_a = np.empty((*a.shape[: first + 1], num_in), a.dtype)  # [E?, R, in]
    made_a[..., column_of.reshape(-1)] = a.reshape(*a.shape[: first + 1], -1)
    made_b = np.zeros((*b.shape[:first], num_out, b.shape[-1]), b.dtype)  # [E?, out, R]
    made_b[..., row_of.reshape(-1), :] = b.reshape(*b.shape[:first], -1, b.shape[-1])
    all_a.append(made_a)
    all_b.append(made_b * np.float32(trained.adapter.scale / adapter.scale) if trained.adapter != adapter else made_b)
    if trained.magnitude is not None:
      made_magnitude[row_of.reshape(-1)] = trained.magnitude[slot.index].reshape(-1)
  if len(some) > 1 and not is_shared:
    rank = sum(each.adapter.rank for each in some)
    alpha = adapter.scale * (rank**0.5 if adapter.use_rslora else rank)
    adapter = dataclasses.replace(adapter, rank=rank, alpha=alpha)
    a, b = np.concatenate(all_a, first), np.concatenate(all_b, -1)
  else:
    a, b = all_a[0], sum(all_b[1:], start=all_b[0])
  a, b = module.joined(a, b)
  parts = {'lora_A.weight': np.ascontiguousarray(a), 'lora_B.weight': np.ascontiguousarray(b)}
  return adapter, parts | ({'lora_magnitude_vector': made_magnitude} if adapter.use_dora else {})


def _set(array: np.ndarray, place: tuple[int, ...], values: np.ndarray) -> None:
  """Writes values of just the shape that they have there, which an assignment alone would not ask for."""
  if array[place].shape != values.shape:
    raise ValueError(f'{values.shape} do not fit {array[place].shape}')
  array[place] = values


def _config(settings: Mapping[str, LowRankAdapter], modules: Sequence[PeftModule]) -> dict[str, Any]:
  """Returns the keys of adapter_config.json that follow from the adapters, by the names of their modules."""
  linears, parameters = (
    [module.name for module in modules if (module.num_experts is None) == is_linear] for is_linear in (True, False)
  )
  kinds = {(adapter.use_rslora, adapter.use_dora) for adapter in settings.values()}
  if len(kinds) > 1:
    raise UserError('some adapters have use_rslora or use_dora and others do not, which no config of `peft` says.')
  ((use_rslora, use_dora),) = kinds
  (rank, alpha), _ = Counter((adapter.rank, adapter.alpha) for adapter in settings.values()).most_common(1)[0]
  targets, expert_targets = ([name for name in settings if name in names] for names in (linears, parameters))
  ends = {name.rpartition('.')[2] for name in targets}
  left_out = {name.rpartition('.')[2] for name in linears if name not in settings}
  is_whole = len(expert_targets) == len([name for name in parameters if _parameter(name) in map(_parameter, settings)])
  named = map(_parameter, expert_targets) if is_whole else expert_targets
  return {
    'peft_type': 'LORA',
    'task_type': 'CAUSAL_LM',
    'r': rank,
    'lora_alpha': alpha,
    # `peft` has no dropout of a parameter's input.
    'lora_dropout': 0.0 if expert_targets else max(adapter.dropout_rate for adapter in settings.values()),
    'use_rslora': use_rslora,
    'use_dora': use_dora,
    'bias': 'none',
    'inference_mode': True,
    'target_modules': sorted(targets if ends & left_out else ends),
    **({'target_parameters': sorted({*named})} if expert_targets else {}),
    **({'fan_in_fan_out': True} if any(module.is_transposed for module in modules) else {}),
    'rank_pattern': {re.escape(name): each.rank for name, each in settings.items() if each.rank != rank},
    'alpha_pattern': {re.escape(name): each.alpha for name, each in settings.items() if each.alpha != alpha},
  }


def _parameter(name: str) -> str:
  """Returns the name of a parameter of experts without its layer: 'mlp.experts.down_proj'."""
  return '.'.join(name.split('.')[-3:])
