"""DecodeModel: a PartitionedModel as decoding calls it, with a KV cache and stored weights.

    model = DecodeModel(partitioned_model, settings)
    stored = model.storage.store(variables)      # the model's, unless the settings have a weights_dtype
    logits, new = model.forward(variables, cache, batch)

Programs call `forward` (decode_programs.py), within the context `scope`.
"""

from collections.abc import Mapping
import contextlib
import dataclasses
from typing import Any

from flax import traverse_util
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from spmd_tasks.decoding import nextn_drafts
from spmd_tasks.decoding.cache_arrays import has_blocks, is_state, with_snapshots
from spmd_tasks.decoding.kv_cache import KvCache
from spmd_tasks.decoding.weight_storage import (
  LAYER_KERNELS,
  WeightStorage,
  find_kernels,
  multiplying_by_layer,
  with_layer_kernels,
)
from spmd_tasks.errors import UserError
from spmd_tasks.layers.adapter import adapter_choices, map_adapters
from spmd_tasks.layers.base import layer_scope
from spmd_tasks.runtime import DecodeSettings, PartitionedModel
from spmd_tasks.runtime.task import Variables
from spmd_tasks.sharding.axis_rules import stage_axis, without_axis
from spmd_tasks.sharding.specs import ShardingScope, current_platform, step_scope
from spmd_tasks.sharding.weights import is_quantized, unbox_weights, weight_specs


class DecodeModel:
  """A model that reads tokens after those in a KV cache.

  Attributes:
    settings: the sizes.
    mesh: the mesh of the model.
    platform: the platform of the mesh's devices.
    storage: how variables are stored for decoding; its `store` converts the model's variables.
    variables: the stored and arranged variables, as abstract arrays with shardings.
    max_len: S, positions of a text.
    encoder_len: E, the encoder's positions; None if the model has no encoder.
    has_prefix: whether a prompt, and the context of a text that is scored, sees itself in both directions.
    has_states: whether a layer has a state per text, beside keys and values.
    heads: the number of the model's own head that guesses each draft (nextn_drafts.py); () without such heads.
    vocab_size: V.
    adapter_names: the names of the low-rank adapters, which have the numbers from 1 on in requests.
  """

  def __init__(
    self,
    model: PartitionedModel,
    settings: DecodeSettings,
    *,
    temperature: float = 1.0,
    uses_heads: bool = True,
    records_routing: bool = False,
  ):
    """Traces the model; compiles nothing.

    Args:
      model: the partitioned model.
      settings: the sizes.
      temperature: the model's logits are divided by it.
      uses_heads: whether the model's own heads guess the drafts, if it has any.
      records_routing: whether the cache also stores which experts computed each token.

    Raises:
      UserError: the model cannot generate text.
    """
    self._task = model.task.as_task('text generation')
    self._model = model
    self._temperature = temperature
    self.settings = settings
    self.mesh = model.mesh
    self.storage = WeightStorage(model, settings.weights_dtype)
    self.adapter_names = adapter_choices(self._task.model)
    # Decoding runs layers one after another, with weights sharded over the pipeline stages.
    axis = stage_axis(model.mesh.axis_names, model.axis_rules)
    rules = model.axis_rules if axis is None else without_axis(axis, model.axis_rules)
    # A call has too few tokens to split: devices that split a sequence in training compute the same.
    self._axis_rules = tuple((name, None if name == 'seq' else axes) for name, axes in rules)
    spec = model.input_layout.spec
    check_reads_tokens(spec, settings)
    self.max_len = settings.max_len or spec['ids'].shape[1]
    self._kv_cache = KvCache(
      max_len=self.max_len,
      dtype=settings.cache_dtype,
      implementation=settings.cache_attention,
      records_routing=records_routing,
    )
    self.encoder_len = None
    if 'encoder_ids' in spec:
      self.encoder_len = settings.encoder_len or spec['encoder_ids'].shape[1]
    self.has_prefix = 'prefix_mask' in spec
    with self.scope():
      self.platform = current_platform()
    num_heads = getattr(model.task.model, 'num_nextn_predict_layers', 0) if uses_heads else 0
    num_guessed = settings.num_drafts if num_heads and settings.num_beams == 1 else 0
    self.heads = tuple(min(number, num_heads - 1) for number in range(num_guessed))

    self._prefills: dict[int, Any] = {}  # by the number of rows: the shapes that a prefill returns
    kernels: set[tuple[str, ...]] = set()
    finds_kernels = self.platform == 'cpu' and model.mesh.size == 1
    with find_kernels(kernels) if finds_kernels else contextlib.nullcontext():
      logits, boxed = self._prefill_shapes(settings.num_slots)
    self.vocab_size = logits.shape[-1]
    self.has_states = any(is_state(path) for path, _ in jax.tree_util.tree_flatten_with_path(unbox_weights(boxed))[0])
    # The trace sees the model's own kernels, some of which are stored quantized.
    stored = traverse_util.flatten_dict(self.storage.padded.get('params', {}))
    self._layer_kernels = {path for path in kernels if not is_quantized(stored[path])}
    self.variables = self.arrange(self.storage.padded)

  def arrange(self, variables: Variables) -> Variables:
    """Returns stored variables as programs take them; does nothing if they are arranged already."""
    return with_layer_kernels(variables, self._layer_kernels)

  def true_variables(self, arranged: Variables) -> Variables:
    """Returns arranged variables as the model takes them, without padding; called in a program."""
    return arranged if LAYER_KERNELS in arranged else self.storage.true(arranged)  # one device has no padding

  def forward(self, variables: Variables, cache: Any, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, Any]:
    """Calls the model, see `Forward` of decode_state.py; called in a program, within `scope`."""
    if self.has_prefix and cache is None:
      batch = {'prefix_mask': batch['segment_ids'], **batch}
    is_known = {'adapters': bool(self.adapter_names), 'prefix_mask': self.has_prefix}
    batch = {name: entry for name, entry in batch.items() if is_known.get(name, True)}
    logits, new = self._read_tokens(variables, cache, batch)
    return logits if self._temperature == 1 else logits / self._temperature, unbox_weights(new)

  def _read_tokens(self, variables: Variables, cache: Any, batch: Mapping[str, Any]) -> tuple[jax.Array, Any]:
    """Calls the model as `forward` does; returns boxed keys and values.

    Raises:
      UserError: the model cannot generate text.
    """
    if cache is not None:
      variables = variables | {'cache': cache}
    model, numbers = self._task.model, batch.get('adapters')
    if numbers is not None:
      model = map_adapters(model, lambda adapter: adapter.of_rows(numbers))
    positional, named = self._task.arguments(batch, train=False)
    rows: dict[str, Any] = {name: batch.get(name) for name in ('slots', 'tables', 'drafts')}
    with (
      layer_scope(cache=dataclasses.replace(self._kv_cache, **rows)),
      self._task.layer_context(),
      multiplying_by_layer(variables) as variables,
    ):
      outputs, updated = model.apply(variables, *positional, **named, mutable='new_cache')
    if not isinstance(outputs, Mapping) or 'logits' not in outputs or not updated.get('new_cache'):
      raise UserError(
        f"{type(model).__name__} cannot generate text: it must return logits [B, T, V] under the key 'logits', and its "
        'attention must update the KV cache (layers/cache.py): use LanguageModel, or its Attention.'
      )
    return outputs['logits'], updated['new_cache']

  def abstract_cache(
    self, num_rows: int, blocks: tuple[int, int] | None = None, num_snapshots: int = 0
  ) -> tuple[Any, Any]:
    """Returns the shapes of a KV cache for rows of max_len tokens, and its PartitionSpecs.

    With `blocks`, (B, b), arrays that hold texts of any length are pools of blocks. With `num_snapshots`, a cache with
    states also has snapshots of them.
    """

    def as_pool(path, leaf):
      if blocks is None or not has_blocks(path):
        return leaf
      shape = (*leaf.shape[:-4], blocks[0], leaf.shape[-3], blocks[1], leaf.shape[-1])
      return jax.ShapeDtypeStruct(shape, leaf.dtype)

    _, boxed = self._prefill_shapes(num_rows)
    cache = jax.tree_util.tree_map_with_path(as_pool, unbox_weights(boxed))
    with self.scope() as scope:
      specs = jax.tree.map(lambda box, x: scope.activation_spec(box.split_dims, x.shape), weight_specs(boxed), cache)
    if not num_snapshots:
      return cache, specs
    of_slots = lambda leaf: jax.ShapeDtypeStruct((*leaf.shape[:-4], num_snapshots, *leaf.shape[-3:]), leaf.dtype)
    return with_snapshots(cache, of_slots), with_snapshots(specs)

  def _prefill_shapes(self, num_rows: int) -> tuple[Any, Any]:
    """Returns the shapes of the logits and of the boxed keys and values that a prefill of `num_rows` texts returns."""
    batch = {
      name: jax.ShapeDtypeStruct((num_rows, self.max_len), jnp.int32) for name in ('ids', 'segment_ids', 'segment_pos')
    }
    if self.encoder_len is not None:
      text = jax.ShapeDtypeStruct((num_rows, self.encoder_len), jnp.int32)
      batch |= {f'encoder_{name}': text for name in ('ids', 'segment_ids', 'segment_pos')}

    def prefill(variables, batch):
      logits, new = self._read_tokens(variables, None, batch | ({'returns_hidden': True} if self.heads else {}))
      if self.heads:
        first = batch['ids'][:, 0]
        _, new = nextn_drafts.guess(
          self._read_tokens,
          variables,
          None,
          batch,
          new,
          self.heads,
          draw=lambda logits: first,
          following=batch['ids'],
          lengths=first,
        )
      return logits, new

    if num_rows not in self._prefills:
      with self.scope():
        self._prefills[num_rows] = jax.eval_shape(prefill, self._model.abstract_state.variables, batch)
    return self._prefills[num_rows]

  def empty_cache(self, num_rows: int) -> Any:
    """Returns, in a program, zeros for rows of max_len tokens, sharded over the mesh."""

    def empty(leaf, spec):
      return jax.lax.with_sharding_constraint(jnp.zeros(leaf.shape, leaf.dtype), NamedSharding(self.mesh, spec))

    return jax.tree.map(empty, *self.abstract_cache(num_rows))

  def scope(self) -> contextlib.AbstractContextManager[ShardingScope]:
    """Returns the context in which the model is traced."""
    return step_scope(self.mesh, self._axis_rules, self._model.inputs_split_mapping)


def check_reads_tokens(spec: Mapping[str, Any], settings: DecodeSettings | None) -> None:
  """Raises a UserError if the batches of a model have no tokens, so that it can continue no text."""
  if 'ids' not in spec and (settings is None or settings.max_len is None):
    raise UserError(
      f'the model generates no text, because its batches have {", ".join(sorted(spec))} and no `ids`, the tokens of a '
      'language model: take --mode eval, or `model.apply` in Python; a language model with other training data needs '
      'task.decode.max_len.'
    )
