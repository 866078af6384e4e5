"""Modules given to modules: why giving one template to two places does not tie their weights."""

import dataclasses

import flax.linen as nn


class WithSublayers(nn.Module):
  """A Linen module whose fields hold other modules as templates, each of which gets weights of its own.

  Linen recognises one Python object in two fields and makes one module with shared weights of it. Configs invite that
  by accident (`norm = RmsNorm()` given to the block and to the model; a Fiddle config referenced twice builds one
  object), and nothing would tell. Here every template is copied as it is handed over, so that weights are shared only
  where a layer says so, as TokenEmbedding(tied=True) does.
  """

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name, None)
      # A module that already has a parent is bound: Linen itself is at work, and its identity matters.
      if field.name != 'parent' and isinstance(value, nn.Module) and value.parent is None:
        object.__setattr__(self, field.name, value.clone(parent=None))
    super().__post_init__()
