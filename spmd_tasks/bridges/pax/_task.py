"""PaxTask: a Paxml SingleTask as a task of ours; its steps are Paxml's own pure functions inside our partitioned step.

    task = PaxTask(task=praxis.base_hyperparams.instantiate(task_config), input_spec=train_input.element_spec())
    model = partition_spmd_model(task, mesh, task.input_spec)

Loss, learner, optimizer state, random numbers and the order of all operations are those of `paxml.trainer_lib`, so a
run follows the real Paxml. Ours are the mesh, the padding of uneven weights, checkpoints, inputs and the loop.
The random numbers are drawn as `paxml.main` draws them: the generator is `rbg`; the key of `task.train.random_seed` is
split into a key for the initial variables and the root of the train, eval and decode keys.
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
from praxis import base_layer, base_model, py_utils

from spmd_tasks.bridges.pax._input import complete_tokens, to_nested_map
from spmd_tasks.bridges.pax._support import check_trained_variables
from spmd_tasks.bridges.pax._variables import (
  PRNG_IMPL,
  box_variables,
  cast_floats,
  cast_variables,
  praxis_context,
  spec_of_partition,
)
from spmd_tasks.errors import UserError, naming_own_code
from spmd_tasks.learning import LearnerState
from spmd_tasks.runtime import BaseTask, TrainState
from spmd_tasks.runtime.input_layout import InputSpec
from spmd_tasks.runtime.task import Batch, Variables
from spmd_tasks.sharding.reductions import sums_of_squares
from spmd_tasks.sharding.weights import replicated_spec

# Metrics of ours by the name of the summary that Paxml's learner makes of the same number.
_LEARNER_SUMMARIES = {'grad_norm': 'learning/raw_grad_norm', 'learning_rate': 'learning/lr'}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PaxTask(BaseTask):
  """A built `paxml.tasks_lib.SingleTask` as a BaseTask.

  Its steps do not accumulate gradients, and no step is skipped: Paxml applies updates that are not finite, too.

  Attributes:
    task: the SingleTask, with its model and its learner.
    input_spec: name -> global shape and dtype of the training batch; the model's variables follow from it.
    eval_with_ema: evaluate the averaged weights that the optimizer keeps (`eval_use_ema_states`).
    first_decoded_step: a decode job leaves out earlier checkpoints (`decode_start_after_n_steps`).
    model: the Praxis model, `task.model`.
    decode: None: a decode job decodes batches by the model's own `decode`, see `make_decoder`.
  """

  task: tasks_lib.SingleTask
  input_spec: InputSpec
  eval_with_ema: bool = False
  first_decoded_step: int = 0
  model: Any = dataclasses.field(init=False, repr=False)
  decode: None = dataclasses.field(init=False, default=None)

  def __post_init__(self):
    if self.eval_with_ema and not tasks_lib.has_ema(self.task):
      raise UserError(
        'eval_with_ema (task.train.eval_use_ema_states) needs averaged weights: set '
        'task.train.learner.optimizer.ema_decay, for example to 0.9999.'
      )
    _check_loss_names(self.task.loss_aggregator_inst)
    object.__setattr__(self, 'model', self.task.model)

  @functools.cached_property
  def weight_hparams(self) -> Any:
    """The model's variables as Praxis declares them: a tree of WeightHParams by collection."""
    with self._calling('the declaration of variables', self.input_spec):
      declared = dict(self.model.abstract_init_with_metadata(to_nested_map(self.input_spec)))
    declared.pop('params_axes', None)
    return declared

  @contextlib.contextmanager
  def _calling(self, what: str, batch: Iterable[str] = (), do_eval: bool | None = None) -> Iterator[None]:
    """Enters the context of Praxis; errors of the model's code, or of Praxis about its fields, become UserErrors."""
    named = naming_own_code(f'{what} of {type(self.model).__name__}', keys=batch, part=self.model)
    with named, praxis_context(do_eval=do_eval):
      yield

  def make_key(self, seed: int) -> jax.Array:
    """Returns Paxml's root key of the seed."""
    return jax.random.key(seed, impl=PRNG_IMPL)

  def init_variables(self, rng: jax.Array, batch: Batch) -> Variables:
    """Draws the model's variables as Paxml does, with boxes of the split dims that Praxis declares.

    Raises a UserError if the learner trains no variable.
    """
    with self._calling('the initialization', batch):
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
    with self._calling('the optimizer state'):
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
    """Returns one WeightSpec per leaf of the learner's state, split as Paxml splits them."""
    specs = jax.tree.map(replicated_spec, abstract_learner)
    try:
      partition = self.task.create_train_state_partition_specs(self.weight_hparams)
    except ValueError as error:
      if 'init_partition_spec' not in str(error):
        raise
      name = type(self.task.learners[0].optimizer).__name__  # one for pmap
      logging.warning('The optimizer %s has no split dims for its state, which every device has as a whole.', name)
      return specs
    # By path: what the optimizer leaves out is a MaskedNode in the state, and None here where it is one of optax.
    by_path = dict(jax.tree_util.tree_leaves_with_path(partition.opt_states))
    opt_state = jax.tree_util.tree_map_with_path(
      lambda path, leaf: spec_of_partition(leaf, by_path[path]), abstract_learner.opt_state
    )
    return specs.replace(opt_state=opt_state)

  def train_step(
    self, weight_specs: Any, state: TrainState, batch: Batch, *, keeps_examples: bool = False
  ) -> tuple[TrainState, dict[str, jax.Array]]:
    """Applies Paxml's `train_step_single_learner`; returns the new state and its metrics (`_train_metrics`)."""
    _refuse_examples(keeps_examples)
    with self._calling('the train step', batch):
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
      # A model that computes in bfloat16 updates them in it. Paxml keeps them so; these are the same values.
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
    """Evaluates one batch by Paxml's `eval_step_single_learner`; returns averages of its weighted scalars.

    What a model draws at random in evaluation, such as BERT's masks, depends on the train step, as Paxml's does.
    """
    _refuse_examples(keeps_examples)
    with self._calling('the eval step', batch):
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
    """Returns the model's predictions, in evaluation mode. Of a language model the `ids` of the batch suffice."""
    model = self.model
    with self._calling('compute_predictions', batch, do_eval=True):
      predictions, _ = model.apply(
        cast_variables(variables, self.weight_hparams, model.fprop_dtype),
        cast_floats(to_nested_map(complete_tokens(batch)), model.fprop_dtype),  # paddings too, as in a train step
        method=model.compute_predictions,
        mutable=self.task.evaluate.apply_mutable_list,
      )
    return jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, predictions)

  def decode_step(
    self, variables: Variables, batch: Batch, step: jax.Array, number: jax.Array, *, in_training: bool = False
  ) -> Any:
    """Decodes a batch by Paxml's `decode_step`; returns a `trainer_lib.StepFnOutput` without a loss.

    `step` (int32) is the train step of the variables, `number` (int32) that of the batch in its dataset, from 1.
    A training job draws from the seed of training, a decode job from that of decoding.
    """
    settings = self.task.decode
    with self._calling('the decode step', batch):
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

  def make_decoder(self, *arguments: Any, **named: Any) -> Any:
    """Makes the PaxDecoder of a job, by which programs.decode decodes batches instead of prompts.

    Raises a UserError if the model has no `decode`.
    """
    if type(self.model).decode is base_model.BaseModel.decode:
      name = type(self.model).__name__
      raise UserError(f'{name} has no decode(), which makes what decode jobs write: define it, or use --mode eval.')
    from spmd_tasks.bridges.pax._decode import PaxDecoder

    return PaxDecoder(*arguments, first_step=self.first_decoded_step, **named)

  def evaluation_variables(self, state: TrainState) -> Variables:
    """Returns the variables of a TrainState that evaluation uses: raw, or averaged by the optimizer."""
    return self.averaged_variables(state) if self.eval_with_ema else state.variables

  def evaluates_trained_weights(self, state: TrainState) -> bool:
    """Returns whether `evaluation_variables` of a state, or of its shapes, are `state.variables`."""
    return not self.eval_with_ema

  def decoding_variables(self, state: TrainState) -> Variables:
    """Returns the variables that Paxml's decode jobs use: averaged wherever the optimizer averages."""
    return self.averaged_variables(state) if tasks_lib.has_ema(self.task) else state.variables

  def averaged_variables(self, state: TrainState) -> Variables:
    """Returns the variables of a TrainState, averaged by the optimizer where it averages them."""
    averaged = tasks_lib.extract_ema(pax_state(state)).mdl_vars  # those of batch normalization too
    return state.variables | {name: averaged[name] for name in state.variables if averaged.get(name) is not None}


def _refuse_examples(keeps_examples: bool) -> None:
  if keeps_examples:
    raise UserError(
      'a PaxTask has no per-example outputs, but a hook, an eval set or --write_examples needs them: leave it out.'
    )


def pax_state(state: TrainState) -> train_states.TrainState:
  """Returns a TrainState of Paxml with the leaves of ours."""
  return train_states.TrainState(
    step=state.step.astype(jnp.uint32) if hasattr(state.step, 'astype') else state.step,
    mdl_vars=state.variables,
    opt_states=state.learner.opt_state,
  )


def _train_metrics(task: Any, output: Any, squares: Any) -> dict[str, jax.Array]:
  """Returns the metrics of a train step, float32, scalars or vectors.

  They are `loss`, `loss_weight`, `skipped` (always 0), `weight_norm`, the model's weighted scalars and clu metrics, and
  what Paxml summarises as scalars.

  Args:
    task, output: the SingleTask, and the `trainer_lib.StepFnOutput` of its step.
    squares: the sums of the squares of the new weights, a tree.
  """
  summaries = _scalar_summaries(output.summary_tensors)
  metrics = {name: value for name, (value, _) in output.weighted_scalars.items()} | summaries
  metrics |= _computed(output.clu_metrics or {})
  metrics |= {ours: summaries[theirs] for ours, theirs in _LEARNER_SUMMARIES.items() if theirs in summaries}
  metrics |= {
    'loss': output.loss,
    'loss_weight': _loss_weight(task, output),
    'skipped': jnp.zeros(()),
    'weight_norm': jnp.sqrt(jax.tree.reduce(jnp.add, squares)),
  }
  return {name: jnp.asarray(value, jnp.float32) for name, value in metrics.items() if jnp.ndim(value) <= 1}


def _eval_metrics(task: Any, output: Any) -> dict[str, clu_metrics.Metric]:
  """Returns averages of an eval step's weighted scalars and loss, and the metrics of clu that the model returns."""
  means = dict(output.weighted_scalars) | {'loss': (output.loss, _loss_weight(task, output))}
  averages = {}
  for name, (mean, weight) in means.items():  # numbers of Python among them
    mean, weight = jnp.asarray(mean, jnp.float32), jnp.asarray(weight, jnp.float32)
    averages[name] = clu_metrics.Average(total=mean * weight, count=weight)
  return dict(output.clu_metrics or {}) | averages


def _check_loss_names(aggregator: Any) -> None:
  """Makes Paxml's aggregator of losses name a loss that the model does not return, where it only asserts."""
  if type(aggregator) is not base_metrics.LossAggregator:
    return
  aggregate = aggregator.aggregate

  def checked(losses: Any) -> Any:
    if aggregator.loss_key not in losses:
      raise UserError(
        f'task.train.learner.loss_name = {aggregator.loss_key!r} is none of the losses that compute_loss of the model '
        f'returns first: take one of {sorted(losses)}.'
      )
    return aggregate(losses)

  aggregator.aggregate = checked


def _computed(metrics: Any) -> dict[str, jax.Array]:
  """Returns the values of metrics of clu that can be computed on devices; others are seen in evals alone."""
  found = {}
  for name, metric in metrics.items():
    try:
      value = metric.compute()
    except jax.errors.JAXTypeError:  # by NumPy on the host
      continue
    if isinstance(value, jax.Array):
      found[name] = value
  return found


def _loss_weight(task: Any, output: Any) -> jax.Array:
  name = task.learners[0].loss_name
  if name in (output.clu_metrics or {}):
    return jnp.asarray(output.clu_metrics[name].weight)
  if name in output.weighted_scalars:
    return jnp.asarray(output.weighted_scalars[name][1])
  return jnp.ones(())  # several losses are added up: Paxml has no weight of their sum


def _scalar_summaries(summaries: Any) -> dict[str, jax.Array]:
  """Returns the summaries that are one number, by the name that Paxml gave, without the type at its end."""
  found: dict[str, Any] = {}
  for name, value in py_utils.NestedMap(summaries).FlattenItems():
    values = value if isinstance(value, list | tuple) else [value]
    if all(hasattr(item, 'ndim') and item.ndim == 0 for item in values):
      found[name.removesuffix('_scalar').removesuffix('_aggregate')] = sum(values) / len(values)
  return found
