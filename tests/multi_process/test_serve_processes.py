"""Two processes over loopback decode and serve the tokens of one process; the server ends in order in every case."""

from concurrent.futures import ThreadPoolExecutor
import contextlib
import json
import os
import re
import signal
import socket
import sys

import httpx
from launch import Job, coordinator_flags
import pytest

from spmd_tasks import exit_codes
from tests import binary
from tests.drawn_weights import write_job

pytestmark = pytest.mark.slow

START_S = 200.0
DEADLINE_S = 30.0  # from a fault until the last process is gone
MODEL = 'lm.UnevenTiny'
SETTINGS = ['ici_mesh_shape=1,2,4', 'model_dims=12', 'num_layers=1', 'hidden_dims=18', 'seq_len=64', 'batch_size=8']
SETTINGS += [
  f'task.decode.{setting}' for setting in ('prefill_chunk=8', 'min_bucket=8', 'prefill_rows=2', 'num_slots=2')
]
COMMAND = ['--exp', MODEL, *(part for setting in SETTINGS for part in ('--set', setting))]
# Beside them, a decoding job has prompts of tokens, and samples.
SAMPLED = [{'prompt_ids': [i + 1] * (i + 1), 'max_tokens': 4, 'temperature': 1.0, 'n': 2} for i in range(3)]
PROMPTS = [('def ' * (number + 1))[: 2 * number + 1] for number in (1, 3, 5)]
HEADERS = {'authorization': 'Bearer secret'}


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
  """(job_log_dir, what one process makes of PROMPTS with its newest checkpoint); the weights of both are drawn."""
  directory = write_job(tmp_path_factory.mktemp('served') / 'job', MODEL, SETTINGS, steps=(2, 4))
  prompts = directory.parent / 'prompts.jsonl'
  asked = [*({'prompt': prompt, 'max_tokens': 6} for prompt in PROMPTS), *SAMPLED]
  prompts.write_text(''.join(json.dumps(prompt) + '\n' for prompt in asked))
  assert binary.run_in_process(*COMMAND, '--job_log_dir', directory, *decoding(directory, 'outputs.jsonl')) == 0
  return directory, [outputs[0]['text'] for outputs in read(directory, 'outputs.jsonl')[: len(PROMPTS)]]


def decoding(job_log_dir, name):
  """Flags of a decoding job of `prompts.jsonl` beside the directory."""
  paths = ('--decode_input', job_log_dir.with_name('prompts.jsonl'), '--decode_output', job_log_dir.with_name(name))
  return ('--mode', 'decode_once', *paths)


def read(job_log_dir, name):
  """The outputs of each prompt."""
  return [json.loads(line)['outputs'] for line in job_log_dir.with_name(name).read_text().splitlines()]


def start(job_log_dir, log_dir, *flags: str) -> Job:
  """Two processes of four devices, both dims of the mesh across them."""
  log_dir.mkdir()
  key = log_dir / 'key'
  key.write_text('secret')
  command = [sys.executable, '-m', 'spmd_tasks.main', *COMMAND, '--job_log_dir', str(job_log_dir), '--mode', 'serve']
  # Whole prompts: fewer programs than in chunks, as the decoding jobs read them.
  command += ['--num_fake_devices=4', '--port=0', '--drain_s=20', '--api_key_file', str(key)]
  command += ['--set', 'task.decode.prefill_chunk=64', '--set', 'task.decode.min_bucket=64']
  argvs = [[*command, *flags, *own] for own in coordinator_flags(num_processes=2)]
  return Job(argvs, log_dir=log_dir, num_devices=4)


@pytest.mark.exhaustive  # the servers below decode too
def test_two_processes_decode_what_one_does(trained, tmp_path):
  job_log_dir, _ = trained
  flags = [*COMMAND, '--num_fake_devices=4', '--job_log_dir', str(job_log_dir)]
  command = [sys.executable, '-m', 'spmd_tasks.main', *flags, *map(str, decoding(job_log_dir, 'shared.jsonl'))]
  argvs = [command + own for own in coordinator_flags(num_processes=2)]
  with Job(argvs, log_dir=tmp_path, num_devices=4) as job:
    ranks = job.wait(deadline_s=START_S)
  assert [rank.returncode for rank in ranks] == [0, 0], [rank.log for rank in ranks]
  alone, shared = (
    [[output['ids'] for output in outputs] for outputs in read(job_log_dir, name)]
    for name in ('outputs.jsonl', 'shared.jsonl')
  )
  assert alone == shared
  assert [len(ids) for ids in alone] == [1] * len(PROMPTS) + [2] * len(SAMPLED)


def client_of(job: Job) -> httpx.Client:
  job.wait_for_text(0, 'Serving ', limit_s=START_S)
  url = re.search(r'Serving \S+, step \d, at (\S+)', job.log(0))[1]
  return httpx.Client(base_url=url, headers=HEADERS, timeout=120)


def complete(client: httpx.Client, prompt, **wanted) -> str:
  response = client.post('/v1/completions', json={'model': MODEL, 'prompt': prompt, 'max_tokens': 6} | wanted)
  assert response.status_code == 200, response.text
  return response.json()['choices'][0]['text']


def complete_all(client: httpx.Client) -> list[str]:
  """The texts for PROMPTS, asked for at once."""
  with ThreadPoolExecutor(8) as pool:
    return list(pool.map(lambda prompt: complete(client, prompt), PROMPTS))


def long_stream(client: httpx.Client):
  body = {'model': MODEL, 'prompt': 'a', 'max_tokens': 60, 'ignore_eos': True, 'stream': True}
  return client.stream('POST', '/v1/completions', json=body)


class SharedServer:
  """A running server; `running` starts another one after `close`, so that tests run in any order."""

  def __init__(self, job_log_dir, make_directory):
    self._job_log_dir, self._make_directory = job_log_dir, make_directory
    self._stack = contextlib.ExitStack()
    self.job = None

  def running(self):
    if self.job is None:
      self.job = self._stack.enter_context(start(self._job_log_dir, self._make_directory('logs') / 'shared'))
      self.client = self._stack.enter_context(client_of(self.job))
    return self

  def close(self):
    self._stack.close()
    self.job = None


@pytest.fixture(scope='module')
def shared_server(trained, tmp_path_factory):
  with contextlib.closing(SharedServer(trained[0], tmp_path_factory.mktemp)) as server:
    yield server


@pytest.fixture
def client(shared_server):
  return shared_server.running().client


def test_two_processes_serve_what_one_decodes_in_any_company(client, trained):
  with ThreadPoolExecutor(8) as pool:
    noise = [pool.submit(complete, client, 'xyz', temperature=1.0, seed=seed, n=2) for seed in range(4)]
    texts = complete_all(client)
    assert len({future.result() for future in noise}) > 1
  assert texts == trained[1]


@pytest.fixture(scope='module')
def published(shared_server, trained):
  """The texts for PROMPTS after the checkpoint of step 2 was published; afterwards the newest one is served again."""
  client = shared_server.running().client
  assert client.post('/admin/publish', json={'step': 99}).status_code == 409
  assert complete_all(client) == trained[1]
  with ThreadPoolExecutor(8) as pool:
    running = [pool.submit(complete, client, prompt) for prompt in PROMPTS]
    published = client.post('/admin/publish', json={'step': 2})
    assert published.json() == {'model': MODEL, 'step': 2}, published.text
    texts = complete_all(client)
    assert all(future.result() in pair for future, *pair in zip(running, texts, trained[1], strict=True))
  assert client.post('/admin/unpublish', json={}).status_code == 200
  assert client.post('/admin/publish', json={}).json()['step'] == 4
  return texts


def test_unpublish_and_publish_the_newest(client, trained, published):
  assert published != trained[1]
  assert complete_all(client) == trained[1]
  assert 'spmd_tasks_late_compilations 0.0\n' in client.get('/metrics').text


def attack(port: int, stack: contextlib.ExitStack) -> None:
  """Random bytes, requests of other protocols, and 200 connections that stay open, some within a greeting."""
  http2 = b'PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n'
  messages = [
    *(os.urandom(size) for size in (1, 40, 70, 5000)),
    b'GET / HTTP/1.1\r\nHost: localhost\r\n\r\n',
    b'\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03',
    http2 + os.urandom(200),
    http2 + b'\xff\xff\xff\x04\x00\x00\x00\x00\x00',  # a frame of 16 MB
  ]
  for number in range(200):
    sock = stack.enter_context(socket.create_connection(('127.0.0.1', port), timeout=5))
    with contextlib.suppress(OSError):
      sock.sendall(http2[:number] if number % 2 else messages[number % len(messages)])
      if number % 3 == 0:
        sock.close()


def test_strangers_disturb_nothing_and_sigterm_to_both_lets_running_requests_end(client, shared_server):
  job = shared_server.job
  port = int(re.search(r'coordinator_address=127.0.0.1:(\d+)', ' '.join(job.argvs[0]))[1])
  with contextlib.ExitStack() as stack:
    attack(port, stack)
    lines = stack.enter_context(long_stream(client)).iter_lines()
    first = next(lines)
    job.send(1, signal.SIGTERM)
    job.wait_for_text(0, 'Stopping: ', limit_s=DEADLINE_S)  # to whichever process it comes
    job.send(0, signal.SIGTERM)
    rest = [line for line in [first, *lines] if line]
  assert rest[-1] == 'data: [DONE]'
  assert json.loads(rest[-2].removeprefix('data: '))['choices'][0]['finish_reason'] == 'length'
  ranks = job.wait(deadline_s=DEADLINE_S)
  assert [rank.returncode for rank in ranks] == [exit_codes.OK] * 2, [rank.log for rank in ranks]
  assert 'Server stopped; requests cut off: 0.' in ranks[0].log
  shared_server.close()
