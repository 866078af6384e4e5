"""Counts the model FLOPs of a step in its jaxpr, and knows devices' peak FLOP/s, for model FLOPs utilization (MFU).

    mfu = model_flops(model) / (step_seconds * num_devices * peak_flops_per_device(device_kind))

Model FLOPs are the FLOPs that the mathematics needs, whatever the implementation does, as in PaLM (Chowdhery et al.
2022, appendix B). Rematerialization, padding and elementwise operations do not count.
"""

from collections.abc import Callable, Iterator, Mapping
import math
import re
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
import jax.numpy as jnp

from spmd_tasks.layers.base import layer_scope
from spmd_tasks.learning.frozen_weights import are_frozen, fill_in, without_frozen
from spmd_tasks.runtime.partition import PartitionedModel
from spmd_tasks.runtime.task import BaseTask, Variables
from spmd_tasks.sharding.quantized import dequantized_spec
from spmd_tasks.sharding.weights import is_quantized

# Dense bfloat16 peaks per jax.Device, from the vendors' data sheets; the first name in the device kind applies. A
# jax.Device is a chip, except on TPU v2, v3 and 7x, where it is one of a chip's two cores.
_PEAK_BF16_FLOPS = (
  ('TPU v2', 22.5e12),
  ('TPU v3', 61.5e12),
  ('TPU v4 lite', 137e12),
  ('TPU v4', 275e12),
  ('TPU v5 lite', 197e12),
  ('TPU v5e', 197e12),
  ('TPU v5', 459e12),  # what jax calls v5p
  ('TPU v5p', 459e12),
  ('TPU v6 lite', 918e12),
  ('TPU v6e', 918e12),
  ('TPU7x', 1153.5e12),
  ('A100', 312e12),
  ('H100 PCIe', 756e12),
  ('H100 NVL', 835.5e12),
  ('H100', 989.4e12),
  ('H200 NVL', 835.5e12),
  ('H200', 989.4e12),
  ('GH200', 989.4e12),
  ('GB200', 2500e12),
  ('B200', 2250e12),
)


def peak_flops_per_device(device_kind: str) -> float | None:
  """Returns the dense bfloat16 FLOP/s of one `jax.Device` by its `device_kind`; None for CPUs and unknown devices."""
  # Match whole words: an RTX A1000 is not an A100.
  return next((peak for name, peak in _PEAK_BF16_FLOPS if re.search(rf'\b{name}\b', device_kind)), None)


def peak_flops(num_devices: int) -> float | None:
  """Returns the FLOP/s of this many of JAX's devices at an MFU of 1; None for CPUs and unknown devices."""
  peak = peak_flops_per_device(jax.devices()[0].device_kind)
  return None if peak is None else peak * num_devices


def model_flops(model: PartitionedModel) -> int:
  """Counts the model FLOPs of a train step on all devices.

  Our layers are traced without a sharding scope, so that what a shard pads does not count.
  """
  arguments = model.task, model.input_layout.spec, model.abstract_state.variables, model.weight_specs
  with model.scope() if model.task.explicit_axes else jax.sharding.use_abstract_mesh(model.mesh.abstract_mesh):
    return model_flops_per_train_step(*arguments)


def model_flops_per_train_step(
  task: BaseTask,
  batch_spec: Mapping[str, jax.ShapeDtypeStruct],
  abstract_variables: Variables,
  weight_specs: Any = None,
) -> int:
  """Counts the model FLOPs of one update on a global batch of `batch_spec`: three times the FLOPs of the forward pass.

  Attention counts in full, masked or not; embedding lookups do not count; of a mixture of experts only the selected
  experts count. Products for gradients of weights that `weight_specs` freezes do not count. `task.prepare_batch` counts
  once, because it has no backward pass.
  """

  def backward(trained, variables, batch, rng):
    def loss(trained):
      return task.training_loss(variables | {'params': fill_in(trained, variables['params'])}, batch, rng)

    return jax.grad(loss)(trained)

  rng = jax.eval_shape(lambda: jax.random.key(0))
  arguments = (abstract_variables, dict(batch_spec), rng)
  with layer_scope(plain_products=True):
    flops = 3 * count_matmul_flops(task.training_loss, *arguments)
    flops -= 2 * count_matmul_flops(task.prepare_batch, abstract_variables, dict(batch_spec))
    if weight_specs is not None and are_frozen(weight_specs):  # quantized kernels count as float32
      dequantized = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32) if is_quantized(leaf) else leaf
      weights = jax.tree.map(dequantized, abstract_variables['params'], is_leaf=is_quantized)
      weight_specs = jax.tree.map(dequantized_spec, weight_specs, is_leaf=is_quantized)
      arguments = (abstract_variables | {'params': weights}, *arguments[1:])
      trained = without_frozen(weights, weight_specs)
      flops -= count_matmul_flops(backward, weights, *arguments) - count_matmul_flops(backward, trained, *arguments)
    return flops


def count_matmul_flops(fn: Callable[..., Any], *abstract_args: Any) -> int:
  """Counts the FLOPs of the matrix products and convolutions of `fn`, two per multiply-add; `fn` is only traced.

  A `scan` counts every iteration, a `cond` its most expensive branch, and a `shard_map` its body once per device of its
  manual axes. A `while` counts its body once, because its trip count is unknown. A ragged (grouped) product counts each
  row once, whatever its group. Hand-written kernels (Pallas, cuDNN) do not count.
  """
  return _jaxpr_flops(jax.make_jaxpr(fn)(*abstract_args).jaxpr)


def _jaxpr_flops(jaxpr: Jaxpr) -> int:
  return sum(_equation_flops(equation) for equation in jaxpr.eqns)


def _equation_flops(equation: JaxprEqn) -> int:
  params = equation.params
  match equation.primitive.name:
    case 'dot_general':
      return _product_flops(equation, params['dimension_numbers'])
    case 'ragged_dot_general' | 'ragged_dot':
      numbers = params['ragged_dot_dimension_numbers']
      return _product_flops(equation, numbers.dot_dimension_numbers, numbers.rhs_group_dimensions)
    case 'conv_general_dilated':
      # Every output element is a sum over the kernel's window and over the input features of one group.
      kernel = _shape(equation.invars[1])
      num_out_features = kernel[params['dimension_numbers'].rhs_spec[0]]
      return 2 * math.prod(_shape(equation.outvars[0])) * (math.prod(kernel) // num_out_features)
    case 'scan':
      return params['length'] * _inner_flops(params)
    case 'cond':
      return max(_jaxpr_flops(branch.jaxpr) for branch in params['branches'])
    case 'shard_map':
      num_devices = math.prod(params['mesh'].shape[axis] for axis in params['newly_manual_axes'])
      return num_devices * _inner_flops(params)
    case 'pallas_call':
      return 0
    case 'call_hi_primitive':  # of jax.checkpoint with jax_remat3
      return _inner_flops(params['_prim'].params)
    case _:
      return _inner_flops(params)


def _product_flops(equation: JaxprEqn, numbers: Any, rhs_group_dims: tuple[int, ...] = ()) -> int:
  """Counts 2 * batch * M * K * N: each element of the left side is multiplied once per free index of the right side."""
  (_, rhs_contracting), (_, rhs_batch) = numbers
  lhs, rhs = map(_shape, equation.invars[:2])
  other_dims = {*rhs_contracting, *rhs_batch, *rhs_group_dims}
  return 2 * math.prod(lhs) * math.prod(size for dim, size in enumerate(rhs) if dim not in other_dims)


def _shape(operand: Any) -> tuple[int, ...]:
  return operand.aval.shape


def _inner_flops(params: Mapping[str, Any]) -> int:
  """Counts all jaxprs in the parameters of an equation, such as jit, remat, custom_vjp and while."""
  return sum(_jaxpr_flops(jaxpr) for value in params.values() for jaxpr in _jaxprs_in(value))


def _jaxprs_in(value: Any) -> Iterator[Jaxpr]:
  if isinstance(value, ClosedJaxpr):
    yield value.jaxpr
  elif isinstance(value, Jaxpr):
    yield value
  elif isinstance(value, tuple | list):
    for item in value:
      yield from _jaxprs_in(item)
