"""Mixture of experts: a feed-forward sublayer in which each token uses a few of many experts.

    ffn = MixtureOfExperts(
      router=TopKRouter(num_experts=8, num_selected=2, normalize_gates=1.0),
      experts=Experts(num_experts=8, hidden_dim=384),
      computation=Dropless(),
    )

A router decides (`TopKRouter`, or `ExpertChoiceRouter`), `Experts` declares the weights, and a computation applies
them: `Dropless` computes every choice; `CapacityGather` gives each expert a fixed number of slots and drops the rest.
The layer reports `RoutingSums`: balance losses and load statistics.

Reading order: _layer.py, _router.py, _balance.py; _experts.py with _permutation.py (sorting tokens by expert) and
grouped_matmul.py; _dropless.py with _expert_parallel.py (the meaning of each mesh axis) and _dispatches.py (two ways
to move tokens between devices); _capacity.py with _slots.py.
"""

from spmd_tasks.lazy_exports import lazy_exports

with lazy_exports(globals()):
  from spmd_tasks.layers.moe._balance import RoutingSums, load_balance_loss, router_z_loss
  from spmd_tasks.layers.moe._capacity import CapacityGather
  from spmd_tasks.layers.moe._dispatches import FURTHER_PASSES_NAME
  from spmd_tasks.layers.moe._dropless import Dropless
  from spmd_tasks.layers.moe._experts import BALANCED_SHARE_NAME, Experts, ExpertWeights
  from spmd_tasks.layers.moe._layer import ExpertComputation, ExtraFfnBlock, MixtureOfExperts
  from spmd_tasks.layers.moe._router import (
    ExpertChoiceRouter,
    Router,
    RouterOutput,
    TopKRouter,
  )
  from spmd_tasks.layers.moe._slots import DerivedGroupSize
