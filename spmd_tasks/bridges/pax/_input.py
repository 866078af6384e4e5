"""PaxInput: a `praxis.base_input.BaseInput` as an input of ours, with a position that can be saved.

    train_input = PaxInput(config=my_experiment.train_datasets()[0])

A position is the input's own state where its class has one (`get_state`); otherwise it is the number of batches, and a
restored job reads and drops that many. Which of the two it is, is logged.

A Pax NestedMap has branches, a batch of ours is flat, with names such as `target/ids`: a `/` of a key is `~1`, and `~`
is `~0` (RFC 6901). The elements of a list are `views/[0]`, ....
"""

import base64
from collections.abc import Mapping, Sequence
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

from spmd_tasks.errors import UserError, naming_own_code
from spmd_tasks.inputs import Batch, InputIterator, State

_END = object()  # in place of a batch


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PaxInput:
  """An input that Praxis' config describes.

  Attributes:
    config: the `pax_fiddle.Config` of a BaseInput. Its batch size is per process, as in Pax.
    is_training: used as the training input, which must not end; an eval input gives `eval_loop_num_batches` batches,
      all if -1 or None.
  """

  config: Any
  is_training: bool = True

  @property
  def batch_size(self) -> int:
    """Rows of the global batch."""
    return next(iter(self.element_spec().values())).shape[0]

  def element_spec(self) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns global shapes and dtypes, read from the first batch of an input of its own."""
    return dict(self._spec)

  @functools.cached_property
  def _spec(self) -> dict[str, jax.ShapeDtypeStruct]:
    pax_input = self.make(0, jax.process_count())
    with self._naming('get_next()'):
      batch = next(iter(functools.partial(next_batch, pax_input), object()), _END)
    if batch is _END:
      remedy = f'let {self.config.cls.__name__}.get_next return one'
      raise UserError(f'input {self.config.name!r} ends before its first batch: {remedy}.')
    if not isinstance(batch, Mapping):
      raise UserError(
        f'{self.config.cls.__name__}.get_next of the input {self.config.name!r} returns {type(batch).__name__}: return '
        'a NestedMap of arrays.'
      )
    spec = {}
    for name, rows in flatten_batch(batch).items():
      if rows.ndim == 0:
        raise UserError(f'input {self.config.name!r} gives {name!r} without a batch dim: give it a row per example.')
      spec[name] = jax.ShapeDtypeStruct((rows.shape[0] * jax.process_count(), *rows.shape[1:]), rows.dtype)
    return spec

  @property
  def shapes_may_vary(self) -> bool:
    """Whether a batch may have other shapes than the first, as the last one of an eval; then its step is compiled anew.

    Not of several processes, whose batches must agree.
    """
    return not self.is_training and jax.process_count() == 1

  def make_iterator(self, shard_index: int = 0, shard_count: int = 1) -> 'PaxInputIterator':
    """Makes the input of one process: Pax' infeed host `shard_index` of `shard_count`.

    Raises a UserError if the dataset is no training dataset, but stands for one, so that there is a model to evaluate.
    """
    if self.is_training and not self.config.is_training:
      raise UserError(
        f'the experiment has no training dataset, only {self.config.name!r} and the like to evaluate or decode: give '
        'one of datasets() is_training=True.'
      )
    num_batches = None if self.is_training else self.config.eval_loop_num_batches
    limit = None if num_batches in (None, -1) else num_batches
    return PaxInputIterator(functools.partial(self.make, shard_index, shard_count), shard_count, limit)

  def reshard_states(self, states: Sequence[State], shard_count: int) -> list[State]:
    """Returns the states unchanged.

    Raises a UserError: another number of processes saved them: only the input itself knows which rows a process reads.
    """
    if len(states) != shard_count:
      raise UserError(
        f'input {self.config.name!r} was saved by {len(states)} processes and cannot be continued exactly by '
        f'{shard_count}: run with {len(states)}, or start a new job from the weights (init_from).'
      )
    return list(states)

  def make(self, shard_index: int, shard_count: int) -> Any:
    """Makes Praxis' own input object of one process."""
    config = self.config.clone()
    if not config.num_infeed_hosts:  # else the experiment has said how its hosts share the data
      config.num_infeed_hosts, config.infeed_host_index = shard_count, shard_index
    if not 0 <= config.infeed_host_index < config.num_infeed_hosts:
      raise UserError(
        f'input {config.name!r} has infeed_host_index = {config.infeed_host_index} of num_infeed_hosts = '
        f'{config.num_infeed_hosts}: count from 0, or leave both at 0, which takes this process of all.'
      )
    with self._naming('the construction'):
      return base_hyperparams.instantiate(config)

  def _naming(self, what: str) -> contextlib.AbstractContextManager[None]:
    cls = self.config.cls
    return naming_own_code(f'{what} of the input {self.config.name!r} ({cls.__name__})', part=cls)


class PaxInputIterator(InputIterator):
  """Yields the batches of one process, flat, and counts them."""

  def __init__(self, make: Any, shard_count: int, limit: int | None):
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
    """Returns the number of batches and, where the input has one, its own state."""
    state: State = {'num_batches': self._count, 'shard_count': self._shard_count}
    try:
      own = self._input.get_state()
    except NotImplementedError:
      return state
    return state | {'own_state': base64.b64encode(own).decode()}

  def set_state(self, state: State) -> None:
    """Continues after the batch at which `state` was taken.

    Raises a UserError if the state is of another kind of input, or another number of processes saved it.
    """
    if state.get('shard_count') != self._shard_count or 'num_batches' not in state:
      raise UserError(
        f'the saved position {state} is not one of a Pax input with {self._shard_count} process(es): run with the '
        'processes and the input that saved it, or start a new job.'
      )
    self._input, self._count = self._make(), state['num_batches']
    name = type(self._input).__name__
    if 'own_state' in state:
      logging.info('The input %s continues by its own state.', name)
      self._input.set_state(base64.b64decode(state['own_state']))
      return
    logging.info('The input %s has no state of its own: %d batches are read and dropped.', name, self._count)
    for number in range(self._count):
      try:
        next_batch(self._input)
      except StopIteration as error:
        raise UserError(
          f'the input {name} ends after {number} batches, but the checkpoint has read {self._count}: give it the data '
          'that it had, or start a new job from the weights (init_from).'
        ) from error

  def close(self) -> None:
    """Forgets the input."""
    self._input = None


def next_batch(pax_input: Any) -> Any:
  """Returns the next batch of Praxis' own input object, a NestedMap; raises StopIteration at the end."""
  try:
    return pax_input.get_next()
  except Exception as error:
    if type(error).__name__ == 'OutOfRangeError':  # TensorFlow's word for the end
      raise StopIteration from error
    raise


def flatten_batch(batch: Any) -> dict[str, np.ndarray]:
  """Returns the arrays of a NestedMap by path. Strings, which no device can hold, are left out.

  64-bit numbers become those of 32 bits that JAX computes with.
  """
  found = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
    array = np.asarray(leaf)
    if array.dtype.kind in 'biufcV':  # V: bfloat16
      found['/'.join(map(_name_of_key, path))] = array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)
  return found


def take_strings(batch: Any) -> dict[str, Any]:
  """Returns the texts of a NestedMap, which `flatten_batch` leaves out, in branches like its own."""
  found: dict[str, Any] = {}
  for name, value in batch.items():
    if hasattr(value, 'items'):
      if texts := take_strings(value):
        found[name] = texts
    elif np.asarray(value).dtype.kind in 'OSU':
      found[name] = value
  return found


def complete_tokens(batch: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a batch with all that a language model of Praxis asks for; `ids` [B, T] alone are one document a row."""
  if 'ids' not in batch:
    return dict(batch)
  ids = jnp.asarray(batch['ids'])
  ones = jnp.ones(ids.shape, jnp.int32)
  positions = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
  batch = {'labels': ids, 'segment_ids': ones, 'segment_pos': positions} | dict(batch)
  paddings = (batch['segment_ids'] == 0).astype(jnp.float32)
  return {'paddings': paddings, 'weights': 1 - paddings} | batch


def to_nested_map(batch: Mapping[str, Any]) -> py_utils.NestedMap:
  """Returns the NestedMap of which `flatten_batch` gave the names; tuples in it become lists."""
  nested: dict[str, Any] = {}
  for name, value in batch.items():
    *branches, leaf = (key.replace('~1', '/').replace('~0', '~') for key in name.split('/'))
    node = nested
    for branch in branches:
      node = node.setdefault(branch, {})
    node[leaf] = value
  return _nested_maps(nested)


def _name_of_key(key: Any) -> str:
  if isinstance(key, jax.tree_util.SequenceKey):
    return f'[{key.idx}]'
  return jax.tree_util.keystr((key,), simple=True).replace('~', '~0').replace('/', '~1')


def _nested_maps(node: Any) -> Any:
  """Returns dicts as NestedMaps, and those whose keys are `[0]`, `[1]`, ... as lists."""
  if not isinstance(node, dict):
    return node
  children = {key: _nested_maps(child) for key, child in node.items()}
  if children and all(re.fullmatch(r'\[\d+\]', key) for key in children):
    return [children[key] for key in sorted(children, key=lambda key: int(key[1:-1]))]
  return py_utils.NestedMap(children)
