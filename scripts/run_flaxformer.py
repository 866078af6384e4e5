"""Computes the cases of tests/layers/moe/flaxformer_cases.py with Flaxformer's real MoeLayer, on 8 fake devices.

.venv/bin/python scripts/run_flaxformer.py PATH_OF_FLAXFORMER tests/data/moe/flaxformer.npz
"""

import os
import pathlib
import sys
from typing import Any

os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=8'

import jax
import jax.numpy as jnp
import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent


def make_layer(name):
  from flaxformer.architectures.moe import moe_layers, routing
  from flaxformer.components import dense
  from flaxformer_cases import CASES, EXPERTS, HIDDEN, setting

  shared = dict(
    router_weights=routing.RouterWeights(use_bias=False, dtype=jnp.float32),
    jitter_noise=0.0,
    dtype=jnp.float32,
    ignore_padding_tokens=setting(name, 'ignores_padding'),
  )
  choices = dict(num_selected_experts=setting(name, 'k'), batch_prioritized_routing=setting(name, 'by_score'))
  router = {
    'masked': lambda: routing.TokensChooseMaskedRouter(**shared, **choices),
    'scatter': lambda: routing.TokensChooseScatterRouter(**shared, **choices),
    'experts': lambda: routing.ExpertsChooseMaskedRouter(**shared),
  }[CASES[name][2]]()
  return moe_layers.MoeLayer(
    num_experts=EXPERTS,
    max_group_size=setting(name, 'max_group_size'),
    train_capacity_factor=1.25,
    eval_capacity_factor=0.7,
    expert=dense.MlpBlock(
      use_bias=False,
      intermediate_dim=HIDDEN,
      activations=('gelu', 'linear'),
      intermediate_dropout_rate=0.0,
      final_dropout_rate=0.0,
      dtype=jnp.float32,
    ),
    router=router,
    num_expert_partitions=setting(name, 'expert_partitions'),
    num_model_partitions=2,
    min_expert_capacity=2,
    dtype=jnp.float32,
  )


def run(name):
  from flaxformer_cases import AUX_WEIGHT, Z_WEIGHT, draw, setting
  from megablocks_cases import digest

  layer, arrays = make_layer(name), draw(name)
  cotangent = arrays.pop('cotangent')

  def loss(parts):
    experts = {part: {'kernel': parts[part]} for part in ('wi_0', 'wi_1', 'wo')}
    params = {'expert': experts, 'router': {'router_weights': {'w': {'kernel': parts['router']}}}}
    y, sown = layer.apply(
      {'params': params}, parts['x'], enable_dropout=setting(name, 'train'), mutable='intermediates'
    )
    values = {key: jnp.squeeze(value[0]) for key, value in sown['intermediates'].items()}
    total = jnp.sum(y * cotangent) + AUX_WEIGHT * values['auxiliary_loss'] + Z_WEIGHT * values['router_z_loss']
    return total, (y, values)

  gradients, (y, values) = jax.grad(loss, has_aux=True)(arrays)
  results = {'y': y} | values | {f'd_{part}': digest(gradient) for part, gradient in gradients.items()}
  return {f'{name}/{part}': np.asarray(value, np.float32) for part, value in results.items()}


def main():
  source, out = sys.argv[1:]
  sys.path[:0] = [source, str(ROOT / 'tests/layers/moe')]
  from flaxformer_cases import CASES

  results: dict[str, Any] = {}
  for name in CASES:
    results |= run(name)
  np.savez_compressed(out, **results)
  print(f'{len(CASES)} cases, {pathlib.Path(out).stat().st_size} bytes')


if __name__ == '__main__':
  main()
