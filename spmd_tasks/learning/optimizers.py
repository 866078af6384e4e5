"""Settings of optimizers: AdamW, Adafactor, Muon, Sgd, Lion. `from_optax.py` wraps any other optax optimizer.

Each class has a `learning_rate` (a number or a schedule) and `transformation(weight_specs)`, which returns an optax
transformation from gradients to a direction. The learner multiplies the direction by minus the learning rate. Weight
decay is decoupled and part of the direction, `weights -= learning_rate * (direction + weight_decay * weights)`; weights
with one of `decay_exempt_tags` do not decay.
"""

import abc
import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from spmd_tasks.errors import UserError
from spmd_tasks.learning.adafactor import scale_by_adafactor
from spmd_tasks.learning.frozen_weights import fill_in
from spmd_tasks.learning.layer_weights import are_matrices
from spmd_tasks.learning.muon import SCALES, scale_by_muon
from spmd_tasks.learning.schedules import LearningRate, check_learning_rate
from spmd_tasks.learning.skipping import SkippableTransformation, chain, scale_by_adam


def _add_decayed_weights(
  weight_specs: Any, weight_decay: float, decay_exempt_tags: tuple[str, ...]
) -> list[optax.GradientTransformation]:
  if not weight_decay:
    return []
  mask = jax.tree.map(lambda spec: not set(spec.tags).intersection(decay_exempt_tags), weight_specs)
  return [optax.add_decayed_weights(weight_decay, mask)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Settings(abc.ABC):
  """Settings that all optimizers have.

  Attributes:
    learning_rate: a number, or a schedule over the train state's step.
    weight_decay: decoupled decay of the weights; the learning rate multiplies it too.
    decay_exempt_tags: weights with one of these tags (`WeightSpec.tags`) do not decay.
  """

  learning_rate: LearningRate
  weight_decay: float = 0.0
  decay_exempt_tags: tuple[str, ...] = ('no_decay',)

  def __post_init__(self):
    name = type(self).__name__
    check_learning_rate(f'{name}.learning_rate', self.learning_rate)
    if isinstance(self.decay_exempt_tags, str):
      raise UserError(f'{name}.decay_exempt_tags is {self.decay_exempt_tags!r}; it must be a tuple of tags.')
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if field.name in ('beta1', 'beta2', 'momentum') and value is not None and not 0 <= value < 1:
        raise UserError(f'{name}.{field.name} is {value}; it must be in [0, 1).')
      if field.name == 'weight_decay' and not value >= 0:
        raise UserError(f'{name}.{field.name} is {value}; it must be 0 or more.')
      if field.name == 'epsilon' and not value > 0:
        raise UserError(f'{name}.epsilon is {value}; it must be more than 0: a gradient may be exactly 0.')
      if field.name == 'momentum_dtype' and not jnp.issubdtype(jnp.dtype(value), jnp.floating):
        raise UserError(f'{name}.momentum_dtype is {value}; it must be a floating dtype such as float32 or bfloat16.')

  @abc.abstractmethod
  def _direction(self, weight_specs: Any) -> list[optax.GradientTransformation]:
    """Returns transformations from gradients to the direction before weight decay."""

  def transformation(self, weight_specs: Any) -> SkippableTransformation:
    """Returns the transformation from gradients to the direction, for a tree of WeightSpec congruent to the weights."""
    decay = _add_decayed_weights(weight_specs, self.weight_decay, self.decay_exempt_tags)
    return chain(*self._direction(weight_specs), *decay)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamW(_Settings):
  """Adam with decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101).

  Attributes:
    beta1: decay of the first moment.
    beta2: decay of the second moment.
    epsilon: added to the root of the second moment.
    momentum_dtype: of the stored first moment.
  """

  beta1: float = 0.9
  beta2: float = 0.999
  epsilon: float = 1e-8
  momentum_dtype: str = 'float32'

  def _direction(self, weight_specs: Any) -> list[optax.GradientTransformation]:
    return [scale_by_adam(beta1=self.beta1, beta2=self.beta2, epsilon=self.epsilon, momentum_dtype=self.momentum_dtype)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adafactor(_Settings):
  """Adafactor as T5 and Pax use it. Layers of a scanned stack are separate weights (see `adafactor.py`).

  `momentum` averages directions before the learning rate multiplies them, T5X's after. The two are equal while the
  learning rate is constant.

  Attributes:
    momentum: decay of an average of the directions (T5X's beta1, not debiased); None: no average.
    momentum_dtype: of the stored average.
    decay_exponent: update t = 1, 2, ... keeps `1 - t ** -decay_exponent` of the old second moments.
    min_dim_size_to_factor: second moments are factored where a layer's weight has two dims of at least this size.
    epsilon: added to the squared gradient.
    clipping_threshold: the largest rms of one layer's direction before the parameter scale; None turns it off.
    multiply_by_parameter_scale: makes the learning rate relative to the rms of the layer's weight.
    min_parameter_scale: lower bound of that rms.
  """

  momentum: float | None = None
  momentum_dtype: str = 'float32'
  decay_exponent: float = 0.8
  min_dim_size_to_factor: int = 128
  epsilon: float = 1e-30
  clipping_threshold: float | None = 1.0
  multiply_by_parameter_scale: bool = True
  min_parameter_scale: float = 1e-3

  def __post_init__(self):
    super().__post_init__()
    for name in ('decay_exponent', 'min_dim_size_to_factor', 'min_parameter_scale', 'clipping_threshold'):
      value = getattr(self, name)
      if value is not None and not value > 0:
        raise UserError(f'Adafactor.{name} is {value}; it must be larger than 0.')

  def _direction(self, weight_specs: Any) -> list[optax.GradientTransformation]:
    pieces = [
      scale_by_adafactor(
        weight_specs,
        decay_exponent=self.decay_exponent,
        min_dim_size_to_factor=self.min_dim_size_to_factor,
        epsilon=self.epsilon,
        clipping_threshold=self.clipping_threshold,
        multiply_by_parameter_scale=self.multiply_by_parameter_scale,
        min_parameter_scale=self.min_parameter_scale,
      )
    ]
    if self.momentum is not None:
      pieces.append(optax.ema(self.momentum, debias=False, accumulator_dtype=jnp.dtype(self.momentum_dtype)))
    return pieces


@dataclasses.dataclass(frozen=True, kw_only=True)
class Muon(_Settings):
  """Momentum made orthogonal, matrix by matrix (Jordan et al., 2024); see `muon.py`.

  Kernels of hidden layers are matrices, with heads joined; a router's and adapters' too. Embeddings, the output head,
  norms and biases are updated as by AdamW. Weights decay by the learning rate alone, without the scale, as in
  `torch.optim.Muon`. Jordan et al. use no decay; Moonshot (arXiv 2502.16982) decays all weights by 0.1.

  Attributes:
    momentum: decay of the average of gradients, which is not debiased.
    nesterov: whether the direction looks ahead by one more momentum step.
    momentum_dtype: of the stored average, and of AdamW's first moment.
    scale: factor of a matrix's direction, by torch's names: 'match_rms_adamw', 0.2 sqrt(max(inputs, outputs)), makes it
      as large as AdamW's (Moonshot), so that one learning rate suits all weights; 'original' is
      sqrt(max(1, outputs / inputs)) (Jordan et al.); 'spectral_unclamped' is sqrt(outputs / inputs) (Bernstein).
    coefficients, num_iterations: of the Newton-Schulz steps a x + b x^3 + c x^5.
    dtype: of their products. The publications use bfloat16, which is faster; float32 is the same on every mesh.
    beta1, beta2, epsilon: AdamW's.
    adam_scale: factor of the learning rate of the weights that AdamW updates, and so of their decay.
  """

  momentum: float = 0.95
  nesterov: bool = True
  momentum_dtype: str = 'float32'
  scale: Literal['match_rms_adamw', 'original', 'spectral_unclamped'] = 'match_rms_adamw'
  coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
  num_iterations: int = 5
  dtype: str = 'float32'
  beta1: float = 0.9
  beta2: float = 0.95
  epsilon: float = 1e-8
  adam_scale: float = 1.0

  def __post_init__(self):
    super().__post_init__()
    name = type(self).__name__
    if self.scale not in SCALES:
      raise UserError(f'{name}.scale is {self.scale!r}; it must be one of {tuple(SCALES)}.')
    if len(self.coefficients) != 3 or self.num_iterations < 1:
      raise UserError(
        f'{name}.coefficients are {self.coefficients} for num_iterations={self.num_iterations}: give three numbers, '
        'and 1 step or more.'
      )
    if self.dtype not in ('float32', 'bfloat16'):
      raise UserError(f'{name}.dtype is {self.dtype!r}; it must be float32 or bfloat16.')
    if not self.adam_scale >= 0:
      raise UserError(f'{name}.adam_scale is {self.adam_scale}; it must be 0 or more.')

  def _direction(self, weight_specs: Any) -> list[optax.GradientTransformation]:
    is_matrix = are_matrices(weight_specs, type(self).__name__)

    def part(tree: Any, of_matrices: bool) -> Any:
      return jax.tree.map(lambda matrix, leaf: leaf if matrix == of_matrices else None, is_matrix, tree)

    adam = scale_by_adam(beta1=self.beta1, beta2=self.beta2, epsilon=self.epsilon, momentum_dtype=self.momentum_dtype)
    muon = scale_by_muon(
      part(weight_specs, True),
      momentum=self.momentum,
      nesterov=self.nesterov,
      momentum_dtype=self.momentum_dtype,
      scale=self.scale,
      coefficients=self.coefficients,
      num_iterations=self.num_iterations,
      epsilon=1e-7,  # torch's: norms of the momentum below it count as it
      dtype=self.dtype,
    )

    def update(grads: Any, state: Any, weights: Any = None, **extra_args: Any) -> tuple[Any, Any]:
      of_matrices, muon_state = muon.update(part(grads, True), state[0], **extra_args)
      of_others, adam_state = adam.update(part(grads, False), state[1], **extra_args)
      return fill_in(of_matrices, of_others), (muon_state, adam_state)

    def init(weights: Any) -> Any:
      return muon.init(part(weights, True)), adam.init(part(weights, False))

    return [SkippableTransformation(init, update)]

  def transformation(self, weight_specs: Any) -> SkippableTransformation:
    """Returns the transformation from gradients to the direction; see the base class."""
    whole = super().transformation(weight_specs)
    if self.adam_scale == 1:
      return whole
    is_matrix = are_matrices(weight_specs, type(self).__name__)

    def update(grads: Any, state: Any, weights: Any = None, **extra_args: Any) -> tuple[Any, Any]:
      directions, state = whole.update(grads, state, weights, **extra_args)
      return jax.tree.map(lambda d, matrix: d if matrix else self.adam_scale * d, directions, is_matrix), state

    return SkippableTransformation(whole.init, update)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MuonClip(Muon):
  """Muon, for a model whose attention has `qk_clip`, which bounds its logits (Kimi K2, 2025)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sgd(_Settings):
  """Stochastic gradient descent, with heavy-ball or Nesterov momentum.

  Attributes:
    momentum: `trace = gradient + momentum * trace`; None: plain gradients.
    nesterov: whether the direction looks ahead by one more momentum step.
    momentum_dtype: of the stored trace.
  """

  momentum: float | None = None
  nesterov: bool = False
  momentum_dtype: str = 'float32'

  def __post_init__(self):
    super().__post_init__()
    if self.nesterov and self.momentum is None:
      raise UserError('Sgd.nesterov is True, which needs Sgd.momentum: set momentum, to 0.9 for example.')

  def _direction(self, weight_specs: Any) -> list[optax.GradientTransformation]:
    if self.momentum is None:
      return [optax.identity()]  # optax.chain needs at least one transformation.
    return [optax.trace(self.momentum, nesterov=self.nesterov, accumulator_dtype=jnp.dtype(self.momentum_dtype))]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lion(_Settings):
  """The sign of an interpolated momentum (Chen et al., arXiv 2302.06675).

  Attributes:
    beta1: weight of the momentum in the interpolation whose sign is the direction.
    beta2: decay of the momentum.
    momentum_dtype: of the stored momentum.
  """

  beta1: float = 0.9
  beta2: float = 0.99
  momentum_dtype: str = 'float32'

  def _direction(self, weight_specs: Any) -> list[optax.GradientTransformation]:
    return [optax.scale_by_lion(b1=self.beta1, b2=self.beta2, mu_dtype=jnp.dtype(self.momentum_dtype))]
