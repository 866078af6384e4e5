"""Low-rank adapters (LoRA, DoRA): small products of two matrices that are trained while their kernels stay frozen.

    add_adapters(model, ('attention/',), LowRankAdapter(rank=8, alpha=16.0))     # to the config of a model

`layers/adapter.py` is the interface that layers call. `low_rank.py` implements one adapter of a kernel, and
`choices.py` several adapters of a kernel, one of which each row of a batch selects. `adapted_weights.py` finds the
weights of a model that can have adapters, and adds adapters; `merging.py` merges adapters into the kernels;
`nnx_adapters.py` adds adapters to an NNX module.
`tuning/low_rank.py` trains adapters.
"""

from spmd_tasks.lazy_exports import lazy_exports

with lazy_exports(globals()):
  from spmd_tasks.adapters.adapted_weights import add_adapters
  from spmd_tasks.adapters.low_rank import LowRankAdapter
