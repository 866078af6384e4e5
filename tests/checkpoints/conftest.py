"""Directories of checkpoints for the tests to read and to damage, on a disk and in emulated stores."""

import os
import pathlib
import secrets
import shutil
import urllib.request

from checkpoint_states import device_state
from etils import epath
import pytest

from spmd_tasks.checkpoints import Checkpointer
from spmd_tasks.files import absolute_path


@pytest.fixture(scope='module')
def three_steps(tmp_path_factory) -> pathlib.Path:
  """A directory with checkpoints 1, 2 and 3."""
  directory = tmp_path_factory.mktemp('three_steps') / 'checkpoints'
  checkpointer = Checkpointer(directory)
  for step in (1, 2, 3):
    checkpointer.save(step, device_state(step), {'position': step * 10})
  checkpointer.close()
  return directory


@pytest.fixture
def directory(three_steps, tmp_path) -> pathlib.Path:
  return pathlib.Path(shutil.copytree(three_steps, tmp_path / 'checkpoints'))


# Restoring.


# Object stores.


@pytest.fixture(scope='session')
def gcs_emulator():
  pytest.importorskip('gcsfs')
  from gcs_emulator import GcsEmulator

  with GcsEmulator() as emulator:
    os.environ['STORAGE_EMULATOR_HOST'] = emulator.url  # for the session: clients look at it once
    yield emulator
    del os.environ['STORAGE_EMULATOR_HOST']


@pytest.fixture(scope='session')
def s3_emulator():
  pytest.importorskip('s3fs')
  server = pytest.importorskip('moto.server').ThreadedMotoServer(port=0, verbose=False)
  server.start()
  url = 'http://{}:{}'.format(*server.get_host_and_port())
  own = {'AWS_ENDPOINT_URL': url, 'AWS_ACCESS_KEY_ID': 'a', 'AWS_SECRET_ACCESS_KEY': 'b', 'AWS_REGION': 'us-east-1'}
  os.environ.update(own)
  urllib.request.urlopen(urllib.request.Request(f'{url}/bucket', method='PUT')).close()
  yield url
  for name in own:
    del os.environ[name]
  server.stop()


@pytest.fixture(params=['gs', 's3'])
def store(request) -> epath.Path:
  """A directory in an emulated store."""
  request.getfixturevalue('gcs_emulator' if request.param == 'gs' else 's3_emulator')
  return absolute_path(f'{request.param}://bucket/{secrets.token_hex(4)}')
