"""FromOptax: trains with any optax optimizer.

  FromOptax(factory=optax.lamb, learning_rate=LinearWarmupCosine(...), arguments={'weight_decay': 0.1})

An optimizer that is built already, as `optax.lamb(1e-3)`, is one too, but keeps its learning rate to itself: it is not
among the metrics. Any other transformation, or a chain of several, becomes a function of the learning rate:

  def clipped_yogi(learning_rate, max_delta):
    return optax.chain(optax.clip(max_delta), optax.scale_by_yogi(), optax.scale_by_learning_rate(learning_rate))

  FromOptax(factory=clipped_yogi, learning_rate=1e-3, arguments={'max_delta': 1.0})

State of the optimizer is sharded, padded and checkpointed like the weights (`optimizer_specs.py`), and kept in a step
that is not finite. The results are those of plain optax on the unsharded weights of single layers, each a matrix as
its WeightSpec declares it (`layerwise.py`). Some optimizers train other weights than they evaluate
(`evaluation_weights.py`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import difflib
import inspect
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax

from spmd_tasks.errors import UserError
from spmd_tasks.learning.evaluation_weights import LookaheadWithSlow
from spmd_tasks.learning.layerwise import layerwise
from spmd_tasks.learning.optimizers import Optimizer
from spmd_tasks.learning.schedules import LearningRate, check_learning_rate, learning_rate_at
from spmd_tasks.learning.skipping import SkippableTransformation, keep_if_finite
from spmd_tasks.sharding.weights import leaves_by_name

_LEARNING_RATE = 'learning_rate'


@dataclasses.dataclass(frozen=True, kw_only=True)
class FromOptax(Optimizer):
  """An optax optimizer, built by `factory(learning_rate=..., **arguments)`.

  The learning rate is evaluated at the train state's step, which stands still when a step is skipped, and passed to the
  factory in every step. Weights decay as optax decides: pass a `mask` in `arguments` to exempt norms and biases.

  Attributes:
    factory: function of `learning_rate` that returns an optax transformation whose updates include the learning rate.
    learning_rate: a number, or a schedule over the train state's step; None for a factory that does not take it.
    arguments: the factory's other keyword arguments.
  """

  # The updates of optax include the learning rate: some optimizers apply momentum or decay after it.
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
    if _LEARNING_RATE in self.arguments:
      raise UserError('FromOptax.arguments has learning_rate: set FromOptax.learning_rate instead.')
    parameters = inspect.signature(self.factory).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
      return
    if self.learning_rate is not None and _LEARNING_RATE not in parameters:
      raise UserError(
        f'FromOptax.factory {self._name()} has no parameter learning_rate: pass a function of the learning rate that '
        'returns optax.chain(..., optax.scale_by_learning_rate(learning_rate)). One that is built already keeps '
        'its own: give fdl.Config(optax.adam, learning_rate=1e-3), and the argument can be set.'
      )
    for name in self.arguments:
      if name not in parameters:
        nearest = difflib.get_close_matches(name, parameters, n=1)
        remedy = f'did you mean {nearest[0]!r}?' if nearest else f'choose from {sorted(parameters)}.'
        raise UserError(f'FromOptax.arguments has {name!r}, but {self._name()} has no such parameter: {remedy}')

  def _name(self) -> str:
    return getattr(self.factory, '__qualname__', repr(self.factory))

  @classmethod
  def of(cls, transformation: optax.GradientTransformation | optax.MultiSteps) -> 'FromOptax':
    """Returns an optimizer that is built already as one of a config."""

    def optimizer() -> optax.GradientTransformation | optax.MultiSteps:
      return transformation

    optimizer.__qualname__ = 'learner.optimizer'
    return cls(factory=optimizer, learning_rate=None)

  def _build(self, learning_rate: jax.Array | None) -> optax.GradientTransformationExtraArgs:
    given = {} if learning_rate is None else {_LEARNING_RATE: learning_rate}
    transformation: Any = self.factory(**given, **self.arguments)
    if isinstance(transformation, optax.MultiSteps):
      transformation = transformation.gradient_transformation()
    if not isinstance(transformation, optax.GradientTransformation):
      raise UserError(
        f'FromOptax.factory {self._name()} returned {type(transformation).__name__}, not an optax transformation: '
        'correct the factory.'
      )
    return optax.with_extra_args_support(transformation)

  @contextlib.contextmanager
  def _one_sentence(self) -> Iterator[None]:
    """Context in which an error of the optimizer's update says what it is called with."""
    try:
      yield
    except UserError:
      raise
    except Exception as error:
      raise UserError(
        f'{self._name()} cannot train here, because its update fails ({type(error).__name__}: {error}): a train step '
        'gives it the gradients, its state, the weights, and the loss as `value`. Choose an optimizer that needs no '
        'more, without a line search; optax.lookahead must be the outermost one, sam have opaque_mode=False.'
      ) from error

  def _check(self, what: str, returned: Any, like: str, given: Any) -> None:
    """Raises a UserError if what the update returned has other leaves or shapes than what it was given."""
    shapes, wanted = ({k: jnp.shape(x) for k, x in leaves_by_name(tree).items()} for tree in (returned, given))
    if shapes != wanted:
      name = next(name for name in (*wanted, *shapes) if shapes.get(name) != wanted.get(name))
      shown = [str(list(x[name])) if name in x else 'none' for x in (shapes, wanted)]
      raise UserError(
        f'{self._name()} returns {what} of another shape than {like}: {shown[0]} for {name}, which has {shown[1]}. '
        'Correct it, or choose another optimizer.'
      )

  def transformation(self, weight_specs: Any) -> SkippableTransformation:
    """Returns the transformation from gradients to the direction to go against, for Learner.

    `init` and `update` raise a UserError if the state has PRNG keys, the optimizer needs other arguments than
    `learning_rate` and `value`, the loss, or its updates are not like the weights.
    """

    def of_layers(names: Sequence[str]) -> Any:
      def init(weights: Any) -> Any:
        rate = None if self.learning_rate is None else learning_rate_at(self.learning_rate, 0)
        state = self._build(rate).init(weights)
        return LookaheadWithSlow(state, slow=weights) if isinstance(state, optax.LookaheadState) else state

      def update(grads: Any, state: Any, weights: Any, *arguments: Any) -> Any:
        given = dict(zip(names, arguments))
        transformation = self._build(given.pop(_LEARNING_RATE, None))
        with self._one_sentence():
          if isinstance(state, LookaheadWithSlow):
            params = optax.LookaheadParams(fast=weights, slow=state.slow)
            updates, new = transformation.update(grads, state.lookahead, params, **given)
            return updates.fast, LookaheadWithSlow(new, optax.apply_updates(state.slow, updates.slow))
          try:
            updates, new = transformation.update(grads, state, weights, **given)
          except TypeError as error:  # as sam, also within a chain, which passes every argument on
            if 'unexpected keyword argument' not in str(error):
              raise
            updates, new = transformation.update(grads, state, weights)
        return updates, new

      return layerwise(init, update, weight_specs, self._name())

    def init(weights: Any) -> Any:
      state = of_layers(())[0](weights)
      for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):
          raise UserError(
            f'the state of {self._name()} has a {leaf.dtype} at {jax.tree_util.keystr(path)}, which checkpoints cannot '
            'store: choose an optimizer without random numbers.'
          )
      # Some states begin with the weights themselves. A train step donates both, so they must not share a buffer.
      return jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), state)

    def update(
      grads: Any,
      state: Any,
      weights: Any = None,
      *,
      is_finite: jax.typing.ArrayLike,
      step: Any = None,
      **extra_args: Any,
    ) -> tuple[Any, Any]:
      del step  # of the train state; optax's optimizers count for themselves
      given = {name: x for name, x in extra_args.items() if x is not None}
      updates, new_state = of_layers(tuple(given))[1](grads, state, weights, *given.values())
      self._check('an update', updates, 'a weight', weights)
      self._check('a new state', new_state, 'a state', state)
      # Optax adds updates to the weights; the learner subtracts directions.
      return jax.tree.map(jnp.negative, updates), keep_if_finite(is_finite, new_state, state)

    return SkippableTransformation(init, update)
