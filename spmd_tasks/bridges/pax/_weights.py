"""Converts Praxis' declarations of variables (WeightHParams) to our boxes and WeightSpecs."""

from collections.abc import Iterable, Sequence
from typing import Any

from flax import linen
import flax.core
import jax
from jax.sharding import PartitionSpec
from praxis import base_layer, pax_fiddle

from spmd_tasks.errors import UserError
from spmd_tasks.sharding import WeightSpec
from spmd_tasks.sharding.specs import SplitDim
from spmd_tasks.sharding.weights import WeightBox


def box_variables(variables: Any, weight_hparams: Any, mesh_axis_names: Sequence[str] | None) -> dict[str, Any]:
  """Puts each variable in a WeightBox with the split dims and collections of its WeightHParams.

  Args:
    variables: a tree of arrays by collection, abstract or not.
    weight_hparams: a congruent tree of WeightHParams.
    mesh_axis_names: of the model; indices in split dims count along it. None: nothing is split.
  """

  def box(path: Any, hparams: base_layer.WeightHParams, value: Any) -> WeightBox:
    split_dims: Iterable[Any] = ()
    if mesh_axis_names is not None and hparams.tensor_split_dims_mapping is not None:
      name = jax.tree_util.keystr(path, simple=True, separator='.')
      split_dims = partition_of(hparams.full_split_dims_mapping, mesh_axis_names, f'the split dims of {name}')
    return WeightBox(
      value=value,
      split_dims=filled_split_dims(split_dims, value.ndim),
      tags=_tags(hparams),
      stacked=0,  # checkpoints keep Pax' own layout of repeats and stages
    )

  return dict(jax.tree_util.tree_map_with_path(box, weight_hparams, variables))


class DeclaringModel:
  """Stands for a Praxis model where Paxml initializes one: `init` also keeps what the variables are declared as.

  Praxis' `init` and `abstract_init_with_metadata` run the model in the same way, and each drops what the other returns.
  One run gives both: tracing it twice took a tenth of all that comes before a small model's compilation.

  Attributes:
    hparams: of the model.
    weight_hparams: a tree of WeightHParams by collection, once `init` has run.
  """

  def __init__(self, model: base_layer.BaseLayer):
    self._model = model
    self.hparams = model.hparams
    self.weight_hparams: dict[str, Any] = {}

  @staticmethod
  def can_stand_for(model: base_layer.BaseLayer) -> bool:
    """Whether the model is initialized by Praxis' own methods."""
    own = base_layer.BaseLayer
    names = 'init', 'abstract_init_with_metadata', '_abstract_init'
    return all(getattr(type(model), name) is getattr(own, name) for name in names)

  def abstract_init_with_metadata(self, *args: Any, **kwargs: Any) -> None:
    """Returns nothing: Paxml asks for the declarations before `init`, and without optimizer states needs none."""

  def init(self, rngs: Any, inputs: Any) -> dict[str, Any]:
    """Returns the new variables, by collection."""
    model = self._model
    boxed = linen.Module.init(model, rngs, inputs, method=model.__call__, mutable=base_layer.DEFAULT_INIT_MUTABLE_LIST)
    declared = flax.core.unfreeze(base_layer.unbox_meta(boxed))
    self.weight_hparams = {name: tree for name, tree in declared.items() if name != 'params_axes'}
    return flax.core.unfreeze(base_layer.maybe_unbox_value(boxed))


def partition_of(split_dims: Sequence[Any], mesh_axis_names: Sequence[str], what: str) -> PartitionSpec:
  """Returns the PartitionSpec of Pax' split dims; `what` is what they are in an error.

  Raises:
    UserError: they name an axis that the mesh does not have.
  """
  for entry in split_dims:
    for axis in entry if isinstance(entry, list | tuple) else (entry,):
      if (isinstance(axis, str) and axis not in mesh_axis_names) or (
        isinstance(axis, int) and axis >= len(mesh_axis_names)
      ):
        raise UserError(
          f'{what}, {tuple(split_dims)}, have the mesh axis {axis!r}, but task.model.mesh_axis_names are '
          f'{list(mesh_axis_names)}: correct one of the two.'
        )
  return base_layer.to_partition_spec(split_dims, mesh_axis_names)


def remove_split_dims(model: Any) -> None:
  """Takes all split dims and meshes out of the config of a model and its layers."""
  for config, _ in pax_fiddle.daglish.iterate(model):
    if isinstance(config, pax_fiddle.Config) and issubclass(config.cls, base_layer.BaseLayer):
      for name in ('weight_split_dims_mapping', 'activation_split_dims_mapping'):
        mapping = getattr(config, name, None)
        for field in mapping.__arguments__ if isinstance(mapping, pax_fiddle.Config) else ():
          setattr(mapping, field, None)
      config.ici_mesh_shape = config.dcn_mesh_shape = config.mesh_axis_names = None


def _tags(hparams: base_layer.WeightHParams) -> tuple[str, ...]:
  """Returns the names of the collections, and our tag for those without weight decay."""
  collections = tuple(hparams.collections or ())
  is_undecayed = base_layer.WeightHParamsCollection.SKIP_LP_REGULARIZATION in collections
  return (*collections, 'no_decay') if is_undecayed else collections


def spec_of_partition(leaf: jax.ShapeDtypeStruct, partition: PartitionSpec) -> WeightSpec:
  """Returns the WeightSpec of a leaf whose PartitionSpec is known."""
  return WeightSpec(shape=leaf.shape, init=None, split_dims=filled_split_dims(partition, leaf.ndim), dtype=leaf.dtype)


def filled_split_dims(entries: Iterable[Any], ndim: int) -> tuple[SplitDim, ...]:
  """Returns one entry per dim: those of a spec that may be shorter, then None."""
  given = [None if entry == () else entry for entry in entries]
  return (*given, *[None] * (ndim - len(given)))
