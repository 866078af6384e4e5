"""Adds what layers report, such as the balance losses of routers, to a loss.

Shapes: L layers, E experts.
"""

from collections.abc import Mapping
import math
from typing import Any

import jax
import jax.numpy as jnp

from spmd_tasks.errors import UserError


def with_aux_losses(
  settings: Any,
  loss: jax.Array,
  weight: jax.Array,
  metrics: Mapping[str, tuple[jax.Array, jax.Array]],
  aux: Mapping[str, jax.Array],
) -> tuple[jax.Array, dict[str, tuple[jax.Array, jax.Array]]]:
  """Implements `WithAuxLosses.add_aux_losses`.

  Raises a UserError: `aux_loss_weights` and `aux` do not fit together, or an entry has the name of another metric.
  """
  weights = settings.aux_loss_weights
  _check(weights, settings.num_aux_layers, aux)
  if taken := sorted({'loss', *metrics}.intersection(aux)):
    raise UserError(f"the entries {taken} of aux have the names of the loss's own metrics: rename them in the layer.")
  metrics = dict(metrics)
  for name, values in aux.items():
    mean = jnp.mean(jnp.atleast_1d(values).astype(jnp.float32), axis=0)
    mean = jnp.where(weight == 0, 0.0, mean)  # whatever the layers report for a batch of padding
    metrics[name] = (mean, weight)
    if name in weights:
      loss = loss + weights[name] * mean
  return loss, metrics


def _check(weights: Mapping[str, float], expected_layers: int | None, aux: Mapping[str, jax.Array]) -> None:
  """Raises a UserError if an aux loss is missing, is a vector, or is not reported by `num_aux_layers` layers."""
  for name in weights:
    if name not in aux:
      raise UserError(
        f'aux_loss_weights names {name!r}, but the model reports {sorted(aux)}: correct the name, or use a layer '
        'that computes it.'
      )
    shape = jnp.shape(aux[name])
    if len(shape) > 1:
      raise UserError(
        f'the aux loss {name!r} has shape {shape}, but a loss has one value per layer: remove it from aux_loss_weights.'
      )
    num_layers = math.prod(shape)
    if expected_layers is not None and num_layers != expected_layers:
      raise UserError(
        f'{num_layers} layers report the aux loss {name!r}, but num_aux_layers is {expected_layers}: correct it, '
        'or pass on the aux of every layer and pipeline stage.'
      )
