"""PraxisTask and PraxisLayer: Praxis models and layers in experiments of ours. Neither needs Paxml and its TensorFlow.

A whole model, with our learner:

    def task(self):
      return fdl.Config(
        PraxisTask,
        model=pax_fiddle.Config(layers.LanguageModel, name='lm', lm_tpl=...),
        learner=fdl.Config(Learner, optimizer=fdl.Config(AdamW, learning_rate=3e-4)),
      )

A Praxis model computes predictions and loss in one call and returns weighted scalars, `{name: (value, weight)}`; one of
them is differentiated, the others are metrics. Losses that its layers add (`aux_loss`) are inside it.

A single layer, as a Linen module; our stacks scan, pipeline and pad it as they do their own:

    norm = PraxisLayer(config=pax_fiddle.Config(layers.LayerNorm, dim=64))
    y = norm(x)
"""

from collections.abc import Mapping
import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from praxis import base_hyperparams, base_layer, pax_fiddle

from spmd_tasks.bridges.pax._batches import complete_tokens, to_nested_map
from spmd_tasks.bridges.pax._variables import box_variables, cast_floats, cast_variables, praxis_context
from spmd_tasks.errors import UserError
from spmd_tasks.layers import LossOutput
from spmd_tasks.runtime import Task
from spmd_tasks.runtime.task import Batch, Variables

_praxis_context = functools.partial(praxis_context, 'threefry2x32')  # the generator of our keys
_NOT_STORED = ('aux_loss', 'summaries', 'params_axes')
_STORED_BY_LAYERS = (base_layer.PARAMS, base_layer.NON_TRAINABLE, 'batch_stats')


@dataclasses.dataclass(frozen=True, kw_only=True)
class PraxisTask(Task):
  """A task whose model is Praxis'.

  Attributes:
    model: the `pax_fiddle.Config` of a `praxis.base_model.BaseModel`, or a built one. For its split dims to hold, its
      `mesh_axis_names` must be those of the experiment.
    loss: not used: the model computes its loss.
    loss_name: which of the model's weighted scalars is differentiated.
  """

  model: Any
  loss: Any = None
  loss_name: str = 'total_loss'

  def __post_init__(self):
    if not isinstance(self.model, base_layer.BaseLayer):
      object.__setattr__(self, 'model', base_hyperparams.instantiate(self.model))
    super().__post_init__()

  def _refuse_other_kinds(self) -> None:
    """The model is Praxis', and computes the loss."""

  def init_variables(self, rng: jax.Array, batch: Batch) -> Variables:
    """Draws the model's variables, with boxes of the split dims and collections that Praxis declares."""
    inputs = _inputs(batch)
    with _praxis_context(do_eval=False):
      declared = dict(self.model.abstract_init_with_metadata(inputs))
      variables = dict(self.model.init(_rngs(rng), cast_floats(inputs, self.model.fprop_dtype)))
    for name in _NOT_STORED:
      declared.pop(name, None)
      variables.pop(name, None)
    return box_variables(variables, declared, self.model.mesh_axis_names)

  def predict(self, variables: Variables, batch: Batch) -> Any:
    """Returns the model's predictions, in evaluation mode. Of a language model the `ids` of the batch suffice."""
    inputs = to_nested_map(complete_tokens(batch))
    with _praxis_context(do_eval=True):
      predictions, _ = self.model.apply(
        self._cast_variables(variables, inputs),
        cast_floats(inputs, self.model.fprop_dtype),
        method=self.model.compute_predictions,
        mutable=_NOT_STORED,
      )
    return predictions

  def compute_loss(
    self, variables: Variables, batch: Batch, *, train: bool, rng: jax.Array | None = None
  ) -> LossOutput:
    """Computes loss, metrics and, when `train`, the new values of all variables but the weights.

    Without `rng`, what the model draws at random, such as BERT's masks, is the same each time.

    Raises:
      UserError: the model returns no weighted scalar of the name `loss_name`, or one that is no (value, weight).
    """
    inputs = _inputs(batch)
    stored = [name for name in variables if name != 'params']
    with _praxis_context(do_eval=not train):
      (metrics, _), updated = self.model.apply(
        self._cast_variables(variables, inputs),
        cast_floats(inputs, self.model.fprop_dtype),
        rngs=_rngs(jax.random.key(0) if rng is None else rng),
        mutable=[*_NOT_STORED, *stored],
      )
    means = {}
    for name, value in metrics.items():
      if not isinstance(value, tuple | list) or len(value) != 2:
        raise UserError(
          f'the metric {name!r} of {type(self.model).__name__} is a {type(value).__name__}: return (value, weight).'
        )
      means[name] = (jnp.asarray(value[0], jnp.float32), jnp.asarray(value[1], jnp.float32))
    if self.loss_name not in means:
      raise UserError(
        f'{type(self.model).__name__} returns no {self.loss_name!r} to differentiate: set task.loss_name to one of '
        f'{sorted(means)}.'
      )
    loss, weight = means.pop(self.loss_name)
    like = {name: variables[name] for name in stored}
    new = {name: jax.tree.map(lambda x, old: x.astype(old.dtype), updated[name], like[name]) for name in stored}
    return LossOutput(loss=loss, weight=weight, metrics=means, per_example={}, updated_variables=new if train else {})

  def decode_forward(self, variables: Variables, cache: Any, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, Any]:
    """Reads tokens after those in a KV cache, by Praxis' own `extend_step`; as Task.decode_forward."""
    from spmd_tasks.bridges.pax._kv_cache import read_tokens

    paddings = (batch['segment_ids'] == 0).astype(jnp.float32)
    inputs = to_nested_map({**batch, 'labels': batch['ids'], 'weights': 1 - paddings, 'paddings': paddings})
    with _praxis_context(do_eval=True):
      return read_tokens(self.model, self._cast_variables(variables, inputs), cache, batch)

  def _cast_variables(self, variables: Variables, inputs: Any) -> Variables:
    if self.model.fprop_dtype == jnp.float32:
      return variables
    return cast_variables(variables, self.model.abstract_init_with_metadata(inputs), self.model.fprop_dtype)


class PraxisLayer(nn.Module):
  """Calls a Praxis layer with the arguments of its own `__call__`.

  Weights under `layer`, in Praxis' structure; other variables in their collections. A layer may use the rng `dropout`.

  Fields:
    config: the `pax_fiddle.Config` of a `praxis.base_layer.BaseLayer`. For its split dims to hold, its
      `mesh_axis_names` must be those of the experiment.
  """

  config: Any

  @nn.compact
  def __call__(self, *args: Any, train: bool = False, **kwargs: Any) -> Any:
    """Applies the layer; not `train` is Praxis' `do_eval`.

    Raises:
      UserError: the layer adds a loss, which nothing here would read.
    """
    with pax_fiddle.empty_flax_module_stack():  # else it would be a submodule, with Praxis' boxes in our scope
      layer = base_hyperparams.instantiate(self.config)
    with _praxis_context(do_eval=not train):
      declared = dict(layer.abstract_init_with_metadata(*args, **kwargs))

      def draw(rng: Any, name: str) -> Any:
        variables = layer.init(_rngs(rng), *args, **kwargs)
        return box_variables({name: variables[name]}, {name: declared[name]}, layer.mesh_axis_names)[name]

      variables, others = {}, {}
      for name in (name for name in _STORED_BY_LAYERS if declared.get(name)):
        if name == base_layer.PARAMS:
          variables[name] = self.param('layer', draw, name)
        else:
          others[name] = self.variable(name, 'layer', lambda name=name: draw(self.make_rng('params'), name))
          variables[name] = others[name].value
      rngs = _rngs(self.make_rng('dropout')) if self.has_rng('dropout') else {}
      mutable = [*others, base_layer.AUX_LOSS, base_layer.SUMMARIES] if train else [base_layer.SUMMARIES]
      output, updated = layer.apply(variables, *args, rngs=rngs, mutable=mutable, **kwargs)
    if updated.get(base_layer.AUX_LOSS):
      raise UserError(
        f'{type(layer).__name__} adds a loss, which a layer of ours returns as a statistic: take one of ours, or take '
        'the whole model by PraxisTask.'
      )
    if train and not self.is_initializing():
      for name, variable in others.items():
        variable.value = updated[name]
    return output


def _rngs(rng: jax.Array) -> dict[str, jax.Array]:
  """Returns the keys of Praxis' streams."""
  keys = jax.random.split(jax.random.key_data(rng), 3)
  return dict(zip(('params', 'random', 'dropout'), keys, strict=True))


def _inputs(batch: Mapping[str, jax.Array]) -> Any:
  """Returns the batch as Praxis' models read it: with `paddings`, 1 where there is no token."""
  if 'paddings' not in batch and 'segment_ids' in batch:
    batch = {**batch, 'paddings': (batch['segment_ids'] == 0).astype(jnp.float32)}
  return to_nested_map(batch)
