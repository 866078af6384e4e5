"""Mixture-of-experts language models: the base of the registered `moe` experiments."""

import fiddle as fdl

from spmd_tasks.layers import GatedFeedForward, LanguageModelLoss, StackSequence, TransformerStack
from spmd_tasks.layers.moe import Dropless, ExpertComputation, Experts, MixtureOfExperts, TopKRouter
from spmd_tasks.recipes.dense import DenseLanguageModel


class MoeLanguageModel(DenseLanguageModel):
  """A decoder-only transformer whose feed-forward sublayers are dropless mixtures of gated experts.

  `hidden_dims` is the hidden size of one expert, `shared_hidden_dims` the size of an expert that every token
  passes (None: there is none). The first `num_dense_layers` layers have one network of `dense_hidden_dims` instead of
  experts.
  """

  num_experts: int = 8
  num_selected_experts: int = 2
  shared_hidden_dims: int | None = None
  num_dense_layers: int = 0
  dense_hidden_dims: int | None = None
  load_balance_weight: float = 0.01
  router_z_weight: float = 1e-3

  def router(self) -> fdl.Config[TopKRouter]:
    """The router, which chooses the experts of each token."""
    return fdl.Config(
      TopKRouter, num_experts=self.num_experts, num_selected=self.num_selected_experts, normalize_gates=1.0
    )

  def computation(self) -> fdl.Config[ExpertComputation]:
    """The computation of the experts' outputs: dropless, or with a capacity."""
    return fdl.Config(Dropless)

  def ffn(self) -> fdl.Config[MixtureOfExperts]:
    shared = None if self.shared_hidden_dims is None else self._gated(self.shared_hidden_dims)
    return fdl.Config(
      MixtureOfExperts,
      router=self.router(),
      experts=fdl.Config(Experts, num_experts=self.num_experts, hidden_dim=self.hidden_dims, dtype=self.dtype),
      computation=self.computation(),
      shared_expert=shared,
    )

  def stack(self) -> fdl.Config[TransformerStack] | fdl.Config[StackSequence]:
    mixtures = super().stack()
    if not self.num_dense_layers:
      return mixtures
    mixtures.num_layers -= self.num_dense_layers
    dense = fdl.copy_with(
      super().stack(),
      block=self.block(self._gated(self.dense_hidden_dims or self.hidden_dims)),
      num_layers=self.num_dense_layers,
    )
    return fdl.Config(StackSequence, stacks=(dense, mixtures))

  def loss(self) -> fdl.Config[LanguageModelLoss]:
    weights = {'load_balance_loss': self.load_balance_weight, 'router_z_loss': self.router_z_weight}
    num_mixtures = self.num_layers - self.num_dense_layers + self.num_nextn_predict_layers
    return fdl.copy_with(super().loss(), aux_loss_weights=weights, num_aux_layers=num_mixtures)

  def _gated(self, hidden_dim: int) -> fdl.Config[GatedFeedForward]:
    return fdl.Config(GatedFeedForward, hidden_dim=hidden_dim, activation='silu', dtype=self.dtype)
