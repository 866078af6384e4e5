"""Statistics: what a layer reports of its tokens, as sums that stay sums until all tokens are in.

A balance loss is a product of two means over tokens, so it must not be averaged over parts of a batch: a pipeline,
which sees the batch in microbatches, adds up the parts' statistics first. Blocks therefore return sums, and the stack
of blocks turns them into numbers.

Shapes: L layers.
"""

import abc
from collections.abc import Mapping

from flax import struct
import jax


class Statistics(struct.PyTreeNode, abc.ABC):
  """Float32 sums over tokens; the statistics of two sets of tokens are their sum, leaf by leaf.

  Attributes:
    num_tokens: scalar, how many tokens were summed; its rank tells how many dims of layers were stacked in front.
  """

  num_tokens: jax.Array

  @abc.abstractmethod
  def values(self) -> dict[str, jax.Array]:
    """The numbers that the sums stand for, by name: scalars, or vectors where a name is one of several experts'."""


def values_per_layer(aux: Mapping[str, Statistics]) -> dict[str, jax.Array]:
  """Name -> [L] (or [L, ...] for vectors), from statistics whose leaves have any number of stacked dims in front."""
  values: dict[str, jax.Array] = {}
  for statistics in aux.values():
    num_stacked = statistics.num_tokens.ndim
    function = type(statistics).values
    for _ in range(num_stacked):
      function = jax.vmap(function)
    stacked = function(statistics)
    values |= {name: value.reshape(-1, *value.shape[num_stacked:]) for name, value in stacked.items()}
  return values
