"""The claim `coordinates`: with muP, a model starts and learns alike at all widths.

It trains the shrunk experiment for some steps on one batch, at several widths, and measures

* `start`: the root mean square of every activation at the start;
* `weight`: by how much the change of every weight can change what reads it: the largest singular value times
  sqrt(inputs / outputs) for kernels (Yang et al., arXiv 2310.17813), the root mean square for tables and vectors;
* `change`: the root mean square of every activation's change.

Each grows like a power of the width, whose exponent muP makes 0 ("coordinate check": Yang et al., arXiv 2203.03466,
appendix D.1). It is not exactly 0: the logits and a router's logits start as sums of random terms, which shrink like
1 / sqrt(width), and the gradients of different tokens align less in a wide kernel.

Every layer's output is one activation, named by the layer's path; the layers of a stack are one.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import functools
import math
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from spmd_tasks.errors import UserError
from spmd_tasks.experiment import Job, partition_job
from spmd_tasks.learning.layer_weights import layer_inputs, layer_matrix
from spmd_tasks.learning.schedules import learning_rate_at
from spmd_tasks.sharding import WeightSpec
from spmd_tasks.sharding.weights import leaves_by_name
from spmd_tasks.verification._cases import Bench, Case, Verdict, skipped_case
from spmd_tasks.verification._settings import Setting, build_job, draw_batches

# Fields of recipes that grow with the width; the size of a head stays.
_WIDTHS = ('model_dims', 'num_heads', 'num_kv_heads', 'hidden_dims', 'shared_hidden_dims', 'dense_hidden_dims')
_KEPT = ('batch_size', 'num_layers', 'num_train_steps')  # which follow from the width in a Ladder
_FACTORS = (1, 2, 4, 8)  # by default, of the shrunk width
_NUM_STEPS = 4
_NUM_SEEDS = 2
_MAX_EXPONENT = 0.25
_MIN_EXPONENTS = {'activation': -0.25, 'weight': -0.5, 'output': -0.75}
_MAX_SINGULAR_ITERATIONS = 30

When = Literal['start', 'weight', 'change']
_PHRASES = {'start': '{} at the start', 'weight': 'the change of {}', 'change': 'the change of {}'}


def parse_widths(text: str) -> tuple[int, ...]:
  """Parses the flag --widths. Raises a UserError if it is not at least two different widths, such as '64,256'."""
  words = text.split(',')
  widths = tuple(int(word) for word in words if word.strip().isdecimal())
  if len(widths) < len(words) or len({*widths}) < 2 or min(widths) < 1:
    raise UserError(f"--widths {text} must be two different positive numbers or more, such as '64,256'.")
  return widths


def coordinate_cases(bench: Bench) -> Iterator[Case]:
  """Yields the case of an experiment with muP, or one that is skipped."""
  values, learner = bench.source.values, getattr(bench.source.base.task, 'learner', None)
  if getattr(getattr(learner, 'optimizer', None), 'base_width', None) is None:
    yield skipped_case('coordinates', 'all widths', 'the experiment does not use muP (mup_base_width)')
    return
  if missing := [name for name in ('model_dims', 'num_heads', 'hidden_dims') if name not in values]:
    yield skipped_case('coordinates', 'all widths', f'the experiment has no field {missing[0]} to make it wider')
    return
  widths = bench.widths or tuple(factor * int(values['model_dims']) for factor in _FACTORS)
  subject = f'widths {", ".join(map(str, widths))}'
  yield Case(claim='coordinates', subject=subject, decide=functools.partial(_compare, widths=widths))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Growth:
  """How a size grows with the width.

  Attributes:
    when, name: what is measured, and the path of its weight or layer.
    sizes: by width.
    exponent: of the width, by least squares.
    excess: by how much the exponent is outside of what is allowed; 0 or less: it is inside.
  """

  when: When
  name: str
  sizes: Sequence[float]
  exponent: float
  excess: float


def _compare(bench: Bench, widths: Sequence[int]) -> Verdict:
  return _verdict(_growths([_Sizes.measure(bench, width) for width in widths], widths), widths)


def _verdict(growths: Sequence[_Growth], widths: Sequence[int]) -> Verdict:
  for when in _PHRASES:  # a weight that starts wrong also changes wrong, and activations follow the weights
    worst = max((growth for growth in growths if growth.when == when), key=lambda growth: growth.excess)
    if worst.excess > 0:
      sizes = ', '.join(f'{size:.3g}' for size in worst.sizes)
      subject = _PHRASES[when].format(worst.name)
      limit = worst.exponent - math.copysign(worst.excess, worst.exponent)
      return Verdict(
        status='BROKEN',
        detail=f'{subject} grows like width^{worst.exponent:.2f} (allowed: {limit:.2f}): {sizes}',
        failure={'leaf': worst.name, 'when': when, 'exponent': worst.exponent, 'widths': list(widths)},
      )
  closest = max(growths, key=lambda growth: growth.excess)
  phrase = f'{_PHRASES[closest.when].format(closest.name)}, like width^{closest.exponent:.2f}'
  return Verdict(status='held', detail=f'{len(growths)} sizes, {_NUM_STEPS} steps; closest to its limit: {phrase}')


def _growths(by_width: Sequence['_Sizes'], widths: Sequence[int]) -> list[_Growth]:
  growths = []
  for when, name in by_width[0].sizes:
    sizes = [float(measured.sizes[when, name]) for measured in by_width]
    is_output = len({measured.num_elements.get(name) for measured in by_width}) == 1  # such as logits
    lowest = _MIN_EXPONENTS['weight' if when == 'weight' else 'output' if is_output else 'activation']
    exponent = float(np.polyfit(np.log(widths), np.log(np.maximum(sizes, np.finfo(np.float32).tiny)), 1)[0])
    excess = max(exponent - _MAX_EXPONENT, lowest - exponent)
    growths.append(_Growth(when=when, name=name, sizes=sizes, exponent=exponent, excess=excess))
  return growths


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Sizes:
  """The sizes at one width, means over the seeds, in the order of the forward pass.

  Attributes:
    sizes: by what is measured, and the path of its weight or layer.
    num_elements: of activations, by path.
  """

  sizes: Mapping[tuple[When, str], float]
  num_elements: Mapping[str, int]

  @classmethod
  def measure(cls, bench: Bench, width: int) -> '_Sizes':
    job = _with_constant_rate(build_job(bench.source, Setting(overrides=_overrides(bench.source.values, width))))
    model = partition_job(job, job.experiment.mesh_spec().build(jax.devices()[:1]))
    [batch] = draw_batches(job.train_input, 1, bench.seed)
    names: list[str] = []

    @jax.jit
    def activations(variables: Any) -> dict[str, jax.Array]:
      captured = _capture(job.task.model, variables, batch)
      names[:] = captured
      return captured

    sizes: dict[tuple[When, str], list[float]] = {}
    for seed in range(bench.seed, bench.seed + _NUM_SEEDS):
      state = model.init(seed)
      old, old_weights = jax.device_get((activations(state.variables), state.weights))
      for _ in range(_NUM_STEPS):
        state, _ = model.train_step(state, model.train_step.place(batch))
      new, new_weights = jax.device_get((activations(state.variables), state.weights))
      for name in names:
        sizes.setdefault(('start', name), []).append(_rms(old[name]))
        sizes.setdefault(('change', name), []).append(_rms(new[name] - old[name]))
      effects = jax.tree.map(lambda spec, x, y: _effect(y - x, spec), model.weight_specs, old_weights, new_weights)
      for name, effect in leaves_by_name(effects).items():
        sizes.setdefault(('weight', name), []).append(effect)
    return cls(
      sizes={key: float(np.mean(values)) for key, values in sizes.items()},
      num_elements={name: old[name].size for name in names},
    )


def _overrides(values: Mapping[str, Any], width: int) -> tuple[str, ...]:
  """Returns the overrides for a width; it multiplies all fields in _WIDTHS."""
  own = values['model_dims']
  sizes = {name: values[name] for name in _WIDTHS if isinstance(values.get(name), int)}
  if uneven := [f'{name} = {size}' for name, size in sizes.items() if size * width % own]:
    raise UserError(f'width {width} is {width / own:g} times model_dims = {own}, and {uneven[0]} is not divisible so.')
  kept = {name: values[name] for name in _KEPT if name in values}
  return tuple(f'{name}={size * width // own}' for name, size in sizes.items()) + tuple(
    f'{name}={value}' for name, value in kept.items()
  )


def _with_constant_rate(job: Job) -> Job:
  """Returns the job with the highest learning rate of its schedule at every step."""
  task = job.task.as_task('--mode verify')
  learner: Any = task.learner
  steps = jnp.arange(job.experiment.num_train_steps)
  rates = jax.vmap(functools.partial(learning_rate_at, learner.optimizer.learning_rate))(steps)
  optimizer = dataclasses.replace(learner.optimizer, learning_rate=float(jnp.max(rates)))
  return dataclasses.replace(
    job, task=dataclasses.replace(task, learner=dataclasses.replace(learner, optimizer=optimizer))
  )


def _rms(x: np.ndarray) -> float:
  return float(np.sqrt(np.mean(np.square(x, dtype=np.float64))))


def _effect(change: np.ndarray, spec: WeightSpec) -> float:
  """Returns by how much the change of a weight can change its output, for inputs of size 1; a mean over matrices."""
  if not layer_inputs(spec):
    return _rms(change)
  matrices = change.reshape(-1, *layer_matrix(spec))
  vectors = np.random.default_rng(0).normal(size=(len(matrices), matrices.shape[-1], 1))
  norms = np.ones(len(matrices))
  for _ in range(_MAX_SINGULAR_ITERATIONS):  # a power iteration: an SVD of a large kernel takes seconds
    norms = np.linalg.norm(vectors, axis=(1, 2))
    vectors = np.swapaxes(matrices, 1, 2) @ (matrices @ (vectors / np.maximum(norms, 1e-30)[:, None, None]))
  return float(np.mean(np.sqrt(norms))) * math.sqrt(matrices.shape[1] / matrices.shape[2])


def _capture(model: nn.Module, variables: Any, batch: Mapping[str, Any]) -> dict[str, jax.Array]:
  """Returns the outputs of all layers, by path, in the order in which they are computed."""
  order: list[tuple[str, ...]] = []

  def is_activation(module: nn.Module, method: str) -> bool:
    if method not in ('__call__', 'attend') or isinstance(module, nn.Dropout):
      return False
    order.append((*module.path, method))
    return True

  _, captured = model.apply(variables, batch, capture_intermediates=is_activation, mutable=['intermediates'])
  outputs = {}
  for path in dict.fromkeys(order):
    node: Any = captured['intermediates']
    for key in path:
      node = node[key]
    [output] = node
    output = output[0] if isinstance(output, tuple) else output
    output = getattr(output, 'logits', output)  # of a router
    if isinstance(output, jax.Array) and jnp.issubdtype(output.dtype, jnp.floating):
      outputs['/'.join(path).removesuffix('/__call__')] = output
  return outputs
