"""FromOptax: trains with any optax optimizer.

  FromOptax(factory=optax.lamb, learning_rate=LinearWarmupCosine(...), arguments={'weight_decay': 0.1})

A built optimizer, such as `optax.lamb(1e-3)`, can be given to a Learner directly, but then the learning rate is not
among the metrics. For any other transformation, write a function of the learning rate:

  def clipped_yogi(learning_rate, max_delta):
    return optax.chain(optax.clip(max_delta), optax.scale_by_yogi(), optax.scale_by_learning_rate(learning_rate))

  FromOptax(factory=clipped_yogi, learning_rate=1e-3, arguments={'max_delta': 1.0})

Optimizer state is sharded, padded and checkpointed like the weights (`optimizer_specs.py`), and does not change in a
non-finite step. Results equal plain optax on the unsharded weights of single layers, with the matrices that WeightSpecs
declare (`layerwise.py`). Some optimizers train other weights than they evaluate (`evaluation_weights.py`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import inspect
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax

from spmd_tasks.errors import UserError
from spmd_tasks.learning.evaluation_weights import LookaheadWithSlow
from spmd_tasks.learning.layerwise import are_layers_apart, layerwise
from spmd_tasks.learning.optimizers import Optimizer
from spmd_tasks.learning.schedules import LearningRate, check_learning_rate, learning_rate_at
from spmd_tasks.learning.skipping import SkippableTransformation, keep_if_finite
from spmd_tasks.sharding.weights import leaves_by_name

_LEARNING_RATE = 'learning_rate'
_BUILT = 'learner.optimizer'  # the name of the factory of a built optimizer


def built_optimizer_error(name: str, field: str = 'a field of the experiment that makes it') -> UserError:
  """Returns the error for setting a field of a built optax optimizer called `name`; `field` can be set instead."""
  return UserError(
    f'{name} is a built optax optimizer, which has no fields to set: set {field}, or write '
    'FromOptax(factory=optax.adam, learning_rate=1e-3), or in a fdl.Config(Task, ...) fdl.Config(optax.adam, '
    'learning_rate=1e-3), in place of optax.adam(1e-3).'
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class FromOptax(Optimizer):
  """An optax optimizer, built by `factory(learning_rate=..., **arguments)`.

  The learning rate is evaluated at the train state's step, which does not advance when a step is skipped, and passed to
  the factory in every step. Weight decay is optax's: pass a `mask` in `arguments` to exempt norms and biases.

  Attributes:
    factory: function of `learning_rate` that returns an optax transformation whose updates include the learning rate.
    learning_rate: a number, or a schedule over the train state's step; None for a factory without `learning_rate`.
    arguments: the factory's other keyword arguments.
  """

  # optax's updates include the learning rate, because some optimizers apply momentum or decay after it.
  applies_learning_rate: ClassVar[bool] = True

  factory: Callable[..., optax.GradientTransformation]
  learning_rate: LearningRate | None
  arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    if isinstance(self.factory, optax.GradientTransformation) or not callable(self.factory):
      raise UserError(
        f'FromOptax.factory is {type(self.factory).__name__}, not a function: pass optax.lamb, not optax.lamb(1e-3).'
      )
    if self.learning_rate is not None:
      check_learning_rate('FromOptax.learning_rate', self.learning_rate)
    rate = {} if self.learning_rate is None else {_LEARNING_RATE: self.learning_rate}
    if self._name() == _BUILT and (rate or self.arguments):
      raise built_optimizer_error(_BUILT)
    signature = inspect.signature(self.factory)
    try:
      signature.bind(**rate, **self.arguments)
    except TypeError as error:
      raise UserError(
        f'FromOptax cannot call {self._name()}({", ".join(signature.parameters)}) with its learning_rate and arguments '
        f'({error}): correct the arguments, or pass a factory that takes learning_rate, such as a function that '
        'returns optax.chain(..., optax.scale_by_learning_rate(learning_rate)).'
      ) from error

  def _name(self) -> str:
    return getattr(self.factory, '__qualname__', repr(self.factory))

  @classmethod
  def of(cls, transformation: optax.GradientTransformation | optax.MultiSteps) -> 'FromOptax':
    """Wraps a built optax optimizer."""

    def optimizer() -> optax.GradientTransformation | optax.MultiSteps:
      return transformation

    optimizer.__qualname__ = _BUILT
    return cls(factory=optimizer, learning_rate=None)

  def _build(self, learning_rate: jax.Array | None) -> optax.GradientTransformationExtraArgs:
    rate = {} if learning_rate is None else {_LEARNING_RATE: learning_rate}
    transformation: Any = self.factory(**rate, **self.arguments)
    if isinstance(transformation, optax.MultiSteps):
      transformation = transformation.gradient_transformation()
    if not isinstance(transformation, optax.GradientTransformation):
      raise UserError(
        f'FromOptax.factory {self._name()} returns {type(transformation).__name__}: it must return an optax '
        'transformation.'
      )
    return optax.with_extra_args_support(transformation)

  @contextlib.contextmanager
  def _explain_errors(self) -> Iterator[None]:
    """Raises errors of the optimizer's update as a UserError that lists the arguments of `update`."""
    try:
      yield
    except UserError:
      raise
    except Exception as error:
      raise UserError(
        f'the update of {self._name()} fails ({type(error).__name__}: {error}): it gets only the gradients, its state, '
        'the weights, and the loss as `value`. Choose an optimizer without a line search; optax.lookahead must be the '
        'outermost transformation, and sam needs opaque_mode=False.'
      ) from error

  def _check_shapes(self, what: str, returned: Any, expected: Any) -> None:
    """Raises a UserError if a tree that `update` returned does not have the leaves and shapes of `expected`."""
    shapes, expected_shapes = (
      {name: list(jnp.shape(x)) for name, x in leaves_by_name(tree).items()} for tree in (returned, expected)
    )
    if shapes != expected_shapes:
      name = next(name for name in (*expected_shapes, *shapes) if shapes.get(name) != expected_shapes.get(name))
      raise UserError(
        f'{self._name()} returns {what} with the shape {shapes.get(name)} for {name}, which has the shape '
        f'{expected_shapes.get(name)}: correct it, or choose another optimizer.'
      )

  def _functions(self, names: Sequence[str]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns optax's (init, update) for the weights of single layers; `update` also takes the named arguments."""

    def init(weights: Any) -> Any:
      rate = None if self.learning_rate is None else learning_rate_at(self.learning_rate, 0)
      state = self._build(rate).init(weights)
      return LookaheadWithSlow(state, slow=weights) if isinstance(state, optax.LookaheadState) else state

    def update(grads: Any, state: Any, weights: Any, *arguments: Any) -> Any:
      extra_args = dict(zip(names, arguments))
      transformation = self._build(extra_args.pop(_LEARNING_RATE, None))
      with self._explain_errors():
        if isinstance(state, LookaheadWithSlow):
          params = optax.LookaheadParams(fast=weights, slow=state.slow)
          updates, new = transformation.update(grads, state.lookahead, params, **extra_args)
          return updates.fast, LookaheadWithSlow(new, optax.apply_updates(state.slow, updates.slow))
        try:
          updates, new = transformation.update(grads, state, weights, **extra_args)
        except TypeError as error:  # sam takes no extra arguments, alone or in a chain, which passes them on
          if 'unexpected keyword argument' not in str(error):
            raise
          updates, new = transformation.update(grads, state, weights)
      return updates, new

    return init, update

  def updates_layers_apart(self, weight_specs: Any) -> bool:
    """Whether no layer's update reads another layer."""
    rate = {} if self.learning_rate is None else {_LEARNING_RATE: jnp.float32(0)}
    arguments = {**rate, 'value': jnp.float32(0)}
    return are_layers_apart(*self._functions(tuple(arguments)), weight_specs, self._name(), (*arguments.values(),))

  def transformation(self, weight_specs: Any) -> SkippableTransformation:
    """Returns the transformation from gradients to directions, for Learner.

    `init` and `update` raise a UserError if the state has PRNG keys, if the optimizer needs arguments other than
    `learning_rate` and the loss as `value`, or if its updates do not have the shapes of the weights.
    """

    def layerwise_functions(names: Sequence[str]) -> Any:
      return layerwise(*self._functions(names), weight_specs, self._name())

    def init(weights: Any) -> Any:
      state = layerwise_functions(())[0](weights)
      for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):
          raise UserError(
            f'the state of {self._name()} has a {leaf.dtype} at {jax.tree_util.keystr(path)}, which checkpoints cannot '
            'store: choose an optimizer without random numbers.'
          )
      # Some initial states have the weights themselves. A train step donates both, so they must not share a buffer.
      return jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), state)

    def update(
      grads: Any,
      state: Any,
      weights: Any = None,
      *,
      is_finite: jax.typing.ArrayLike,
      step: Any = None,
      layer_numbers: Any = None,
      **extra_args: Any,
    ) -> tuple[Any, Any]:
      del step, layer_numbers  # optax's optimizers count their own steps
      arguments = {name: x for name, x in extra_args.items() if x is not None}
      updates, new_state = layerwise_functions(tuple(arguments))[1](grads, state, weights, *arguments.values())
      self._check_shapes('an update', updates, weights)
      self._check_shapes('a state', new_state, state)
      # Optax adds updates to the weights; the learner subtracts directions.
      return jax.tree.map(jnp.negative, updates), keep_if_finite(is_finite, new_state, state)

    return SkippableTransformation(init, update)
