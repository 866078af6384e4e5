"""Task: a Linen model with its loss and its learner. BaseTask: the protocol that programs run. TrainState.

The steps of a task are pure functions of global arrays without padding. They know no mesh and no sharding;
`partition.py` compiles them for a mesh.
"""

import abc
from collections.abc import Callable, Mapping, Sequence
import contextlib
import copy
import dataclasses
import sys
from typing import Any, Protocol

from clu import metrics as clu_metrics
import fiddle as fdl
from flax import struct
import flax.linen as nn
import jax
import jax.numpy as jnp

from spmd_tasks.errors import UserError, own_code_errors
from spmd_tasks.layers import LossOutput
from spmd_tasks.layers.base import named_arguments, signature_of, train_flags, warn_of_default
from spmd_tasks.layers.losses import StepOutputs, as_loss
from spmd_tasks.layers.quantized_products import check_patterns, quantizing
from spmd_tasks.learning import BaseLearner, LearnerState
from spmd_tasks.learning.accumulation import accumulate_gradients
from spmd_tasks.learning.frozen_weights import fill_in, mark_frozen, without_frozen
from spmd_tasks.learning.learner import as_learner
from spmd_tasks.learning.numbered_update import NumberedUpdate
from spmd_tasks.learning.skipping import keep_if_finite
from spmd_tasks.runtime.decode_settings import DecodeSettings
from spmd_tasks.runtime.sown_values import declared_updates, sown_values, warn_of_sown, without_sown
from spmd_tasks.sharding.explicit_axes import explicitly
from spmd_tasks.sharding.weights import (
  BALANCE_BIAS_TAG,
  PINNED_HOST,
  QUANTIZED_DTYPES,
  WEIGHT_FACTORS,
  resolved_linen_boxes,
)

Batch = dict[str, jax.Array]
Variables = dict[str, Any]  # Linen's collections by name: 'params', the weights, and others, such as 'batch_stats'
_AVERAGE_PREFIX = 'ema_'  # of a collection with averages: ema_batch_stats


class TrainState(struct.PyTreeNode):
  """Everything that a train step changes. A pytree; trees of shapes, specs and shardings are of this class too.

  Attributes:
    step: int32 scalar, the number of updates applied so far (a skipped step does not count).
    rng: uint32[2], the data of the job's base key; step s uses the key `fold_in(rng, s)`.
    weights: the model's parameters, a tree of arrays.
    learner: optimizer state, averaged weights and counts of skipped steps.
    non_trainable: the model's other variables by collection, such as `batch_stats`; they have no gradients. A task that
      evaluates averaged weights also has the averages of these variables, such as `ema_batch_stats`.
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


class BaseTask(Protocol):
  """What the programs train, evaluate and decode. `Task` implements it for Linen models; the Pax bridge has another.

  To run another framework's steps on the mesh, subclass it and implement its abstract methods. Methods that compute are
  pure functions: a compiled program traces them on global arrays without padding, inside a `sharding_scope`.

  Attributes:
    model: the model, as its framework represents it.
    decode: how text is generated from prompts; None if the model does not continue prompts.
    num_microbatches: the number of microbatches into which `train_step` splits a batch.
    max_consecutive_skips: the training program stops after this many consecutive skipped steps.
  """

  model: Any
  decode: DecodeSettings | None

  @property
  def num_microbatches(self) -> int:
    return 1

  @property
  def max_consecutive_skips(self) -> int:
    return 1

  @property
  def explicit_axes(self) -> bool:
    """Whether the model and the loss are called with explicit mesh axes (sharding/explicit_axes.py)."""
    return False

  @property
  def shows_metrics(self) -> bool:
    """Whether the progress line shows the metrics that the loss returns; metric files always have them."""
    return False

  @abc.abstractmethod
  def make_key(self, seed: int) -> jax.Array:
    """Returns the base key of a job with this seed: a scalar PRNG key."""

  @abc.abstractmethod
  def init_variables(self, rng: jax.Array, batch: Batch) -> Variables:
    """Initializes the model's variables, boxed with their split dims. `batch` is zeros with the input spec's shapes."""

  def mark_weights(self, weight_specs: Any) -> Any:
    """Returns the weights' WeightSpecs with the task's tags and dtypes; frozen weights have the tag `frozen`."""
    return weight_specs

  @abc.abstractmethod
  def init_state(self, variables: Variables, weight_specs: Any, rng: jax.Array) -> TrainState:
    """Returns the state at step 0. `rng` is the job's base key, from which every step derives its key."""

  @abc.abstractmethod
  def learner_specs(self, abstract_learner: LearnerState, weight_specs: Any) -> LearnerState:
    """Returns a WeightSpec with split dims for each leaf of the learner's state."""

  def step_numbers(
    self, weight_specs: Any, abstract_state: TrainState
  ) -> 'tuple[tuple[Any, ...], Callable[[Sequence[Any]], BaseTask]]':
    """Returns the numbers that a compiled `train_step` takes as arguments, and a function from them to the task.

    Tasks that differ only in these scalars have one compiled step. The default is no numbers.
    """
    del weight_specs, abstract_state
    return (), lambda numbers: self

  @abc.abstractmethod
  def train_step(
    self, weight_specs: Any, state: TrainState, batch: Batch, *, keeps_examples: bool = False
  ) -> tuple[TrainState, dict[str, Any]]:
    """Applies one update. Returns the new state, and metrics by name: float32 scalars or vectors.

    The metrics include the scalars `loss`, `loss_weight` and `skipped` (0 or 1). With `keeps_examples` they also
    include `outputs`, the StepOutputs with per-example outputs; a task that has none raises a UserError.
    """

  @abc.abstractmethod
  def eval_step(
    self, variables: Variables, batch: Batch, step: jax.Array, *, keeps_examples: bool = False
  ) -> dict[str, Any]:
    """Evaluates one batch. Returns clu metrics by name, including `loss`, which are merged over the evaluation set.

    `step` is the train step of the variables, int32. `keeps_examples` is as in `train_step`.
    """

  @abc.abstractmethod
  def predict(self, variables: Variables, batch: Batch) -> Any:
    """Returns the model's predictions without dropout: a tree of arrays."""

  def prepare_batch(self, variables: Variables, batch: Batch) -> Batch:
    """Returns the batch with the entries that `training_loss` needs and that have no gradient."""
    del variables
    return batch

  def training_loss(self, variables: Variables, batch: Batch, rng: jax.Array) -> Any:
    """Computes the loss of a training batch, whose FLOPs --mode plan and the MFU count. The default is an eval step."""
    del rng
    return self.eval_step(variables, batch, jnp.int32(0))

  def evaluation_variables(self, state: TrainState) -> Variables:
    """Returns the variables to evaluate, with raw or averaged weights. `state` may be abstract."""
    return state.variables

  def decoding_variables(self, state: TrainState) -> Variables:
    """Returns the variables to generate text with."""
    return self.evaluation_variables(state)

  def as_task(self, reader: str) -> 'Task':
    """Returns self as a Task, for a `reader` such as '--mode serve' that needs its Linen model, loss or learner.

    Raises a UserError if the task runs another framework's model.
    """
    raise UserError(
      f'{reader} needs the Linen model, the loss and the learner of a Task, which a {type(self).__name__} does not '
      'have: train, evaluate and decode it, or write the experiment with a Task.'
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task(BaseTask):
  """A Linen model with its loss, learner and decode settings. An experiment's `task()` returns a config of one.

  Attributes:
    model: a Linen module. `model(batch, train=...)` returns the predictions that `loss` reads. If its first argument is
      named like an entry of the batch, every argument is passed the entry of its name instead of the whole batch.
      Instead of `train` it may take another flag of `layers.base.train_flags`, such as `deterministic`. Or a class of
      NNX modules, or a `functools.partial` of one: the built task has the Linen module of nnx_model.py.
    loss: a function `loss(predictions, batch)` that returns the mean over rows, a tuple (mean, metrics) or a
      LossOutput, and may take `train` as the model does; or a Loss. The built task has a Loss.
    learner: turns gradients into new weights: an optimizer, such as `optax.adamw(1e-3)`, or a Learner around one. The
      built task has a BaseLearner.
    eval_with_ema: evaluate, decode and serve averaged weights instead of raw ones; frozen weights have no average. The
      model's other floats, such as the statistics of BatchNorm, are averaged with the same decay.
    decode: how text is generated.
    trained: regular expressions that the names of trained weights match, such as ('lora_',). The other weights are
      frozen: they have no gradients and no optimizer state. None trains all weights.
    frozen_dtype: the dtype in which frozen kernels are stored: 'bfloat16', 'int8', 'nf4' or 'nf4_double'
      (sharding/quantized.py); None: float32.
    quantization: which Linears multiply in int8 or fp8, and how: see layers/quantized_products.py; None: none.
    explicit_axes: call the model and the loss with explicit mesh axes (sharding/explicit_axes.py), for code that reads
      or sets the sharding in the types of arrays. Weights without split dims are then replicated.

  A field may be given as the fdl.Config of its value, which is built at once. Only a fdl.Config(Task, ...) keeps it
  unbuilt, so that `--set` can change its arguments.

  Raises (on construction):
    UserError: a field has the wrong type; or `eval_with_ema` without averaged weights, or `frozen_dtype` without frozen
      weights.
  """

  model: nn.Module
  loss: Any
  learner: Any
  eval_with_ema: bool = False
  decode: DecodeSettings = dataclasses.field(default_factory=DecodeSettings)
  trained: tuple[str, ...] | None = None
  frozen_dtype: str | None = None
  quantization: str | Mapping[str, Any] | None = None
  explicit_axes: bool = False

  def __post_init__(self):
    for field in dataclasses.fields(self):
      if isinstance(config := getattr(self, field.name), fdl.Buildable):
        object.__setattr__(self, field.name, fdl.build(config))
    object.__setattr__(self, 'learner', as_learner(self.learner))
    if 'flax.nnx' in sys.modules:  # importing it takes a second
      from spmd_tasks.runtime.nnx_model import as_linen

      object.__setattr__(self, 'model', as_linen(self.model))
    for name, expected, is_valid in (
      ('model', 'an instance of a flax.linen.Module or a class of nnx.Modules', isinstance(self.model, nn.Module)),
      ('loss', 'a function (predictions, batch)', callable(self.loss)),
      ('learner', 'a Learner(optimizer=...) or an optimizer', isinstance(self.learner, BaseLearner)),
    ):
      value = getattr(self, name)
      if not is_valid or isinstance(value, type):
        kind = f'the class {value.__name__} itself' if isinstance(value, type) else f'of type {type(value).__name__}'
        raise UserError(f'{name} is {kind}: it must be {expected}, or the fdl.Config of one.')
    object.__setattr__(self, 'loss', as_loss(self.loss))
    if self.eval_with_ema and self.learner.ema_decay is None:
      raise UserError('eval_with_ema=True needs averaged weights: set task.learner.ema_decay, for example to 0.999.')
    if self.frozen_dtype is not None and self.trained is None:
      raise UserError(f'frozen_dtype={self.frozen_dtype!r} needs frozen weights: set task.trained, such as ("lora_",).')
    dtypes = ('float32', 'bfloat16', *QUANTIZED_DTYPES)
    if self.frozen_dtype not in (None, *dtypes):
      raise UserError(f'frozen_dtype={self.frozen_dtype!r} must be one of {dtypes}.')

  @property
  def num_microbatches(self) -> int:
    return self.learner.num_microbatches

  @property
  def max_consecutive_skips(self) -> int:
    return self.learner.max_consecutive_skips

  @property
  def shows_metrics(self) -> bool:
    return self.loss.shows_metrics

  def as_task(self, reader: str) -> 'Task':
    return self

  def init_variables(self, rng: jax.Array, batch: Batch) -> Variables:
    """Initializes the model's variables, boxed with their split dims; a variable without a box is replicated.

    Leaves out sown values (sown_values.py), and adds the averages of variables that are not weights. Logs once which
    arguments of the model keep their defaults.
    """

    def init(variables: Variables, batch: Batch, rng: jax.Array) -> Variables:
      positional, named = self.arguments(batch, train=False)
      for argument in () if positional else signature_of(self.model).parameters.values():
        if argument.name not in named and argument.default is not argument.empty:
          warn_of_default(self.model, argument, 'make it an entry of the batch, or a field of the model')
      variables, sown = sown_values(self.model, {'params': rng}, *positional, **named)
      warn_of_sown(type(self.model).__name__, frozenset(sown))
      return without_sown(variables, sown)

    with self._model_errors(batch), resolved_linen_boxes():
      variables = explicitly(init, {}, batch, rng)
    return variables | {f'{_AVERAGE_PREFIX}{name}': variables[name] for name in self._averaged_collections(variables)}

  def _averaged_collections(self, variables: Variables) -> list[str]:
    """Returns the names of the collections, beside the weights, of which averages are evaluated."""
    own = [name for name in variables if not name.startswith(_AVERAGE_PREFIX)]
    return [name for name in own if name not in ('params', WEIGHT_FACTORS)] if self.eval_with_ema else []

  def with_averages(self, old: Variables, new: Variables, step: jax.typing.ArrayLike) -> Variables:
    """Returns new non-trainable variables with their averages, given the old ones and the step of the update."""
    if not self.eval_with_ema:
      return new
    weight = 1 - self.learner.ema_decay_at(step)

    def move(average: jax.Array, value: jax.Array) -> jax.Array:
      if not jnp.issubdtype(value.dtype, jnp.floating):
        return value
      start = average.astype(jnp.float32)
      return (start + weight * (value.astype(jnp.float32) - start)).astype(value.dtype)

    averages = {f'{_AVERAGE_PREFIX}{name}': name for name in self._averaged_collections(old)}
    return new | {average: jax.tree.map(move, old[average], new[name]) for average, name in averages.items()}

  def mark_weights(self, weight_specs: Any) -> Any:
    """Returns the weights' WeightSpecs; frozen weights get the tag `frozen` and `frozen_dtype`.

    Raises a UserError if a pattern of `trained` matches no weight, or if the loss needs a trained weight to be frozen.
    """
    if self.trained is not None:
      weight_specs = mark_frozen(weight_specs, self.trained, self.frozen_dtype)
    self.loss.check_weights(weight_specs)
    if self.quantization is not None:
      check_patterns(self.quantization, weight_specs)
    return weight_specs

  def predict(self, variables: Variables, batch: Batch, **apply: Any) -> Any:
    """Returns the model's predictions without dropout; `apply` are further arguments of Linen's `Module.apply`."""

    def predict(variables: Variables, batch: Batch) -> Any:
      positional, named = self.arguments(batch, train=False)
      return self._apply(variables | self.constants(variables, batch), *positional, **named, **apply)

    return explicitly(predict, variables, batch)

  def _apply(self, variables: Variables, *positional: Any, **named: Any) -> Any:
    with self.layer_context():
      return self.model.apply(variables, *positional, **named)

  def layer_context(self) -> contextlib.AbstractContextManager[None]:
    """Returns the context in which the model is called (traced): its Linears multiply as `quantization` says."""
    return quantizing(self.quantization)

  def constants(self, variables: Variables, batch: Batch) -> Variables:
    """Returns collections that the model reads but that are not state, computed from the batch. By default none."""
    return {}

  def arguments(self, batch: Mapping[str, Any], *, train: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the model's positional and keyword arguments: the batch or entries by name, and its train flag."""
    first, *others = signature_of(self.model).parameters.values()
    if first.name not in batch:
      return (batch,), named_arguments('model', self.model, train=train)
    entries = {**batch, **train_flags(train)}
    for argument in others:
      is_variadic = argument.kind in (argument.VAR_POSITIONAL, argument.VAR_KEYWORD)
      if argument.name not in entries and argument.default is argument.empty and not is_variadic:
        raise UserError(
          f'{type(self.model).__name__}.__call__ takes {argument.name}, but the batch has {sorted(batch)}: name '
          'entries of the batch, or take the whole `batch`.'
        )
    return (), {argument.name: entries[argument.name] for argument in (first, *others) if argument.name in entries}

  def _model_errors(self, batch: Batch) -> contextlib.AbstractContextManager[None]:
    """Context in which errors of an experiment's own model name the model and its arguments."""
    name, keys = type(self.model).__name__, tuple(batch)
    first = next(iter(signature_of(self.model).parameters))
    what = f'the model {name}({first})'
    if first not in ('batch', *keys):
      what += f', which gets the whole batch because no entry ({", ".join(sorted(keys))}) is named {first},'
      keys = ()
    return own_code_errors(what, keys=keys, part=self.model)

  def prepare_batch(self, variables: Variables, batch: Batch) -> Batch:
    return dict(self.loss.prepare_batch(self, variables, batch))

  def compute_loss(
    self, variables: Variables, batch: Batch, *, train: bool, rng: jax.Array | None = None
  ) -> LossOutput:
    """Computes the loss of one batch, and if `train` the new values of all variables except the weights.

    `rng` seeds dropout and is needed only if `train`.
    """

    def compute(variables: Variables, batch: Batch, rng: jax.Array | None) -> LossOutput:
      if not train:
        return self.loss.compute(self.predict(variables, batch), batch, train=False)
      positional, named = self.arguments(batch, train=True)
      rngs = {} if rng is None else {'dropout': rng}
      mutable = [name for name in variables if name != 'params' and not name.startswith(_AVERAGE_PREFIX)]
      read = variables | self.constants(variables, batch)
      predictions, updated = self._apply(read, *positional, **named, rngs=rngs, mutable=mutable)
      output = self.loss.compute(predictions, batch, train=True)
      return output.replace(updated_variables=declared_updates(updated, variables))

    return explicitly(compute, variables, self.prepare_batch(variables, batch), rng)

  def training_loss(self, variables: Variables, batch: Batch, rng: jax.Array) -> jax.Array:
    return self.compute_loss(variables, batch, train=True, rng=rng).loss

  def evaluation_variables(self, state: TrainState) -> Variables:
    """Returns the variables to evaluate, with raw or averaged weights. `state` may be abstract."""
    weights = self.learner.evaluation_weights(state.learner, state.weights, averaged=self.eval_with_ema)
    others = state.non_trainable
    averages = {name: others[f'{_AVERAGE_PREFIX}{name}'] for name in self._averaged_collections(others)}
    return state.variables | averages | {'params': weights}

  def decoding_variables(self, state: TrainState) -> Variables:
    """Returns the variables to generate text with."""
    return self.evaluation_variables(state)

  def make_key(self, seed: int) -> jax.Array:
    """Returns the base key, always of threefry2x32: a job's numbers must not depend on JAX's default generator."""
    return jax.random.key(seed, impl='threefry2x32')

  def init_state(self, variables: Variables, weight_specs: Any, rng: jax.Array) -> TrainState:
    """Returns the state at step 0. `rng` is the job's base key, from which every step derives its key."""
    self.learner.check_variables(variables)
    weights, others = variables['params'], {name: tree for name, tree in variables.items() if name != 'params'}
    learner = self.learner.init(weights, weight_specs)
    return TrainState(jnp.zeros((), jnp.int32), jax.random.key_data(rng), weights, learner, others)

  def learner_specs(self, abstract_learner: LearnerState, weight_specs: Any) -> LearnerState:
    """Returns a WeightSpec with split dims for each leaf of the learner's state."""
    return self.learner.state_split_dims(abstract_learner, weight_specs)

  def step_numbers(
    self, weight_specs: Any, abstract_state: TrainState
  ) -> tuple[tuple[Any, ...], Callable[[Sequence[Any]], BaseTask]]:
    """Returns the numbers of the learner's update (numbered_update.py), and a function from them to the task."""
    state_specs = jax.tree.leaves(self.learner_specs(abstract_state.learner, weight_specs))
    if any(spec.memory_kind == PINNED_HOST for spec in state_specs):  # the update reads it as it is stored
      return super().step_numbers(weight_specs, abstract_state)
    trained = without_frozen(abstract_state.weights, weight_specs)

    def apply(grads: Any, loss: Any, step: Any, state: Any, weights: Any, factors: Any) -> Any:
      return self.learner.update(grads, loss, step, state, weights, weight_specs, factors=factors)

    update = NumberedUpdate.trace(
      apply,
      jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, jnp.float32), trained),
      jax.ShapeDtypeStruct((), jnp.float32),
      abstract_state.step,
      abstract_state.learner,
      abstract_state.weights,
      abstract_state.non_trainable.get(WEIGHT_FACTORS),
    )

    def with_numbers(numbers: Sequence[Any]) -> BaseTask:
      def numbered(grads: Any, loss: Any, step: Any, state: Any, weights: Any, specs: Any, factors: Any = None) -> Any:
        return update(numbers, grads, loss, step, state, weights, factors)

      learner = copy.copy(self.learner)
      object.__setattr__(learner, 'update', numbered)
      return dataclasses.replace(self, learner=learner)

    return update.numbers, with_numbers

  def train_step(
    self, weight_specs: Any, state: TrainState, batch: Batch, *, keeps_examples: bool = False
  ) -> tuple[TrainState, dict[str, Any]]:
    """Applies one update. If the loss or a gradient is not finite, variables, optimizer state and step do not change.

    Returns:
      The new state, and metrics: float32 scalars, or vectors with one value per expert. They always include the scalars
      `loss`, `loss_weight` and `skipped` (0 or 1); for a mixture of inputs also `loss_by_source` and its weights
      `loss_weight_by_source`; and if the loss returns summaries, or with `keeps_examples`, also `outputs`, its
      StepOutputs.
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
      batch = dict(self.loss.prepare_whole_batch(self, state.variables, batch, learner.num_microbatches))
      settings = learner.num_microbatches, learner.accumulation
      is_sum = jax.tree.map(lambda spec: BALANCE_BIAS_TAG in spec.tags, trained_specs)
      skips_empty = self.loss.may_have_empty_microbatches(batch)
      output, gradients = accumulate_gradients(
        loss_fn, trained, batch, rng, *settings, is_sum=is_sum, skips_empty=skips_empty
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
    non_trainable = self.with_averages(
      state.non_trainable, state.non_trainable | dict(output.updated_variables), state.step
    )
    non_trainable = keep_if_finite(learner_metrics['skipped'] == 0, non_trainable, state.non_trainable)
    metrics = {name: mean for name, (mean, _) in output.metrics.items()}
    if 'loss_by_source' in metrics:
      metrics['loss_weight_by_source'] = output.metrics['loss_by_source'][1]
    metrics |= {'loss': output.loss, 'loss_weight': output.weight} | learner_metrics
    metrics |= StepOutputs.of(output, batch, keeps_examples=keeps_examples)
    return state.replace(step=step, weights=weights, learner=learner_state, non_trainable=non_trainable), metrics

  def eval_step(
    self, variables: Variables, batch: Batch, step: jax.Array, *, keeps_examples: bool = False
  ) -> dict[str, Any]:
    """Evaluates one batch. Returns averages weighted by its loss weights, which are merged over the evaluation set.

    A metric with one value per expert has a vector total and a scalar count. `step` is not used. `outputs` is as in
    `train_step`.
    """
    del step
    output = self.compute_loss(variables, batch, train=False)
    means = {'loss': (output.loss, jnp.float32(1) if output.is_sum else output.weight)} | output.metrics
    averages = {name: clu_metrics.Average(total=mean * weight, count=weight) for name, (mean, weight) in means.items()}
    return averages | StepOutputs.of(output, batch, keeps_examples=keeps_examples)
