"""Folder: a Hugging Face model folder, with its config parsed and its weights read lazily."""

from collections.abc import Callable, Collection, Iterable, Mapping
import dataclasses
import difflib
import functools
import os
from pathlib import Path
import re
from typing import Any

from absl import logging
from flax import traverse_util
import jax
import numpy as np
import numpy.typing as npt

from spmd_tasks.bridges._lazy_arrays import LazyArray, device_array, lazy_array, place_on_mesh
from spmd_tasks.bridges._rules import RuleTable
from spmd_tasks.bridges.huggingface._config_keys import Config, is_inert
from spmd_tasks.bridges.huggingface._decoder import Decoder, build_model
from spmd_tasks.bridges.huggingface._describe import describe_model, model_slots, num_nextn_heads
from spmd_tasks.bridges.huggingface._families import (
  ALIASES,
  FAMILIES,
  REFUSED,
  SCORE_HEAD,
  WRAPPER_KEYS,
  WRAPPERS,
  Family,
)
from spmd_tasks.bridges.huggingface._quantized import dequantize
from spmd_tasks.bridges.huggingface._safetensors import dtype_of, read_tensors, tensor_names
from spmd_tasks.errors import UserError
from spmd_tasks.inputs.tokenizer_files import read_json_object
from spmd_tasks.layers import LanguageModel
from spmd_tasks.layers.adapter import ADAPTER_TAG
from spmd_tasks.runtime import PartitionedModel
from spmd_tasks.runtime.dequantized import dequantized_shapes, dequantized_specs
from spmd_tasks.sharding.weights import is_quantized

CONFIG_FILE = 'config.json'
# The tensors of the text model in a multimodal model have the prefix language_model.model. in old files and
# model.language_model. in new ones.
_TEXT_PREFIX = re.compile(r'^language_model\.(?=lm_head\.|model\.)|(?<=^model\.)language_model\.')
_TEXT_PART = re.compile(r'(model\.)?language_model\.|lm_head\.')
Store = Callable[[str, jax.Array], Any]  # converts a weight, given its name, to the form in which it is stored


def read_config(file: Path, remedy: str) -> dict[str, Any]:
  """Reads a config in JSON. Raises a UserError if it cannot be read, with `remedy` if it does not exist."""
  if not file.exists():
    raise UserError(f'{file} does not exist: {remedy}.')
  return read_json_object(str(file))


def open_folder(path: os.PathLike | str, *, accept_config_keys: Collection[str] = ()) -> 'Folder':
  """Opens a folder and parses its config.json. No code of the folder is run.

  Args:
    path: the folder.
    accept_config_keys: unknown keys of config.json to ignore, because they do not affect what the model computes.

  Raises:
    UserError: there is no config.json, or its family or a setting is not supported.
  """
  path = Path(path).expanduser()
  file = path / CONFIG_FILE
  values = read_config(file, 'give a Hugging Face model folder, or hf://org/name for a model on the hub')
  wrapper, text_type = WRAPPERS.get(str(values.get('model_type')), ('', ''))
  is_text_part = [wrapper] == values.get('architectures')
  try:
    if is_text_part:
      values = _text_part(values, text_type, file, accept_config_keys)
      _log_text_part(str(path), wrapper, values['architectures'][0])
    family, architecture = _family_of(values, file, accept_config_keys)
    decoder = family.read(Config(values | {'architectures': [architecture]}, str(file), accept_config_keys))
  except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
    if isinstance(error, UserError):
      raise
    raise UserError(f'{file} has an invalid setting ({error}): download it again.') from error
  family = family.of_files(tensor_names(path))
  folder = Folder(path=path, config=values, family=family, decoder=decoder, is_text_part=is_text_part)
  if family.tied_by_files and (names := tensor_names(path)):
    folder = dataclasses.replace(folder, decoder=dataclasses.replace(decoder, tied=family.names.head not in names))
  elif decoder.tied and decoder.num_labels is None and folder.has_untied_head():
    folder = dataclasses.replace(folder, decoder=dataclasses.replace(decoder, tied=False))
  return folder if family.nextn is None else folder.with_nextn_heads(folder.count_nextn_heads())


def _family_of(values: Mapping[str, Any], file: Path, accepted: Collection[str]) -> tuple[Family, str]:
  """Returns the family and the architecture that a config.json names."""
  model_type, architectures = str(values.get('model_type')), values.get('architectures')
  family = FAMILIES.get(ALIASES.get(model_type, model_type))
  if model_type in REFUSED:
    layer, nearest = REFUSED[model_type]
    raise UserError(
      f'{file} has the model type {model_type!r}, which is not supported: {layer}. The nearest family that is read is '
      f'{nearest} ({FAMILIES[nearest].architecture}).'
    )
  if family is not None:
    supported = {name.lower(): name for name in family.architectures}  # LLaMAForCausalLM is in old folders
    names = [family.architecture] if not architectures or 'architectures' in accepted else architectures
    if architecture := next((supported[str(name).lower()] for name in names if str(name).lower() in supported), None):
      return family, architecture
  user_code = ' with code of its own (auto_map), which is not run' if 'auto_map' in values else ''
  remedy = f'; to read it as {family.architecture}, --set accept_config_keys=architectures' if family else ''
  (nearest,) = difflib.get_close_matches(model_type, FAMILIES, n=1, cutoff=0.0)
  raise UserError(
    f'{file} has the architecture {architectures!r:.100} of model type {model_type!r:.100}{user_code}, but supported '
    f'are {", ".join(family.architecture for family in FAMILIES.values())}, and the ForSequenceClassification and '
    f'headless models of the decoder-only families. The nearest by name is {nearest} '
    f'({FAMILIES[nearest].architecture}){remedy}.'
  )


@functools.cache
def _log_text_part(path: str, wrapper: str, architecture: str) -> None:
  logging.info('%s is a %s, of which only the text model is read, a %s.', path, wrapper, architecture)


def _text_part(values: Mapping[str, Any], text_type: str, file: Path, accepted: Collection[str]) -> dict[str, Any]:
  """Returns the text model's part of a multimodal config; its type is `text_type` if it names none."""
  Config(values, str(file), accepted).finish(WRAPPER_KEYS)
  shared = {
    key: value
    for key, value in values.items()
    if value is not None and key != 'model_type' and (is_inert(key) or key == 'tie_word_embeddings')
  }
  text = {'model_type': text_type} | values['text_config'] | shared
  family = FAMILIES.get(ALIASES.get(text['model_type'], text['model_type']))
  return text | {'architectures': [text['model_type'] if family is None else family.architecture]}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Folder:
  """A model in a folder; created by `open_folder`.

  Attributes:
    path: the folder.
    config: the content of config.json.
    family: the model's family.
    decoder: the model's description.
    is_text_part: whether the files have a multimodal model, whose text model this is.
    has_new_score_head: whether the model has a score head of zeros that is not in the files.
  """

  path: Path
  config: Mapping[str, Any]
  family: Family
  decoder: Decoder
  is_text_part: bool = False
  has_new_score_head: bool = False

  def with_score_head(self, num_labels: int) -> 'Folder':
    """Returns the folder with a score head of zeros in place of the logits; `num_labels` 0 for no head."""
    decoder = dataclasses.replace(self.decoder, num_labels=num_labels, num_nextn=0)
    return dataclasses.replace(self, decoder=decoder, has_new_score_head=num_labels > 0)

  def with_nextn_heads(self, num: int) -> 'Folder':
    """Returns the folder with only the first `num` multi-token prediction heads."""
    if num == self.decoder.num_nextn:
      return self
    return dataclasses.replace(self, decoder=dataclasses.replace(self.decoder, num_nextn=num))

  def count_nextn_heads(self) -> int:
    """Returns how many multi-token prediction heads, of those that config.json counts, have tensors."""
    nextn, names = self.family.nextn, tensor_names(self.path)
    if nextn is None or self.decoder.num_labels is not None:
      return 0
    most = self.decoder.num_nextn if nextn.has_key or nextn.key in self.config else nextn.most
    heads = [self.family.names.nextn_prefixes(self.decoder, number)[1] for number in range(most)]
    has_head = [f'{head}{self.family.names.nextn_projection}.weight' in names for head in heads]
    return [*has_head, False].index(False)

  @property
  def num_missing_nextn_heads(self) -> int:
    """The number of multi-token prediction heads that config.json counts but whose tensors are missing."""
    nextn = self.family.nextn
    if nextn is None or self.decoder.num_labels is not None or self.unused_nextn_tensors:
      return 0
    return (self.config.get(nextn.key) or 0) - self.decoder.num_nextn

  @property
  def dtype(self) -> str:
    """The dtype of the weights in config.json; float32 if it has none."""
    return dtype_of(self.config.get('dtype') or self.config.get('torch_dtype') or 'float32').name

  def build_model(self, *, dtype: str | None = None) -> LanguageModel:
    """Builds the unbound model; it computes in `dtype`, or in the folder's dtype if None."""
    return build_model(self.decoder, dtype=dtype or self.dtype)

  def has_untied_head(self) -> bool:
    """Whether the files have a head that differs from the embedding table; `transformers` does not tie these."""
    if not tensor_names(self.path):
      return False
    tensors, names = self._named_tensors(), self.family.names
    return names.head in tensors and names.table in tensors and not are_equal(tensors[names.head], tensors[names.table])

  @functools.cached_property
  def tensors(self) -> dict[str, LazyArray]:
    """The tensors of the model, by their names in the family.

    Raises a UserError like `read_tensors`, or if a multi-token prediction head has its own embedding or logits.
    """
    others = self.unused_nextn_tensors.keys() | self.nextn_copies.keys() | self.constants.keys()
    tensors = {name: tensor for name, tensor in self._all_tensors[0].items() if name not in others}
    for name, first in self.nextn_copies.items():
      if first in tensors and not are_equal(self._all_tensors[0][name], tensors[first]):
        raise UserError(
          f'{self.path} has {name}, which differs from {first}, but multi-token prediction heads must share it: leave '
          'them out with num_nextn_predict_layers=0.'
        )
    return tensors

  @property
  def nextn_copies(self) -> dict[str, str]:
    """Tensors of multi-token prediction heads that repeat a tensor of the model -> that tensor."""
    copies = self.family.nextn_copies(self.decoder)
    return {name: first for name, first in copies.items() if name in self._all_tensors[0]}

  @functools.cached_property
  def unused_nextn_tensors(self) -> dict[str, LazyArray]:
    """The tensors of multi-token prediction heads that the model leaves out."""
    is_unused_nextn = self.family.is_unused_nextn
    return {name: tensor for name, tensor in self._all_tensors[0].items() if is_unused_nextn(name, self.decoder)}

  @functools.cached_property
  def constants(self) -> dict[str, LazyArray]:
    """The tensors that all models of the family have alike. Raises a UserError if one has another value."""
    expected = self.family.constant_tensors(self.decoder)
    tensors = {name: self._all_tensors[0][name] for name in expected if name in self._all_tensors[0]}
    for name, tensor in tensors.items():
      if not np.allclose(np.asarray(tensor, np.float32), expected[name], rtol=1e-2, atol=0):  # as rounded to bfloat16
        raise UserError(
          f'{self.path} has {name} = {np.asarray(tensor)}, which must be {expected[name]} in its family; other values '
          'are not supported.'
        )
    return tensors

  def stored_dtype(self, name: str) -> str:
    """Returns the dtype of a tensor in the files; the folder's dtype if the tensor is quantized or absent."""
    tensors, quantized = self._all_tensors
    return tensors[name].dtype.name if name in tensors and name not in quantized else self.dtype

  @functools.cached_property
  def _all_tensors(self) -> tuple[dict[str, LazyArray], set[str]]:
    tensors, names = self._named_tensors(), self.family.names
    if self.decoder.tied and names.table not in tensors and names.head in tensors:
      tensors[names.table] = tensors[names.head]
    tensors = {name: tensor for name, tensor in tensors.items() if not self.family.is_ignored(name, self.decoder)}
    rows, columns = (self.config.get('quantization_config') or {}).get('weight_block_size') or (128, 128)
    return dequantize(tensors, (rows, columns))

  def _named_tensors(self) -> dict[str, LazyArray]:
    """Returns the tensors of the files, by their names in the family."""
    tensors = read_tensors(self.path)
    if self.is_text_part:
      head = self.family.names.nextn_head or ' '
      texts = {name: x for name, x in tensors.items() if _TEXT_PART.match(name) or name.startswith(head)}
      tensors = {_TEXT_PREFIX.sub('', name, 1): tensor for name, tensor in texts.items()}
    self._merge_table_copies(tensors)
    if self.has_new_score_head:
      tensors[SCORE_HEAD] = lazy_array(np.zeros((self.decoder.num_labels or 0, self.decoder.embed_dim), np.float32))
    return {self.family.full_name(name, self.decoder): tensor for name, tensor in tensors.items()}

  def _merge_table_copies(self, tensors: dict[str, LazyArray]) -> None:
    """Removes further copies of the embedding table. Raises a UserError if they differ."""
    table = self.family.names.table
    for name in self.family.table_copies:
      if (copy := tensors.pop(name, None)) is None:
        continue
      first = tensors.setdefault(table, copy)
      if not are_equal(first, copy):
        raise UserError(
          f'{self.path} has {name}, which differs from {table}, but the model has one embedding table: tie them '
          "(model.set_input_embeddings(model.shared) of transformers' model), and save it again."
        )

  def lazy_weights(self, model: Any, abstract_weights: Any) -> dict[str, LazyArray]:
    """Returns the weights by name, in the checkpoint layout, without reading them.

    Args:
      model: a LanguageModel that computes what the folder's model does.
      abstract_weights: the model's weights in the checkpoint layout, as a tree of ShapeDtypeStructs.

    Raises:
      UserError: the model's settings differ, or a tensor is missing, unused, or has a wrong shape or dtype.
    """
    num_labels = getattr(getattr(model, 'embedding', None), 'num_labels', None)
    if num_labels is not None and self.decoder.num_labels is None:
      return self.with_score_head(num_labels).lazy_weights(model, abstract_weights)
    if (num := num_nextn_heads(model)) < self.decoder.num_nextn:
      return self.with_nextn_heads(num).lazy_weights(model, abstract_weights)
    self._check_model(model)
    target = traverse_util.flatten_dict(abstract_weights, sep='/')
    rules = self.family.rules(self.decoder, model_slots(model))
    table = RuleTable(rules=rules, source=str(self.path), target='the model')
    table.check(self.tensors, target)
    for name, tensor in self.tensors.items():
      if tensor.dtype.kind not in 'fV':  # V: bfloat16 and other extension dtypes
        raise UserError(f'{self.path} has {name} in {tensor.dtype}, which must be a floating dtype: convert it.')
    return table.convert_lazily(self.tensors, target)

  def read_weights(
    self,
    model: PartitionedModel,
    *,
    names: Iterable[str] | None = None,
    dtypes: Mapping[str, npt.DTypeLike] = {},
    store: Store = lambda name, weight: weight,
  ) -> Any:
    """Reads the weights onto the mesh, padded and sharded; each process reads only the shards of its devices.

    Args:
      model: the partitioned model; apart from adapters, it must compute what the folder's model does.
      names: the names of the weights to read, in order; None for all.
      dtypes: name -> dtype, if it differs from the dtype in training. A weight whose dtype equals the file's is read
        without a further copy, unless `store` makes one.
      store: called with each weight as soon as it is read; returns the weight to keep.

    Returns:
      A tree like the weights, with None for adapters and for weights that were not requested.

    Raises:
      UserError: as in `lazy_weights`, before anything is read.
    """
    specs = dequantized_specs(model.weight_specs)
    canonical = _flat(model.canonical_state.weights)
    canonical = {name: leaf for name, leaf in canonical.items() if ADAPTER_TAG not in specs[name].tags}
    target = {name: jax.ShapeDtypeStruct(leaf.shape, dtypes.get(name, leaf.dtype)) for name, leaf in canonical.items()}
    lazy = self.lazy_weights(model.task.model, traverse_util.unflatten_dict(target, sep='/'))
    true, padded = _flat(model.abstract_state.weights), dequantized_shapes(model)
    weights: dict[str, Any] = dict.fromkeys(padded)
    for name in canonical if names is None else names:
      weights[name] = store(name, place_on_mesh(lazy[name].reshape(true[name].shape), padded[name]))
    return traverse_util.unflatten_dict(weights, sep='/')

  def _check_model(self, model: Any) -> None:
    ours, theirs = vars(describe_model(model)), vars(self.decoder)
    if differences := [f'{name} = {ours[name]!r}, not {theirs[name]!r}' for name in ours if ours[name] != theirs[name]]:
      raise UserError(
        f'the model has {"; ".join(differences)} in {self.path}: set them as there to start from these weights.'
      )


def are_equal(first: LazyArray, second: LazyArray) -> bool:
  """Whether two tensors have equal values; compares a thousand rows at a time."""
  if first.shape != second.shape:
    return False
  starts = range(0, first.shape[0], 1000)
  blocks = ((start, min(start + 1000, first.shape[0])) for start in starts)
  return all(np.array_equal(np.asarray(first.cut(0, *rows)), np.asarray(second.cut(0, *rows))) for rows in blocks)


def weights_on_mesh(model: PartitionedModel, padded_weights: Any) -> dict[str, LazyArray]:
  """Returns the weights on the mesh by name, in the checkpoint layout; reading a part of a weight gathers it.

  Quantized weights, which are frozen, are left out.
  """
  padded = traverse_util.flatten_dict(padded_weights, sep='/')
  true, canonical = _flat(model.abstract_state.weights), _flat(model.canonical_state.weights)
  weights = {}
  for name, array in padded.items():
    if is_quantized(array):
      continue
    lazy = device_array(array)
    for dim, size in enumerate(true[name].shape):
      lazy = lazy.cut(dim, 0, size)
    weights[name] = lazy.reshape(canonical[name].shape)
  return weights


def _flat(weights: Any) -> dict[str, jax.ShapeDtypeStruct]:
  """Returns abstract weights by name; a quantized kernel is described as its float32 values."""
  return {
    name: jax.ShapeDtypeStruct(leaf.shape, np.float32) if is_quantized(leaf) else leaf
    for name, leaf in traverse_util.flatten_dict(weights, sep='/').items()
  }
