"""Fixtures: emulated object stores, and a directory in one. A conftest.py imports the names."""

import os
import secrets
import urllib.request

from etils import epath
import pytest

from spmd_tasks.files import absolute_path


@pytest.fixture(scope='session')
def gcs_emulator():
  pytest.importorskip('gcsfs')
  from tests.gcs_emulator import GcsEmulator

  with GcsEmulator() as emulator:
    os.environ.update(own := emulator.environment)  # for the session: clients look at it once
    yield emulator
    for name in own:
      del os.environ[name]


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


# For what does not depend on the kind of store.
one_kind_of_store = pytest.mark.parametrize(
  'store', ['gs', pytest.param('s3', marks=pytest.mark.exhaustive)], indirect=True
)
