"""Recurrent layers: they know earlier tokens by a state of fixed size, not by keys and values of each token.

    layer = GatedDeltaNet(num_heads=32, num_key_heads=16, key_head_dim=128, value_head_dim=128)
    y = layer.apply(variables, x, segment_ids)  # [B, T, D] -> [B, T, D]

A layer takes the place of a block's `attention`; a BlockGroup mixes both kinds of blocks. Read delta_net.py, then
delta_rule.py (the recurrence) and short_convolution.py.
"""

from spmd_tasks.lazy_exports import lazy_exports

with lazy_exports(globals()):
  from spmd_tasks.layers.recurrent.delta_net import GatedDeltaNet
