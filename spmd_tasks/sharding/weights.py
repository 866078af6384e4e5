"""WeightSpec: the declaration of a weight, inside a Linen module:

    kernel = self.param('kernel', WeightSpec(shape=(D, F), init=..., split_dims=('embed', 'mlp')))

`self.param` returns the plain array. Linen stores it in a `WeightBox` with its split dims and tags; `nn.scan` adds an
entry to the box for the dimension that it adds. `weight_specs` reads the specs back, also from abstract values.
"""

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import math
from typing import Any

from flax import struct
from flax.core import meta
import flax.linen as nn
import jax
import jax.numpy as jnp

from spmd_tasks.errors import UserError
from spmd_tasks.sharding.specs import SplitDim, current_sharding_scope

Initializer = Callable[[jax.Array, tuple[int, ...], Any], jax.Array]

# Key in `metadata_params` of nn.scan for the split dim of the dimension that it adds: {STACK_DIM: 'layers'}.
STACK_DIM = 'stack_dim'
# Collection of factors that multiply weights after a step (attention/_qk_clip.py).
WEIGHT_FACTORS = 'weight_factors'
# The formats of quantized kernels (quantized.py).
QUANTIZED_DTYPES = ('int8', 'nf4', 'nf4_double')
# Tag of routers' biases, which are updated by expert load (learning/expert_weights.py), not by the optimizer.
BALANCE_BIAS_TAG = 'balance_bias'
# Tag of weights that were declared without split dims, and that `weight_specs` splits.
SPLIT_BY_DEFAULT = 'split_by_default'
# The memory kind of the host's memory that a device can copy to and from.
PINNED_HOST = 'pinned_host'


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightSpec:
  """The declaration of one weight.

  Attributes:
    shape: one entry per dim.
    init: returns the initial value, init(rng, shape, dtype); None for a weight that exists already.
    split_dims: one entry per dim; None for a weight that is not sharded.
    dtype: dtype of the stored weight.
    tags: properties of the weight: `no_decay` (no weight decay), `expert` (split by expert parallelism), `balance_bias`
      (updated by expert load, not by the optimizer), `adapter` (part of a low-rank adapter), `frozen` (not trained).
    stacked: the number of leading dims that count layers: one per `nn.scan`, two in a circular pipeline.
    num_input_dims: the number of input dims of one layer's matrix; the others are outputs: 1 for [D, F] and [D, H, K],
      2 for [H, K, D]. 0 for a weight that is not a matrix, such as a table; None if the layer does not declare it.
    memory_kind: where it is stored between steps: PINNED_HOST, or None for the device's own memory.
  """

  shape: tuple[int, ...]
  init: Initializer | None
  split_dims: tuple[SplitDim, ...] | None = None
  dtype: Any = jnp.float32
  tags: tuple[str, ...] = ()
  stacked: int = 0
  num_input_dims: int | None = None
  memory_kind: str | None = None

  def __post_init__(self):
    if self.split_dims is not None and len(self.split_dims) != len(self.shape):
      raise UserError(
        f'split dims {self.split_dims} do not fit a weight of shape {self.shape}: give one entry per dim.'
      )
    if self.init is not None and min(self.shape, default=1) < 1:  # optimizer state may be empty
      raise UserError(f'a layer declares a weight of shape {self.shape}, which is empty: raise the size of 0.')

  @property
  def canonical_shape(self) -> tuple[int, ...]:
    """The shape in checkpoints: all layers in one dim, in execution order."""
    if self.stacked < 2:
      return self.shape
    return (math.prod(self.shape[: self.stacked]), *self.shape[self.stacked :])

  @property
  def num_separate_dims(self) -> int:
    """The number of leading dims that count separate matrices: layers of a stack, then experts."""
    return self.stacked + ('expert' in self.tags)

  @property
  def all_split_dims(self) -> tuple[SplitDim, ...]:
    """The split dims with one entry per dim, even if the weight is not sharded."""
    return (None,) * len(self.shape) if self.split_dims is None else self.split_dims

  def __call__(self, rng: jax.Array) -> 'WeightBox':
    """Initializes the weight; has the signature of an initializer for `nn.Module.param`."""
    value = self.init(rng, self.shape, self.dtype)  # type: ignore[misc]
    return WeightBox(value, self.all_split_dims, self.tags, num_input_dims=self.num_input_dims)


class WeightBox(struct.PyTreeNode, meta.AxisMetadata):
  """A weight's value with its split dims and tags; Linen unboxes it when a layer reads the weight."""

  value: Any
  split_dims: tuple[SplitDim, ...] = struct.field(pytree_node=False)
  tags: tuple[str, ...] = struct.field(pytree_node=False)
  stacked: int = struct.field(pytree_node=False, default=0)
  num_input_dims: int | None = struct.field(pytree_node=False, default=None)

  def unbox(self) -> Any:
    return _with_declared_type(self.value, self.split_dims)

  def replace_boxed(self, val: Any) -> 'WeightBox':
    return self.replace(value=val)

  def add_axis(self, index: int, params: dict[Any, Any]) -> 'WeightBox':
    split_dims = (*self.split_dims[:index], params.get(STACK_DIM), *self.split_dims[index:])
    return self.replace(split_dims=split_dims, stacked=self.stacked + 1)

  def remove_axis(self, index: int, params: dict[Any, Any]) -> 'WeightBox':
    split_dims = (*self.split_dims[:index], *self.split_dims[index:][1:])  # `index` may be negative
    return self.replace(split_dims=split_dims, stacked=self.stacked - 1)


@contextlib.contextmanager
def resolved_linen_boxes() -> Iterator[None]:
  """Context in which a model is initialized: the names in the boxes of Linen's `nn.with_partitioning` are split dims.

  In the context of a mesh Linen otherwise takes them for mesh axes, and constrains the values.
  """
  boxes: list[Any] = [meta.Partitioned, nn.LogicallyPartitioned]
  originals = [(box, box.unbox) for box in boxes]
  for box, _ in originals:
    box.unbox = lambda self, apply_constraint=True: _with_declared_type(self.value, self.names)
  try:
    yield
  finally:
    for box, unbox in originals:
      box.unbox = unbox


def _with_declared_type(value: Any, split_dims: tuple[SplitDim, ...]) -> Any:
  """Returns a new weight with its split dims in its type, as a step gives it to a model with explicit axes."""
  scope = current_sharding_scope()
  if scope is None or not scope.has_explicit_axes:
    return value
  return scope.place(value, scope.activation_spec(split_dims, value.shape))


class Quantized(struct.PyTreeNode, meta.AxisMetadata):
  """A quantized kernel in a format of quantized.py. Its leaves are arrays, their shapes, or their WeightSpecs."""

  @property
  def shape(self) -> tuple[int, ...]:
    """The shape of the kernel, if the leaves are not padded."""
    raise NotImplementedError

  def unbox(self) -> Any:
    """Returns the dequantized kernel, float32."""
    raise NotImplementedError

  def replace_boxed(self, val: Any) -> Any:
    return val

  def add_axis(self, index: int, params: dict[Any, Any]) -> 'Quantized':
    return self

  def remove_axis(self, index: int, params: dict[Any, Any]) -> 'Quantized':
    return self


def is_quantized(leaf: Any) -> bool:
  """Returns whether a leaf of a tree of weights is quantized."""
  return isinstance(leaf, Quantized)


def weight_specs(boxed_weights: Any, largest_dim: SplitDim = None) -> Any:
  """Returns a tree of WeightSpecs (without initializers) for a tree of boxed variables, abstract or not.

  Reads the boxes of Linen's `nn.with_partitioning` as well as our own. A variable without a box and with two dims or
  more, such as the kernel of Linen's `nn.Dense`, is split on its largest dim by `largest_dim`.
  """

  def spec_of(leaf) -> WeightSpec:
    box = _as_box(leaf)
    if box is not None:
      declared = {name: getattr(box, name) for name in ('split_dims', 'tags', 'stacked', 'num_input_dims')}
      return dataclasses.replace(replicated_spec(box.value), **declared)
    spec = replicated_spec(leaf)
    if len(spec.shape) < 2 or largest_dim is None:
      return spec
    split_dims: list[SplitDim] = [None] * len(spec.shape)
    split_dims[spec.shape.index(max(spec.shape))] = largest_dim
    return dataclasses.replace(spec, split_dims=tuple(split_dims), tags=(SPLIT_BY_DEFAULT,))

  return jax.tree.map(spec_of, boxed_weights, is_leaf=_is_box)


def _is_box(leaf: Any) -> bool:
  return isinstance(leaf, meta.AxisMetadata)


def _as_box(leaf: Any) -> WeightBox | None:
  if isinstance(leaf, meta.Partitioned):
    return WeightBox(leaf.value, tuple(leaf.names), ())
  return leaf if isinstance(leaf, WeightBox) else None


def replicated_spec(leaf: Any) -> WeightSpec:
  """Returns the WeightSpec of a replicated array, abstract or not."""
  return WeightSpec(shape=tuple(leaf.shape), init=None, split_dims=(None,) * len(leaf.shape), dtype=leaf.dtype)


def leaf_name(path: Any) -> str:
  """Returns the name of a leaf from its key path, such as `weights/embedding/table`."""
  return jax.tree_util.keystr(path, simple=True, separator='/')


def leaves_by_name(tree: Any) -> dict[str, Any]:
  """Returns the leaves of a tree by name, in its order."""
  return {leaf_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def unbox_weights(boxed_weights: Any) -> Any:
  """Returns the plain arrays of a tree of WeightBoxes."""
  return jax.tree.map(lambda leaf: leaf.value if _as_box(leaf) else leaf, boxed_weights, is_leaf=_is_box)


def refuse_plain_weights(boxed_weights: Any) -> None:
  """Raises a UserError if a weight of a stacked layer has no box, which would say which dim counts layers."""
  for path, leaf in jax.tree_util.tree_flatten_with_path(boxed_weights, is_leaf=_is_box)[0]:
    if not isinstance(leaf, WeightBox):
      raise UserError(
        f'weight {leaf_name(path)} of a stacked layer has no split dims: use Linear or declare_weight of '
        'spmd_tasks.layers, or pass a WeightSpec to self.param.'
      )
