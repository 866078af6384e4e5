"""The axis rules that T5X's `standard_logical_axis_rules` stand for."""

from spmd_tasks.errors import UserError
from spmd_tasks.sharding import AxisRules


def t5x_axis_rules(
  base_rules: AxisRules, *, activation_partitioning_dims: int = 1, parameter_partitioning_dims: int = 1
) -> AxisRules:
  """Returns the base rules with weights and the residual stream split as by T5X's `standard_logical_axis_rules`.

  Two dims of parameters split the features of weights over `data`; two of activations split the residual stream over
  `mdl`, and the scales of norms. T5X's contrib/moe has `activation_partitioning_dims=2` by default.

  Raises:
    UserError: a number of dims is not 1 or 2.
  """
  if {activation_partitioning_dims, parameter_partitioning_dims} - {1, 2}:
    raise UserError(f'{activation_partitioning_dims=} and {parameter_partitioning_dims=} must be 1 or 2.')
  residual = 'mdl' if activation_partitioning_dims == 2 else None
  embed = 'data' if parameter_partitioning_dims == 2 else None
  changed = {'embed': embed, 'norm': residual or embed, 'expert_embed': None, 'act_embed': residual}
  return tuple((name, changed.get(name, axes)) for name, axes in base_rules)
