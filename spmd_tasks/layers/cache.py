"""KvCache: what layers may ask of the KV cache while a model generates text. decoding/kv_cache.py implements it.

Attention stores keys and values of every token:

    if (cache := current_layer_scope().cache) is not None:
      earlier = cache.update(self, {'key': key, 'value': value}, split_dims)
      if earlier is not None:
        return earlier.attend(query, key, value, segment_ids, segment_pos, options)

Any other layer that reads earlier tokens has a state, arrays of fixed size per text, and a function that advances it:

    def advance(inputs, state):  # state is {} in a text's first call
      y, new = read(inputs['x'], inputs['segment_ids'], state.get('state', zeros))
      return y, {'state': new}

    y = cache.advance_state(self, advance, {'x': x, 'segment_ids': segment_ids}, segment_pos, {'state': split_dims})

Where entries are stored, in which dtype, and how they are read is the implementation's business.

Shapes: B rows, T tokens of the call, S tokens of the encoder's text, H query heads, G key/value heads, K head dim.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import flax.linen as nn
import jax

from spmd_tasks.layers.attention._plain import AttentionOptions
from spmd_tasks.sharding import SplitDims


class EarlierTokens(Protocol):
  """What one attention has stored of the tokens of earlier calls."""

  def attend(
    self,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segment_ids: jax.Array | None,
    segment_pos: jax.Array,
    options: AttentionOptions,
    *,
    split_dims: SplitDims = None,
  ) -> jax.Array:
    """Computes causal attention of this call's tokens to earlier tokens and to one another: [B, T, H, K].

    Args:
      query: [B, T, H, K].
      key, value: [B, T, G, K], as they were given to `update`.
      segment_ids: int32 [B, T], 0 for padding, which comes after the tokens. None: no padding.
      segment_pos: int32 [B, T], consecutive positions in the text; earlier tokens have those before the first.
        Positions of padding are ignored; a row of padding alone costs least with 0 in its first column.
      options: of a causal attention.
      split_dims: of the queries.
    """
    ...


class KvCache(Protocol):
  """The KV cache in one call of a model.

  Attributes:
    max_len: the most tokens that a text can have; None: not known.
  """

  @property
  def max_len(self) -> int | None: ...

  def of_model(self, model: nn.Module) -> 'KvCache':
    """Returns the cache as the layers of a model see it, which may read one another's entries."""
    ...

  def in_layer(self, number: jax.Array) -> 'KvCache':
    """Returns the cache as layer `number` of a loop over layers sees it, whose arrays are stacked."""
    ...

  def update(
    self,
    module: nn.Module,
    arrays: Mapping[str, jax.Array],
    split_dims: SplitDims,
    *,
    segment_ids: jax.Array | None = None,
    window: int | None = None,
  ) -> EarlierTokens | None:
    """Stores arrays of this call's tokens, and returns the tokens of earlier calls; None in a text's first call.

    Args:
      module: the attention that calls.
      arrays: [B, T, G, K] by name: keys and values, or one array that is both.
      split_dims: of the arrays.
      segment_ids: int32 [B, T], 0 for padding; None: no padding.
      window: how many tokens a token sees; None: all. Older ones need not be stored.
    """
    ...

  def read(self, path: tuple[str, ...], num_rows: int, split_dims: SplitDims) -> EarlierTokens | None:
    """Returns what another attention's `update` returned: the tokens of its earlier calls; None in a text's first call.

    Args:
      path: of that attention. If a loop runs it, the loop's last layer is read.
      num_rows: B.
      split_dims: as in its `update`.
    """
    ...

  def advance_state(
    self,
    module: nn.Module,
    advance: Callable[[Any, Mapping[str, jax.Array]], tuple[jax.Array, Mapping[str, jax.Array]]],
    inputs: Any,
    segment_pos: jax.Array,
    split_dims: Mapping[str, SplitDims],
  ) -> jax.Array:
    """Returns the outputs [B, T, ...] of `advance`, and stores the state of each row's text after this call's tokens.

    Args:
      module: the layer that calls.
      advance: from inputs [P, S, ...] of S consecutive tokens and the state before them to outputs [P, S, ...] and the
        state after them. A state is arrays [P, ., ., .] by name, of any dtype. It is {} if no row has earlier tokens,
        and zeros for rows that have none: a text starts from zeros. Padding must not change it. Declares no weights,
        as it may be called several times, for some of the tokens each.
      inputs: a tree of arrays [B, T, ...], in which zeros are padding: it has the segment ids.
      segment_pos: int32 [B, T], consecutive positions in the text; 0 in the first column if no tokens precede the row.
      split_dims: of each array of the state.
    """
    ...

  def write_encoded(
    self, module: nn.Module, key: jax.Array, value: jax.Array, segment_ids: jax.Array, split_dims: SplitDims
  ) -> None:
    """Stores keys and values [B, S, G, K] of the encoder's text and its segment ids [B, S], for all later calls."""
    ...

  def read_encoded(self, module: nn.Module, num_rows: int) -> tuple[jax.Array, jax.Array, jax.Array] | None:
    """Returns what `write_encoded` of the first call has stored; None in the first call."""
    ...

  def write_routing(self, module: nn.Module, expert_ids: jax.Array, split_dims: SplitDims) -> None:
    """Stores which experts compute each token, int32 [B, T, k], if the caller wants to know."""
    ...
