"""Partitions a task over a mesh: the task's pure steps become compiled, sharded steps.

A weight has three shapes. Take the feed-forward kernel of a circular pipeline, 8 layers in 2 repeats, on stage 2 x
data 4:

    true        [2, 4, 30, 90]    declared by the model, with the split dims (None, 'layers', 'embed', 'mlp')
    padded      [2, 4, 32, 90]    stored on the mesh: `jit` needs even shards, so 30 is rounded up to a multiple of 4
    canonical   [8, 30, 90]       stored in checkpoints: true sizes, all layers in one dim, for any mesh and pipeline

Every compiled step slices the padding off its arguments, runs the pure step in a `sharding_scope`, in which axis rules
turn split dims into sharding constraints, and pads the new state with zeros.

The names follow Praxis' `partition_spmd_model` and T5X's partitioners.
"""

from collections.abc import Callable, Mapping
import contextlib
import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from spmd_tasks.errors import UserError, own_code_errors
from spmd_tasks.learning.frozen_weights import are_frozen, fill_in, without_frozen
from spmd_tasks.runtime.compilation import CompiledStep, StepOfSizes, compiler_options
from spmd_tasks.runtime.input_layout import InputLayout, InputSpec, make_input_layout
from spmd_tasks.runtime.task import BaseTask, TrainState, Variables
from spmd_tasks.sharding import AxisRules, SplitDims, WeightSpec, padding, split_dims_to_partition_spec
from spmd_tasks.sharding.explicit_axes import with_axis_type
from spmd_tasks.sharding.quantized import quantize
from spmd_tasks.sharding.specs import ShardingScope, check_axis_rules, spec_axes, step_scope
from spmd_tasks.sharding.weights import (
  PINNED_HOST,
  Quantized,
  is_quantized,
  leaf_name,
  replicated_spec,
  unbox_weights,
  weight_specs,
)

Part = Callable[[TrainState], Any]  # selects a subtree of a TrainState, or of a tree with its structure


def whole_state(state: TrainState) -> TrainState:
  """Selects the whole TrainState."""
  return state


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PartitionedModel:
  """A task on a mesh: shapes, shardings and compiled steps. `partition_spmd_model` creates it.

  The trees below have the structure of TrainState, and `weight_specs` has the structure of its weights, so one
  `jax.tree.map` can map over several of them.

  Attributes:
    weight_specs: a WeightSpec per weight.
    abstract_state: true shapes and dtypes, as the model, the loss and the optimizer see them.
    state_specs: a PartitionSpec per leaf.
    padded_state: padded shapes with NamedShardings, as the state is stored on the mesh.
    canonical_state: canonical shapes with even NamedShardings, as checkpoints are written and read.
    input_layout: how the training batch is placed on the mesh.
    keeps_examples: whether the metrics of train steps include the loss's per-example outputs (StepOutputs).
    tpu_options: options of the TPU compiler for `train_step`, from the Experiment.
    batch_sizes: further batch sizes of the training input, for which `train_step` has programs too.
  """

  task: BaseTask
  mesh: Mesh | AbstractMesh
  axis_rules: AxisRules
  inputs_split_mapping: Mapping[str, SplitDims] | None
  weight_specs: Any
  abstract_state: TrainState
  state_specs: TrainState
  padded_state: TrainState
  canonical_state: TrainState
  input_layout: InputLayout
  _init_variables: Callable[[jax.Array], Variables]
  keeps_examples: bool = False
  tpu_options: Mapping[str, str] | None = None
  batch_sizes: tuple[int, ...] = ()

  @functools.cached_property
  def total_num_params(self) -> int:
    """The number of the model's parameters, without padding."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self.abstract_state.weights, is_leaf=is_quantized))

  @functools.cached_property
  def num_trained_params(self) -> int:
    """The number of parameters that are not frozen, without padding."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self.trained_part(self.abstract_state).weights))

  @functools.cached_property
  def padding_waste(self) -> float:
    """The fraction of the stored weights that is padding."""
    states = self.abstract_state, self.padded_state
    true, padded = (sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state.weights)) for state in states)
    return 1 - true / padded

  @functools.cached_property
  def has_frozen_weights(self) -> bool:
    """Whether the task freezes some weights."""
    return are_frozen(self.weight_specs)

  def trained_part(self, state: TrainState) -> TrainState:
    """Returns a TrainState, or a tree with its structure, with None in place of frozen weights."""
    return state.replace(weights=without_frozen(state.weights, self.weight_specs))

  def init(self, seed: int) -> TrainState:
    """Initializes a padded TrainState at step 0, each shard on its own device. Weights do not depend on the mesh."""
    return self._jitted_init(self.task.make_key(seed))

  def init_with(
    self, seed: int, replace: Callable[[Any, Any], Any], arrays: Any, *, donate: bool = False
  ) -> TrainState:
    """Initializes a TrainState as `init` does, but replaces the true weights by `replace(weights, arrays)`.

    Weights that `replace` does not use are not computed. `arrays` is a tree of arrays on the mesh, such as another
    job's weights; with `donate`, the new state may reuse their memory.
    """
    return self._jit_init(replace, donate_argnums=(1,) if donate else ())(self.task.make_key(seed), arrays)

  def lower_init(self) -> Any:
    """Returns the lowered `init` (jax.stages.Lowered), for inspection and planning."""
    return self._jitted_init.lower(self.task.make_key(0))

  def _jit_init(self, replace: Callable[..., Any], donate_argnums: tuple[int, ...] = ()) -> Any:
    def init(rng, *arrays):
      with self.scope():
        variables = self._init_variables(rng)
        variables['params'] = replace(variables['params'], *arrays)
        state = self.task.init_state(variables, self.weight_specs, rng)
        return padding.pad(self._constrain(state), self.padded_state)

    return jax.jit(init, out_shardings=_shardings(self.padded_state), donate_argnums=donate_argnums)

  @functools.cached_property
  def _jitted_init(self) -> Any:
    return self._jit_init(lambda weights: weights)

  @functools.cached_property
  def train_step(self) -> CompiledStep:
    """The step `(padded state, placed batch) -> (padded state, replicated float32 metrics)`. It donates the state."""
    step = self._train_step(self.input_layout)
    if not self.batch_sizes:
      return step
    return StepOfSizes([step, *(self._train_step(self._layout_of_size(size)) for size in self.batch_sizes)])

  def _layout_of_size(self, batch_size: int) -> InputLayout:
    """Returns the layout of batches with another number of rows."""
    spec = self.input_layout.spec
    spec = {name: jax.ShapeDtypeStruct((batch_size, *x.shape[1:]), x.dtype) for name, x in spec.items()}
    return make_input_layout(spec, self.mesh, self.inputs_split_mapping, self.axis_rules)

  def _train_step(self, layout: InputLayout) -> CompiledStep:
    numbers, task_with = self._step_numbers

    def train_step(padded_state, padded_batch, numbers):
      with self.scope():
        state = self._true_state(padded_state)
        batch = self._true_batch(padded_batch, layout)
        task = task_with(numbers)
        state, metrics = task.train_step(self.weight_specs, state, batch, keeps_examples=self.keeps_examples)
        new_state = self._padded_state(state)
        if self.has_frozen_weights:  # reuse their buffers
          new_state = new_state.replace(weights=fill_in(self.trained_part(new_state).weights, padded_state.weights))
        return new_state, metrics

    devices = self.mesh.devices.flat if isinstance(self.mesh, Mesh) else ()
    replicated = NamedSharding(self.mesh, PartitionSpec())
    jitted = jax.jit(
      train_step,
      in_shardings=(_shardings(self.padded_state), _shardings(layout.padded), replicated),
      out_shardings=(_shardings(self.padded_state), replicated),
      donate_argnums=0,
      compiler_options=compiler_options(devices, self.tpu_options),
    )
    abstract_numbers = tuple(jax.ShapeDtypeStruct((), number.dtype, sharding=replicated) for number in numbers)
    return CompiledStep(jitted, (self.padded_state, layout.padded, abstract_numbers), layout, numbers)

  @functools.cached_property
  def _step_numbers(self) -> Any:
    with self.scope(), own_code_errors('the train step'):
      return self.task.step_numbers(self.weight_specs, self.abstract_state)

  def eval_step(self, input_spec: InputSpec, *, keeps_examples: bool = False) -> 'EvaluationStep':
    """Returns the step `(padded state, placed batch) -> replicated clu Averages`.

    It evaluates the state's `task.evaluation_variables`. To evaluate variables without a state, call
    `with_variables(padded variables, placed batch, train step)`. With `keeps_examples` the result includes the loss's
    per-example outputs (StepOutputs).
    """
    function = functools.partial(self.task.eval_step, keeps_examples=keeps_examples)
    return self._evaluation_step('eval_step', input_spec, function, jax.ShapeDtypeStruct((), jnp.int32))

  def forward_step(self, input_spec: InputSpec) -> 'EvaluationStep':
    """Returns the step `(padded state, placed batch) -> replicated predictions`, without dropout."""
    return self._evaluation_step('forward_step', input_spec, self.task.predict)

  def _evaluation_step(self, *arguments: Any) -> 'EvaluationStep':
    return EvaluationStep(self.task, self.batch_step(*arguments))

  def true_variables(self, padded_variables: Variables) -> Variables:
    """Slices the padding off the model's variables. Call it inside a compiled step and a `sharding_scope`."""
    variables = padding.unpad(padded_variables, self.abstract_state.variables)
    return _constrain(variables, self.state_specs.variables, self.mesh)

  def batch_step(
    self,
    name: str,
    input_spec: InputSpec,
    function: Callable[..., Any],
    *arguments: jax.ShapeDtypeStruct,
    output_spec: InputSpec | None = None,
  ) -> CompiledStep:
    """Returns a step that calls `function(variables, batch, *arguments)` with padded variables and a placed batch.

    Args:
      name: the name of the compiled program, in profiles.
      input_spec: global shapes and dtypes of the batches.
      function: function of true variables and a batch; its outputs, any tree of arrays, are replicated.
      arguments: shapes and dtypes of further arguments, the same host arrays on every process.
      output_spec: if given, the function returns a dict of arrays with these shapes, which are placed like a batch.
    """
    layout, output_layout = (
      make_input_layout(spec, self.mesh, self.inputs_split_mapping, self.axis_rules)
      for spec in (input_spec, output_spec or {})
    )
    replicated = NamedSharding(self.mesh, PartitionSpec())

    def step(padded_variables, padded_batch, *arguments):
      with self.scope():
        outputs = function(self.true_variables(padded_variables), self._true_batch(padded_batch, layout), *arguments)
        return output_layout.with_zero_rows(outputs) if output_spec else outputs

    step.__name__ = name
    jitted = jax.jit(
      step,
      in_shardings=(_shardings(self.padded_state.variables), _shardings(layout.padded), *[replicated] * len(arguments)),
      out_shardings=_shardings(output_layout.padded) if output_spec else replicated,
    )
    return CompiledStep(jitted, (self.padded_state.variables, layout.padded, *arguments), layout)

  def to_canonical(self, state: TrainState, part: Part = whole_state) -> Any:
    """Converts a part of the padded state to the canonical layout of checkpoints."""
    return self._conversion(part)(part(state))

  def from_canonical(self, state: Any, part: Part = whole_state) -> Any:
    """Converts a part of a canonical state, such as `part=lambda state: state.weights`, to the padded layout."""
    true, padded = part(self.abstract_state), part(self.padded_state)
    convert = lambda tree: padding.pad(_reshape(tree, true), padded)
    return _compile_conversion(convert, part(self.canonical_state), padded)(state)

  def compile_conversions(self, part: Part = whole_state) -> None:
    """Compiles `to_canonical` now, so that the first checkpoint does not have to."""
    self._conversion(part)

  def _conversion(self, part: Part) -> Callable[[Any], Any]:
    if part not in self._conversions:
      true, canonical = part(self.abstract_state), part(self.canonical_state)
      convert = lambda tree: _reshape(padding.unpad(tree, true), canonical)
      self._conversions[part] = _compile_conversion(convert, part(self.padded_state), canonical)
    return self._conversions[part]

  @functools.cached_property
  def _conversions(self) -> dict[Part, Callable[[Any], Any]]:
    return {}

  def scope(self) -> contextlib.AbstractContextManager[ShardingScope]:
    """Returns the context in which the task's methods are traced."""
    variable_specs = self.state_specs.variables if self.task.explicit_axes else None
    return step_scope(self.mesh, self.axis_rules, self.inputs_split_mapping, variable_specs)

  def _constrain(self, state: TrainState) -> TrainState:
    return _constrain(state, self.state_specs, self.mesh)

  def _true_state(self, padded_state: TrainState) -> TrainState:
    """Slices padding off. The learner takes and returns leaves in the host's memory as they are stored."""

    def true_leaf(x, padded, true, spec):
      return x if _is_on_host(padded) else _constrain(padding.unpad(x, true), spec, self.mesh)

    return jax.tree.map(true_leaf, padded_state, self.padded_state, self.abstract_state, self.state_specs)

  def _padded_state(self, state: TrainState) -> TrainState:
    def padded_leaf(x, padded, spec):
      return x if _is_on_host(padded) else padding.pad(_constrain(x, spec, self.mesh), padded)

    return jax.tree.map(padded_leaf, state, self.padded_state, self.state_specs)

  def _true_batch(self, padded_batch: dict[str, jax.Array], layout: InputLayout) -> dict[str, jax.Array]:
    batch = layout.true_rows(padded_batch)
    specs = {name: spec for name, spec in layout.split_specs.items() if spec is not None}
    return batch | _constrain({name: batch[name] for name in specs}, specs, self.mesh)


class EvaluationStep(CompiledStep):
  """A step on the variables to evaluate, which may differ from the trained ones (averages, some optimizers)."""

  def __init__(self, task: BaseTask, step: CompiledStep):
    super().__init__(step._jitted, step._abstract_arguments, step.layout)
    self._task = task

  def __call__(self, state: TrainState, batch: Any) -> Any:
    """Runs the step on what the task evaluates of a TrainState. Raises a UserError for anything else."""
    if not isinstance(state, TrainState):
      raise UserError(
        f'the {self._name} needs a TrainState, not a {type(state).__name__}, because a task may evaluate other weights '
        'than it trains: pass the state, or pass evaluation variables to with_variables().'
      )
    takes_step = len(self._abstract_arguments) > 2  # an eval step does, a forward step does not
    return self.with_variables(self._task.evaluation_variables(state), batch, *([state.step] if takes_step else []))

  def with_variables(self, variables: Variables, batch: Any, *arguments: Any) -> Any:
    """Runs the step on variables, such as `task.evaluation_variables(state)` or restored ones.

    The third argument of an eval step is the train step of the variables, int32.
    """
    return super().__call__(variables, batch, *arguments)


def partition_spmd_model(
  task: BaseTask,
  mesh: Mesh | AbstractMesh,
  input_spec: InputSpec,
  *,
  axis_rules: AxisRules = (),
  inputs_split_mapping: Mapping[str, SplitDims] | None = None,
  default_split_dim: str | None = None,
) -> PartitionedModel:
  """Partitions a task over a mesh. Works on shapes: does not allocate or compile anything.

  Args:
    task: model, loss and learner.
    mesh: an AbstractMesh gives a model for inspection and planning, which cannot run. Axes become automatic, also those
      of `jax.make_mesh`.
    input_spec: name -> global shape and dtype of the training batch, batch dim first.
    axis_rules: ordered (logical name, mesh axes) pairs that resolve split dims.
    inputs_split_mapping: split dims of the inputs by rank (`map_1d`, `map_2d`, ...) inside a step; None keeps inputs
      sharded on batch over the whole mesh.
    default_split_dim: split dim for the largest dim of weights without split dims, such as those of Linen's own layers,
      if they have two dims or more. They are replicated if it is None or a name without an axis rule, or if the task
      has explicit axes.

  Raises a UserError if split dims, axis rules or the input mapping do not fit the mesh.
  """
  mesh = with_axis_type(mesh, AxisType.Auto)
  axis_rules = tuple((name, target) for name, target in axis_rules)
  check_axis_rules(axis_rules, mesh.axis_names)
  input_layout = make_input_layout(input_spec, mesh, inputs_split_mapping, axis_rules)

  # 1. Trace the model's init for the WeightSpecs of all weights and other variables.
  def init_boxed(rng):
    batch = {name: jnp.zeros(spec.shape, spec.dtype) for name, spec in input_spec.items()}
    return task.init_variables(rng, batch)

  key = jax.eval_shape(lambda: task.make_key(0))
  with step_scope(mesh, axis_rules, inputs_split_mapping, {} if task.explicit_axes else None):
    jitted_init = jax.jit(init_boxed)  # `init_variables` reuses its trace
    boxed = dict(jitted_init.trace(key).out_info)
  has_rule = not task.explicit_axes and default_split_dim in {*mesh.axis_names, *(name for name, _ in axis_rules)}
  specs = task.mark_weights(weight_specs(boxed.pop('params'), default_split_dim if has_rule else None))
  non_trainable_specs = weight_specs(boxed)

  def init_variables(rng):
    variables = dict(unbox_weights(jitted_init(rng)))
    return variables | {'params': jax.tree.map(_cast, variables['params'], specs)}

  # 2. Trace the state's init for the WeightSpecs of the whole state.
  abstract_variables = jax.tree.map(
    lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype), {'params': specs, **non_trainable_specs}
  )
  abstract_state = jax.eval_shape(
    lambda variables, rng: task.init_state(variables, specs, rng), abstract_variables, key
  )
  leaf_specs = TrainState(
    step=replicated_spec(abstract_state.step),
    rng=replicated_spec(abstract_state.rng),
    weights=specs,
    learner=task.learner_specs(abstract_state.learner, specs),
    non_trainable=non_trainable_specs,
  )

  # 3. Resolve each leaf's PartitionSpec, padded shape and canonical shape.
  def partition_spec(path, leaf):
    try:
      return split_dims_to_partition_spec(leaf.split_dims, mesh.axis_names, axis_rules)
    except ValueError as error:
      raise UserError(f'{leaf_name(path)}: {error}') from error

  state_specs = jax.tree_util.tree_map_with_path(partition_spec, leaf_specs)

  def padded(leaf, leaf_spec, spec):
    shape = padding.padded_shape(leaf.shape, spec, mesh.shape)
    return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=_sharding(mesh, spec, leaf_spec))

  def canonical(leaf, leaf_spec, spec):
    shape = leaf_spec.canonical_shape
    num_merged = len(leaf.shape) - len(shape) + 1
    if num_merged > 1:  # a circular pipeline's [repeats, layers per repeat, ...] becomes [layers, ...]
      axes = spec_axes(spec, len(leaf.shape))
      spec = PartitionSpec(tuple(itertools.chain(*axes[:num_merged])), *axes[num_merged:])
    even = padding.evenly_divided_spec(shape, spec, mesh.shape)
    return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=_sharding(mesh, even, leaf_spec))

  return PartitionedModel(
    task=task,
    mesh=mesh,
    axis_rules=axis_rules,
    inputs_split_mapping=inputs_split_mapping,
    weight_specs=specs,
    abstract_state=abstract_state,
    state_specs=state_specs,
    padded_state=jax.tree.map(padded, abstract_state, leaf_specs, state_specs),
    canonical_state=jax.tree.map(canonical, abstract_state, leaf_specs, state_specs),
    input_layout=input_layout,
    _init_variables=init_variables,
  )


def _cast(weight: jax.Array, spec: WeightSpec | Quantized) -> Any:
  if isinstance(spec, Quantized):
    return quantize(weight, spec)
  return weight if weight.dtype == spec.dtype else weight.astype(spec.dtype)


def _sharding(mesh: Mesh | AbstractMesh, spec: PartitionSpec, leaf_spec: WeightSpec) -> NamedSharding:
  return NamedSharding(mesh, spec, memory_kind=leaf_spec.memory_kind)


def _is_on_host(leaf: jax.ShapeDtypeStruct) -> bool:
  return leaf.sharding.memory_kind == PINNED_HOST


def _shardings(tree: Any) -> Any:
  return jax.tree.map(lambda leaf: leaf.sharding, tree)


def _constrain(tree: Any, specs: Any, mesh: Mesh | AbstractMesh) -> Any:
  return jax.tree.map(lambda x, spec: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec)), tree, specs)


def _reshape(tree: Any, shapes: Any) -> Any:
  return jax.tree.map(lambda x, target: x if x.shape == target.shape else x.reshape(target.shape), tree, shapes)


def _compile_conversion(convert: Callable[[Any], Any], source: Any, target: Any) -> Callable[[Any], Any]:
  """Compiles `convert` from the layout `source` to the layout `target`; returns the identity if they are equal."""
  is_equal = lambda a, b: a.shape == b.shape and a.sharding.is_equivalent_to(b.sharding, len(a.shape))
  if jax.tree.all(jax.tree.map(is_equal, source, target)):
    return lambda tree: tree
  return jax.jit(convert, out_shardings=_shardings(target)).lower(source).compile()
