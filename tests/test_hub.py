"""Models and data are downloaded from the Hugging Face hub, here a fake server."""

import hashlib
from http import server
import json
import threading
import urllib.parse

import numpy as np
import pytest

from spmd_tasks import load, stores
from spmd_tasks.bridges.huggingface.origin import open_origin
from spmd_tasks.errors import UserError
from spmd_tasks.files import absolute_path
from spmd_tasks.inputs import JsonLines
from tests.model_folders import write_llama

constants = pytest.importorskip('huggingface_hub.constants')

SHA = 'a' * 40
STATUS = {'org/private': (401, 'RepoNotFound'), 'org/gated': (403, 'GatedRepo'), 'org/broken': (500, '')}


class Hub(server.BaseHTTPRequestHandler):
  """`repositories`: api name, such as models/org/name -> file -> bytes."""

  repositories: dict[str, dict[str, bytes]]
  protocol_version = 'HTTP/1.1'

  def do_GET(self):
    path, fetched = urllib.parse.unquote(self.path.partition('?')[0]).strip('/'), self.fetched
    if path.startswith('api/'):
      _, kind, org, name, action, revision = path.split('/')
      files = self.repositories.get(f'{kind}/{org}/{name}')
      if files is None:
        self.answer(*STATUS.get(f'{org}/{name}', (404, 'RepoNotFound')))
      elif revision not in ('main', 'v1', SHA):
        self.answer(404, 'RevisionNotFound')
      elif action == 'revision':
        self.answer(200, body=json.dumps({'id': f'{org}/{name}', 'sha': SHA, 'siblings': []}).encode())
      else:
        entries = [
          {'type': 'file', 'path': file, 'size': len(data), 'oid': hashlib.sha1(data).hexdigest()}
          for file, data in files.items()
        ]
        self.answer(200, body=json.dumps(entries).encode())
      return
    where, _, rest = path.partition('/resolve/')
    data = self.repositories[where if where.startswith('datasets/') else f'models/{where}'][rest.partition('/')[2]]
    if self.command == 'GET':
      fetched.append(rest.partition('/')[2])
    self.answer(200, body=data)

  do_HEAD = do_GET  # noqa: N815
  fetched: list[str]

  def answer(self, status, code='', body=b'{}'):
    self.send_response(status)
    own = {'X-Repo-Commit': SHA, 'ETag': f'"{hashlib.sha1(body).hexdigest()}"', 'X-Error-Code': code}
    for name, value in {'Content-Length': len(body), 'Content-Type': 'application/json', **own}.items():
      if value != '':
        self.send_header(name, str(value))
    self.end_headers()
    if self.command == 'GET':
      self.wfile.write(body)

  def log_message(self, *arguments):
    pass


@pytest.fixture(scope='module')
def hub(tmp_path_factory):
  """The hub, with a model, and data; the client's cache is empty."""
  folder = write_llama(tmp_path_factory.mktemp('hub') / 'model')
  model = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob('*') if path.is_file()}
  lines = {f'data/{name}.jsonl': json.dumps({'text': name}).encode() + b'\n' for name in ('one', 'two')}
  Hub.repositories = {
    'models/org/tiny': {**model, 'pytorch_model.bin': b'x', 'adapter/config.json': b'{}'},
    'datasets/org/texts': {**lines, 'README.md': b'texts'},
  }
  Hub.fetched = []
  httpd = server.ThreadingHTTPServer(('127.0.0.1', 0), Hub)
  threading.Thread(target=httpd.serve_forever, daemon=True).start()
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv('HF_ENDPOINT', f'http://127.0.0.1:{httpd.server_address[1]}')
    patch.setattr(constants, 'HF_HUB_CACHE', str(tmp_path_factory.mktemp('cache')))
    yield folder
  httpd.shutdown()
  httpd.server_close()


def test_a_model_is_loaded_by_its_name(hub):
  text = [[1, 5, 9, 2]]
  np.testing.assert_array_equal(load('hf://org/tiny').logits(np.array(text)), load(hub).logits(text))
  assert 'pytorch_model.bin' not in Hub.fetched
  assert open_origin('//org/tiny', None) == open_origin('hf://org/tiny', None)  # init_from = hf://org/tiny


def test_data_are_read_by_a_pattern_and_once(hub):
  source = JsonLines(pattern='hf://datasets/org/texts@v1/data/t*.jsonl').open()
  assert [source[0].documents[0][0]] == ['two']
  assert 'data/one.jsonl' not in Hub.fetched
  assert len(stores.local_copies('hf://datasets/org/texts@v1/data/**/*.jsonl')) == 2
  assert len(stores.local_copies('hf://datasets/org/texts')) == 3
  assert Hub.fetched.count('data/two.jsonl') == 1


def test_a_folder_of_a_repository_is_one(hub):
  assert stores.local_folder('hf://org/tiny/adapter').endswith(f'{SHA}/adapter')


def test_downloaded_files_are_read_without_the_hub(hub, monkeypatch):
  first = stores.local_copies('hf://org/tiny/adapter')
  monkeypatch.setenv('HF_ENDPOINT', 'http://127.0.0.1:9')
  assert stores.local_copies('hf://org/tiny/adapter') == first
  with pytest.raises(UserError, match=r'127.0.0.1:9/org/other cannot be reached, .* download the folder elsewhere'):
    stores.local_copies('hf://org/other')


@pytest.mark.parametrize(
  'url, sentence',
  [
    ('hf://name', 'must be hf://ORG/NAME'),
    ('hf://org/other', 'does not exist, or is private; correct the name, or log in'),
    ('hf://org/private', 'is private'),
    ('hf://org/gated', 'it is gated; accept its terms at http.*/org/gated, and log in'),
    ('hf://org/tiny@v2', "no branch, tag or commit 'v2'; correct"),
    ('hf://org/tiny/nothing', 'there is nothing at'),
    ('hf://org/-x', "cannot be read: .*'org/-x'.* check the name"),
  ],
)
def test_missing_models_are_refused(hub, url, sentence):
  with pytest.raises(UserError, match=sentence):
    stores.local_folder(url)


def test_a_job_does_not_run_on_the_hub():
  with pytest.raises(UserError, match='can only be read: give a path on gs://'):
    absolute_path('hf://org/name')
