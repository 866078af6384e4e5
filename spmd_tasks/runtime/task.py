"""Defines Task (a model, its loss, its learner, its decode settings), TrainState and the pure steps on it.

The steps are plain mathematics on whole arrays of true shapes. There is no mesh, no sharding and no padding here;
`partition.py` wraps them into compiled steps.
"""

from collections.abc import Callable, Mapping
import contextlib
import dataclasses
import inspect
from typing import Any

from clu import metrics as clu_metrics
from flax import struct
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from spmd_tasks.errors import UserError, naming_own_code
from spmd_tasks.layers import LossOutput, RunsModel
from spmd_tasks.layers.base import layer_scope, named_arguments, signature_of, train_flags, warn_of_default
from spmd_tasks.layers.losses import StepOutputs, as_loss_output
from spmd_tasks.learning import Learner, LearnerState
from spmd_tasks.learning.frozen_weights import fill_in, without_frozen
from spmd_tasks.learning.skipping import keep_if_finite
from spmd_tasks.runtime.decode_settings import DecodeSettings
from spmd_tasks.runtime.sown_values import of_state, sown_values, warn_of_sown, without_sown
from spmd_tasks.sharding.weights import BALANCE_BIAS_TAG, QUANTIZED_DTYPES, WEIGHT_FACTORS

Batch = dict[str, jax.Array]
Variables = dict[str, Any]  # Linen's collections by name: 'params', the weights, and others, such as 'batch_stats'


class TrainState(struct.PyTreeNode):
  """Everything that a training step changes. A pytree; shapes, specs and shardings come in trees of this class too.

  Attributes:
    step: int32 scalar, the number of updates applied so far (a skipped step does not count).
    rng: uint32[2], the job's base key data; step s draws from `fold_in(rng, s)`.
    weights: the model's parameters, a tree of arrays.
    learner: optimizer state, averaged weights and the counts of skipped steps.
    non_trainable: the model's other variables by collection, such as `batch_stats`; they have no gradient.
  """

  step: Any
  rng: Any
  weights: Any
  learner: LearnerState
  non_trainable: Any = struct.field(default_factory=dict)

  @property
  def variables(self) -> Variables:
    """All variables of the model by collection; the weights are `params`."""
    return {'params': self.weights, **self.non_trainable}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
  """A model with its loss, learner and decode settings; frozen. An experiment's `task()` returns a config of one.

  Attributes:
    model: a Linen module. `model(batch, train=...)` returns predictions in the form that `loss` reads. If its first
      argument has the name of an entry of the batch, each argument gets the entry of its name in place of the batch.
      `train` may have another name of `layers.base.train_flags`, such as `deterministic`.
    loss: `loss(predictions, batch)`, a mean over the batch's loss weights: a LossOutput, or what `as_loss_output`
      makes one of: a scalar, the mean over rows, or (scalar, metrics). It may run the model itself (layers.RunsModel),
      and take `train` as the model does.
    learner: turns gradients into new weights: a Learner, or an optimizer, such as `optax.adamw(1e-3)`.
    eval_with_ema: evaluate, decode and serve the averaged weights instead of the raw ones; frozen ones as they are.
    decode: how text is generated.
    trained: patterns of the names of weights that are trained, such as ('lora_',); the others are frozen: they have no
      gradient and no optimizer state. None: all are trained.
    frozen_dtype: in which frozen kernels are held: 'bfloat16', 'int8', 'nf4' or 'nf4_double' (sharding/quantized.py);
      None: float32.
    quantization: which Linears multiply in int8 or fp8, and how: see layers/quantized_products.py; None: none.

  Raises (on construction):
    UserError: a part is of another kind; `eval_with_ema` without averaged weights, or `frozen_dtype` without frozen
      ones.
  """

  model: nn.Module
  loss: Callable[[Any, Batch], Any]
  learner: Any  # a Learner once it is built
  eval_with_ema: bool = False
  decode: DecodeSettings = dataclasses.field(default_factory=DecodeSettings)
  trained: tuple[str, ...] | None = None
  frozen_dtype: str | None = None
  quantization: str | Mapping[str, Any] | None = None

  def __post_init__(self):
    is_optax = isinstance(self.learner, optax.GradientTransformation | optax.MultiSteps)
    if is_optax or hasattr(self.learner, 'transformation'):
      object.__setattr__(self, 'learner', Learner(optimizer=self.learner))
    self._refuse_other_kinds()
    if self.eval_with_ema and self.learner.ema_decay is None:
      raise UserError('eval_with_ema=True needs averaged weights: set task.learner.ema_decay, for example to 0.999.')
    if self.frozen_dtype is not None and self.trained is None:
      raise UserError(f'frozen_dtype={self.frozen_dtype!r} needs frozen weights: set task.trained, such as ("lora_",).')
    held = ('float32', 'bfloat16', *QUANTIZED_DTYPES)
    if self.frozen_dtype not in (None, *held):
      raise UserError(f'frozen_dtype={self.frozen_dtype!r} must be one of {held}.')

  def _refuse_other_kinds(self) -> None:
    for name, wanted, fits in (
      ('model', 'an instance of a flax.linen.Module', isinstance(self.model, nn.Module)),
      ('loss', 'a function (predictions, batch)', callable(self.loss) and not isinstance(self.loss, type)),
      ('learner', 'a Learner(optimizer=...) or an optimizer', hasattr(self.learner, 'state_split_dims')),
    ):
      value = getattr(self, name)
      if not fits:
        found = f'the class {value.__name__} itself' if isinstance(value, type) else f'of type {type(value).__name__}'
        raise UserError(f'{name} is {found}: it must be {wanted}, or the fdl.Config of one.')

  def init_variables(self, rng: jax.Array, batch: Batch) -> Variables:
    """Draws the model's variables, with the boxes of their WeightSpecs. Variables without a box are not split.

    Sown values are not among them, see sown_values.py. The log names arguments of the model that keep their defaults,
    once.
    """
    with _naming(self.model, 'model', batch):
      positional, named = self.arguments(batch, train=False)
      for argument in () if positional else signature_of(self.model).parameters.values():
        if argument.name not in named and argument.default is not argument.empty:
          warn_of_default(self.model, argument, 'make it an entry of the batch, or a field of the model')
      variables, sown = sown_values(self.model, {'params': rng}, *positional, **named)
    warn_of_sown(type(self.model).__name__, frozenset(sown))
    return without_sown(variables, sown)

  def mark_weights(self, weight_specs: Any) -> Any:
    """Returns the WeightSpecs that the model declared, with the tag `frozen` and the dtype of frozen weights.

    Raises a UserError if a pattern of `trained` names no weight, or the loss refuses weights that are trained.
    """
    if self.trained is not None:
      from spmd_tasks.learning.trained_weights import mark_frozen

      weight_specs = mark_frozen(weight_specs, self.trained, self.frozen_dtype)
    if isinstance(self.loss, RunsModel):
      self.loss.check_weights(weight_specs)
    if self.quantization is not None:
      from spmd_tasks.layers.quantized_products import check_patterns

      check_patterns(self.quantization, weight_specs)
    return weight_specs

  def predict(self, variables: Variables, batch: Batch, **apply: Any) -> Any:
    """Returns the model's predictions, without dropout; `apply` are further arguments of Linen's `Module.apply`."""
    given, named = self.arguments(batch, train=False)
    return self._apply(variables | self.constants(variables, batch), *given, **named, **apply)

  def _apply(self, variables: Variables, *given: Any, **named: Any) -> Any:
    with layer_scope(quantization=self.quantization):
      return self.model.apply(variables, *given, **named)

  def constants(self, variables: Variables, batch: Batch) -> Variables:
    """Returns collections that a model reads and that are no state, made of the batch; of this class none."""
    return {}

  def arguments(self, batch: Mapping[str, Any], *, train: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns what the model is called with: the batch, or the entries that its arguments name, and its train flags."""
    first, *others = signature_of(self.model).parameters.values()
    if first.name not in batch:
      return (batch,), named_arguments('model', self.model, train=train)
    entries = {**batch, **train_flags(train)}
    for each in others:
      is_needed = each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
      if each.name not in entries and is_needed:
        raise UserError(
          f'{type(self.model).__name__}.__call__ takes {each.name}, but the batch holds {sorted(batch)}: name entries '
          'of the batch, or take the whole `batch`.'
        )
    return (), {each.name: entries[each.name] for each in (first, *others) if each.name in entries}

  def _loss(self, predictions: Any, batch: Batch, train: bool) -> LossOutput:
    with _naming(self.loss, 'loss', batch):
      returned = self.loss(predictions, batch, **_flags_of(self.loss, train))
    return as_loss_output(self.loss, returned, max((len(rows) for rows in batch.values() if rows.ndim), default=1))

  def compute_loss(
    self, variables: Variables, batch: Batch, *, train: bool, rng: jax.Array | None = None
  ) -> LossOutput:
    """Computes the loss of one batch, and when `train` the new values of all variables but the weights.

    `rng` feeds dropout and is needed only when `train`.
    """
    if isinstance(self.loss, RunsModel):
      batch = self.loss.with_model(self, variables, batch)
    if not train:
      return self._loss(self.predict(variables, batch), batch, train)
    positional, named = self.arguments(batch, train=True)
    rngs = {} if rng is None else {'dropout': rng}
    mutable = [name for name in variables if name != 'params']
    read = variables | self.constants(variables, batch)
    predictions, updated = self._apply(read, *positional, **named, rngs=rngs, mutable=mutable)
    return self._loss(predictions, batch, train).replace(updated_variables=of_state(updated, variables))

  def evaluation_variables(self, state: TrainState) -> Variables:
    """Returns the variables of a TrainState (or of its shapes) that evaluation uses, with raw or averaged weights."""
    weights = self.learner.evaluation_weights(state.learner, state.weights, averaged=self.eval_with_ema)
    return state.variables | {'params': weights}

  def evaluates_trained_weights(self, state: TrainState) -> bool:
    """Returns whether `evaluation_variables` of a state, or of its shapes, are `state.variables`."""
    return self.learner.evaluates_trained_weights(state.learner, averaged=self.eval_with_ema)

  def decoding_variables(self, state: TrainState) -> Variables:
    """Returns the variables of a TrainState that text is generated with."""
    return self.evaluation_variables(state)

  def make_key(self, seed: int) -> jax.Array:
    """Returns the seed's key, of one fixed generator: a job's numbers must not depend on JAX's default."""
    return jax.random.key(seed, impl='threefry2x32')

  def init_state(self, variables: Variables, weight_specs: Any, rng: jax.Array) -> TrainState:
    """Returns the state at step 0. `rng` is the job's base key, from which every step derives its own."""
    self.learner.check_variables(variables)
    weights, others = variables['params'], {name: tree for name, tree in variables.items() if name != 'params'}
    learner = self.learner.init(weights, weight_specs)
    return TrainState(jnp.zeros((), jnp.int32), jax.random.key_data(rng), weights, learner, others)

  def learner_specs(self, abstract_learner: LearnerState, weight_specs: Any) -> LearnerState:
    """Returns one WeightSpec per leaf of the learner's state: the learner says how they are split."""
    return self.learner.state_split_dims(abstract_learner, weight_specs)

  def train_step(
    self, weight_specs: Any, state: TrainState, batch: Batch, *, keeps_examples: bool = False
  ) -> tuple[TrainState, dict[str, Any]]:
    """Applies one update. If the loss or a gradient is not finite, variables, optimizer state and step stay unchanged.

    Returns:
      The new state, and metrics: float32 scalars, or vectors with one value per expert. The scalars `loss`,
      `loss_weight` and `skipped` (0 or 1) are always among them. Of a mixture of inputs, `loss_by_source` and its
      weights `loss_weight_by_source` are among them. Where the loss gives summaries, or with `keeps_examples`,
      `outputs` are its StepOutputs.
    """
    trained, trained_specs = (without_frozen(tree, weight_specs) for tree in (state.weights, weight_specs))

    def loss_fn(trained, microbatch, rng):
      weights = fill_in(trained, state.weights)
      output = self.compute_loss(state.variables | {'params': weights}, microbatch, train=True, rng=rng)
      return output.loss, output

    learner = self.learner
    rng = jax.random.fold_in(jax.random.wrap_key_data(state.rng, impl='threefry2x32'), state.step)
    if learner.num_microbatches == 1:
      gradients, output = jax.grad(loss_fn, has_aux=True)(trained, batch, rng)
      gradients = jax.tree.map(lambda gradient: gradient.astype(jnp.float32), gradients)
    else:
      from spmd_tasks.learning.accumulation import accumulate_gradients

      if whole := getattr(self.loss, 'with_whole_batch', None):  # adds what depends on all rows, see PreferenceLoss
        batch = dict(whole(self, state.variables, batch, learner.num_microbatches))
      settings = learner.num_microbatches, learner.accumulation
      is_sum = jax.tree.map(lambda spec: BALANCE_BIAS_TAG in spec.tags, trained_specs)
      skips = getattr(self.loss, 'fills_first_parts', lambda batch: False)(batch)
      output, gradients = accumulate_gradients(
        loss_fn, trained, batch, rng, *settings, is_sum=is_sum, skips_empty=skips
      )
    weights, learner_state, learner_metrics = learner.update(
      gradients,
      output.loss,
      state.step,
      state.learner,
      state.weights,
      weight_specs,
      factors=output.updated_variables.get(WEIGHT_FACTORS),
    )
    step = state.step + (1 - learner_metrics['skipped'].astype(jnp.int32))
    non_trainable = keep_if_finite(
      learner_metrics['skipped'] == 0, state.non_trainable | dict(output.updated_variables), state.non_trainable
    )
    metrics = {name: mean for name, (mean, _) in output.metrics.items()}
    if 'loss_by_source' in metrics:
      metrics['loss_weight_by_source'] = output.metrics['loss_by_source'][1]
    metrics |= {'loss': output.loss, 'loss_weight': output.weight} | learner_metrics
    metrics |= StepOutputs.of(output, batch, keeps_examples=keeps_examples)
    return state.replace(step=step, weights=weights, learner=learner_state, non_trainable=non_trainable), metrics

  def eval_step(
    self, variables: Variables, batch: Batch, step: jax.Array, *, keeps_examples: bool = False
  ) -> dict[str, Any]:
    """Evaluates one batch. Returns averages over its loss weights, to be merged over the batches of the set.

    A metric with one value per expert has a vector as its total and a scalar as its count. `step`, int32, is that of
    the variables, for evals that draw random numbers. `outputs` as in `train_step`.
    """
    del step
    output = self.compute_loss(variables, batch, train=False)
    means = {'loss': (output.loss, jnp.float32(1) if output.is_sum else output.weight)} | output.metrics
    averages = {name: clu_metrics.Average(total=mean * weight, count=weight) for name, (mean, weight) in means.items()}
    return averages | StepOutputs.of(output, batch, keeps_examples=keeps_examples)


def require_task(task: Any, what: str) -> None:
  """Raises a UserError if `what`, such as '--mode serve', needs a Task and `task` is of another kind, as Pax's is."""
  if not isinstance(task, Task):
    raise UserError(
      f'{what} reads the model, the loss and the learner of a Task, and a {type(task).__name__} keeps them to itself: '
      'train, evaluate and decode it, or write the experiment with a Task of this project.'
    )


def _flags_of(loss: Any, train: bool) -> dict[str, bool]:
  """Returns the train flags that a loss takes as arguments of these names, unless it has them already."""
  try:
    parameters = inspect.signature(loss).parameters
  except (TypeError, ValueError):  # some functions of C have none
    return {}
  bound = getattr(loss, 'keywords', {})  # of a functools.partial
  return {name: value for name, value in train_flags(train).items() if name in parameters and name not in bound}


def _naming(part: Any, role: str, batch: Batch) -> contextlib.AbstractContextManager[None]:
  """Context in which an error of a model or loss of the experiment's own names it, and what it is called with."""
  name, keys = getattr(part, '__name__', type(part).__name__), tuple(batch)
  inputs = 'predictions, batch' if role == 'loss' else next(iter(signature_of(part).parameters))
  what = f'the {role} {name}({inputs})'
  if role == 'model' and inputs not in ('batch', *keys):
    what += f', which gets the whole batch because no entry ({", ".join(sorted(keys))}) is named {inputs},'
    keys = ()
  return naming_own_code(what, keys=keys, part=part)
