"""Mixture of experts: a feed-forward sublayer in which each token uses a few of many experts.

    from spmd_tasks.layers.moe import Dropless, Experts, MixtureOfExperts, TopKRouter

    ffn = MixtureOfExperts(
      router=TopKRouter(num_experts=8, num_selected=2, normalize_gates=1.0),
      experts=Experts(num_experts=8, hidden_dim=384),
      computation=Dropless(),
    )

A router decides (`TopKRouter`, or `ExpertChoiceRouter`), `Experts` declares the weights, and a computation applies
them: `Dropless` computes every choice; `CapacityEinsum` and `CapacityGather` give each expert a fixed number of slots
and drop the rest. The layer reports `RoutingSums`: balance losses and load statistics.

Reading order, one idea per file:
  _layer.py, _router.py, _balance.py             the layer, the decision, losses that balance the load
  _experts.py, _permutation.py                   the networks, and sorting tokens by expert
  _grouped_matmul.py, _megablox_backend.py       their matmuls, with one backend per platform
  _dropless.py, _expert_parallel.py              dropless computation, and the meaning of each mesh axis
  _dispatches.py                                 two ways to move tokens between devices
  _capacity.py, _slots.py, _slot_resharding.py   computation with a capacity
"""

from etils import epy

with epy.lazy_api_imports(globals()):
  from spmd_tasks.layers.moe._balance import RoutingSums, load_balance_loss, router_z_loss
  from spmd_tasks.layers.moe._capacity import CapacityComputation, CapacityEinsum, CapacityGather
  from spmd_tasks.layers.moe._dispatches import FURTHER_PASSES_NAME
  from spmd_tasks.layers.moe._dropless import Dropless
  from spmd_tasks.layers.moe._experts import Experts, ExpertWeights
  from spmd_tasks.layers.moe._layer import ExpertComputation, ExtraFfnBlock, MixtureOfExperts
  from spmd_tasks.layers.moe._router import (
    ExpertChoiceRouter,
    Router,
    RouterOutput,
    TopKRouter,
  )
  from spmd_tasks.layers.moe._slots import DerivedGroupSize, Slots

__all__ = [
  'FURTHER_PASSES_NAME',
  'CapacityComputation',
  'CapacityEinsum',
  'CapacityGather',
  'DerivedGroupSize',
  'Dropless',
  'ExpertChoiceRouter',
  'ExpertComputation',
  'ExpertWeights',
  'Experts',
  'ExtraFfnBlock',
  'MixtureOfExperts',
  'Router',
  'RouterOutput',
  'RoutingSums',
  'Slots',
  'TopKRouter',
  'load_balance_loss',
  'router_z_loss',
]
