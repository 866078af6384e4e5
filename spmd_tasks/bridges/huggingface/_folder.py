"""Folder: a model in Hugging Face's format, its config read, its weights waiting in their files."""

from collections.abc import Callable, Collection, Iterable, Mapping
import dataclasses
import functools
import itertools
import os
from pathlib import Path
import re
from typing import Any

from flax import traverse_util
import jax
import numpy as np
import numpy.typing as npt

from spmd_tasks.bridges._lazy_arrays import LazyArray, device_array, lazy_array, place_on_mesh
from spmd_tasks.bridges._rules import RuleTable
from spmd_tasks.bridges.huggingface._config_keys import Config, is_inert
from spmd_tasks.bridges.huggingface._decoder import Decoder, build_model
from spmd_tasks.bridges.huggingface._describe import describe_model, model_slots, num_nextn_heads
from spmd_tasks.bridges.huggingface._families import FAMILIES, REFUSED, SCORE_HEAD, Family
from spmd_tasks.bridges.huggingface._quantized import dequantize
from spmd_tasks.bridges.huggingface._safetensors import dtype_of, read_tensors, tensor_names
from spmd_tasks.bridges.huggingface._special_keys import NEXTN_KEY
from spmd_tasks.errors import UserError
from spmd_tasks.inputs.tokenizer_files import read_json_object
from spmd_tasks.layers import LanguageModel
from spmd_tasks.layers.adapter import ADAPTER_TAG
from spmd_tasks.runtime import PartitionedModel
from spmd_tasks.runtime.dequantized import dequantized_shapes, dequantized_specs
from spmd_tasks.sharding.weights import is_quantized

CONFIG_FILE = 'config.json'
# Gemma 3 of text and images: its text model is the family _TEXT_TYPE under other names, old (language_model.model.)
# or new (model.language_model.).
_WRAPPER, _WRAPPER_ARCHITECTURE, _TEXT_TYPE = 'gemma3', 'Gemma3ForConditionalGeneration', 'gemma3_text'
_WRAPPER_KEYS = {'text_config', 'vision_config', 'mm_tokens_per_image', 'boi_token_index', 'eoi_token_index'}
_WRAPPER_KEYS.add('tie_word_embeddings')
_TEXT_PREFIX = re.compile(r'^language_model\.(?=lm_head\.|model\.)|(?<=^model\.)language_model\.')
_IMAGE_PART = re.compile(r'(model\.)?(vision_tower|multi_modal_projector)\.')
Store = Callable[[str, jax.Array], Any]  # makes of a weight, given its name, the form in which it is held


def read_config(file: Path, remedy: str) -> dict[str, Any]:
  """Reads a config in JSON; `remedy` says what to do if there is none. Raises a UserError if it cannot be read."""
  if not file.exists():
    raise UserError(f'{file} does not exist: {remedy}.')
  return read_json_object(str(file))


def open_folder(path: os.PathLike | str, *, accept_config_keys: Collection[str] = ()) -> 'Folder':
  """Reads the config.json of a folder. Code that the folder may have is not run.

  `accept_config_keys` are keys that are unknown here and do not change what the model computes.

  Raises a UserError if there is none, its family is unknown here, or it has a setting that is.
  """
  path = Path(path).expanduser()
  file = path / CONFIG_FILE
  values = read_config(file, "give the folder of a model in Hugging Face's format")
  is_text_part = (values.get('model_type'), values.get('architectures')) == (_WRAPPER, [_WRAPPER_ARCHITECTURE])
  if is_text_part:
    values = _text_part(values, file, accept_config_keys)
  family, architecture = _family_of(values, file, accept_config_keys)
  try:
    decoder = family.read(Config(values | {'architectures': [architecture]}, str(file), accept_config_keys))
  except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
    if isinstance(error, UserError):
      raise
    raise UserError(f'{file} has a setting that its family cannot have ({error}): download it again.') from error
  folder = Folder(path=path, config=values, family=family, decoder=decoder, is_text_part=is_text_part)
  if family.tied_by_files and (names := tensor_names(path)):
    folder = dataclasses.replace(folder, decoder=dataclasses.replace(decoder, tied=family.names.head not in names))
  elif decoder.tied and decoder.num_labels is None and folder.has_untied_head():
    folder = dataclasses.replace(folder, decoder=dataclasses.replace(decoder, tied=False))
  if decoder.num_nextn:
    names, layers = tensor_names(path), range(decoder.num_layers, decoder.num_layers + decoder.num_nextn)
    has_head = (decoder.num_labels is None and f'{family.names.layer.format(i)}eh_proj.weight' in names for i in layers)
    folder = folder.with_nextn_heads(sum(itertools.takewhile(bool, has_head)))
  return folder


def _family_of(values: Mapping[str, Any], file: Path, accepted: Collection[str]) -> tuple[Family, str]:
  """Returns the family of a config.json, and which of its architectures."""
  model_type, named = values.get('model_type'), values.get('architectures')
  family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
  if isinstance(model_type, str) and model_type in REFUSED:
    raise UserError(f'{file} is of a model of type {model_type!r}, which is not known here: {REFUSED[model_type]}.')
  if family is not None:
    known = {name.lower(): name for name in family.architectures}  # LLaMAForCausalLM is in old folders
    names = [family.architecture] if not named or 'architectures' in accepted else named
    if architecture := next((known[str(name).lower()] for name in names if str(name).lower() in known), None):
      return family, architecture
  user_code = ', with code of its own (auto_map), which is not run' if 'auto_map' in values else ''
  remedy = ', or with --set accept_config_keys=architectures the first of the type' if family else ''
  raise UserError(
    f'{file} is of a model {named!r:.100} of type {model_type!r:.100}{user_code}: known here are '
    f'{", ".join(each.architecture for each in FAMILIES.values())}, and those of decoders with a head for '
    f'ForSequenceClassification, or with none{remedy}.'
  )


def _text_part(values: Mapping[str, Any], file: Path, accepted: Collection[str]) -> dict[str, Any]:
  """Returns the config of the text model in that of a model of text and images."""
  text = values.get('text_config')
  if not isinstance(text, dict) or text.get('model_type') != _TEXT_TYPE:
    raise UserError(f'{file} has no text_config of type {_TEXT_TYPE!r}: download it again.')
  Config(values, str(file), accepted).finish(_WRAPPER_KEYS)
  given = {key: value for key, value in values.items() if is_inert(key) or key == 'tie_word_embeddings'}
  given = {key: value for key, value in given.items() if value is not None and key != 'model_type'}
  return text | given | {'architectures': [FAMILIES[_TEXT_TYPE].architecture]}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Folder:
  """A model in a folder; `open_folder` makes it.

  Attributes:
    path: of the folder.
    config: the content of config.json.
    family, decoder: what that says.
    is_text_part: whether the files also have a model of images, which is left out.
    has_new_score_head: the files have no head that scores; it is zeros.
  """

  path: Path
  config: Mapping[str, Any]
  family: Family
  decoder: Decoder
  is_text_part: bool = False
  has_new_score_head: bool = False

  def with_score_head(self, num_labels: int) -> 'Folder':
    """Returns the folder of a language model with zeros as a head that scores, in place of that of the logits."""
    decoder = dataclasses.replace(self.decoder, num_labels=num_labels, num_nextn=0)
    return dataclasses.replace(self, decoder=decoder, has_new_score_head=num_labels > 0)

  def with_nextn_heads(self, num: int) -> 'Folder':
    """Returns the folder of a model with the first `num` of the heads that predict further tokens."""
    if num == self.decoder.num_nextn:
      return self
    return dataclasses.replace(self, decoder=dataclasses.replace(self.decoder, num_nextn=num))

  @property
  def num_missing_nextn_heads(self) -> int:
    """How many heads that predict further tokens the config names and the files lack, where the model has any."""
    has_any = self.family.has_nextn_heads and self.decoder.num_labels is None
    return (self.config.get(NEXTN_KEY) or 0) - self.decoder.num_nextn if has_any else 0

  @property
  def dtype(self) -> str:
    """The dtype that the config names for the weights; float32 where it names none."""
    return dtype_of(self.config.get('dtype') or self.config.get('torch_dtype') or 'float32').name

  def build_model(self, *, dtype: str | None = None) -> LanguageModel:
    """Returns the model, unbound; it computes in `dtype`, or in the folder's where that is None."""
    return build_model(self.decoder, dtype=dtype or self.dtype)

  def has_untied_head(self) -> bool:
    """Whether the files have a head beside the table that differs from it: then `transformers` does not tie them."""
    if not tensor_names(self.path):
      return False
    tensors, names = self._named_tensors(), self.family.names
    return (
      names.head in tensors and names.table in tensors and not _are_equal(tensors[names.head], tensors[names.table])
    )

  @functools.cached_property
  def tensors(self) -> dict[str, LazyArray]:
    """Every tensor of the model, by the name in the files.

    Raises a UserError as `read_tensors`, or where a head has an embedding or logits of its own.
    """
    others = self.unused_nextn_tensors.keys() | self.nextn_copies.keys()
    tensors = {name: tensor for name, tensor in self._all_tensors[0].items() if name not in others}
    for name, first in self.nextn_copies.items():
      if first in tensors and not _are_equal(self._all_tensors[0][name], tensors[first]):
        raise UserError(
          f'{self.path} has {name}, which differs from {first}, but heads that predict further tokens share it here: '
          'leave them aside with num_nextn_predict_layers=0.'
        )
    return tensors

  @property
  def nextn_copies(self) -> dict[str, str]:
    """The tensors of heads that repeat one of the model, and which one that is."""
    copies = self.family.nextn_copies(self.decoder)
    return {name: first for name, first in copies.items() if name in self._all_tensors[0]}

  @functools.cached_property
  def unused_nextn_tensors(self) -> dict[str, LazyArray]:
    """The tensors of heads that predict further tokens, which the model does not have."""
    is_unused_nextn = self.family.is_unused_nextn
    return {name: tensor for name, tensor in self._all_tensors[0].items() if is_unused_nextn(name, self.decoder)}

  def stored_dtype(self, name: str) -> str:
    """Returns the dtype in which a tensor is stored, or the folder's for one that is quantized or absent."""
    tensors, quantized = self._all_tensors
    return tensors[name].dtype.name if name in tensors and name not in quantized else self.dtype

  @functools.cached_property
  def _all_tensors(self) -> tuple[dict[str, LazyArray], set[str]]:
    tensors, names = self._named_tensors(), self.family.names
    if self.decoder.tied and names.table not in tensors and names.head in tensors:
      tensors[names.table] = tensors[names.head]
    known = {name: tensor for name, tensor in tensors.items() if not self.family.is_ignored(name, self.decoder)}
    rows, columns = (self.config.get('quantization_config') or {}).get('weight_block_size') or (128, 128)
    return dequantize(known, (rows, columns))

  def _named_tensors(self) -> dict[str, LazyArray]:
    """Returns the tensors of the files by the names of the family."""
    found = read_tensors(self.path)
    if self.is_text_part:
      found = {_TEXT_PREFIX.sub('', name, 1): each for name, each in found.items() if not _IMAGE_PART.match(name)}
    self._join_copies(found)
    if self.has_new_score_head:
      found[SCORE_HEAD] = lazy_array(np.zeros((self.decoder.num_labels or 0, self.decoder.embed_dim), np.float32))
    return {self.family.full_name(name, self.decoder): tensor for name, tensor in found.items()}

  def _join_copies(self, found: dict[str, LazyArray]) -> None:
    """Leaves one of the tensors that are the table. Raises a UserError where they differ."""
    table = self.family.names.table
    for name in self.family.table_copies:
      if (copy := found.pop(name, None)) is None:
        continue
      first = found.setdefault(table, copy)
      if not _are_equal(first, copy):
        raise UserError(
          f'{self.path} has another table of embeddings as {name} than as {table}, but the model has one: tie them '
          "(model.set_input_embeddings(model.shared) of transformers' model), and save it again."
        )

  def lazy_weights(self, model: Any, abstract_weights: Any) -> dict[str, LazyArray]:
    """Returns our weights by name, in the layout of checkpoints; nothing is read.

    Args:
      model: a LanguageModel that computes what the folder's does.
      abstract_weights: its weights as checkpoints have them: a tree of ShapeDtypeStructs.

    Raises:
      UserError: the model has other settings, or the files lack a tensor, have one more, or one of another shape.
    """
    num_labels = getattr(getattr(model, 'embedding', None), 'num_labels', None)
    if num_labels is not None and self.decoder.num_labels is None:
      return self.with_score_head(num_labels).lazy_weights(model, abstract_weights)
    if (num := num_nextn_heads(model)) < self.decoder.num_nextn:
      return self.with_nextn_heads(num).lazy_weights(model, abstract_weights)
    self._check_model(model)
    wanted = traverse_util.flatten_dict(abstract_weights, sep='/')
    rules = self.family.rules(self.decoder, model_slots(model))
    table = RuleTable(rules=rules, source=str(self.path), target='the model')
    table.check(self.tensors, wanted)
    for name, tensor in self.tensors.items():
      if tensor.dtype.kind not in 'fV':  # V: bfloat16 and the like
        raise UserError(f'{self.path} has {name} in {tensor.dtype}: a weight is of a floating type.')
    return table.convert_lazily(self.tensors, wanted)

  def read_weights(
    self,
    model: PartitionedModel,
    *,
    names: Iterable[str] | None = None,
    dtypes: Mapping[str, npt.DTypeLike] = {},
    store: Store = lambda name, weight: weight,
  ) -> Any:
    """Reads the weights onto the mesh, as the partitioner stores them: padded, each device its own shard.

    Args:
      model: of a task whose model computes what the folder's does, apart from adapters.
      names: of the weights that are read, one after the other; None: of all.
      dtypes: of weights, by name, that are held in another dtype than in training. In the dtype of the file, a weight
        is read without any other copy of it, unless `store` makes one.
      store: called with each weight as soon as it is read.

    Returns:
      A tree like the weights, with None for adapters and for what was not asked for.

    Raises a UserError: as `lazy_weights`; nothing has been read then.
    """
    specs = dequantized_specs(model.weight_specs)
    canonical = _flat(model.canonical_state.weights)
    canonical = {name: leaf for name, leaf in canonical.items() if ADAPTER_TAG not in specs[name].tags}
    wanted = {name: jax.ShapeDtypeStruct(leaf.shape, dtypes.get(name, leaf.dtype)) for name, leaf in canonical.items()}
    lazy = self.lazy_weights(model.task.model, traverse_util.unflatten_dict(wanted, sep='/'))
    true, padded = _flat(model.abstract_state.weights), dequantized_shapes(model)
    weights: dict[str, Any] = dict.fromkeys(padded)
    for name in canonical if names is None else names:
      weights[name] = store(name, place_on_mesh(lazy[name].reshape(true[name].shape), padded[name]))
    return traverse_util.unflatten_dict(weights, sep='/')

  def _check_model(self, model: Any) -> None:
    ours, theirs = vars(describe_model(model)), vars(self.decoder)
    if differences := [f'{n} = {each!r} and not {theirs[n]!r}' for n, each in ours.items() if each != theirs[n]]:
      raise UserError(
        f'the model differs from that of {self.path}, whose weights it cannot take: it has {"; ".join(differences)}.'
      )


def _are_equal(first: LazyArray, second: LazyArray) -> bool:
  """Whether both have the same numbers; compares a thousand rows at a time."""
  num_rows = first.shape[0]
  cuts = ((start, min(start + 1000, num_rows)) for start in range(0, num_rows, 1000))
  parts = ((np.asarray(each.cut(0, *rows)) for each in (first, second)) for rows in cuts)
  return first.shape == second.shape and all(itertools.starmap(np.array_equal, parts))


def weights_on_mesh(model: PartitionedModel, padded_weights: Any) -> dict[str, LazyArray]:
  """Returns weights that are stored on the mesh by name, in the layout of checkpoints; reading a part gathers it.

  Quantized ones, which are frozen, are left out.
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
  """Returns abstract weights by name; of a quantized kernel, the numbers in float32."""
  return {
    name: jax.ShapeDtypeStruct(leaf.shape, np.float32) if is_quantized(leaf) else leaf
    for name, leaf in traverse_util.flatten_dict(weights, sep='/').items()
  }
