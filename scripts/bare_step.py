"""A train step of a dense language model, handwritten with plain jax.jit for one model and one mesh.

bench_step.py compares the framework's step with this one. It uses nothing of spmd_tasks: the transformer, the loss,
clipping and AdamW are written out, with the sharding constraints of the default axis rules. Angles and masks are
computed once for all layers, and nonfinite steps are not detected. Weights have the tree of lm.DenseLanguageModel.

Matmuls compute in `dtype`; weights, norms, angles and the loss stay in float32. With `remat` the backward pass
recomputes each layer except its attention. gpu_check.py sets both.

Shapes: B batch, T sequence, D model, H heads, K head dim, F ffn, V vocab, L layers.
"""

from collections.abc import Callable, Mapping
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

PEAK, FINAL_FRACTION = 3e-3, 0.1
BETA1, BETA2, EPSILON, WEIGHT_DECAY, CLIP, Z_LOSS = 0.9, 0.95, 1e-8, 0.1, 1.0, 1e-4
BATCH = ('replica', 'data')


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
  wide = x.astype(jnp.float32)
  return (wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + 1e-6) * scale).astype(x.dtype)


def rotate(x: jax.Array, sin: jax.Array, cos: jax.Array) -> jax.Array:
  first, second = jnp.split(x, 2, axis=-1)
  return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def logits_of(
  weights: Any,
  batch: Mapping[str, jax.Array],
  constrain: Callable[..., jax.Array],
  dtype: Any = jnp.float32,
  remat: bool = False,
  implementation: Any = None,
) -> jax.Array:
  """Returns float32 logits [B, T, V]; `implementation` is passed to jax.nn.dot_product_attention."""
  table, layers = weights['embedding']['table'], weights['stack']['layers']
  head_dim = layers['attention']['query']['kernel'].shape[-1]
  frequencies = 10_000.0 ** (-jnp.arange(0, head_dim, 2) / head_dim)
  angles = batch['segment_pos'][:, :, None, None] * frequencies
  sin, cos = jnp.sin(angles), jnp.cos(angles)  # [B, T, 1, K/2]
  segments, positions = batch['segment_ids'], jnp.arange(batch['ids'].shape[1])
  mask = (segments[:, :, None] == segments[:, None, :]) & (positions[:, None] >= positions[None, :])

  def before(x: jax.Array, w: Any) -> tuple[jax.Array, ...]:
    normed = rms_norm(x, w['attention_norm']['scale'])
    query, key, value = (
      constrain(
        jnp.einsum('BTD,DHK->BTHK', normed, w['attention'][name]['kernel'].astype(dtype)), BATCH, None, 'mdl', None
      )
      for name in ('query', 'key', 'value')
    )
    return rotate(query, sin, cos), rotate(key, sin, cos), value

  def after(x: jax.Array, attended: jax.Array, w: Any) -> jax.Array:
    out = jnp.einsum('BTHK,HKD->BTD', attended, w['attention']['out']['kernel'].astype(dtype))
    x = constrain(x + out, BATCH, None, None)
    normed = rms_norm(x, w['ffn_norm']['scale'])
    gate = constrain(normed @ w['ffn']['gate']['kernel'].astype(dtype), BATCH, None, 'mdl')
    up = constrain(normed @ w['ffn']['up']['kernel'].astype(dtype), BATCH, None, 'mdl')
    return constrain(x + (jax.nn.silu(gate) * up) @ w['ffn']['down']['kernel'].astype(dtype), BATCH, None, None)

  if remat:
    before, after = jax.checkpoint(before), jax.checkpoint(after)

  def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
    query, key, value = before(x, w)
    attended = jax.nn.dot_product_attention(query, key, value, mask=mask[:, None], implementation=implementation)
    return after(x, attended, w), None

  # Looked up with D gathered and V split, so that no rows are exchanged along D.
  table = table.astype(dtype)
  x = constrain(table, 'mdl', None)[batch['ids']] * jnp.asarray(math.sqrt(table.shape[1]), dtype)
  x = constrain(x, BATCH, None, None)
  x, _ = jax.lax.scan(layer, x, layers)
  normed = rms_norm(x, weights['final_norm']['scale'])
  kernel = weights['embedding'].get('softmax_kernel')
  kernel = table.T if kernel is None else kernel.astype(dtype)
  return constrain(jnp.matmul(normed, kernel, preferred_element_type=jnp.float32), BATCH, None, 'mdl')


def loss_of(weights: Any, batch: Mapping[str, jax.Array], constrain: Callable[..., jax.Array], **how: Any) -> jax.Array:
  """Mean cross-entropy plus z-loss over the batch's tokens; `how` is of `logits_of`."""
  logits = logits_of(weights, batch, constrain, **how)
  log_normalizer = jax.nn.logsumexp(logits, axis=-1)
  # Compared and summed, not gathered: the logits are sharded over V.
  is_label = batch['labels'][..., None] == jnp.arange(logits.shape[-1])
  per_token = log_normalizer - jnp.sum(jnp.where(is_label, logits, 0.0), axis=-1) + Z_LOSS * log_normalizer**2
  return jnp.sum(per_token * batch['weights']) / jnp.sum(batch['weights'])


def learning_rate_at(step: jax.Array, total_steps: int) -> jax.Array:
  warmup = round(0.05 * total_steps)
  progress = jnp.clip((step - warmup) / (total_steps - warmup), 0.0, 1.0)
  cosine = PEAK * (FINAL_FRACTION + (1 - FINAL_FRACTION) * 0.5 * (1 + jnp.cos(jnp.pi * progress)))
  return jnp.where(step < warmup, PEAK * step / warmup, cosine)


def adamw(path: Any, w: jax.Array, g: jax.Array, mu: jax.Array, nu: jax.Array, step: jax.Array, rate: jax.Array):
  mu = BETA1 * mu + (1 - BETA1) * g
  nu = BETA2 * nu + (1 - BETA2) * g * g
  count = step.astype(jnp.float32) + 1
  direction = mu / (1 - BETA1**count) / (jnp.sqrt(nu / (1 - BETA2**count)) + EPSILON)
  decay = 0.0 if path[-1].key == 'scale' else WEIGHT_DECAY
  return w - rate * (direction + decay * w), mu, nu


def init_state(weights: Any) -> dict[str, Any]:
  """Returns the state at step 0, with copies of the weights, as the step donates its state."""
  mu, nu = (jax.tree.map(jnp.zeros_like, weights) for _ in range(2))
  return {'step': jnp.zeros((), jnp.int32), 'weights': jax.tree.map(jnp.copy, weights), 'mu': mu, 'nu': nu}


def make_step(padded: Any, batch_sharding: NamedSharding, total_steps: int, true: Any = None, **options: Any) -> Any:
  """Returns the jitted `(state, batch) -> (state, {'loss', 'grad_norm'})`, which donates the state.

  Args:
    padded: the stored shapes and shardings of the weights.
    batch_sharding: the sharding of the batch.
    total_steps: the length of the learning rate schedule.
    true: the shapes of the weights without padding, if they are stored with padding.
    options: dtype, remat and implementation of `logits_of`.
  """
  mesh = batch_sharding.mesh

  def constrain(x: jax.Array, *split_dims: Any) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*split_dims)))

  def unpad(x: jax.Array, stored: Any, shape: Any) -> jax.Array:
    return jax.lax.with_sharding_constraint(jax.lax.slice(x, (0,) * x.ndim, shape.shape), stored.sharding)

  def pad(x: jax.Array, stored: Any) -> jax.Array:
    x = jax.lax.with_sharding_constraint(x, stored.sharding)
    return jnp.pad(x, [(0, new - old) for new, old in zip(stored.shape, x.shape)])

  def step(state: dict[str, Any], batch: dict[str, jax.Array]) -> tuple[dict[str, Any], dict[str, jax.Array]]:
    batch = {name: constrain(x, BATCH, None) for name, x in batch.items()}
    count, trees = state['step'], [state[name] for name in ('weights', 'mu', 'nu')]
    if true is not None:
      trees = [jax.tree.map(unpad, tree, padded, true) for tree in trees]
    weights, mu, nu = trees
    loss, grads = jax.value_and_grad(loss_of)(weights, batch, constrain, **options)
    grad_norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
    grads = jax.tree.map(lambda g: g * (CLIP / jnp.maximum(grad_norm, CLIP)), grads)
    rate = learning_rate_at(count, total_steps)
    updates = jax.tree_util.tree_map_with_path(
      lambda path, w, g, mu, nu: adamw(path, w, g, mu, nu, count, rate), weights, grads, mu, nu
    )
    trees = jax.tree.transpose(jax.tree.structure(weights), jax.tree.structure((0, 0, 0)), updates)
    if true is not None:
      trees = [jax.tree.map(pad, tree, padded) for tree in trees]
    state = dict(zip(('weights', 'mu', 'nu'), trees), step=count + 1)
    return state, {'loss': loss, 'grad_norm': grad_norm}

  shardings = jax.tree.map(lambda stored: stored.sharding, padded)
  replicated = NamedSharding(mesh, P())
  state_shardings = {'step': replicated, 'weights': shardings, 'mu': shardings, 'nu': shardings}
  return jax.jit(
    step,
    in_shardings=(state_shardings, batch_sharding),
    out_shardings=(state_shardings, replicated),
    donate_argnums=0,
  )
