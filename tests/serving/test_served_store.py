"""A job, and a model's folder, in an object store are served as `load` generates, and exported to the store."""

import secrets

import jax
from jax.sharding import Mesh
import numpy as np
import pytest

from spmd_tasks import load
from spmd_tasks.stores import upload
from tests import binary
from tests.model_folders import write_llama
from tests.serving.served import client_of_binary
from tests.serving.test_serve_binary import SHAPE

pytestmark = pytest.mark.slow
SIZES = ('max_len=64', 'min_bucket=64', 'num_slots=1', 'temperature=0')  # few programs
DECODE = tuple(f'task.decode.{size}' for size in SIZES)


def a_job(url: str, tmp_path) -> tuple[object, ...]:
  """Trains one, and returns the flags by which it is served."""
  assert binary.run_in_process(*SHAPE, '--ici_mesh_shape', '1,2,4', '--mode', 'train', '--job_log_dir', url) == 0
  return ('--job_log_dir', url)


def a_folder(url: str, tmp_path) -> tuple[object, ...]:
  upload(write_llama(tmp_path / 'llama'), url)
  return ('--exp', 'hf.Model', '--set', f'model={url}', '--job_log_dir', f'{url}_served')


@pytest.mark.parametrize('make, scheme', [(a_job, 'gs'), (a_folder, 's3')])
def test_is_served_as_it_is_loaded_and_exported(make, scheme, gcs_emulator, s3_emulator, tmp_path, monkeypatch):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  url = f'{scheme}://bucket/{secrets.token_hex(4)}'
  flags = make(url, tmp_path)
  settings = [flag for setting in DECODE for flag in ('--set', setting)]
  with client_of_binary(*flags, *settings, num_devices=1) as client:
    (card,) = client.models.list()
    text = client.completions.create(model=card.id, prompt='the cat', max_tokens=6, temperature=0).choices[0].text
  assert text
  one_device = Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), ('replica', 'data', 'mdl'))
  assert load(url, mesh=one_device, overrides=DECODE).generate(['the cat'], max_tokens=6) == [text]
  if make is a_job:  # of no family of Hugging Face
    return
  assert binary.run_in_process(*flags, '--mode', 'export', '--format', 'hf', '--out', f'{url}_out') == 0
  assert load(f'{url}_out', mesh=one_device, overrides=DECODE).generate(['the cat'], max_tokens=6) == [text]
