"""Weights of a folder are converted to the dtype of storage as they are read, bitwise as by a later conversion."""

from flax import traverse_util
import jax
import numpy as np
import pytest

from spmd_tasks.bridges.huggingface import open_folder
from spmd_tasks.bridges.huggingface.origin import variables_from_folder
from spmd_tasks.config import resolve
from spmd_tasks.decoding import weight_storage
from spmd_tasks.decoding.weight_storage import WeightStorage
from spmd_tasks.experiment import partition_job
from spmd_tasks.learning.frozen_weights import fill_in
from tests.bridges.huggingface.test_folders import write_folder


@pytest.fixture(scope='module')
def model_and_path(tmp_path_factory):
  path = tmp_path_factory.mktemp('folders') / 'qwen3_moe'
  write_folder(path, 'qwen3_moe', np.random.default_rng(0), 'bfloat16')  # 3 heads, 12 experts, vocabulary 259
  job = resolve('hf.Model', [f'model={path}', 'ici_mesh_shape=1,2,4']).build()
  assert job.task.decode.weights_dtype == 'bfloat16'  # the folder's dtype
  return partition_job(job), str(path)


@pytest.mark.parametrize(
  'dtype, platform', [('bfloat16', 'cpu'), ('bfloat16', 'gpu'), ('int8', 'gpu'), ('nf4_double', 'cpu')]
)
def test_weights_are_converted_as_they_are_read(dtype, platform, model_and_path, monkeypatch):
  model, path = model_and_path
  monkeypatch.setattr(weight_storage, 'current_platform', lambda: platform)
  storage = WeightStorage(model, dtype)
  converted = storage.store(variables_from_folder(model, open_folder(path)))
  dtypes = {}
  store_one = storage.store_one
  storage.store_one = lambda name, weight: [dtypes.setdefault(name, weight.dtype), store_one(name, weight)][1]
  read = variables_from_folder(model, open_folder(path), storage)
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(read), jax.device_get(converted))
  assert jax.tree.map(lambda x: x.sharding, read) == jax.tree.map(lambda x: x.sharding, converted)
  assert storage.store(read)['params']['embedding']['table'] is read['params']['embedding']['table']
  nothing = traverse_util.unflatten_dict(dict.fromkeys(traverse_util.flatten_dict(read['params'])))
  assert jax.tree.structure(fill_in(read['params'], nothing)) == jax.tree.structure(read['params'])
  assert dtypes['stack/layers/ffn/experts/up'] == ('bfloat16' if dtype == 'bfloat16' else 'float32')
  assert dtypes['embedding/table'] == 'bfloat16'
  assert dtypes['final_norm/scale'] == 'float32'
