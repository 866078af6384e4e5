"""Which collectives the compiled gradient of an expert-parallel computation has."""

import collections
import re

from dropless_reference import (
  DOWN_SPLIT_DIMS,
  UP_SPLIT_DIMS,
  compute,
  draw_expert_ids,
  draw_inputs,
  mesh_and_rules,
)
import jax
from jax.sharding import NamedSharding
import numpy as np

from spmd_tasks.sharding.specs import sharding_scope, split_dims_to_partition_spec

KINDS = ('all-to-all', 'all-gather', 'all-reduce', 'reduce-scatter', 'collective-permute')
TOKENS_SPLIT_DIMS = ('batch', 'seq', 'act_embed')
SPLIT_DIMS = {
  'x': TOKENS_SPLIT_DIMS,
  'gates': TOKENS_SPLIT_DIMS,
  'up': UP_SPLIT_DIMS,
  'gate': UP_SPLIT_DIMS,
  'down': DOWN_SPLIT_DIMS,
}


def compile_gradient(computation, axis_sizes, rules):
  """The text of the program for the gradient of sum(y^2): B=16, T=4, D=10, F=14, E=4, k=2."""
  rng = np.random.default_rng(0)
  mesh, rules = mesh_and_rules(axis_sizes, rules)
  inputs, _ = draw_inputs(rng, B=16, T=4, D=10, F=14)
  expert_ids = draw_expert_ids(rng, 'mixed', B=16, T=4)

  def loss(inputs):
    with sharding_scope(mesh, rules):
      return (compute(computation, inputs, expert_ids)[0] ** 2).sum()

  shardings = {
    name: NamedSharding(mesh, split_dims_to_partition_spec(SPLIT_DIMS[name], mesh.axis_names, rules)) for name in inputs
  }
  return jax.jit(jax.grad(loss), in_shardings=(shardings,), out_shardings=shardings).lower(inputs).compile().as_text()


def count_collectives(program):
  """{(kind, type of one result): how many}; an all-to-all's results, one per device, count as one."""
  counts = collections.Counter()
  for line in program.splitlines():
    match = re.search(rf' = (.*?) ({"|".join(KINDS)})\(', line)
    if match:
      types = re.findall(r'\w+\[[\d,]*\]', match[1])
      counts.update((match[2], array) for array in (types[:1] if match[2] == 'all-to-all' else types))
  return dict(counts)
