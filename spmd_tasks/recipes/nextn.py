"""Gives a recipe's model heads that predict further tokens (layers/nextn.py)."""

import fiddle as fdl

from spmd_tasks.errors import UserError
from spmd_tasks.layers import NextnHead, NextnLanguageModel, TransformerStack


def with_heads(model: fdl.Config, block: fdl.Config, num: int, remat_policy: str) -> fdl.Config[NextnLanguageModel]:
  """Returns the model with `num` heads, of one block and norms like the final one. Needs num >= 1."""
  if num < 1:
    raise UserError(f'num_nextn_predict_layers = {num} must be at least 0.')
  stack = fdl.Config(TransformerStack, block=block, num_layers=1, remat_policy=remat_policy)
  head = fdl.Config(NextnHead, stack=stack, norm=fdl.copy_with(model.final_norm))
  parts = {name: getattr(model, name) for name in model.__arguments__}
  return fdl.Config(NextnLanguageModel, **parts, num_nextn_predict_layers=num, nextn_head=head)
