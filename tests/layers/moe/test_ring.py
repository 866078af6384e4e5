"""The ring's program: tokens are handed on and nothing else, and no device ever holds the tokens of all."""

import re

from dropless_collectives import compile_gradient, count_collectives
from dropless_reference import draw_inputs, mesh_and_rules, value_and_gradients
import jax
import jax.numpy as jnp
import numpy as np

from spmd_tasks.layers.moe.dropless import Dropless

SCOPE = ({'expert': 4}, {'batch': 'expert'})


def test_tokens_are_handed_on_and_weights_stay():
  """4 devices with 16 tokens of 2 choices each: 64 tokens and 128 rows in all."""
  program = compile_gradient(Dropless(), *SCOPE)
  # x and y, then x, d_y and d_x; the gates, then gates and d_gates; the ids. XLA shares what both rounds hand on.
  found = count_collectives(program)
  assert set(found) == {('collective-permute', t) for t in ('f32[16,10]', 'f32[16,2]', 's32[16,2]')}
  assert found['collective-permute', 'f32[16,10]'] <= 5
  assert found['collective-permute', 'f32[16,2]'] <= 3
  assert not re.search(r'f32\[(64|128),', program)


def test_gradients_of_narrow_weights_are_summed_in_float32(rng):
  """1 + 2^-9 times 3 more is lost in bfloat16, one addition at a time."""
  inputs, d_y = draw_inputs(rng, B=4, T=1, D=1, F=1, E=4, k=1, gated=False)
  expert_ids = np.zeros((4, 1, 1), np.int32)
  inputs = {
    name: jnp.ones_like(array, jnp.float32 if name == 'gates' else jnp.bfloat16) for name, array in inputs.items()
  }
  d_y = np.array([1.0, 2**-8, 2**-8, 2**-8]).reshape(4, 1, 1)
  run = value_and_gradients(Dropless(), *mesh_and_rules(*SCOPE))
  _, gradients, _ = run(inputs, expert_ids, d_y)
  hidden = float(jax.nn.silu(jnp.bfloat16(1.0)))
  assert float(gradients['down'][0, 0, 0]) == float(jnp.bfloat16(hidden * (1 + 3 * 2**-8)))
