"""Jobs that run in this process share what JAX traces and compiles of equal tasks on equal meshes: most of their time.

Usage:

    with shared_models():
      main.run(...)

What a job computes with is the same as without: a PartitionedModel is a function of its arguments, and holds no state
of a job. Processes that the tests start trace and compile for themselves.
"""

from collections import deque
from collections.abc import Callable, Iterator
import contextlib
import functools
import re
import sys
from typing import Any
from unittest import mock

from spmd_tasks import experiment
from spmd_tasks.programs import decode, hooks, judges, samples


class Shared:
  """A function that is called once for equal arguments, which need not be hashable; the results
  that were asked for last are kept.

  Partial functions are equal where their functions and arguments are.
  """

  def __init__(self, function: Callable[..., Any], max_kept: int):
    self._function = function
    self._kept: deque[tuple[Any, Any]] = deque(maxlen=max_kept)

  def __call__(self, *args: Any, **settings: Any) -> Any:
    asked = [*map(_parts, args), {name: _parts(value) for name, value in settings.items()}]
    place = next((place for place, (known, _) in enumerate(self._kept) if known == asked), None)
    if place is None:
      found = asked, self._function(*args, **settings)
    else:
      found = self._kept[place]
      del self._kept[place]
    self._kept.append(found)
    return found[1]

  def forget(self) -> None:
    self._kept.clear()


def _parts(value: Any) -> Any:
  if type(value).__name__ == 'PaxTask':  # tasks of Paxml are equal to themselves alone
    without_end = re.sub(r'^train\.num_train_steps.*', '', value.task.hparams.to_text(), flags=re.MULTILINE)
    return without_end, value.input_spec, value.eval_with_ema, value.num_microbatches, value.max_consecutive_skips
  return (value.func, value.args, value.keywords) if isinstance(value, functools.partial) else value


def _partition(*args: Any, **settings: Any) -> Any:
  model = _partition_spmd_model(*args, **settings)
  for name in ('batch_step', 'eval_step', 'forward_step'):
    vars(model)[name] = Shared(functools.partial(getattr(type(model), name), model), max_kept=8)  # it is frozen
  return model


_partition_spmd_model = experiment.partition_spmd_model
_models = Shared(_partition, max_kept=10)
_decode_steps = Shared(decode.DecodeSteps, max_kept=3)
_model_flops = Shared(hooks.model_flops, max_kept=6)
_WITH_DECODE_STEPS = ('spmd_tasks.loading', 'spmd_tasks.tuning.rollout_sampler')  # imported by who uses them


@contextlib.contextmanager
def shared_models() -> Iterator[None]:
  with contextlib.ExitStack() as patches:
    patches.enter_context(mock.patch.object(experiment, 'partition_spmd_model', _models))
    patches.enter_context(mock.patch.object(hooks, 'model_flops', _model_flops))
    extensions = [sys.modules[name] for name in _WITH_DECODE_STEPS if name in sys.modules]
    for module in (decode, judges, samples, *extensions):
      patches.enter_context(mock.patch.object(module, 'DecodeSteps', _decode_steps))
    yield


def forget() -> None:
  """Lets go of the compiled programs."""
  _models.forget()
  _decode_steps.forget()
  _model_flops.forget()
