"""PaxTask: a Paxml SingleTask as a task of this package, which calls Paxml's pure step functions.

    task = PaxTask(task=praxis.base_hyperparams.instantiate(task_config), input_spec=train_input.element_spec())
    model = partition_spmd_model(task, mesh, task.input_spec)

`paxml.trainer_lib` computes the loss, the updates and the optimizer state, so a run has Paxml's numbers. This package
provides the mesh, the padding of uneven weights, checkpoints, inputs and the loop. Random keys are derived as in
`paxml.main`: the PRNG is `rbg`, and the key of `task.train.random_seed` is split into a key for the initial variables
and a root key for the train, eval and decode steps.
"""

from collections.abc import Iterable, Iterator
import contextlib
import dataclasses
import functools
from typing import Any

from absl import logging
from clu import metrics as clu_metrics
import jax
import jax.numpy as jnp
from paxml import base_metrics, summary_utils, tasks_lib, train_states, trainer_lib
from praxis import base_layer, py_utils

from spmd_tasks.bridges.pax._input import complete_tokens, to_nested_map
from spmd_tasks.bridges.pax._support import check_trained_variables
from spmd_tasks.bridges.pax._variables import (
  PRNG_IMPL,
  box_variables,
  cast_floats,
  cast_variables,
  praxis_context,
  weight_spec,
)
from spmd_tasks.errors import UserError, own_code_errors
from spmd_tasks.learning import LearnerState
from spmd_tasks.runtime import BaseTask, TrainState
from spmd_tasks.runtime.input_layout import InputSpec
from spmd_tasks.runtime.task import Batch, Variables
from spmd_tasks.sharding.reductions import sums_of_squares
from spmd_tasks.sharding.weights import replicated_spec

# Our name of a metric -> the name of the learner's summary in Paxml.
_LEARNER_SUMMARIES = {'grad_norm': 'learning/raw_grad_norm', 'learning_rate': 'learning/lr'}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PaxTask(BaseTask):
  """A built `paxml.tasks_lib.SingleTask` as a BaseTask.

  Its steps do not accumulate gradients. As in Paxml, nonfinite updates are applied, not skipped.

  Attributes:
    task: the SingleTask, with its model and learner.
    input_spec: name -> global shape and dtype of the training batch, with which the model is initialized.
    eval_with_ema: whether to evaluate the optimizer's averaged weights (`eval_use_ema_states`).
    model: the Praxis model, `task.model`.
    decode: None, because the model's `decode` takes batches, not prompts (`_decode.py`).
  """

  task: tasks_lib.SingleTask
  input_spec: InputSpec
  eval_with_ema: bool = False
  model: Any = dataclasses.field(init=False, repr=False)
  decode: None = dataclasses.field(init=False, default=None)

  def __post_init__(self):
    if self.eval_with_ema and not tasks_lib.has_ema(self.task):
      raise UserError(
        'eval_with_ema (task.train.eval_use_ema_states) requires averaged weights: set '
        'task.train.learner.optimizer.ema_decay, such as 0.9999.'
      )
    _name_losses_in_errors(self.task.loss_aggregator_inst)
    object.__setattr__(self, 'model', self.task.model)

  @functools.cached_property
  def weight_hparams(self) -> Any:
    """The WeightHParams of the model's variables by collection."""
    with self._praxis_call('the declaration of variables', self.input_spec):
      weight_hparams = dict(self.model.abstract_init_with_metadata(to_nested_map(self.input_spec)))
    weight_hparams.pop('params_axes', None)
    return weight_hparams

  @contextlib.contextmanager
  def _praxis_call(self, what: str, batch: Iterable[str] = (), do_eval: bool | None = None) -> Iterator[None]:
    """Enters the context of Praxis, in which errors of the model's code become UserErrors."""
    name_errors = own_code_errors(f'{what} of {type(self.model).__name__}', keys=batch, part=self.model)
    with name_errors, praxis_context(do_eval=do_eval):
      yield

  def make_key(self, seed: int) -> jax.Array:
    """Returns Paxml's root key for a seed."""
    return jax.random.key(seed, impl=PRNG_IMPL)

  def init_variables(self, rng: jax.Array, batch: Batch) -> Variables:
    """Initializes the model's variables as Paxml does, in boxes with their split dims.

    Raises a UserError if the learner trains no variable.
    """
    with self._praxis_call('the initialization', batch):
      _, init_key = jax.random.split(jax.random.key_data(rng))
      state, _ = trainer_lib.initialize_model_state(
        self.task,
        init_key,
        to_nested_map(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)),
        discard_opt_states=True,
        do_init_checkpoint_rules=False,
        var_weight_hparams=self.weight_hparams,
      )
    check_trained_variables(self.task.learners[0], self.weight_hparams)
    return box_variables(state.mdl_vars, self.weight_hparams, self.model.mesh_axis_names)

  def init_state(self, variables: Variables, weight_specs: Any, rng: jax.Array) -> TrainState:
    """Returns the state at step 0 with Paxml's optimizer state."""
    with self._praxis_call('the optimizer state'):
      state = self.task.create_train_state(variables, self.weight_hparams)
    return TrainState(
      step=jnp.zeros((), jnp.int32),
      rng=jax.random.key_data(rng),
      weights=variables['params'],
      learner=LearnerState(
        opt_state=state.opt_states,
        ema_weights=None,
        num_skipped=jnp.zeros((), jnp.int32),
        num_skipped_in_a_row=jnp.zeros((), jnp.int32),
      ),
      non_trainable={name: tree for name, tree in variables.items() if name != 'params'},
    )

  def learner_specs(self, abstract_learner: LearnerState, weight_specs: Any) -> LearnerState:
    """Returns one WeightSpec per leaf of the learner's state, sharded as in Paxml."""
    specs = jax.tree.map(replicated_spec, abstract_learner)
    try:
      partition = self.task.create_train_state_partition_specs(self.weight_hparams)
    except ValueError as error:
      if 'init_partition_spec' not in str(error):
        raise
      name = type(self.task.learners[0].optimizer).__name__  # an optimizer for pmap
      logging.warning('The optimizer %s has no split dims for its state, which is replicated.', name)
      return specs
    # By path, because masked parts are MaskedNodes in the state, and may be None in the partition specs.
    by_path = dict(jax.tree_util.tree_leaves_with_path(partition.opt_states))
    opt_state = jax.tree_util.tree_map_with_path(
      lambda path, leaf: weight_spec(leaf, by_path[path]), abstract_learner.opt_state
    )
    return specs.replace(opt_state=opt_state)

  def train_step(
    self, weight_specs: Any, state: TrainState, batch: Batch, *, keeps_examples: bool = False
  ) -> tuple[TrainState, dict[str, jax.Array]]:
    """Calls Paxml's `train_step_single_learner`; returns the new state and the metrics (`_train_metrics`)."""
    _check_no_examples(keeps_examples)
    with self._praxis_call('the train step', batch):
      root, _ = jax.random.split(state.rng)
      train_key, _, _ = jax.random.split(root, 3)
      new_state, output = trainer_lib.train_step_single_learner(
        self.task,
        pax_state(state),
        train_key,
        to_nested_map(batch),
        fprop_dtype=self.model.fprop_dtype,
        var_weight_hparams=self.weight_hparams,
      )
    variables = dict(new_state.mdl_vars)
    metrics = _train_metrics(self.task, output, sums_of_squares(variables['params'], weight_specs))
    state = state.replace(
      step=new_state.step.astype(jnp.int32),
      weights=variables.pop('params'),
      learner=state.learner.replace(opt_state=new_state.opt_states),
      # A model that computes in bfloat16 returns bfloat16, which Paxml keeps; a cast to float32 is exact.
      non_trainable=jax.tree.map(
        lambda old, new: new.astype(old.dtype),
        state.non_trainable,
        {name: variables[name] for name in state.non_trainable},
      ),
    )
    return state, metrics

  def eval_step(
    self, variables: Variables, batch: Batch, step: jax.Array, *, keeps_examples: bool = False
  ) -> dict[str, clu_metrics.Metric]:
    """Calls Paxml's `eval_step_single_learner`; returns averages of its weighted scalars.

    As in Paxml, random numbers in evaluation, such as BERT's masks, depend on the train step.
    """
    _check_no_examples(keeps_examples)
    with self._praxis_call('the eval step', batch):
      root, _ = jax.random.split(jax.random.PRNGKey(self.task.train.random_seed))
      _, eval_key, _ = jax.random.split(root, 3)
      _, output = trainer_lib.eval_step_single_learner(
        self.task,
        train_states.TrainState(step=step.astype(jnp.uint32), mdl_vars=variables, opt_states=[]),
        eval_key,
        to_nested_map(batch),
        fprop_dtype=self.model.fprop_dtype,
        var_weight_hparams=self.weight_hparams,
      )
    return _eval_metrics(self.task, output)

  def predict(self, variables: Variables, batch: Batch) -> Any:
    """Returns the model's predictions in evaluation mode; for a language model, `ids` suffice as the batch."""
    model = self.model
    with self._praxis_call('compute_predictions', batch, do_eval=True):
      predictions, _ = model.apply(
        cast_variables(variables, self.weight_hparams, model.fprop_dtype),
        cast_floats(to_nested_map(complete_tokens(batch)), model.fprop_dtype),  # also paddings, as in a train step
        method=model.compute_predictions,
        mutable=self.task.evaluate.apply_mutable_list,
      )
    return jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, predictions)

  def decode_step(
    self, variables: Variables, batch: Batch, step: jax.Array, number: jax.Array, *, in_training: bool = False
  ) -> Any:
    """Calls Paxml's `decode_step`; returns a `trainer_lib.StepFnOutput` without a loss.

    Args:
      variables: the variables.
      batch: the batch.
      step: int32, the train step of the variables.
      number: int32, the number of the batch in its dataset, from 1.
      in_training: whether to use the seed of training, as in a training job, or the seed of decoding.
    """
    settings = self.task.decode
    with self._praxis_call('the decode step', batch):
      seed = self.task.train.random_seed if in_training else settings.random_seed
      root, _ = jax.random.split(jax.random.PRNGKey(seed))
      key = jax.random.split(root, 3)[2] if in_training else jax.random.split(root)[0]
      if settings.prng_key_fold_with_batch_index:
        key = jax.random.fold_in(key, number)
      (scalars, per_example, clu_metrics), updated = trainer_lib.decode_step(
        self.model,
        train_states.TrainState(step=step.astype(jnp.uint32), mdl_vars=variables, opt_states=[]),
        key,
        self.weight_hparams,
        to_nested_map(batch),
        self.model.fprop_dtype,
        settings.apply_mutable_list,
      )
    return trainer_lib.StepFnOutput(
      loss=None,
      weighted_scalars=scalars,
      per_example_out=per_example,
      summary_tensors=summary_utils.flatten_flax_summaries(updated.get(base_layer.SUMMARIES, {})),
      clu_metrics=clu_metrics,
    )

  def evaluation_variables(self, state: TrainState) -> Variables:
    """Returns the variables to evaluate: the trained ones, or the optimizer's averages."""
    return self.averaged_variables(state) if self.eval_with_ema else state.variables

  def decoding_variables(self, state: TrainState) -> Variables:
    """Returns the variables to decode with, as in Paxml: the averages if the optimizer has them."""
    return self.averaged_variables(state) if tasks_lib.has_ema(self.task) else state.variables

  def averaged_variables(self, state: TrainState) -> Variables:
    """Returns the variables of a TrainState, replaced by the optimizer's averages if there are any."""
    averaged = tasks_lib.extract_ema(pax_state(state)).mdl_vars  # also statistics of batch normalization
    return state.variables | {name: averaged[name] for name in state.variables if averaged.get(name) is not None}


def _check_no_examples(keeps_examples: bool) -> None:
  if keeps_examples:
    raise UserError(
      'a PaxTask has no per-example outputs, which a hook, an eval set or --write_examples needs: leave it out.'
    )


def pax_state(state: TrainState) -> train_states.TrainState:
  """Converts a TrainState to Paxml's TrainState."""
  return train_states.TrainState(
    step=state.step.astype(jnp.uint32) if hasattr(state.step, 'astype') else state.step,
    mdl_vars=state.variables,
    opt_states=state.learner.opt_state,
  )


def _train_metrics(task: Any, output: Any, squares: Any) -> dict[str, jax.Array]:
  """Returns the metrics of a train step, as float32 scalars or vectors.

  They are `loss`, `loss_weight`, `skipped` (always 0), `weight_norm`, the model's weighted scalars and clu metrics, and
  Paxml's scalar summaries.

  Args:
    task: the SingleTask.
    output: the `trainer_lib.StepFnOutput` of its step.
    squares: a tree of the sums of squares of the new weights.
  """
  summaries = _scalar_summaries(output.summary_tensors)
  metrics = {name: value for name, (value, _) in output.weighted_scalars.items()} | summaries
  metrics |= _clu_values(output.clu_metrics or {})
  metrics |= {ours: summaries[theirs] for ours, theirs in _LEARNER_SUMMARIES.items() if theirs in summaries}
  metrics |= {
    'loss': output.loss,
    'loss_weight': _loss_weight(task, output),
    'skipped': jnp.zeros(()),
    'weight_norm': jnp.sqrt(jax.tree.reduce(jnp.add, squares)),
  }
  return {name: jnp.asarray(value, jnp.float32) for name, value in metrics.items() if jnp.ndim(value) <= 1}


def _eval_metrics(task: Any, output: Any) -> dict[str, clu_metrics.Metric]:
  """Returns averages of an eval step's weighted scalars and loss, and the clu metrics of the model."""
  means = dict(output.weighted_scalars) | {'loss': (output.loss, _loss_weight(task, output))}
  averages = {}
  for name, (mean, weight) in means.items():  # may be Python numbers
    mean, weight = jnp.asarray(mean, jnp.float32), jnp.asarray(weight, jnp.float32)
    averages[name] = clu_metrics.Average(total=mean * weight, count=weight)
  return dict(output.clu_metrics or {}) | averages


def _name_losses_in_errors(aggregator: Any) -> None:
  """Makes Paxml's LossAggregator raise a UserError for an unknown loss, in place of its bare assertion."""
  if type(aggregator) is not base_metrics.LossAggregator:
    return
  aggregate = aggregator.aggregate

  def checked_aggregate(losses: Any) -> Any:
    if aggregator.loss_key not in losses:
      raise UserError(
        f'task.train.learner.loss_name = {aggregator.loss_key!r} must be one of the weighted scalars of compute_loss: '
        f'{sorted(losses)}.'
      )
    return aggregate(losses)

  aggregator.aggregate = checked_aggregate


def _clu_values(metrics: Any) -> dict[str, jax.Array]:
  """Returns the values of clu metrics that can be computed on devices; the others are only computed in evals."""
  values = {}
  for name, metric in metrics.items():
    try:
      value = metric.compute()
    except jax.errors.JAXTypeError:  # computed with NumPy
      continue
    if isinstance(value, jax.Array):
      values[name] = value
  return values


def _loss_weight(task: Any, output: Any) -> jax.Array:
  name = task.learners[0].loss_name
  if name in (output.clu_metrics or {}):
    return jnp.asarray(output.clu_metrics[name].weight)
  if name in output.weighted_scalars:
    return jnp.asarray(output.weighted_scalars[name][1])
  return jnp.ones(())  # a sum of several losses has no weight in Paxml


def _scalar_summaries(summaries: Any) -> dict[str, jax.Array]:
  """Returns the scalar summaries by their names in Paxml, without the suffix for the type."""
  scalars: dict[str, Any] = {}
  for name, value in py_utils.NestedMap(summaries).FlattenItems():
    values = value if isinstance(value, list | tuple) else [value]
    if all(hasattr(item, 'ndim') and item.ndim == 0 for item in values):
      scalars[name.removesuffix('_scalar').removesuffix('_aggregate')] = sum(values) / len(values)
  return scalars
