"""Low-rank adapters (LoRA, DoRA): trained beside kernels that stay as they are.

    add_adapters(model, ('attention/',), LowRankAdapter(rank=8, alpha=16.0))     # to the config of a model

`layers/adapter.py` is the interface that layers call. Here, `low_rank.py` implements one adapter beside a kernel and
`choices.py` several, of which each row of a batch has its own. `adapted_weights.py` finds the weights of a model that
can have adapters and adds them; `merging.py` merges them into the kernels. `tuning/low_rank.py` trains adapters.
"""

from spmd_tasks.lazy_exports import lazy_exports

with lazy_exports(globals()):
  from spmd_tasks.adapters.adapted_weights import add_adapters
  from spmd_tasks.adapters.low_rank import LowRankAdapter
