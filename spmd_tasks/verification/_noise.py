"""Bounds the difference that rounding may make, as measured on the reference itself, leaf by leaf, step by step.

Another mesh sums in another order. That costs units in the last place, and what becomes of them depends on the model:
little in most gradients, everything in a gradient that is zero but for rounding, a jump where a router's two best
experts have almost the same score. So the reference's step is taken again from weights that were moved by one unit in
the last place. How far a leaf then moves is its *spread*, and a difference is allowed up to

    SPREADS x spread + ROUNDINGS x epsilon x the leaf's largest entry

Noise is no excuse for everything: a leaf whose allowance exceeds MAX_SHARE of its largest entry is not compared in that
step, and is reported as such. A jump is recognised by moving the weights a little further, in more directions.
"""

from collections.abc import Iterable, Mapping
import dataclasses
from typing import Any

import jax
import numpy as np

from spmd_tasks.runtime import TrainState
from spmd_tasks.verification._runner import Leaves

SPREADS, ROUNDINGS = 16.0, 64.0
MAX_SHARE = 1e-3
FLOAT32 = 2.0**-23  # the rounding unit
# A leaf far smaller than the largest of its kind may be all noise: its allowance is also good up to this share of that.
_MAX_SHARE_OF_LARGEST = 1e-5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
  """One leaf that differs: the step (from 1), its name, the largest difference, and what was allowed.

  `is_of_curve`: found in the curve of losses of training without a stop, not in a single step.
  """

  step: int
  leaf: str
  difference: float
  allowed: float
  is_of_curve: bool = False

  def __str__(self) -> str:
    return f'step {self.step}, {self.leaf}: differs by {self.difference:.3g}, allowed {self.allowed:.3g}'


def moved(state: TrainState, epsilon: float, rng: np.random.Generator) -> TrainState:
  """Returns the state with every weight moved by at most `epsilon` of itself."""
  return state.replace(weights=perturb(state.weights, epsilon, rng))


def perturb(tree: Any, epsilon: float, rng: np.random.Generator) -> Any:
  """Moves every float of a tree by at most `epsilon` of itself, up, down or not at all."""

  def move(x):
    x = np.asarray(x)
    if not np.issubdtype(x.dtype, np.floating) and x.dtype.name != 'bfloat16':
      return x
    steps = rng.integers(-1, 2, x.shape).astype(np.float32)
    return (x.astype(np.float32) * (1 + np.float32(epsilon) * steps)).astype(x.dtype)

  return jax.tree.map(move, tree)


def spread(reference: Leaves, samples: Iterable[Leaves]) -> dict[str, float]:
  """Returns by how much each leaf differs at most from the reference in the samples."""
  sizes = dict.fromkeys(reference, 0.0)
  for sample in samples:
    for name, value in reference.items():
      sizes[name] = max(sizes[name], distance(value, sample[name]))
  return sizes


def distance(a: np.ndarray, b: np.ndarray) -> float:
  """Returns the largest absolute difference; 0 where both are the same NaN or infinity, infinity where only one is."""
  a, b = (np.asarray(x, np.float64) for x in (a, b))
  if a.shape != b.shape:
    return float('inf')
  is_same = (a == b) | (np.isnan(a) & np.isnan(b))
  with np.errstate(invalid='ignore'):
    sizes = np.where(is_same, 0.0, np.abs(a - b))
  return float(np.max(np.where(np.isnan(sizes), np.inf, sizes), initial=0.0))


def largest(x: np.ndarray) -> float:
  """Returns the largest absolute entry that is finite."""
  x = np.abs(np.asarray(x, np.float64))
  return float(np.max(x, where=np.isfinite(x), initial=0.0))


def compare(
  reference: Leaves,
  other: Leaves,
  spreads: dict[str, float],
  epsilon: float,
  step: int,
  scales: Mapping[str, float] | None = None,
) -> tuple[list[Difference], list[Difference], list[str]]:
  """Compares all leaves of a step.

  Args:
    reference, other: leaves by name; a leaf that only one side has differs by infinity.
    spreads: by name, see `spread`.
    epsilon: the rounding unit of the computation.
    step: counted from 1.
    scales: name -> the size that roundings are relative to; of other leaves it is the largest entry.

  Returns:
    (leaves that differ by more than is allowed, largest first; all leaves; names of leaves that are only noise).
  """
  sizes = {name: largest(value) for name, value in reference.items()}
  largest_of: dict[str, float] = {}
  for name, size in sizes.items():
    kind = name.partition('/')[0]
    largest_of[kind] = max(largest_of.get(kind, 0.0), size)
  every, noise = [], []
  for name, value in reference.items():
    if name not in other:
      every.append(Difference(step=step, leaf=name, difference=float('inf'), allowed=0.0))
      continue
    noisy = SPREADS * spreads[name]
    if noisy > max(MAX_SHARE * sizes[name], _MAX_SHARE_OF_LARGEST * largest_of[name.partition('/')[0]]):
      noise.append(name)
      continue
    rounding = (scales or {}).get(name, sizes[name])
    allowed = noisy + ROUNDINGS * epsilon * rounding
    every.append(Difference(step=step, leaf=name, difference=distance(value, other[name]), allowed=allowed))
  wrong = [each for each in every if each.difference > each.allowed]
  return sorted(wrong, key=lambda each: -each.difference / max(each.allowed, 1e-30)), every, noise
