"""Defines BaseTask, the protocol that the programs run, and Task: a Linen model, its loss, its learner; and TrainState.

The steps of a task are pure functions of whole arrays of true shapes. There is no mesh, no sharding and no padding
here; `partition.py` wraps them into compiled steps.
"""

import abc
from collections.abc import Mapping
import contextlib
import dataclasses
from typing import Any, Protocol

from clu import metrics as clu_metrics
from flax import struct
import flax.linen as nn
import jax
import jax.numpy as jnp

from spmd_tasks.errors import UserError, naming_own_code
from spmd_tasks.layers import LossOutput
from spmd_tasks.layers.base import layer_scope, named_arguments, signature_of, train_flags, warn_of_default
from spmd_tasks.layers.losses import StepOutputs, as_loss
from spmd_tasks.learning import BaseLearner, LearnerState
from spmd_tasks.learning.frozen_weights import fill_in, without_frozen
from spmd_tasks.learning.learner import as_learner
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


class BaseTask(Protocol):
  """What the programs train, evaluate and decode. `Task` is one for Linen models; the Pax bridge has another.

  Subclass it to run another framework's steps on the mesh, and define its abstract methods. Those that compute are pure
  functions, traced in compiled programs on arrays of true shapes, under the mesh's axis rules.

  Attributes:
    model: the model, in the form of its framework.
    decode: how text is generated from prompts; None: decode jobs decode batches of `decode_inputs` by `make_decoder`.
    num_microbatches: in how many parts `train_step` differentiates a batch.
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
  def shows_metrics(self) -> bool:
    """Whether the progress line shows the metrics that an experiment's own loss returns; metric files always do."""
    return False

  @abc.abstractmethod
  def make_key(self, seed: int) -> jax.Array:
    """Returns the base key of a job with this seed: a PRNG key, scalar."""

  @abc.abstractmethod
  def init_variables(self, rng: jax.Array, batch: Batch) -> Variables:
    """Draws the model's variables, each in the box of its WeightSpec. `batch` holds zeros of the input spec."""

  def mark_weights(self, weight_specs: Any) -> Any:
    """Returns the weights' WeightSpecs with the task's own tags and dtypes; a frozen weight has the tag `frozen`."""
    return weight_specs

  @abc.abstractmethod
  def init_state(self, variables: Variables, weight_specs: Any, rng: jax.Array) -> TrainState:
    """Returns the state at step 0. `rng` is the job's base key, from which every step derives its own."""

  @abc.abstractmethod
  def learner_specs(self, abstract_learner: LearnerState, weight_specs: Any) -> LearnerState:
    """Returns a WeightSpec per leaf of the learner's state, which says how the leaf is split."""

  @abc.abstractmethod
  def train_step(
    self, weight_specs: Any, state: TrainState, batch: Batch, *, keeps_examples: bool = False
  ) -> tuple[TrainState, dict[str, Any]]:
    """Applies one update. Returns the new state, and metrics by name: float32 scalars or vectors.

    The scalars `loss`, `loss_weight` and `skipped` (0 or 1) must be among the metrics. With `keeps_examples`, so must
    `outputs`, the StepOutputs with the per-example outputs; a task without these raises a UserError.
    """

  @abc.abstractmethod
  def eval_step(
    self, variables: Variables, batch: Batch, step: jax.Array, *, keeps_examples: bool = False
  ) -> dict[str, Any]:
    """Evaluates one batch. Returns clu metrics by name, to be merged over the batches of the set; `loss` is one.

    `step` is the train step of the variables, int32. `keeps_examples` is as in `train_step`.
    """

  @abc.abstractmethod
  def predict(self, variables: Variables, batch: Batch) -> Any:
    """Returns the model's predictions in evaluation mode, without dropout: a tree of arrays."""

  def prepare_batch(self, variables: Variables, batch: Batch) -> Batch:
    """Returns the batch with the entries that `training_loss` computes first, without gradients."""
    del variables
    return batch

  def training_loss(self, variables: Variables, batch: Batch, rng: jax.Array) -> Any:
    """Computes the loss of a training batch; --mode plan and the MFU count its FLOPs. By default an eval step."""
    del rng
    return self.eval_step(variables, batch, jnp.int32(0))

  def evaluation_variables(self, state: TrainState) -> Variables:
    """Returns the variables of a TrainState (or of its shapes) that evaluation uses, with raw or averaged weights."""
    return state.variables

  def evaluates_trained_weights(self, state: TrainState) -> bool:
    """Returns whether `evaluation_variables` of a state, or of its shapes, are `state.variables`."""
    del state
    return True

  def decoding_variables(self, state: TrainState) -> Variables:
    """Returns the variables of a TrainState that generate text."""
    return self.evaluation_variables(state)

  def make_decoder(self, *arguments: Any, **named: Any) -> Any:
    """Makes the decoder of a task whose `decode` is None; see programs/decode.py for its arguments and methods."""
    raise UserError(f'a {type(self).__name__} continues prompts: set task.decode, which is None.')

  def as_task(self, reader: str) -> 'Task':
    """Returns the Task whose Linen model, loss and learner `reader`, such as '--mode serve', needs.

    Raises a UserError if this is a task of another framework.
    """
    raise UserError(
      f'{reader} needs the model, the loss and the learner of a Task, which a {type(self).__name__} does not have: '
      'train, evaluate and decode it, or write the experiment with a Task of this project.'
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task(BaseTask):
  """A Linen model with its loss, learner and decode settings; frozen. An experiment's `task()` returns a config of one.

  Attributes:
    model: a Linen module. `model(batch, train=...)` returns predictions in the form that `loss` reads. If its first
      argument has the name of an entry of the batch, each argument gets the entry of its name in place of the batch.
      `train` may have another name of `layers.base.train_flags`, such as `deterministic`.
    loss: `loss(predictions, batch)`: a function that returns the mean over rows, alone or as (mean, metrics), or a
      LossOutput; it may take `train` as the model does. Or a Loss. Once the task is built, it is a Loss.
    learner: turns gradients into new weights: an optimizer, such as `optax.adamw(1e-3)`, or a Learner around one. Once
      the task is built, it is a BaseLearner.
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
  loss: Any
  learner: Any
  eval_with_ema: bool = False
  decode: DecodeSettings = dataclasses.field(default_factory=DecodeSettings)
  trained: tuple[str, ...] | None = None
  frozen_dtype: str | None = None
  quantization: str | Mapping[str, Any] | None = None

  def __post_init__(self):
    object.__setattr__(self, 'learner', as_learner(self.learner))
    for name, wanted, fits in (
      ('model', 'an instance of a flax.linen.Module', isinstance(self.model, nn.Module)),
      ('loss', 'a function (predictions, batch)', callable(self.loss)),
      ('learner', 'a Learner(optimizer=...) or an optimizer', isinstance(self.learner, BaseLearner)),
    ):
      value = getattr(self, name)
      if not fits or isinstance(value, type):
        kind = f'the class {value.__name__} itself' if isinstance(value, type) else f'of type {type(value).__name__}'
        raise UserError(f'{name} is {kind}: it must be {wanted}, or the fdl.Config of one.')
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
    """Draws the model's variables, with the boxes of their WeightSpecs. Variables without a box are not split.

    Sown values are not among them, see sown_values.py. The log names arguments of the model that keep their defaults,
    once.
    """
    with self._naming(batch):
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
    self.loss.check_weights(weight_specs)
    if self.quantization is not None:
      from spmd_tasks.layers.quantized_products import check_patterns

      check_patterns(self.quantization, weight_specs)
    return weight_specs

  def predict(self, variables: Variables, batch: Batch, **apply: Any) -> Any:
    """Returns the model's predictions, without dropout; `apply` are further arguments of Linen's `Module.apply`."""
    positional, named = self.arguments(batch, train=False)
    return self._apply(variables | self.constants(variables, batch), *positional, **named, **apply)

  def _apply(self, variables: Variables, *positional: Any, **named: Any) -> Any:
    with layer_scope(**self.layer_facts()):
      return self.model.apply(variables, *positional, **named)

  def layer_facts(self) -> dict[str, Any]:
    """Returns the facts of LayerScope under which the model's layers are called."""
    return {'quantization': self.quantization}

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

  def _naming(self, batch: Batch) -> contextlib.AbstractContextManager[None]:
    """Context in which an error of an experiment's own model names the model and what it is called with."""
    name, keys = type(self.model).__name__, tuple(batch)
    first = next(iter(signature_of(self.model).parameters))
    what = f'the model {name}({first})'
    if first not in ('batch', *keys):
      what += f', which gets the whole batch because no entry ({", ".join(sorted(keys))}) is named {first},'
      keys = ()
    return naming_own_code(what, keys=keys, part=self.model)

  def prepare_batch(self, variables: Variables, batch: Batch) -> Batch:
    return dict(self.loss.prepare_batch(self, variables, batch))

  def compute_loss(
    self, variables: Variables, batch: Batch, *, train: bool, rng: jax.Array | None = None
  ) -> LossOutput:
    """Computes the loss of one batch, and when `train` the new values of all variables but the weights.

    `rng` feeds dropout and is needed only when `train`.
    """
    batch = self.prepare_batch(variables, batch)
    if not train:
      return self.loss.compute(self.predict(variables, batch), batch, train=False)
    positional, named = self.arguments(batch, train=True)
    rngs = {} if rng is None else {'dropout': rng}
    mutable = [name for name in variables if name != 'params']
    read = variables | self.constants(variables, batch)
    predictions, updated = self._apply(read, *positional, **named, rngs=rngs, mutable=mutable)
    return self.loss.compute(predictions, batch, train=True).replace(updated_variables=of_state(updated, variables))

  def training_loss(self, variables: Variables, batch: Batch, rng: jax.Array) -> jax.Array:
    return self.compute_loss(variables, batch, train=True, rng=rng).loss

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

      batch = dict(self.loss.prepare_whole_batch(self, state.variables, batch, learner.num_microbatches))
      settings = learner.num_microbatches, learner.accumulation
      is_sum = jax.tree.map(lambda spec: BALANCE_BIAS_TAG in spec.tags, trained_specs)
      skips = self.loss.fills_first_parts(batch)
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
