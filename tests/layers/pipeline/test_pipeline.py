"""A pipelined stack is the stack: same results, gradients and statistics, on 4 stages x data 2 fake devices.

Tolerances: float32; microbatches and shards are summed in another order.
"""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
import numpy as np
import pytest

from spmd_tasks.errors import UserError
from spmd_tasks.layers import (
  GatedFeedForward,
  Linear,
  RmsNorm,
  Statistics,
  TransformerBlock,
  TransformerStack,
  declare_weight,
)
from spmd_tasks.layers.attention import Attention
from spmd_tasks.layers.moe import CapacityGather, ExpertChoiceRouter, Experts, MixtureOfExperts
from spmd_tasks.layers.moe._balance import attach_gradient
from spmd_tasks.layers.pipeline import PipelinedStack
from spmd_tasks.sharding import DEFAULT_AXIS_RULES, MeshSpec, stage_axis_rules
from spmd_tasks.sharding.specs import sharding_scope
from spmd_tasks.sharding.weights import unbox_weights, weight_specs
from tests.layers.tiny_model import DroppedFfn, FfnBlock, assert_close

B, T, D = 16, 9, 12
STAGES = {'data': 2, 'stage': 4}
RULES = (
  ('batch', ('stage', 'data')),
  ('layers', 'stage'),
  *((name, None) for name in ('embed', 'mlp', 'heads', 'kv_heads', 'head_dim', 'norm', 'seq')),
  *((name, None) for name in ('act_embed', 'act_mlp', 'act_heads', 'act_kv_heads')),
)


class SquaredMean(Statistics):
  """Not linear in the tokens, as a balance loss is: the mean over microbatches would be another number."""

  total: jax.Array

  def values(self):
    return {'squared_mean': jnp.square(self.total / self.num_tokens)}


class ReportingFeedForward(nn.Module):
  """A feed-forward sublayer that reports on its tokens, and whose gradients show bubbles and identity layers.

  With x of 0 it is infinite, and its weight `load` has the number of tokens as its gradient, whatever the loss, as a
  balance bias has.
  """

  @nn.compact
  def __call__(self, x, segment_ids=None, *, train=False):
    y, _ = GatedFeedForward(hidden_dim=24)(x, segment_ids, train=train)
    is_real = (segment_ids != 0).astype(x.dtype)
    statistics = SquaredMean(num_tokens=jnp.sum(is_real), total=jnp.sum(is_real * jnp.abs(y).sum(-1)))
    y = y / jnp.sqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True))
    load = declare_weight(self, 'load', shape=(1,), init=nn.initializers.zeros, split_dims=(None,))
    return attach_gradient(y, load, jnp.sum(is_real)[None]), {'y': statistics}


class DocumentSums(nn.Module):
  """In place of attention, which takes most of the time to compile: sums over a document, by the distance of tokens."""

  @nn.compact
  def __call__(self, x, segment_ids, segment_pos, *, train=False):
    distance = segment_pos[:, :, None] - segment_pos[:, None, :]
    weights = jnp.where(segment_ids[:, :, None] == segment_ids[:, None, :], jnp.cos(distance), 0.0)
    return weights @ x / T


def make_block():
  return TransformerBlock(attention=DocumentSums(), ffn=ReportingFeedForward(), norm=RmsNorm())


@functools.cache
def make_mesh(**sizes):
  sizes = sizes or STAGES
  num_devices = int(np.prod(list(sizes.values())))
  return MeshSpec(axis_names=tuple(sizes), ici_mesh_shape=tuple(sizes.values())).build(jax.devices()[:num_devices])


@functools.cache
def inputs():
  rng = np.random.default_rng(0)
  segment_ids = np.sort(rng.integers(0, 4, (B, T)), axis=1)[:, ::-1]  # up to three documents and padding
  segment_pos = np.array([[t - list(row).index(row[t]) for t in range(T)] for row in segment_ids])
  x = rng.normal(size=(B, T, D))
  return jnp.asarray(x, 'float32'), jnp.asarray(segment_ids, 'int32'), jnp.asarray(segment_pos, 'int32')


@functools.cache
def make_weights(num_layers, make_block=make_block):
  """Away from the initial values, where mistakes hide."""
  stack = TransformerStack(block=make_block(), num_layers=num_layers)
  abstract = unbox_weights(jax.eval_shape(stack.init, jax.random.key(0), *inputs())['params'])
  rng = np.random.default_rng(1)
  return jax.tree.map(lambda leaf: jnp.asarray(0.3 * rng.normal(size=leaf.shape) + 0.1, 'float32'), abstract)


def loss_fn(stack, weights, x, rngs=None):
  y, aux = stack.apply({'params': weights}, x, *inputs()[1:], train=True, rngs=rngs)
  loss = jnp.sum(jnp.square(y) * jnp.cos(jnp.arange(D, dtype='float32'))[None, None]) / B + jnp.sum(aux['squared_mean'])
  return loss, (y, aux)


def grad_fn(stack, rngs=None):
  return jax.value_and_grad(functools.partial(loss_fn, stack, rngs=rngs), argnums=(0, 1), has_aux=True)


@functools.cache
def reference(num_layers):
  stack = TransformerStack(block=make_block(), num_layers=num_layers)
  return jax.device_get(jax.jit(grad_fn(stack))(make_weights(num_layers), inputs()[0]))


class Own(nn.Module):
  """A block that returns its output alone and takes no segments, as a TransformerStack allows."""

  is_declared: bool

  @nn.compact
  def __call__(self, x):
    return x + (Linear(output_dims=D)(x) if self.is_declared else nn.Dense(D)(x))


def test_own_blocks_are_drawn_as_in_a_stack():
  x, *_ = inputs()

  def drawn(is_declared):
    stack = PipelinedStack(block=Own(is_declared=is_declared), num_layers=4, num_microbatches=8)
    with sharding_scope(make_mesh(), RULES):
      return unbox_weights(jax.eval_shape(stack.init, jax.random.key(0), x)['params'])

  assert drawn(True)['layers']['Linear_0']['kernel'].shape == (4, D, D)
  with pytest.raises(UserError, match=r'Dense_0/bias .* no split dims'):
    drawn(False)


def split(weights, num_repeats):
  return jax.tree.map(lambda w: w.reshape(num_repeats, -1, *w.shape[1:]) if num_repeats > 1 else w, weights)


def merge(weights, num_repeats):
  return jax.tree.map(lambda w: w.reshape(-1, *w.shape[2:]) if num_repeats > 1 else w, weights)


def compile_grad(stack, num_layers, mesh=None, rules=RULES, rngs=None, make_block=make_block):
  mesh = mesh or make_mesh()

  def run(weights, x):
    with sharding_scope(mesh, rules):
      return grad_fn(stack, rngs)(weights, x)

  spec = jax.P(*[None] * (stack.num_repeats > 1), 'stage')
  weights = split(make_weights(num_layers, make_block), stack.num_repeats)
  even = num_layers // stack.num_repeats % mesh.shape['stage'] == 0
  weights_shardings = NamedSharding(mesh, spec if even else jax.P())
  x_sharding = NamedSharding(mesh, jax.P(('stage', 'data')))
  in_shardings = weights_shardings, x_sharding
  out_shardings = (None, in_shardings)
  compiled = jax.jit(run, in_shardings=in_shardings, out_shardings=out_shardings).lower(weights, inputs()[0]).compile()
  return compiled, jax.device_put((weights, inputs()[0]), in_shardings)


@functools.cache
def pipelined(num_layers, **settings):
  stack = PipelinedStack(block=make_block(), num_layers=num_layers, **settings)
  compiled, args = compile_grad(stack, num_layers)
  (loss, outputs), (weights, x) = jax.device_get(compiled(*args))
  return compiled.as_text(), ((loss, outputs), (merge(weights, stack.num_repeats), x))


# Layers that neither 4 stages nor 4 stages x 2 divide; 16 microbatches are of one row, which two devices share.
CASES = {
  'gpipe': (6, {'num_microbatches': 16, 'remat_policy': 'full'}),
  'circular': (6, {'num_microbatches': 8, 'schedule': 'circular', 'num_repeats': 2, 'remat_policy': 'dots'}),
  'circular, no delay': (6, {'num_microbatches': 4, 'schedule': 'circular', 'num_repeats': 2}),
  'one forward, one backward': (
    6,
    {'num_microbatches': 8, 'schedule': 'one_forward_one_backward', 'remat_policy': 'full'},
  ),
}


# By default experts in a circular pipeline have no delay (test_pipelined_experts.py), and GPipe's dropout is 1F1B's.
EXHAUSTIVE = ('gpipe', 'circular, no delay')


@pytest.mark.parametrize(
  'name', [pytest.param(name, marks=[pytest.mark.exhaustive] * (name in EXHAUSTIVE)) for name in CASES]
)
def test_results_gradients_and_statistics_are_those_of_the_stack(name):
  num_layers, settings = CASES[name]
  _, got = pipelined(num_layers, **settings)
  assert_close(got, reference(num_layers))
  load = got[1][0]['layers']['ffn']['load']
  np.testing.assert_array_equal(load, np.full((num_layers, 1), np.sum(inputs()[1] != 0)))  # each token once


def stage_neighbours(mesh):
  """The pairs of devices that are neighbours along the ring of stages."""
  ids = np.vectorize(lambda device: device.id)(mesh.devices)  # [data, stage]
  pairs = {(a, b) for row in ids for a, b in zip(row, np.roll(row, 1))}
  return pairs | {(b, a) for a, b in pairs}


@pytest.mark.parametrize('name', ['circular', 'one forward, one backward'])
def test_microbatches_go_from_neighbour_to_neighbour_and_nowhere_else(name):
  """Between stages: permutes of one microbatch. Within a stage an all-to-all sorts the rows of its two microbatches.

  Other collectives, of gradients and losses, have no activations.
  """
  num_layers, settings = CASES[name]
  text, _ = pipelined(num_layers, **settings)
  collectives = re.findall(r'= (.*?) (all-[\w-]+|reduce-scatter|collective-[\w-]+)\((.*)', text)
  permutes = [rest for _, kind, rest in collectives if kind == 'collective-permute']
  assert len(permutes) >= 4
  for rest in permutes:
    pairs = re.findall(r'(\d+),(\d+)', re.search(r'source_target_pairs=\{(.*?)\}\}', rest).group(1))
    assert {(int(a), int(b)) for a, b in pairs} <= stage_neighbours(make_mesh())
  assert 'all-to-all' in [kind for _, kind, _ in collectives]
  for shape, kind, _ in collectives:
    if kind == 'collective-permute':
      assert re.fullmatch(rf'\w+\[1,{T}(,{D})?\].*', shape), f'more than a row of one microbatch is sent: {shape}'
    elif kind == 'all-to-all':  # one shape for each device of a group: the groups are as large as a stage
      assert len(re.findall(r'\w+\[', shape)) == make_mesh().shape['data'], shape
    else:
      assert not re.search(rf'\b{T}\b', re.sub(r'\{.*?\}', '', shape)), f'{kind} of activations: {shape}'


def make_dropped():
  return DroppedFfn(ffn=ReportingFeedForward(), norm=RmsNorm())


def dropout_run(mesh=None, rules=RULES, **settings):
  stack = PipelinedStack(block=make_dropped(), num_layers=6, num_microbatches=8, **settings)
  compiled, args = compile_grad(stack, 6, mesh, rules, {'dropout': jax.random.key(3)}, make_dropped)
  outputs, (weights, x) = jax.device_get(compiled(*args))
  return outputs, (merge(weights, stack.num_repeats), x)


def test_dropout_does_not_depend_on_the_schedule_or_the_mesh():
  """GPipe is the circular schedule of one repeat."""
  circular = dropout_run(schedule='circular', num_repeats=2)
  (_, (y, _)), _ = circular
  assert 0.5**6 / 2 < np.mean(y == inputs()[0]) < 2 * 0.5**6  # what all of six layers drop
  stages_innermost = (('batch', ('data', 'stage')), *RULES[1:])
  assert_close(dropout_run(make_mesh(data=4, stage=2), stages_innermost, schedule='one_forward_one_backward'), circular)


def test_weights_start_as_the_stacks_and_say_where_they_lie():
  block = Own(is_declared=True)
  stacks = (
    TransformerStack(block=block, num_layers=4),
    PipelinedStack(block=block, num_layers=4, num_microbatches=4, schedule='circular', num_repeats=2),
  )
  expected, got = (jax.jit(stack.init)(jax.random.key(5), inputs()[0])['params'] for stack in stacks)
  jax.tree.map(np.testing.assert_array_equal, merge(unbox_weights(got), 2), unbox_weights(expected))
  plain, spec = (weight_specs(weights)['layers']['Linear_0']['kernel'] for weights in (expected, got))
  assert spec.canonical_shape == plain.shape == plain.canonical_shape
  assert spec.split_dims == (None, *plain.split_dims)
  assert plain.split_dims[0] == 'layers'
  assert (spec.stacked, spec.tags) == (2, plain.tags)


BIDIRECTIONAL = TransformerBlock(
  attention=Attention(num_heads=3, causal=False), ffn=GatedFeedForward(hidden_dim=24), norm=RmsNorm()
)
EXPERTS_CHOOSE = FfnBlock(
  ffn=MixtureOfExperts(
    router=ExpertChoiceRouter(num_experts=3), experts=Experts(num_experts=3, hidden_dim=5), computation=CapacityGather()
  )
)


@pytest.mark.parametrize(
  'block',
  [
    pytest.param(BIDIRECTIONAL, id='bidirectional attention'),
    pytest.param(EXPERTS_CHOOSE, id='experts choose', marks=pytest.mark.exhaustive),
  ],
)
def test_blocks_that_see_later_tokens_start_and_compute_as_in_the_stack(block):
  """Such blocks generate no text, and say so where a text is generated; a start draws weights."""
  plain = TransformerStack(block=block, num_layers=2)
  weights = jax.jit(plain.init)(jax.random.key(5), *inputs())['params']
  pipelined = PipelinedStack(block=block, num_layers=2, num_microbatches=4)

  def scoped(function, *args):
    with sharding_scope(make_mesh(replica=1, stage=2, data=1, mdl=1), stage_axis_rules(DEFAULT_AXIS_RULES)):
      return jax.jit(function)(*args)

  started = scoped(pipelined.init, jax.random.key(5), *inputs())['params']
  jax.tree.map(np.testing.assert_array_equal, unbox_weights(started), unbox_weights(weights))

  def run(stack, weights):
    y, _ = stack.apply({'params': weights}, *inputs(), train=True)
    return jnp.sum(jnp.where((inputs()[1] != 0)[..., None], jnp.sin(y), 0.0))  # nobody reads the rest

  compute = lambda stack: functools.partial(run, stack)
  plain_weights = unbox_weights(weights)
  assert_close(scoped(compute(pipelined), plain_weights), jax.jit(compute(plain))(plain_weights))


@functools.cache
def evaluate():
  return jax.jit(TransformerStack(block=make_block(), num_layers=4).apply)


@pytest.mark.parametrize('batch_size', [12, 6])
def test_eval_takes_any_batch(batch_size):
  """12 rows are cut into 4 microbatches where 8 are asked for; 6 cannot be cut for 4 stages, and pass in sequence."""
  stack = PipelinedStack(block=make_block(), num_layers=4, num_microbatches=8)
  args = jax.tree.map(lambda a: a[:batch_size], inputs())

  def run(weights, *args):
    with sharding_scope(make_mesh(stage=4), (('batch', 'stage'), ('layers', 'stage'), *RULES[2:])):
      return stack.apply({'params': weights}, *args)

  lowered = jax.jit(run).lower(make_weights(4), *args)
  assert ('collective_permute' in lowered.as_text()) == (batch_size == 12)
  x, segment_ids, segment_pos = inputs()  # of which the other rows are padding
  segment_ids = jnp.where(np.arange(B)[:, None] < batch_size, segment_ids, 0)
  y, aux = evaluate()({'params': make_weights(4)}, x, segment_ids, segment_pos)
  assert_close(lowered.compile()(make_weights(4), *args), (y[:batch_size], aux))


@pytest.mark.parametrize(
  'fields, message',
  [
    ({'schedule': 'interleaved'}, r"'interleaved' is unknown: choose one of \['gpipe', 'circular'"),
    ({'num_repeats': 2}, "num_repeats=2 needs schedule 'circular': set it to 1"),
    ({'num_repeats': 3, 'schedule': 'circular'}, 'num_layers=8 must be a multiple of num_repeats=3'),
  ],
)
def test_bad_settings_are_errors_when_built(fields, message):
  with pytest.raises(ValueError, match=message):
    PipelinedStack(**{'block': make_block(), 'num_layers': 8, 'num_microbatches': 8} | fields)


@pytest.mark.parametrize(
  'num_microbatches, rules, message',
  [
    (32, RULES, 'num_microbatches=32 of a pipeline must divide the batch of 16 rows'),
    (2, RULES, 'num_microbatches=2 must be a multiple of the 4 stages.* 4 is the nearest'),
    (8, (('layers', ('data', 'stage')), *RULES), "split 'layers' over .* name one axis"),
  ],
)
def test_what_does_not_fit_the_mesh_is_an_error_before_anything_is_compiled(num_microbatches, rules, message):
  stack = PipelinedStack(block=make_block(), num_layers=8, num_microbatches=num_microbatches)
  with sharding_scope(make_mesh(), rules), pytest.raises(ValueError, match=message):
    jax.eval_shape(stack.init, jax.random.key(0), *inputs())
