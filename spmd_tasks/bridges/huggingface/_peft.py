"""Reads and writes low-rank adapters of a Hugging Face model in the format of `peft`.

    adapter = open_adapter('adapters/notes')
    adapter.adapters(folder)                             # kernel -> LowRankAdapter, to build the model with
    adapter.read_weights(partitioned_model, folder)      # the adapters' weights on the mesh
    export_adapter(Path('out'), model, weights, base=folder)

`peft` adds B . A to a weight [out, in]. Our adapters add A . B, with A [in..., R] and B [R, out...], to a kernel
[in..., out...]. The family's rules map weights to kernels; applied to arrays of row and column numbers, they give the
row and the column of the weight for each element of a kernel.

A fused weight, such as queries, keys and values, has one A and one B in `peft`. Reading it gives each kernel all of A,
and its rows of B. Writing kernels with equal A's gives that A again. Different A's are concatenated to an adapter whose
rank is the sum of the ranks, with B zero outside of a kernel's rows and columns.

`peft` adapts a Linear [out, in] (in GPT-2, a Conv1D [in, out]), or by `target_parameters` a parameter with the kernels
of all experts, as transformers 5 has them. Older folders have a Linear for each expert.

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
from spmd_tasks.bridges.huggingface._folder import Folder, are_equal, read_config
from spmd_tasks.bridges.huggingface._patterns import NumberByPattern
from spmd_tasks.bridges.huggingface._safetensors import SINGLE_FILE, new_folder, read_file, write_tensors
from spmd_tasks.bridges.huggingface._tensors import gpt2_rules
from spmd_tasks.errors import UserError
from spmd_tasks.inputs.tokenizer_files import read_json_object
from spmd_tasks.runtime import PartitionedModel

_CONFIG_FILE = 'adapter_config.json'
_MAX_NUMBER = 1_000_000
_GATE_UP, _DOWN = 'gate_up_proj', 'down_proj'
# Keys that are read, or do not affect what is computed from the saved tensors. Other keys must be null, false or empty.
_KNOWN_KEYS = {
  *('peft_type', 'r', 'rank_pattern', 'lora_alpha', 'alpha_pattern', 'lora_dropout', 'use_rslora', 'use_dora', 'bias'),
  *('target_parameters', 'runtime_config', 'qalora_group_size', 'base_model_class', 'fan_in_fan_out'),
  *('auto_mapping', 'base_model_name_or_path', 'revision', 'task_type', 'inference_mode', 'peft_version'),
  *('target_modules', 'exclude_modules', 'layers_to_transform', 'layers_pattern'),
  *('init_lora_weights', 'megatron_config', 'megatron_core', 'loftq_config', 'eva_config', 'corda_config'),
}
_TYPES = {
  'rank_pattern': dict,
  'alpha_pattern': dict,
  'target_parameters': list,
  'use_rslora': bool,
  'use_dora': bool,
}
# Values of `init_lora_weights` with which `peft` does not change the base when it loads the adapter. With pissa, olora,
# corda, loftq and lora_ga, it does.
_PLAIN_INITS = (True, False, None, 'gaussian', 'orthogonal', 'eva', 'mica')
_MERGE = (
  'merge them with PeftModel.from_pretrained(base, adapter).merge_and_unload().save_pretrained(folder), and use that '
  'folder as the model'
)
TENSORS_FILE, BASE_FILE = 'adapter_model.safetensors', 'base.json'
_TENSOR = re.compile(r'base_model\.model\.(.+)\.(?:(lora_A|lora_B)\.weight|(lora_magnitude_vector)(?:\.weight)?)')
_BASE_COPY = re.compile(r'base_model\.model\.(.+)\.base_layer\.weight')  # `peft` saves an adapted lm_head


@dataclasses.dataclass(frozen=True, kw_only=True)
class PeftModule:
  """A Linear, or a parameter with all experts, that `peft` adapts by one A and one B.

  Attributes:
    name: the name of the module or parameter in `transformers`.
    tensor: the name of its weight in the files; '' for a parameter with all experts.
    slots: the kernels in its weight. For experts, a slot's index does not select an expert.
    operations: the operations of the rule that converts the weight to these kernels.
    is_transposed: whether the weight is [in, out].
    num_experts: E of a parameter with all experts; None for a Linear.
    is_interleaved: whether the columns of gate and up are interleaved (gpt-oss).
    is_old: whether only older versions of `peft` and `transformers` have it.
  """

  name: str
  tensor: str = ''
  slots: tuple[Slot, ...]
  operations: tuple[Operation, ...] = ()
  is_transposed: bool = False
  num_experts: int | None = None
  is_interleaved: bool = False
  is_old: bool = False

  def rows_and_columns(self, num_out: int, num_in: int, num_input_dims: int) -> Sequence[tuple[np.ndarray, np.ndarray]]:
    """Returns, for each kernel, the weight's row [out...] and column [in...] of each output and input of the kernel."""
    if self.num_experts is None:
      return _rows_and_columns(self.operations, self.is_transposed, num_out, num_in, num_input_dims)
    num, columns = len(self.slots), np.arange(num_in)
    rows = np.arange(num_out).reshape((-1, num) if self.is_interleaved else (num, -1))
    return [(rows[:, i] if self.is_interleaved else rows[i], columns) for i in range(num)]

  def split_experts(self, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns A [E, R, in] and B [E, out, R] of a parameter with all experts; A and B of a Linear unchanged."""
    if self.num_experts is None:
      return a, b
    return a.reshape(self.num_experts, -1, a.shape[1]), np.moveaxis(b.reshape(len(b), -1, self.num_experts), -1, 0)

  def join_experts(self, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns A and B as `peft` saves them, with two dims; the inverse of `split_experts`."""
    if self.num_experts is None:
      return a, b
    return a.reshape(-1, a.shape[2]), np.moveaxis(b, 0, -1).reshape(b.shape[1], -1)

  def rank(self, num_rows: int) -> int:
    """Returns R, given the number of rows of the saved A."""
    return num_rows // (self.num_experts or 1)


def peft_modules(folder: Folder) -> list[PeftModule]:
  """Returns the modules of a folder's model whose kernels can all have adapters."""
  model = folder.with_nextn_heads(0).build_model()  # `transformers` has no multi-token prediction heads
  adaptable, layers = adaptable_weights(model), model_slots(model)
  modules = []
  for rule in folder.family.rules(folder.decoder, layers):
    name = rule.source[0].name
    if len(rule.source) != 1 or not name.endswith('.weight') or not all(slot.name in adaptable for slot in rule.target):
      continue
    settings: dict[str, Any] = {'tensor': name, 'slots': rule.target, 'operations': rule.operations}
    settings |= {'is_transposed': folder.family.make_rules is gpt2_rules, 'is_old': '/experts/' in rule.target[0].name}
    modules.append(PeftModule(name=folder.family.module_name(name.removesuffix('.weight')), **settings))
  mixture = folder.decoder.mixture
  for i, layer in enumerate(layers):
    if mixture is None or folder.decoder.num_encoder_layers or not folder.decoder.mixed[i]:
      continue
    for name, kernels in ((_GATE_UP, ('gate', 'up')), (_DOWN, ('down',))):
      slots = tuple(Slot(f'{layer.prefix}ffn/experts/{kernel}', layer.index) for kernel in kernels)
      if all(slot.name in adaptable for slot in slots):
        parameter = folder.family.module_name(f'{folder.family.names.layer.format(i)}mlp.experts.{name}')
        routing = mixture.routing
        modules.append(
          PeftModule(name=parameter, slots=slots, num_experts=routing.num_experts, is_interleaved=routing.use_bias)
        )
  return modules


def _tensor_prefix(module: PeftModule, others: Sequence[PeftModule]) -> str:
  """Returns the prefix of a module's tensor names in a folder that also adapts `others`.

  `peft` wraps the module of experts once per parameter, the first one innermost.
  """
  if module.num_experts is None:
    return module.name
  experts, _, parameter = module.name.rpartition('.')
  is_inner = parameter == _GATE_UP and any(other.name == f'{experts}.{_DOWN}' for other in others)
  return f'{experts}.base_layer' if is_inner else experts


def _module_names(prefixes: Sequence[str], targets: Sequence[str]) -> Iterator[tuple[str, str]]:
  """Yields each prefix of tensor names with the name of its module or parameter; the inverse of `_tensor_prefix`.

  Args:
    prefixes: all prefixes of a folder.
    targets: the `target_parameters` of its config.
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
def _rows_and_columns(
  operations: tuple[Operation, ...], is_transposed: bool, num_out: int, num_in: int, num_input_dims: int
) -> list[tuple[Any, Any]]:
  rows, columns = np.ogrid[:num_out, :num_in]
  numbers = [np.broadcast_to(number, (num_out, num_in)).astype(np.int32) for number in (rows, columns)]
  kernels_of_rows, kernels_of_columns = (
    Rule([], [], *operations).apply((number.T if is_transposed else number,)) for number in numbers
  )
  return [
    (rows[(0,) * num_input_dims], columns[(..., *[0] * (columns.ndim - num_input_dims))])
    for rows, columns in zip(kernels_of_rows, kernels_of_columns)
  ]


def open_adapter(path: os.PathLike | str) -> 'AdapterFolder':
  """Opens a folder of `peft` and parses its config.

  Raises a UserError if there is no config or safetensors file, or a setting is not supported.
  """
  path = Path(path).expanduser()
  config = _read_config(path / _CONFIG_FILE)
  if not (path / TENSORS_FILE).is_file():
    raise UserError(f'{path} has no {TENSORS_FILE}: save the adapter as safetensors; pickles are not read.')
  return AdapterFolder(path=path, config=config)


def _read_config(file: Path) -> dict[str, Any]:
  """Reads and checks an adapter_config.json."""
  config = read_config(file, 'use a folder that save_pretrained of `peft` wrote')
  if config.get('peft_type') != 'LORA' or config.get('bias', 'none') != 'none':
    raise UserError(
      f"{file} has peft_type = {config.get('peft_type')!r} and bias = {config.get('bias')!r}, which must be 'LORA' and "
      "'none'."
    )
  if unknown := sorted(key for key, value in config.items() if value and key not in _KNOWN_KEYS):
    raise UserError(f'{file} has {unknown[0]:.60} = {config[unknown[0]]!r:.60}, which is not supported: {_MERGE}.')
  init = config.get('init_lora_weights')
  if (init.lower() if isinstance(init, str) else init) not in _PLAIN_INITS:
    raise UserError(
      f'{file} has init_lora_weights = {init!r:.60}, with which `peft` changes the base when it loads the adapter: '
      f'{_MERGE}.'
    )
  for key, kind in _TYPES.items():
    if not isinstance(config.get(key), kind | None):
      raise UserError(f'{file} has {key} = {config[key]!r:.60}, which must be of type {kind.__name__}.')
  numbers = {key: config.get(key) or 0 for key in ('r', 'lora_alpha', 'lora_dropout')}
  for name in ('rank_pattern', 'alpha_pattern'):
    numbers |= {f'{name} {pattern!r}': value for pattern, value in (config.get(name) or {}).items()}
  for key, value in numbers.items():
    if type(value) not in (int, float) or not 0 <= value <= _MAX_NUMBER:
      raise UserError(f'{file} has {key:.80} = {value!r:.60}, which must be a number from 0 to {_MAX_NUMBER:,}.')
  return config


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class AdapterFolder:
  """A folder of `peft`, created by `open_adapter`; `config` is the content of its adapter_config.json."""

  path: Path
  config: Mapping[str, Any]

  def base(self) -> dict[str, Any] | None:
    """Returns the content of base.json, the adapter's base ('folder', 'sha256'); None without that file."""
    file = self.path / BASE_FILE
    return read_json_object(str(file)) if file.exists() else None

  @functools.cached_property
  def _numbers(self) -> dict[str, NumberByPattern]:
    file, names = self.path / _CONFIG_FILE, ('rank_pattern', 'alpha_pattern')
    return {name: NumberByPattern(file, name, self.config.get(name) or {}) for name in names}

  def _module_setting(self, key: str, patterns: str, module: str) -> Any:
    """Returns the number of the first pattern that matches a module's name, or else the value of `key`."""
    default = 8 if self.config.get(key) is None else self.config[key]  # as in `peft`
    number = self._numbers[patterns].find(module)
    return default if number is None else number

  @functools.cached_property
  def _all_tensors(self) -> dict[str, LazyArray]:
    return read_file(self.path / TENSORS_FILE)

  @functools.cached_property
  def _tensors(self) -> dict[str, dict[str, LazyArray]]:
    """Maps a module's name to its tensors 'lora_A', 'lora_B' and, with DoRA, 'lora_magnitude_vector'."""
    by_prefix: dict[str, dict[str, LazyArray]] = {}
    for name, tensor in self._all_tensors.items():
      if _BASE_COPY.fullmatch(name):
        continue
      match = _TENSOR.fullmatch(name)
      if match is None or tensor.dtype.kind not in 'fV':  # V: bfloat16 and other extension dtypes
        raise UserError(
          f'{self.path / TENSORS_FILE} has {name} in {tensor.dtype}, which must be a floating LoRA tensor of a Linear '
          f'or of experts: {_MERGE}.'
        )
      by_prefix.setdefault(match[1], {})[match[2] or match[3]] = tensor
    if not by_prefix:
      raise UserError(f'{self.path / TENSORS_FILE} has no tensors: save the adapter again.')
    targets = self.config.get('target_parameters') or ()
    modules = {name: by_prefix[prefix] for prefix, name in _module_names([*by_prefix], targets)}
    required = {'lora_A', 'lora_B', *(('lora_magnitude_vector',) if self.config.get('use_dora') else ())}
    for name, parts in modules.items():
      shapes = [parts[part].shape for part in ('lora_A', 'lora_B') if part in parts]
      if parts.keys() != required or [*map(len, shapes)] != [2, 2] or shapes[0][0] != shapes[1][1]:
        part_shapes = {part: list(tensor.shape) for part, tensor in parts.items()}
        raise UserError(
          f'{self.path / TENSORS_FILE} has {name} with {part_shapes}, which must be {sorted(required)} of one rank.'
        )
    return modules

  def _adapted_modules(self, base: Folder) -> Iterator[tuple[PeftModule, dict[str, LazyArray]]]:
    """Yields each adapted module of the base with its tensors."""
    modules = {module.name: module for module in peft_modules(base)}
    for name, parts in self._tensors.items():
      full_name = base.family.full_name(f'{name}.weight', base.decoder).removesuffix('.weight')
      if full_name not in modules:
        raise UserError(f'{self.path} adapts {name}, but {base.path} has no such module that can have an adapter.')
      yield modules[full_name], parts

  def adapters(self, base: Folder) -> dict[str, LowRankAdapter]:
    """Returns the settings of the adapters, by the names of our kernels.

    Raises a UserError if the base lacks an adapted module, layers that are scanned together have different settings, or
    the folder has a kernel of another base.
    """
    self._check_base_copies(base)
    adapters: dict[str, LowRankAdapter] = {}
    for module, parts in self._adapted_modules(base):
      rank = module.rank(parts['lora_A'].shape[0])
      if (config_rank := self._module_setting('r', 'rank_pattern', module.name)) != rank:
        raise UserError(
          f'{self.path} has {module.name} of rank {rank}, but its {_CONFIG_FILE} has rank {config_rank}: save the '
          'adapter again.'
        )
      adapter = LowRankAdapter(
        rank=rank,
        alpha=float(self._module_setting('lora_alpha', 'alpha_pattern', module.name)),
        dropout_rate=float(self.config.get('lora_dropout') or 0.0),
        use_rslora=bool(self.config.get('use_rslora')),
        use_dora=bool(self.config.get('use_dora')),
      )
      for slot in module.slots:
        if adapters.setdefault(slot.name, adapter) != adapter:
          raise UserError(
            f'{self.path} has {module.name} with another rank or alpha than in other layers of {slot.name}: use the '
            'same for all layers.'
          )
    return adapters

  def _check_base_copies(self, base: Folder) -> None:
    """Raises a UserError if a kernel of the base that the folder repeats is not the base's."""
    for name, copy in self._all_tensors.items():
      if (match := _BASE_COPY.fullmatch(name)) is None:
        continue
      kernel = base.tensors.get(base.family.full_name(f'{match[1]}.weight', base.decoder))
      if kernel is None or not are_equal(kernel.astype(copy.dtype), copy):
        raise UserError(
          f'{self.path} has {match[1]}.base_layer.weight, which differs from the kernel of {base.path}: give the base '
          f'that the adapter was trained on, or {_MERGE}.'
        )

  def lacks_layers(self, base: Folder) -> bool:
    """Whether some layers of an adapted weight have no adapter (`layers_to_transform` of `peft`)."""
    adapted = [module for module, _ in self._adapted_modules(base)]
    kernels, names = {slot.name for module in adapted for slot in module.slots}, {module.name for module in adapted}
    others = (module for module in peft_modules(base) if module.name not in names)
    return any(slot.name in kernels for module in others for slot in module.slots)

  def read_weights(self, model: PartitionedModel, base: Folder) -> Any:
    """Reads the adapters onto the mesh of a model that has them, as a tree like the weights with None for the others.

    Raises a UserError if the model's adapters are not `adapters(base)`, or a shape does not fit.
    """
    expected = {name: dataclasses.replace(adapter, names=()) for name, adapter in adapters_of(model.task.model).items()}
    if (adapters := self.adapters(base)) != expected:
      name = min(name for name in {*adapters, *expected} if adapters.get(name) != expected.get(name))
      raise UserError(
        f'{self.path} has the adapter {adapters.get(name)} of {name}, but the model has {expected.get(name)}: use the '
        "folder's settings."
      )
    canonical = traverse_util.flatten_dict(model.canonical_state.weights, sep='/')
    true = traverse_util.flatten_dict(model.abstract_state.weights, sep='/')
    padded = traverse_util.flatten_dict(model.padded_state.weights, sep='/')
    weights: dict[str, Any] = dict.fromkeys(padded)
    for name, array in self.read_arrays({name: leaf.shape for name, leaf in canonical.items()}, base).items():
      weights[name] = place_on_mesh(lazy_array(array).reshape(true[name].shape), padded[name])
    return traverse_util.unflatten_dict(weights, sep='/')

  def read_arrays(self, shapes: Mapping[str, tuple[int, ...]], base: Folder) -> dict[str, np.ndarray]:
    """Reads the adapters into float32 arrays in the checkpoint layout, by the names of our weights.

    Layers without an adapter in the folder have zeros.

    Args:
      shapes: name -> shape of the adapters' weights; other names are ignored.
      base: the folder of the base.

    Raises:
      UserError: a tensor does not fit its shape.
    """
    weight_names = {name: AdapterNames(kernel=name) for name in self.adapters(base)}
    weights = {
      part: np.zeros(shapes[part], np.float32)
      for names in weight_names.values()
      for part in (names.a, names.b, names.magnitude)
      if part in shapes
    }
    for module, parts in self._adapted_modules(base):
      arrays = {part: np.asarray(tensor).astype(np.float32) for part, tensor in parts.items()}
      num_out, num_in = arrays['lora_B'].shape[0], arrays['lora_A'].shape[1]
      a, b = module.split_experts(arrays['lora_A'], arrays['lora_B'])
      rank_dim = 0 if module.num_experts is None else 1
      first_slot = module.slots[0]
      num_input_dims = weights[weight_names[first_slot.name].a][first_slot.index].ndim - rank_dim - 1
      try:
        rows_and_columns = module.rows_and_columns(num_out, num_in, num_input_dims)
        for slot, (rows, columns) in zip(module.slots, rows_and_columns, strict=True):
          names = weight_names[slot.name]
          _assign(weights[names.a], slot.index, np.moveaxis(a[..., columns], rank_dim, -1))
          _assign(weights[names.b], slot.index, np.moveaxis(b[:, rows] if rank_dim else b[rows], -1, rank_dim))
          if names.magnitude in weights:
            _assign(weights[names.magnitude], slot.index, arrays['lora_magnitude_vector'].reshape(-1)[rows])
      except ValueError as error:
        raise UserError(
          f'{self.path} has {module.name} with {list(b.shape)} . {list(a.shape)}, which does not fit the model: use an '
          'adapter of this model.'
        ) from error
    return weights


def export_adapter(
  target: Path, model: Any, weights: Mapping[str, LazyArray], *, base: Folder, digest: str, is_writer: bool = True
) -> int:
  """Writes the adapters of a model as a folder that `peft` loads; returns the number of adapted modules.

  Args:
    target: the folder to write, which must not exist.
    model: a LanguageModel with adapters.
    weights: its weights by name, in the checkpoint layout; only adapters are read.
    base: the folder of the base model.
    digest: the digest of that folder, for base.json.
    is_writer: whether this process writes. All processes must call this function, because they read weights together.

  Raises:
    UserError: the model has no adapters, or `peft` cannot express an adapter.
  """
  adapters = adapters_of(model)
  if not adapters:
    raise UserError('the model has no adapters: use --format hf, or a job with adapters, such as finetune.LoraText.')
  modules = [module for module in peft_modules(base) if not module.is_old]
  if others := sorted(adapters.keys() - {slot.name for module in modules for slot in module.slots}):
    raise UserError(
      f'{others[0]} has an adapter, but is not in a Linear or a parameter of experts of {base.path}: use --format hf, '
      'which merges the adapters.'
    )
  adapted = [module for module in modules if any(slot.name in adapters for slot in module.slots)]
  trained = {kernel: _TrainedAdapter.read(weights, kernel, adapter) for kernel, adapter in adapters.items()}
  tensors: dict[str, LazyArray] = {}
  settings: dict[str, LowRankAdapter] = {}
  for module in adapted:
    settings[module.name], parts = _to_peft(module, trained, base)
    prefix = f'base_model.model.{_tensor_prefix(module, adapted)}'
    tensors |= {f'{prefix}.{part}': lazy_array(array) for part, array in parts.items()}
  config = _peft_config(settings, modules) | {'base_model_name_or_path': str(base.path)}
  if is_writer:
    with new_folder(target) as folder:
      for name, values in ((_CONFIG_FILE, config), (BASE_FILE, {'folder': str(base.path), 'sha256': digest})):
        (folder / name).write_text(json.dumps(values, indent=2, sort_keys=True) + '\n', encoding='utf-8')
      for _ in write_tensors(folder, tensors, max_shard_bytes=2**62):
        pass
      os.replace(folder / SINGLE_FILE, folder / TENSORS_FILE)
  return len(settings)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _TrainedAdapter:
  """The adapter of a kernel, with its weights in all layers: a [L, E?, in..., R], b [L, E?, R, out...]."""

  adapter: LowRankAdapter
  a: np.ndarray
  b: np.ndarray
  magnitude: np.ndarray | None

  @classmethod
  def read(cls, weights: Mapping[str, LazyArray], kernel: str, adapter: LowRankAdapter) -> '_TrainedAdapter':
    names = AdapterNames(kernel=kernel)
    magnitude = np.asarray(weights[names.magnitude]) if adapter.use_dora else None
    a, b = np.asarray(weights[names.a]), np.asarray(weights[names.b])
    return cls(adapter=dataclasses.replace(adapter, names=()), a=a, b=b, magnitude=magnitude)


def _to_peft(
  module: PeftModule, trained: Mapping[str, _TrainedAdapter], base: Folder
) -> tuple[LowRankAdapter, dict[str, np.ndarray]]:
  """Returns a module's adapter in `peft`, and its tensors by the last parts of their names."""
  of_slots = [trained.get(slot.name) for slot in module.slots]
  present = [kernel for kernel in of_slots if kernel is not None]
  adapter, first_a = present[0].adapter, present[0].a
  if adapter.use_dora and (len(present) < len(of_slots) or module.num_experts is not None):
    what = 'experts' if module.num_experts is not None else 'only a part of a fused Linear'
    raise UserError(
      f'{module.name} has use_dora, which `peft` does not support for {what}: use --format hf, which merges adapters.'
    )
  rank_dim = 0 if module.num_experts is None else 1
  one_a = first_a[module.slots[0].index]
  num_input_dims = one_a.ndim - rank_dim - 1
  num_in = one_a.size // one_a.shape[-1] // (module.num_experts or 1)
  num_out = len(module.slots) * present[0].b.shape[-1]  # for experts, B is [E, R, F]
  if module.num_experts is None:
    num_out = base.tensors[module.tensor].shape[1 if module.is_transposed else 0]
  all_a, all_b, magnitude = [], [], np.empty(num_out, np.float32)
  rows_and_columns = module.rows_and_columns(num_out, num_in, num_input_dims)
  for slot, kernel, (rows, columns) in zip(module.slots, of_slots, rows_and_columns, strict=True):
    if kernel is None:
      continue
    a, b = np.moveaxis(kernel.a[slot.index], -1, rank_dim), np.moveaxis(kernel.b[slot.index], rank_dim, -1)
    peft_a = np.empty((*a.shape[: rank_dim + 1], num_in), a.dtype)  # [E?, R, in]
    peft_a[..., columns.reshape(-1)] = a.reshape(*a.shape[: rank_dim + 1], -1)
    peft_b = np.zeros((*b.shape[:rank_dim], num_out, b.shape[-1]), b.dtype)  # [E?, out, R]
    peft_b[..., rows.reshape(-1), :] = b.reshape(*b.shape[:rank_dim], -1, b.shape[-1])
    if kernel.adapter != adapter:
      peft_b = peft_b * np.float32(kernel.adapter.scale / adapter.scale)
    all_a.append(peft_a)
    all_b.append(peft_b)
    if kernel.magnitude is not None:
      magnitude[rows.reshape(-1)] = kernel.magnitude[slot.index].reshape(-1)
  if all(kernel.adapter == adapter and np.array_equal(kernel.a.reshape(first_a.shape), first_a) for kernel in present):
    a, b = all_a[0], sum(all_b[1:], start=all_b[0])
  else:
    rank = sum(kernel.adapter.rank for kernel in present)
    alpha = adapter.scale * (rank**0.5 if adapter.use_rslora else rank)
    adapter = dataclasses.replace(adapter, rank=rank, alpha=alpha)
    a, b = np.concatenate(all_a, rank_dim), np.concatenate(all_b, -1)
  a, b = module.join_experts(a, b)
  parts = {'lora_A.weight': np.ascontiguousarray(a), 'lora_B.weight': np.ascontiguousarray(b)}
  return adapter, parts | ({'lora_magnitude_vector': magnitude} if adapter.use_dora else {})


def _assign(array: np.ndarray, index: tuple[int, ...], values: np.ndarray) -> None:
  """Assigns values without broadcasting. Raises a ValueError if the shapes differ."""
  if array[index].shape != values.shape:
    raise ValueError(f'{values.shape} does not fit {array[index].shape}')
  array[index] = values


def _peft_config(settings: Mapping[str, LowRankAdapter], modules: Sequence[PeftModule]) -> dict[str, Any]:
  """Returns the keys of adapter_config.json that follow from the adapters.

  Args:
    settings: name of an adapted module -> its adapter in `peft`.
    modules: all modules of the model.
  """
  linears, parameters = (
    [module.name for module in modules if (module.num_experts is None) == is_linear] for is_linear in (True, False)
  )
  kinds = {(adapter.use_rslora, adapter.use_dora) for adapter in settings.values()}
  if len(kinds) > 1:
    raise UserError(
      'only some adapters have use_rslora or use_dora, which a config of `peft` cannot express: use --format hf, which '
      'merges the adapters.'
    )
  ((use_rslora, use_dora),) = kinds
  (rank, alpha), _ = Counter((adapter.rank, adapter.alpha) for adapter in settings.values()).most_common(1)[0]
  targets, expert_targets = ([name for name in settings if name in names] for names in (linears, parameters))
  last_parts = {name.rpartition('.')[2] for name in targets}
  other_last_parts = {name.rpartition('.')[2] for name in linears if name not in settings}
  adapted_parameters = {_without_layer(name) for name in expert_targets}
  if len(expert_targets) == sum(_without_layer(name) in adapted_parameters for name in parameters):  # in all layers
    expert_targets = sorted(adapted_parameters)
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
    'target_modules': sorted(targets if last_parts & other_last_parts else last_parts),
    **({'target_parameters': sorted(expert_targets)} if expert_targets else {}),
    **({'fan_in_fan_out': True} if any(module.is_transposed for module in modules) else {}),
    'rank_pattern': {re.escape(name): adapter.rank for name, adapter in settings.items() if adapter.rank != rank},
    'alpha_pattern': {re.escape(name): adapter.alpha for name, adapter in settings.items() if adapter.alpha != alpha},
  }


def _without_layer(name: str) -> str:
  """Returns the name of a parameter of experts without its layer, such as 'mlp.experts.down_proj'."""
  return '.'.join(name.split('.')[-3:])
