"""Resolves split dims to PartitionSpecs by the axis rules: Pax's direct mesh axes and T5X's logical names in one.

    split_dims_to_partition_spec(('embed', 'mlp'), ('data', 'mdl'), (('embed', 'data'), ('mlp', 'mdl')))

returns PartitionSpec('data', 'mdl'). The *split dims* of a tensor name the mesh axes that split each of its dimensions.
An entry is

* a mesh axis (`'data'`), or several of them (`('replica', 'data')`);
* a logical name (`'mlp'`), which the axis rules map to mesh axes;
* None or -1: unsharded.

Axis rules are resolved rule by rule, as in Flax's `logical_to_mesh_axes`: in the order of the list, a rule shards the
dimension with its name if no earlier rule did and all of its mesh axes are free in this tensor. So an earlier rule
takes precedence, whatever the order of the dimensions, and a dimension to which no rule applies is unsharded. Beyond
Flax, split dims may be mesh axes, which are assigned before all rules; one dimension may have several names; two
dimensions may share a name (the first takes precedence); and a name without a rule is an error.

`constrain` applies split dims to an activation inside a `sharding_scope`.

Rows and tokens are never split unevenly (`activation_spec`): XLA (jaxlib 0.10.2 and 0.11.2) includes the rows with
which it pads shards in some sums, and the gradient of a lookup adds them to row 0 of the table. Features may be uneven:
sums over rows do not mix padded features with others.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import itertools
import math
import threading
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from spmd_tasks.errors import UserError

SplitDim = str | Sequence[str] | int | None
SplitDims = Sequence[SplitDim] | None
AxisRules = Sequence[tuple[str, SplitDim]]


def axes_of(entry: SplitDim) -> tuple[str, ...]:
  """Returns the names in an entry of split dims or of a PartitionSpec; () if it is unsharded."""
  if entry is None or entry == -1:
    return ()
  return (entry,) if isinstance(entry, str | int) else tuple(entry)  # type: ignore[return-value]  # no int is a name


def spec_entry(axes: Sequence[str]) -> str | tuple[str, ...] | None:
  """Returns the entry of a PartitionSpec for the axes of one dim."""
  return None if not axes else axes[0] if len(axes) == 1 else tuple(axes)


def check_axis_rules(axis_rules: AxisRules, mesh_axis_names: Sequence[str]) -> None:
  """Raises a UserError if a rule maps to an unknown mesh axis, or a mesh axis's first rule does not map to itself."""
  seen: set[str] = set()
  for name, target in axis_rules:
    is_first = name not in seen
    seen.add(name)
    if is_first and name in mesh_axis_names and axes_of(target) != (name,):
      raise UserError(
        f'axis rule ({name!r}, {target!r}) has the name of a mesh axis but does not map to it: rename the rule; the '
        f'mesh axes are {tuple(mesh_axis_names)}.'
      )
    for axis in axes_of(target):
      if axis not in mesh_axis_names:
        raise UserError(
          f'axis rule ({name!r}, {target!r}) names {axis!r}, which is not one of the mesh axes '
          f'{tuple(mesh_axis_names)}: correct the rule or add the axis to mesh_axis_names.'
        )


def split_dims_to_partition_spec(
  split_dims: SplitDims, mesh_axis_names: Sequence[str], axis_rules: AxisRules = ()
) -> PartitionSpec:
  """Returns the PartitionSpec of a tensor, with one entry per dimension; PartitionSpec() if `split_dims` is None.

  A rule with the name of a mesh axis replaces the axis: (axis, None) leaves its dims unsharded (`without_axis` in
  axis_rules.py). `check_axis_rules` refuses such rules of an experiment.

  Raises a UserError if a name is neither a mesh axis nor a logical name, or a mesh axis is named twice.
  """
  if split_dims is None:
    return PartitionSpec()
  entries = [axes_of(entry) for entry in split_dims]
  names = [name for entry in entries for name in entry]
  rule_names = {name for name, _ in axis_rules}
  direct_names = set(mesh_axis_names) - rule_names
  direct = [name for name in names if name in direct_names]
  for name in names:
    if name not in direct_names | rule_names:
      raise UserError(
        f'split dims {tuple(split_dims)} name {name!r}, which is neither a mesh axis {tuple(mesh_axis_names)} nor a '
        f'logical name of the axis rules {sorted(rule_names)}: correct it or add a rule.'
      )
    if direct.count(name) > 1:
      raise UserError(
        f'split dims {tuple(split_dims)} use mesh axis {name!r} twice: split only one dim of a tensor over it.'
      )
  # The mesh axes of each name of each entry; None until a rule applies to the name.
  assigned: list[list[tuple[str, ...] | None]] = [
    [(name,) if name in direct_names else None for name in entry] for entry in entries
  ]
  used = set(direct)
  for rule, target in axis_rules:
    axes = axes_of(target)
    for entry, axes_of_names in zip(entries, assigned):
      for i, name in enumerate(entry):
        if name == rule and axes_of_names[i] is None and not used.intersection(axes):
          axes_of_names[i] = axes
          used.update(axes)
  return PartitionSpec(*(spec_entry([*itertools.chain(*filter(None, axes_of_names))]) for axes_of_names in assigned))


def spec_axes(spec: PartitionSpec, ndim: int) -> list[tuple[str, ...]]:
  """Returns the mesh axes of each of `ndim` dimensions; () for an unsharded dimension."""
  entries = list(spec) + [None] * (ndim - len(spec))
  return [axes_of(entry) for entry in entries]


def num_parts(axes: Sequence[str], axis_sizes: Mapping[str, int]) -> int:
  """Returns the number of parts into which `axes` split a dimension."""
  return math.prod(axis_sizes[axis] for axis in axes)


def even_spec(
  spec: PartitionSpec, shape: Sequence[int], axis_sizes: Mapping[str, int], axes: Collection[str] | None = None
) -> PartitionSpec:
  """Returns a spec without uneven dims: a dim keeps the subset of its axes that splits it evenly into the most parts.

  A dim that is split over none of `axes` may stay uneven; if `axes` is None, no dim may.
  """

  def even_axes(size: int, dim_axes: tuple[str, ...]) -> tuple[str, ...]:
    if axes is not None and not {*dim_axes}.intersection(axes):
      return dim_axes
    subsets = [subset for n in range(len(dim_axes), -1, -1) for subset in itertools.combinations(dim_axes, n)]
    even = [subset for subset in subsets if size % num_parts(subset, axis_sizes) == 0]
    return max(even, key=lambda subset: num_parts(subset, axis_sizes))

  return PartitionSpec(*(spec_entry(even_axes(*dim)) for dim in zip(shape, spec_axes(spec, len(spec)))))


def row_axes(
  mesh_axis_names: Sequence[str], axis_rules: AxisRules, inputs_split_mapping: Mapping[str, SplitDims] | None = None
) -> frozenset[str]:
  """Returns the mesh axes that split rows or tokens: the axes of inputs, of `batch` and of `seq`."""
  mapped = [entry for split_dims in (inputs_split_mapping or {}).values() for entry in split_dims or ()]
  names = {'batch', 'seq', *(name for entry in mapped for name in axes_of(entry))}
  targets = {axis for name, axes in axis_rules if name in names for axis in axes_of(axes)}
  return frozenset(targets | names.intersection(mesh_axis_names))


def shard_on_batch_dim_partition_spec(mesh_axis_names: Sequence[str], ndim: int) -> PartitionSpec:
  """Returns a spec that splits the first dim, the batch, over the whole mesh; a scalar is replicated."""
  return PartitionSpec(tuple(mesh_axis_names), *[None] * (ndim - 1)) if ndim else PartitionSpec()


def infer_partition_spec_based_on_rank(
  ndim: int,
  inputs_split_mapping: Mapping[str, SplitDims] | None,
  mesh_axis_names: Sequence[str],
  axis_rules: AxisRules = (),
) -> PartitionSpec | None:
  """Returns an input's PartitionSpec by its rank: key `map_1d` for rank 1, `map_2d` for rank 2, ...

  Returns None ("leave as is") if there is no mapping, or if the key maps to None. A scalar is replicated.

  Raises a UserError if the mapping has no key for the rank, or an entry whose length is not the rank.
  """
  if inputs_split_mapping is None:
    return None
  if ndim == 0:
    return PartitionSpec()
  key = f'map_{ndim}d'
  if key not in inputs_split_mapping:
    raise UserError(
      f'inputs_split_mapping has no key {key!r} for an input of rank {ndim} (it has {sorted(inputs_split_mapping)}): '
      f'add {key!r} with {ndim} split dims, or with None to leave such inputs as they are.'
    )
  split_dims = inputs_split_mapping[key]
  if split_dims is None:
    return None
  if len(split_dims) != ndim:
    raise UserError(f'inputs_split_mapping[{key!r}] = {tuple(split_dims)} must have {ndim} entries: give one per dim.')
  return split_dims_to_partition_spec(split_dims, mesh_axis_names, axis_rules)


@dataclasses.dataclass(frozen=True)
class ShardingScope:
  """The mesh and axis rules by which `constrain` resolves split dims.

  Attributes:
    mesh, axis_rules: the mesh and the rules.
    row_axes: the axes that split rows, see `row_axes`.
    inputs_split_mapping: split dims of inputs by rank; None: inputs are sharded on batch over the whole mesh.
    variable_specs: if the model and the loss are called with explicit axes (explicit_axes.py), the PartitionSpecs of
      the model's variables, by collection; else None.
  """

  mesh: Mesh | AbstractMesh
  axis_rules: AxisRules
  row_axes: frozenset[str] = frozenset()
  inputs_split_mapping: Mapping[str, SplitDims] | None = None
  variable_specs: Mapping[str, Any] | None = None

  @property
  def has_explicit_axes(self) -> bool:
    """Whether types of arrays have their sharding here."""
    return self.variable_specs is not None and AxisType.Explicit in self.mesh.axis_types

  def spec(self, split_dims: SplitDims) -> PartitionSpec:
    return split_dims_to_partition_spec(split_dims, self.mesh.axis_names, self.axis_rules)

  def activation_spec(self, split_dims: SplitDims, shape: Sequence[int], *, is_even: bool = False) -> PartitionSpec:
    """Returns the PartitionSpec of an activation, which splits rows and tokens evenly.

    A dim of rows or tokens that its axes do not divide keeps the subset of them that splits it evenly into the most
    parts; devices along the other axes compute the same. Dims of features may be uneven.

    Args:
      split_dims: one entry per dim, or for the first dims.
      shape: shape of the activation.
      is_even: whether features must be split evenly too, as for a `shard_map`.
    """
    is_even = is_even or self.has_explicit_axes
    return even_spec(self.spec(split_dims), shape, self.mesh.shape, None if is_even else self.row_axes)

  def place(self, x: jax.Array, spec: PartitionSpec) -> jax.Array:
    """Returns an array of a traced program, sharded by a spec."""
    if self.has_explicit_axes:
      return jax.sharding.reshard(x, spec)
    return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))

  @property
  def device(self) -> Any:
    """A device of the mesh, or an abstract device with `platform` and `device_kind`; None if the mesh has neither.

    Do not use `jax.default_backend()` instead: a step may be compiled for devices that this process does not have.
    """
    if isinstance(self.mesh, Mesh):
      return self.mesh.devices.flat[0]
    return getattr(self.mesh, 'abstract_device', None)  # the mesh inside a `shard_map`

  def shard_map(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """Returns the `jax.shard_map` of a function over all axes that are not yet manual (`free_mesh`).

    Sets check_vma=False, because kernels do not track over which axes their results vary.
    """
    mesh, axis_names = self.free_mesh()
    layout = {'in_specs': in_specs, 'out_specs': out_specs}
    return jax.shard_map(function, mesh=mesh, axis_names=axis_names, **layout, check_vma=False)

  def free_mesh(self) -> tuple[Any, frozenset[str]]:
    """Returns the mesh to use for a `shard_map` here, and the axes that no enclosing `shard_map` made manual."""
    context = jax.sharding.get_abstract_mesh()
    manual = {name for name, kind in zip(context.axis_names, context.axis_types) if kind == AxisType.Manual}
    return (context if manual else self.mesh), frozenset(self.mesh.axis_names) - manual


_scopes = threading.local()


@contextlib.contextmanager
def sharding_scope(
  mesh: Mesh | AbstractMesh,
  axis_rules: AxisRules,
  inputs_split_mapping: Mapping[str, SplitDims] | None = None,
  variable_specs: Mapping[str, Any] | None = None,
) -> Iterator[ShardingScope]:
  """Context in which `constrain` uses this mesh and these axis rules; enter it while a step is traced.

  Its `row_axes` include those of an enclosing scope.
  """
  outer = current_sharding_scope()
  rows = row_axes(mesh.axis_names, axis_rules, inputs_split_mapping) | (outer.row_axes if outer else frozenset())
  with scope_of(ShardingScope(mesh, axis_rules, rows, inputs_split_mapping, variable_specs)) as scope:
    yield scope


@contextlib.contextmanager
def step_scope(mesh: Mesh | AbstractMesh, *settings: Any) -> Iterator[ShardingScope]:
  """Context in which a task is traced: a `sharding_scope` whose mesh is JAX's too, as in `jax.set_mesh`.

  So a user's `jax.shard_map` without a mesh, or a sharding constraint to a PartitionSpec, finds it.
  """
  outer = jax.sharding.get_abstract_mesh()
  context = jax.sharding.use_abstract_mesh(mesh.abstract_mesh if outer.empty else outer)
  with context, sharding_scope(mesh, *settings) as scope:
    yield scope


@contextlib.contextmanager
def scope_of(scope: ShardingScope) -> Iterator[ShardingScope]:
  """Context in which `scope` is the innermost scope."""
  outer = current_sharding_scope()
  _scopes.current = scope
  try:
    yield scope
  finally:
    _scopes.current = outer


def current_sharding_scope() -> ShardingScope | None:
  """Returns the innermost `sharding_scope`; None outside of any."""
  return getattr(_scopes, 'current', None)


def current_device() -> Any:
  """Returns a device that the current step is compiled for: a device of the scope's mesh, or else JAX's first."""
  return getattr(current_sharding_scope(), 'device', None) or jax.devices()[0]


def current_platform() -> str:
  """Returns the platform that the current step is compiled for."""
  return current_device().platform


def constrain(x: jax.Array, split_dims: SplitDims) -> jax.Array:
  """Constrains an activation to its split dims, one entry per dim; None leaves its layout to the compiler.

  Outside a `sharding_scope` this is the identity. If the mesh does not divide a dimension, rows and tokens are split
  over fewer devices (`activation_spec`), and the compiler pads features.
  """
  scope = current_sharding_scope()
  if scope is None or split_dims is None:
    return x
  if len(split_dims) != x.ndim:
    raise UserError(f'split dims {tuple(split_dims)} do not fit an array of shape {x.shape}: give one entry per dim.')
  return scope.place(x, scope.activation_spec(split_dims, x.shape))


def gathered_axes(split_dims: SplitDims, token_split_dims: SplitDims) -> set[str]:
  """Returns the mesh axes that split both weight and tokens, over which `gather_for_tokens` gathers the weight."""
  scope = current_sharding_scope()
  if scope is None or split_dims is None or token_split_dims is None:
    return set()
  weight_axes, token_axes = (
    set(itertools.chain(*spec_axes(scope.spec(entries), len(entries)))) for entries in (split_dims, token_split_dims)
  )
  shared = weight_axes & token_axes
  return shared if any(scope.mesh.shape[axis] > 1 for axis in shared) else set()


def gather_for_tokens(weight: jax.Array, split_dims: SplitDims, token_split_dims: SplitDims) -> jax.Array:
  """Gathers a weight over the mesh axes that split the tokens it is multiplied with (fully sharded data parallelism).

  Left alone, XLA may multiply by one shard after another and add the results, which is slow if shards are small. The
  weight's gradient is reduce-scattered over these axes. `token_split_dims` are the split dims of the activations' rows
  and tokens, such as ('batch', 'seq').
  """
  scope, gathered = current_sharding_scope(), gathered_axes(split_dims, token_split_dims)
  if scope is None or not gathered:
    return weight
  weight_axes = spec_axes(scope.spec(split_dims), weight.ndim)
  entries = [spec_entry([axis for axis in axes if axis not in gathered]) for axes in weight_axes]
  return scope.place(weight, PartitionSpec(*entries))
