"""With several low-rank adapters of a kernel, each row computes the same as a Linear with only its adapter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tasks.adapters import LowRankAdapter
from spmd_tasks.adapters.choices import AdapterChoices
from spmd_tasks.errors import UserError
from spmd_tasks.layers import Linear
from spmd_tasks.layers.adapter import adapter_choices
from spmd_tasks.layers.moe import Dropless, Experts, MixtureOfExperts, TopKRouter

RNG = np.random.default_rng(0)
X = RNG.normal(size=(4, 5, 3, 4)).astype(np.float32)
NUMBERS = np.array([2, 0, 1, 2], np.int32)
ALONE = {'wide': LowRankAdapter(rank=3, alpha=6.0), 'narrow': LowRankAdapter(rank=2, alpha=6.0, use_rslora=True)}
SHAPES = {'kernel': (3, 4, 2, 7), 'bias': (2, 7), 'lora_a': (3, 4, 3), 'lora_b': (3, 2, 7)}
WEIGHTS = {name: (RNG.normal(size=shape) * 0.3).astype(np.float32) for name, shape in SHAPES.items()}


def linear(adapter):
  return Linear(output_dims=(2, 7), num_input_dims=2, use_bias=True, split_dims=None, product=adapter)


def weights_of(number):
  """Returns the weights of the base, or of the base with adapter 1 or 2."""
  weights = {name: WEIGHTS[name] for name in ('kernel', 'bias')}
  if number:
    weights |= {'lora_a': WEIGHTS['lora_a'] * number, 'lora_b': WEIGHTS['lora_b'] / number}
  if number == 2:
    weights = weights | {'lora_a': weights['lora_a'][..., :2], 'lora_b': weights['lora_b'][:2]}
  return weights


def stacked_weights(num_more=0):
  """Stacks both adapters and `num_more` adapters that no row selects, whose large numbers would show in any sum."""
  a, b = np.zeros((3, 3, 4, 3)), np.zeros((3, 3, 2, 7))
  for number, adapter in enumerate(ALONE.values(), 1):
    weights = weights_of(number)
    a[number, ..., : adapter.rank], b[number, : adapter.rank] = weights['lora_a'], weights['lora_b'] * adapter.scale
  stacks = {'lora_a': a, 'lora_b': b}
  more = {name: np.full((num_more, *stack.shape[1:]), 1e6) for name, stack in stacks.items()}
  stacks = {name: np.concatenate([stack, more[name]]).astype(np.float32) for name, stack in stacks.items()}
  return weights_of(0) | stacks


def apply(module, weights, x, numbers=None):
  if numbers is not None:
    module = module.clone(product=module.product.of_rows(jnp.asarray(numbers)))
  with jax.default_matmul_precision('highest'):
    return np.asarray(module.apply({'params': weights}, x))


@pytest.mark.parametrize('num_more', [0, 20])
@pytest.mark.parametrize('num_tokens', [1, 5])
def test_each_row_computes_the_same_as_with_only_its_adapter(num_tokens, num_more):
  x = X[:, :num_tokens]
  choices = (*ALONE, *(f'other {i}' for i in range(num_more)))
  together = linear(AdapterChoices(rank=3, choices=choices))
  weights = stacked_weights(num_more)
  ours = apply(together, weights, x, NUMBERS)
  base = apply(linear(None), weights_of(0), x)
  np.testing.assert_array_equal(ours[NUMBERS == 0], base[NUMBERS == 0])
  for row, number in enumerate(NUMBERS):
    alone = linear([None, *ALONE.values()][number])
    expected = apply(alone, weights_of(number), x[row : row + 1])[0]
    np.testing.assert_allclose(ours[row], expected, rtol=1e-5, atol=1e-5)
  others = apply(together, weights, x, np.where(NUMBERS == 2, 2, 1 - NUMBERS))
  np.testing.assert_array_equal(ours[NUMBERS == 2], others[NUMBERS == 2])  # independent of other rows' adapters
  np.testing.assert_array_equal(apply(together, weights, x), base)
  assert adapter_choices(together) == choices


def test_adapters_of_experts_cannot_be_selected_per_row():
  layer = MixtureOfExperts(
    router=TopKRouter(num_experts=3, num_selected=2),
    experts=Experts(num_experts=3, hidden_dim=5, adapters=(AdapterChoices(rank=2, names=('up',), choices=('a', 'b')),)),
    computation=Dropless(backend='ragged_dot'),
  )
  with pytest.raises(UserError, match=r'the adapters a, b cannot be selected per row in experts .* merge it'):
    jax.eval_shape(layer.init, jax.random.key(0), X.reshape(4, 5, 12))
