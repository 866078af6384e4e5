"""PaxCheckpoint: finds the checkpoints of Paxml and lists their arrays without reading data.

    checkpoints/checkpoint_00000100/metadata/metadata   JSON: the true shapes of the model's variables
    checkpoints/checkpoint_00000100/state/<name>/       one array: zarr v2; all in one OCDBT store from version 1.2 on
    checkpoints/*.orbax-checkpoint-tmp-*                being written, or left by a kill

A name is the path of a leaf in Paxml's TrainState: `step`, `mdl_vars.params.lm.final_ln.scale`, or
`opt_states_0.p#2#i-1_2.m.params.lm....`: learner 0, the variables with the repeat prefix [2], link 2 of its chain of
gradient transformations. An array is stored as it lay on the mesh: zeros follow in every dim that the mesh did not
divide.

This file needs neither Paxml nor TensorFlow.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import functools
import json
import re
from typing import Any, Literal

from etils import epath
import jax

from spmd_tasks.checkpoints.checkpoint_directory import CheckpointDirectory
from spmd_tasks.errors import UserError
from spmd_tasks.files import is_remote, read_text

STATE, METADATA = 'state', 'metadata/metadata'
_STEP_DIRECTORY = re.compile(r'checkpoint_(\d+)')
_COMMITTED = 'commit_success.txt'
_OCDBT_MANIFEST = 'manifest.ocdbt'
ARRAY_TAG = '_array_metadata_tag'


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredArray:
  """An array of a checkpoint, not read yet.

  Attributes:
    store: a tensorstore.TensorStore, whose shape includes the padding.
    true_shape: without padding; None for optimizer state, which Paxml does not describe.
  """

  store: Any
  true_shape: tuple[int, ...] | None

  @property
  def shape(self) -> tuple[int, ...]:
    """The true shape if it is known, else the stored one."""
    return tuple(self.store.shape) if self.true_shape is None else self.true_shape

  @property
  def dtype(self) -> Any:
    return self.store.dtype.numpy_dtype

  def fits(self, shape: Sequence[int]) -> bool:
    """Whether the array may have this shape without its padding."""
    if self.true_shape is not None:
      return self.true_shape == tuple(shape)
    return len(shape) == self.store.rank and all(n <= m for n, m in zip(shape, self.store.shape, strict=True))


@dataclasses.dataclass(frozen=True)
class PaxCheckpoint:
  """One complete checkpoint of Paxml, `checkpoint_<step>`.

  Attributes:
    path: its directory.
  """

  path: epath.Path

  @property
  def step(self) -> int:
    return int(self.path.name.rpartition('_')[2])

  @functools.cached_property
  def is_ocdbt(self) -> bool:
    """Whether all arrays share one store; version 1.1 has a directory per array."""
    return (self.path / STATE / _OCDBT_MANIFEST).exists()

  @functools.cached_property
  def arrays(self) -> dict[str, StoredArray]:
    """Every array by its name. Reads metadata only.

    Raises:
      UserError: Paxml wrote the checkpoint in a form that cannot be read here.
    """
    names = sorted(self._list())
    if not names:
      what = 'one msgpack file, as of a pmap job' if (self.path / STATE / 'checkpoint').exists() else 'no array'
      raise UserError(f'{self.path / STATE} holds {what}: only checkpoints of partitioned (pjit) jobs can be read.')
    shapes = self._true_shapes()
    stores = [self._open(name) for name in names]
    return {
      name: StoredArray(store=store, true_shape=shapes.get(name) if store.rank else ())
      for name, store in zip(names, (future.result() for future in stores), strict=True)
    }

  def name_of(self, path: Sequence[Any]) -> str:
    """Returns the name of the leaf with this key path in a TrainState."""
    return ocdbt_name(path) if self.is_ocdbt else pax_name(path)

  def _open(self, name: str) -> Any:
    import tensorstore as ts  # here: a start without a checkpoint of Paxml does not need it

    base = key_value_store(self.path / STATE)
    store = base | {'path': f'{base["path"]}{name}/'}
    if self.is_ocdbt:
      store = {'driver': 'ocdbt', 'base': base, 'path': f'{name}/'}
    return ts.open({'driver': 'zarr', 'kvstore': store}, open=True, read=True)

  def _list(self) -> Iterator[str]:
    import tensorstore as ts

    if not self.is_ocdbt:
      yield from (path.name for path in (self.path / STATE).iterdir() if (path / '.zarray').exists())
      return
    store = ts.KvStore.open({'driver': 'ocdbt', 'base': key_value_store(self.path / STATE)})
    for key in store.result().list().result():
      name, _, file = key.decode().rpartition('/')
      if file == '.zarray':
        yield name

  def _true_shapes(self) -> dict[str, tuple[int, ...]]:
    if not (self.path / METADATA).exists():  # a checkpoint of ours
      return {}
    described = json.loads(read_text(self.path / METADATA)).get('train_state_metadata', {})

    def walk(node: Mapping[str, Any], name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
      if node.get(ARRAY_TAG):
        if 'unpadded_shape' in node:
          yield name, tuple(node['unpadded_shape'])
        return
      for key, child in node.items():
        if isinstance(child, Mapping):
          yield from walk(child, f'{name}.{key}' if name else key)

    return dict(walk(described, ''))


def pax_name(path: Sequence[Any]) -> str:
  """Returns Paxml's name of a leaf: fields and keys joined by dots, `_i` for item i of a list or a tuple.

  Args:
    path: of jax.tree_util.tree_flatten_with_path.
  """
  name = ''
  for key in path:
    if isinstance(key, jax.tree_util.SequenceKey):
      name += f'_{key.idx}'
    else:
      name += ('.' if name else '') + jax.tree_util.keystr((key,), simple=True)
  return name


def ocdbt_name(path: Sequence[Any]) -> str:
  """Returns Orbax's name of a leaf, which Paxml uses with OCDBT: all keys joined by dots."""
  return jax.tree_util.keystr(tuple(path), simple=True, separator='.')


def pax_checkpoints(directory: epath.PathLike) -> dict[int, PaxCheckpoint]:
  """Returns Paxml's complete checkpoints in `<job>/checkpoints` by ascending step; {} if there is none."""
  directory = epath.Path(directory)
  paths = list(directory.iterdir()) if directory.is_dir() else []
  found = [PaxCheckpoint(path) for path in paths if is_complete(path)]
  return {checkpoint.step: checkpoint for checkpoint in sorted(found, key=lambda checkpoint: checkpoint.step)}


def checkpoint_format(directory: epath.PathLike) -> Literal['pax', 'spmd_tasks'] | None:
  """Says by files who wrote the newest checkpoint in a directory: Paxml or this project; None without a checkpoint.

  Both use the names `checkpoint_<step>`.
  """
  directory = epath.Path(directory)
  own = CheckpointDirectory(path=directory).complete_steps() if directory.is_dir() else []
  newest = {'pax': max(pax_checkpoints(directory), default=-1), 'spmd_tasks': max(own, default=-1)}
  if max(newest.values()) < 0:
    return None
  return 'pax' if newest['pax'] > newest['spmd_tasks'] else 'spmd_tasks'


def open_pax_checkpoint(directory: epath.PathLike, step: int | None = None) -> PaxCheckpoint:
  """Returns the checkpoint of a step (None: the newest) in `<job>/checkpoints`, or the one that `directory` itself is.

  Raises:
    UserError: there is none.
  """
  directory = epath.Path(directory)
  if step is None and is_complete(directory):
    return PaxCheckpoint(directory)
  found = pax_checkpoints(directory)
  if not found or (step is not None and step not in found):
    wanted = '' if step is None else f' of step {step}'
    has = f'its steps are {[*found]}, choose one' if found else 'name the directory `checkpoints` of a Pax job'
    raise UserError(f'{directory} holds no complete checkpoint of Paxml{wanted}: {has}.')
  return found[max(found) if step is None else step]


def is_complete(path: epath.Path) -> bool:
  """Whether Paxml gave a directory its final name. In an object store, where nothing is renamed, a file says so."""
  return (
    _STEP_DIRECTORY.fullmatch(path.name) is not None
    and (path / METADATA).exists()
    and (not is_remote(path) or (path / _COMMITTED).exists())
  )


def key_value_store(path: epath.Path) -> dict[str, Any]:
  """Returns the TensorStore spec of the files below a local directory or `gs://bucket/...`."""
  if not is_remote(path):
    return {'driver': 'file', 'path': f'{path.absolute()}/'}
  bucket, _, rest = str(path).removeprefix('gs://').partition('/')
  return {'driver': 'gcs', 'bucket': bucket, 'path': f'{rest}/'}
