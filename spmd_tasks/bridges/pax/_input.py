"""PaxInput: a `praxis.base_input.BaseInput` as an input of this package, with a state that checkpoints save.

    train_input = PaxInput(config=my_experiment.train_datasets()[0])

The state is the input's own (`get_state`) if its class has one, or else the number of batches, which a resumed job
reads and drops. The log says which.

A batch of Pax is a NestedMap; a batch of this package is flat, with names such as `target/ids`. In a key, `/` is
written as `~1` and `~` as `~0` (RFC 6901). The elements of a list are `views/[0]`, ....
"""

import base64
from collections.abc import Callable, Mapping, Sequence
import contextlib
import dataclasses
import functools
import re
from typing import Any

from absl import logging
import jax
import jax.numpy as jnp
import numpy as np
from praxis import base_hyperparams, py_utils

from spmd_tasks.errors import UserError, own_code_errors
from spmd_tasks.inputs import Batch, InputIterator, State
from spmd_tasks.inputs.base import check_state

_END = object()  # marks the end of an input


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PaxInput:
  """An input described by a config of Praxis.

  Attributes:
    config: the `pax_fiddle.Config` of a BaseInput. Its batch size is per process, as in Pax.
    is_training: whether it is the training input, which must not end. An eval input has `eval_loop_num_batches`
      batches, or all if that is -1 or None.
  """

  config: Any
  is_training: bool = True

  @property
  def batch_size(self) -> int:
    """The global batch size."""
    return next(iter(self.element_spec().values())).shape[0]

  def element_spec(self) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the global shapes and dtypes of the first batch of a new input."""
    return dict(self._spec)

  @functools.cached_property
  def _spec(self) -> dict[str, jax.ShapeDtypeStruct]:
    pax_input = self.make(0, jax.process_count())
    with self._errors('get_next()'):
      batch = next(iter(functools.partial(next_batch, pax_input), object()), _END)
    if batch is _END:
      raise UserError(
        f'the input {self.config.name!r} has no batch: let {self.config.cls.__name__}.get_next return at least one.'
      )
    if not isinstance(batch, Mapping):
      raise UserError(
        f'{self.config.cls.__name__}.get_next of the input {self.config.name!r} returns a {type(batch).__name__}: '
        'return a NestedMap of arrays.'
      )
    spec = {}
    for name, rows in flatten_batch(batch).items():
      if rows.ndim == 0:
        raise UserError(f'the input {self.config.name!r} has {name!r} without a batch dim: add one.')
      spec[name] = jax.ShapeDtypeStruct((rows.shape[0] * jax.process_count(), *rows.shape[1:]), rows.dtype)
    return spec

  @property
  def shapes_may_vary(self) -> bool:
    """Whether a batch may have another shape than the first, such as the last batch of an eval.

    The step is then compiled again. With several processes, batches must have one shape.
    """
    return not self.is_training and jax.process_count() == 1

  def make_iterator(self, shard_index: int = 0, shard_count: int = 1) -> 'PaxInputIterator':
    """Returns an iterator for one process, which is Pax's infeed host `shard_index` of `shard_count`.

    Raises a UserError if this is the training input of an experiment without a training dataset.
    """
    if self.is_training and not self.config.is_training:
      raise UserError(
        f'the experiment has no training dataset, only datasets such as {self.config.name!r}: set is_training=True for '
        'one of datasets().'
      )
    num_batches = None if self.is_training else self.config.eval_loop_num_batches
    limit = None if num_batches in (None, -1) else num_batches
    return PaxInputIterator(functools.partial(self.make, shard_index, shard_count), shard_count, limit)

  def reshard_states(self, states: Sequence[State], shard_count: int) -> list[State]:
    """Returns the states unchanged.

    Raises a UserError if the number of processes changed, because only the input knows which rows a process reads.
    """
    if len(states) != shard_count:
      raise UserError(
        f'the input {self.config.name!r} was saved by {len(states)} processes and cannot be resumed exactly by '
        f'{shard_count}: run with {len(states)}, or start a new job from the weights (init_from).'
      )
    return list(states)

  def make(self, shard_index: int, shard_count: int) -> Any:
    """Builds Praxis's input object of one process."""
    config = self.config.clone()
    if not config.num_infeed_hosts:  # if it is set, the experiment distributes the data itself
      config.num_infeed_hosts, config.infeed_host_index = shard_count, shard_index
    if not 0 <= config.infeed_host_index < config.num_infeed_hosts:
      raise UserError(
        f'the input {config.name!r} has infeed_host_index = {config.infeed_host_index}, which must be at least 0 and '
        f'less than num_infeed_hosts = {config.num_infeed_hosts}: leave both at 0 to use the number of this process.'
      )
    with self._errors('the construction'):
      return base_hyperparams.instantiate(config)

  def _errors(self, what: str) -> contextlib.AbstractContextManager[None]:
    cls = self.config.cls
    return own_code_errors(f'{what} of the input {self.config.name!r} ({cls.__name__})', part=cls)


class PaxInputIterator(InputIterator):
  """Yields the flattened batches of one process, and counts them."""

  def __init__(self, make: Callable[[], Any], shard_count: int, limit: int | None):
    self._make, self._shard_count, self._limit = make, shard_count, limit
    self._input = make()
    self._count = 0

  def __next__(self) -> Batch:
    if self._limit is not None and self._count >= self._limit:
      raise StopIteration
    batch = flatten_batch(next_batch(self._input))
    self._count += 1
    return batch

  def get_state(self) -> State:
    """Returns the number of batches and, if the input has one, its own state."""
    state: State = {'num_batches': self._count, 'shard_count': self._shard_count}
    try:
      own_state = self._input.get_state()
    except NotImplementedError:
      return state
    return state | {'own_state': base64.b64encode(own_state).decode()}

  def set_state(self, state: State) -> None:
    """Continues after the batch at which `state` was returned.

    Raises a UserError if another kind of input or another number of processes saved the state.
    """
    check_state(state, {'shard_count': self._shard_count})
    self._input, self._count = self._make(), state['num_batches']
    name = type(self._input).__name__
    if 'own_state' in state:
      logging.info('The input %s is restored from its own state.', name)
      self._input.set_state(base64.b64decode(state['own_state']))
      return
    logging.info('The input %s has no state of its own: reading and dropping %d batches.', name, self._count)
    for number in range(self._count):
      try:
        next_batch(self._input)
      except StopIteration as error:
        raise UserError(
          f'the input {name} ends after {number} batches, but the checkpoint was saved after {self._count}: use the '
          'same data, or start a new job from the weights (init_from).'
        ) from error

  def close(self) -> None:
    """Drops the input."""
    self._input = None


def next_batch(pax_input: Any) -> Any:
  """Returns the next batch of a Praxis input, a NestedMap; raises StopIteration at the end."""
  try:
    return pax_input.get_next()
  except Exception as error:
    if type(error).__name__ == 'OutOfRangeError':  # TensorFlow's StopIteration
      raise StopIteration from error
    raise


def flatten_batch(batch: Any) -> dict[str, np.ndarray]:
  """Returns the arrays of a NestedMap by path, without strings, and with 64-bit numbers converted to 32 bits."""
  arrays = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
    array = np.asarray(leaf)
    if array.dtype.kind in 'biufcV':  # V: bfloat16
      arrays['/'.join(map(_key_name, path))] = array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)
  return arrays


def string_leaves(batch: Any) -> dict[str, Any]:
  """Returns the strings of a NestedMap as a nested dict."""
  strings: dict[str, Any] = {}
  for name, value in batch.items():
    if hasattr(value, 'items'):
      if nested := string_leaves(value):
        strings[name] = nested
    elif np.asarray(value).dtype.kind in 'OSU':
      strings[name] = value
  return strings


def complete_tokens(batch: Mapping[str, Any]) -> dict[str, Any]:
  """Adds the fields of a Praxis language model's batch that are missing; each row of `ids` [B, T] is one document."""
  if 'ids' not in batch:
    return dict(batch)
  ids = jnp.asarray(batch['ids'])
  ones = jnp.ones(ids.shape, jnp.int32)
  positions = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
  batch = {'labels': ids, 'segment_ids': ones, 'segment_pos': positions} | dict(batch)
  paddings = (batch['segment_ids'] == 0).astype(jnp.float32)
  return {'paddings': paddings, 'weights': 1 - paddings} | batch


def to_nested_map(batch: Mapping[str, Any]) -> py_utils.NestedMap:
  """Converts a flat batch to a NestedMap; the inverse of `flatten_batch`, except that tuples become lists."""
  nested: dict[str, Any] = {}
  for name, value in batch.items():
    *branches, leaf = (key.replace('~1', '/').replace('~0', '~') for key in name.split('/'))
    node = nested
    for branch in branches:
      node = node.setdefault(branch, {})
    node[leaf] = value
  return _nested_maps(nested)


def _key_name(key: Any) -> str:
  if isinstance(key, jax.tree_util.SequenceKey):
    return f'[{key.idx}]'
  return jax.tree_util.keystr((key,), simple=True).replace('~', '~0').replace('/', '~1')


def _nested_maps(node: Any) -> Any:
  """Converts dicts to NestedMaps, and dicts with the keys `[0]`, `[1]`, ... to lists."""
  if not isinstance(node, dict):
    return node
  children = {key: _nested_maps(child) for key, child in node.items()}
  if children and all(re.fullmatch(r'\[\d+\]', key) for key in children):
    return [children[key] for key in sorted(children, key=lambda key: int(key[1:-1]))]
  return py_utils.NestedMap(children)
