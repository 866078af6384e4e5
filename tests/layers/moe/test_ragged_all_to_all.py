"""The ragged all-to-all: its routes against a simulation in numpy, and all of it with that collective emulated.

XLA has it on GPU and TPU only; for these the program is lowered here, not run.
"""

import dataclasses

from dropless_reference import (
  assert_is_reference,
  compute,
  draw_expert_ids,
  draw_inputs,
  mesh_and_rules,
  value_and_gradients,
)
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tasks.layers.moe import DISPATCHES, Dropless
from spmd_tasks.layers.moe._ragged_all_to_all import plan_routes, ragged_all_to_all
from spmd_tasks.sharding import sharding_scope

X, E = 4, 2
SCOPE = ({'data': 2, 'mdl': 2}, {'batch': ('data', 'mdl'), 'expert': ('data', 'mdl')})


def simulate(operands, num_output_rows, routes):
  """Each device's output, -1 where nothing arrives, by the definition of `jax.lax.ragged_all_to_all`."""
  outputs = [np.full(num_output_rows, -1) for _ in operands]
  for sender, (operand, route) in enumerate(zip(operands, routes, strict=True)):
    for receiver, output in enumerate(outputs):
      size, start = route.send_sizes[receiver], route.output_offsets[receiver]
      assert size == routes[receiver].recv_sizes[sender]
      assert start + size <= num_output_rows
      assert np.all(output[start : start + size] == -1)
      output[start : start + size] = operand[route.input_offsets[receiver] :][:size]
  return outputs


SIZES = {
  'mixed': np.random.default_rng(0).integers(0, 5, (X, X, E)),
  'balanced': np.full((X, X, E), 2),
  'one expert': np.full((X, X, E), 3) * (np.arange(X * E).reshape(1, X, E) == 5),
  'none': np.zeros((X, X, E), int),
  'one device sends all': np.full((X, X, E), 3) * (np.arange(X).reshape(X, 1, 1) == 2),
}


@pytest.mark.parametrize('sizes', SIZES.values(), ids=SIZES)
@pytest.mark.parametrize('capacity', [160, 10, 1])
def test_rows_arrive_by_sender_and_expert_and_return_to_their_places(sizes, capacity):
  sizes = sizes.astype(np.int32)
  routes = [jax.tree.map(np.asarray, plan_routes(jnp.asarray(sizes), device, capacity)) for device in range(X)]
  num_rows = 40
  # A row is named by sender, receiver, expert and number; 3 rows at the end of each sender are not routed.
  names = [
    [1000 * s + 100 * r + 10 * e + i for r in range(X) for e in range(E) for i in range(sizes[s, r, e])]
    for s in range(X)
  ]
  operands = [np.array(row_names + [-2] * (num_rows - len(row_names))) for row_names in names]
  arrived = simulate(operands, capacity, [route.there for route in routes])
  for receiver, output in enumerate(arrived):
    expected = [name for row_names in names for name in row_names if name // 100 % 10 == receiver][:capacity]
    assert output[: len(expected)].tolist() == expected
    assert np.all(output[len(expected) :] == -1)
    received = routes[receiver].received
    assert received.tolist() == [
      [sum(name // 1000 == s and name // 10 % 10 == e for name in expected) for e in range(E)] for s in range(X)
    ]
  returned = simulate(arrived, num_rows, [route.back for route in routes])
  kept = {name for output in arrived for name in output.tolist()}
  for operand, output in zip(operands, returned, strict=True):
    assert output.tolist() == [name if name in kept and name >= 0 else -1 for name in operand.tolist()]


@pytest.fixture
def on_an_accelerator(monkeypatch):
  """Dropless believes that its devices are TPUs."""

  def dispatch(x, expert_ids, gates, experts, exchange):
    return ragged_all_to_all(x, expert_ids, gates, experts, dataclasses.replace(exchange, platform='tpu'))

  monkeypatch.setitem(DISPATCHES, 'ragged_all_to_all', dispatch)


def emulate(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
  """The collective, by gathering everything everywhere."""
  del recv_sizes
  device, place = jax.lax.axis_index(axis_name), jnp.arange(output.shape[0])
  gathered = (jax.lax.all_gather(a, axis_name) for a in (operand, input_offsets, send_sizes, output_offsets))
  for rows, inputs, sizes, outputs in zip(*gathered, strict=True):
    i = place - outputs[device]
    arrives = (i >= 0) & (i < sizes[device])
    output = jnp.where(arrives[:, None], rows.at[inputs[device] + i].get(mode='clip'), output)
  return output


@pytest.mark.parametrize('capacity_factor', [None, 0.5])
def test_is_the_loop_over_assignments(capacity_factor, on_an_accelerator, monkeypatch, rng):
  """4 devices with 12 rows each, room for 48 or for 6 on each."""
  monkeypatch.setattr(jax.lax, 'ragged_all_to_all', emulate)
  run = value_and_gradients(
    Dropless(dispatch='ragged_all_to_all', capacity_factor=capacity_factor), *mesh_and_rules(*SCOPE)
  )
  inputs, d_y = draw_inputs(rng, E=8)
  for routing in ('mixed', 'one expert', 'no expert'):
    expert_ids = draw_expert_ids(rng, routing, E=8)
    kept = expert_ids.copy()
    if capacity_factor is not None:
      for receiver in range(4):
        places = [place for place in np.ndindex(*expert_ids.shape) if expert_ids[place] // 2 == receiver]
        for place in sorted(places, key=lambda place: (place[0] // 2, expert_ids[place], place))[6:]:
          kept[place] = 8
    result = run(inputs, expert_ids, d_y)
    assert_is_reference(result, inputs, kept, d_y)
    num_assigned = np.sum(expert_ids < 8)
    expected = (num_assigned - np.sum(kept < 8)) / max(num_assigned, 1)
    np.testing.assert_allclose(result[2]['fraction_dropped'], expected, rtol=1e-6)
    assert result[2]['row_capacity'] == (48 if capacity_factor is None else 6)


@pytest.mark.parametrize('platform', ['tpu', 'cuda'])
def test_lowers_for_accelerators(platform, on_an_accelerator, rng):
  mesh, rules = mesh_and_rules(*SCOPE)
  inputs, _ = draw_inputs(rng)
  expert_ids = draw_expert_ids(rng, 'mixed')

  def loss(inputs):
    with sharding_scope(mesh, rules):
      return (compute(Dropless(dispatch='ragged_all_to_all'), inputs, expert_ids)[0] ** 2).sum()

  lowered = jax.jit(jax.grad(loss)).trace(inputs).lower(lowering_platforms=(platform,))
  # There and back, forward and backward; and the gates there, their gradients back.
  assert lowered.as_text().count('@ragged_all_to_all') == 6


def test_a_cpu_has_no_such_collective(rng):
  mesh, rules = mesh_and_rules(*SCOPE)
  with (
    sharding_scope(mesh, rules),
    pytest.raises(ValueError, match=r"does not run on CPU.*use dispatch='ring' or dispatch='padded_all_to_all'"),
  ):
    compute(Dropless(dispatch='ragged_all_to_all'), draw_inputs(rng)[0], draw_expert_ids(rng, 'mixed'))
