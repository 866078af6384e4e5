"""Ladder: language models of all sizes by one dial, their depth.

    spmd-tasks --exp lm.Ladder --set depth=12 --print_config

For a depth L, `chosen_by_depth` in the printed config says what was chosen, and why:

* width D = `width_per_layer` * L, heads of `head_dim` features, hidden dims of 3 D (with experts, of those chosen
  together), as in nanochat, whose models have 64 features of width per layer;
* tokens: `tokens_per_parameter` for each parameter that a token is multiplied with, 20 by default (Hoffmann et al.,
  arXiv 2203.15556);
* batch: 0.58 * tokens^0.571 tokens (the Step Law: Li et al., arXiv 2503.04715), rounded to 2^n or 3 * 2^n rows;
* learning rate: `base_rate` at the base width and depth, by muP for both (mup.py);
* mesh: all devices on the axis `data`. `--mode plan --search` chooses mesh, remat policy and microbatches for a target.

A field that a subclass or `--set` sets is not chosen, and those that follow from it are: `--set batch_size=8` changes
the number of steps too.
"""

import math
from typing import Any

from spmd_tasks.errors import UserError
from spmd_tasks.recipes.dense import DenseLanguageModel
from spmd_tasks.recipes.mixture_of_experts import MoeLanguageModel

_NUM_EVALS = 10
_IS_SET = 'set, not chosen'
_NUM_EVAL_ROWS = 1024
_BATCH_SIZES = [factor * 2**n for n in range(24) for factor in (1, 3)]  # many axes divide them


class Ladder(DenseLanguageModel):
  """A language model whose sizes, batch, steps and learning rate follow from `depth`."""

  ici_mesh_shape = (1, -1, 1)

  depth: int = 4
  width_per_layer: int = 64
  head_dim: int = 64
  tokens_per_parameter: float = 20.0
  base_rate: float = 3e-3
  base_width: int = 256
  base_depth: int = 4
  chosen_by_depth: tuple[str, ...] = ()  # filled in: what was chosen, and why

  def __post_init__(self):
    if self.depth < 1 or self.width_per_layer * self.depth % self.head_dim:
      raise UserError(
        f'depth = {self.depth} gives a width of {self.width_per_layer} * depth, which must be a positive multiple of '
        f'head_dim = {self.head_dim}: change one of them.'
      )
    reasons: list[str] = []
    chosen_before = {line.partition(':')[0] for line in self.chosen_by_depth if not line.endswith(_IS_SET)}

    def choose(name: str, value: Any, reason: str) -> Any:
      """Sets a field that nobody set below this class, and returns its value."""
      is_set = self.setter_rank(name) < type(self).__mro__.index(Ladder) + 1
      # A saved config has all fields, also those that were chosen.
      if is_set and f'{name} = {getattr(self, name)}' not in chosen_before:
        value, reason = getattr(self, name), _IS_SET
      object.__setattr__(self, name, value)
      reasons.append(f'{name} = {value}: {reason}')
      return value

    choose('num_layers', self.depth, 'the depth')
    width = choose('model_dims', self.width_per_layer * self.depth, f'{self.width_per_layer} * depth')
    choose('num_heads', width // self.head_dim, f'heads of {self.head_dim} features')
    choose('hidden_dims', self._hidden_dims(width), self._hidden_reason())
    num_params = self.num_active_parameters()
    num_tokens = self.tokens_per_parameter * num_params
    law = 0.58 * num_tokens**0.571
    rows = min(_BATCH_SIZES, key=lambda size: abs(math.log(size * self.seq_len / law)))
    reason = f'{law:,.0f} tokens by 0.58 * tokens^0.571, in 2^n or 3 * 2^n rows of {self.seq_len}'
    rows = choose('batch_size', rows, reason)
    evals = max(round(num_tokens / (rows * self.seq_len) / _NUM_EVALS), 1)
    reason = f'{num_tokens:,.0f} tokens, {self.tokens_per_parameter:g} for each of {num_params:,} parameters'
    steps = choose('num_train_steps', evals * _NUM_EVALS, reason)
    choose('eval_every_steps', max(steps // _NUM_EVALS, 1), f'{_NUM_EVALS} times')
    eval_batches = max(_NUM_EVAL_ROWS // rows, 1)
    is_exact = eval_batches * rows == _NUM_EVAL_ROWS
    reason = f'the same {_NUM_EVAL_ROWS} rows' if is_exact else f'{eval_batches * rows} rows, near {_NUM_EVAL_ROWS}'
    choose('eval_batches', eval_batches, f'{reason} at every depth')
    choose('learning_rate', self.base_rate, f'of width {self.base_width} and {self.base_depth} layers, by muP')
    choose('mup_base_width', self.base_width, 'the width of the learning rate')
    choose('mup_base_depth', self.base_depth, 'the layers of the learning rate')
    reason = 'all devices on `data`; --mode plan --search --target CHIPS finds a faster one'
    choose('ici_mesh_shape', Ladder.ici_mesh_shape, reason)
    object.__setattr__(self, 'chosen_by_depth', tuple(reasons))
    super().__post_init__()

  def num_active_parameters(self) -> int:
    """Returns the number of parameters that a token is multiplied with: kernels of layers, and of the output."""
    heads = self.num_heads + (self.num_kv_heads or self.num_heads)
    per_layer = 2 * self.model_dims * heads * self.head_dim + 3 * self.model_dims * self._active_hidden_dims()
    return self.num_layers * per_layer + self.vocab_size * self.model_dims

  def block(self, ffn: Any) -> Any:
    block = super().block(ffn)
    block.attention.head_dim = self.head_dim
    return block

  def _hidden_dims(self, width: int) -> int:
    return 3 * width

  def _hidden_reason(self) -> str:
    return '3 * model_dims'

  def _active_hidden_dims(self) -> int:
    """Returns the number of hidden units that compute a token in one layer."""
    return self.hidden_dims


class MoeLadder(Ladder, MoeLanguageModel):
  """A Ladder with experts, of which a token is computed by as many hidden units as in a dense model."""

  def num_active_parameters(self) -> int:
    return super().num_active_parameters() + self.num_layers * self.model_dims * self.num_experts  # routers

  def _hidden_dims(self, width: int) -> int:
    return 3 * width // self.num_selected_experts

  def _hidden_reason(self) -> str:
    return f'3 * model_dims, over {self.num_selected_experts} experts per token'

  def _active_hidden_dims(self) -> int:
    return self.num_selected_experts * self.hidden_dims + (self.shared_hidden_dims or 0)
