"""Attention over packed documents and to an encoder's text, and positions.

    attention = Attention(num_heads=32, num_kv_heads=8, head_dim=128, rotary=Rotary(max_wavelength=500_000.0))
    y = attention.apply(variables, x, segment_ids, segment_pos)  # [B, T, D] -> [B, T, D]

Read attention.py and rotary.py, then implementations.py (which of them computes a call, a kernel per platform),
positions.py, rotary_scaling.py, temperature.py and latent.py; decoding/kv_cache.py explains generation.
"""

from spmd_tasks.lazy_exports import lazy_exports

with lazy_exports(globals()):
  from spmd_tasks.layers.attention._plain import AttentionOptions
  from spmd_tasks.layers.attention.attention import Attention
  from spmd_tasks.layers.attention.latent import LatentAttention
  from spmd_tasks.layers.attention.positions import (
    LearnedPositions,
    PositionBias,
    RelativePositionBias,
    SinusoidalPositions,
  )
  from spmd_tasks.layers.attention.rotary import Rotary, RotaryScaling
  from spmd_tasks.layers.attention.rotary_scaling import LinearScaling, Llama3Scaling, LongRopeScaling, YarnScaling
