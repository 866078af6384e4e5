"""Serves a trained job from an object store with the real binary and the real `openai` client.

The weights were drawn and saved on eight devices and are served on two, where the heads, hidden dims and vocabulary
have different padding. Prompts are prefilled in chunks of 16 tokens.
"""

from concurrent.futures import ThreadPoolExecutor
import contextlib
import json
import re
import secrets
import signal

import httpx
import jax
import numpy as np
import pytest

from spmd_tasks import load
from spmd_tasks.stores import upload
from tests.drawn_weights import write_job
from tests.serving.fake_engine import TOKENIZER
from tests.serving.served import client_of_binary, one_device

MODEL = 'lm.UnevenTiny'
SETTINGS = ['ici_mesh_shape=1,2,4', 'seq_len=64', 'batch_size=2']

pytestmark = pytest.mark.slow


@pytest.fixture(scope='module')
def job(tmp_path_factory):
  """The directory of a job with a checkpoint of step 3."""
  return write_job(tmp_path_factory.mktemp('served') / 'job', MODEL, SETTINGS, steps=(3,))


@pytest.fixture(scope='module')
def url(job, gcs_emulator, tmp_path_factory):
  """Where the job is in the store."""
  url = f'gs://bucket/{secrets.token_hex(4)}/job'
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv('XDG_CACHE_HOME', str(tmp_path_factory.mktemp('cache')))
    upload(job, url)
    yield url


@contextlib.contextmanager
def serving(url, key):
  key.write_text('secret\n')
  flags = ('--job_log_dir', url, '--api_key_file', key, '--drain_s', 20)  # config.json names the model
  sizes = ('num_slots=2', 'prefill_chunk=16', 'prefill_rows=1')  # docs/serving.md has the same programs
  overrides = [word for size in sizes for word in ('--set', f'task.decode.{size}')]
  with client_of_binary(*flags, *overrides, api_key='secret') as client:
    assert re.fullmatch(
      r'Restoring the newest checkpoint of \S+/job\.\n'
      r'Restored step 3 in [\d.]+ s\. Compiling\.\n'
      r'The KV cache has 8 blocks of 16 tokens: 2 texts of 64 tokens at once\.\n'
      r'Serving lm.UnevenTiny, step 3, at (http://127.0.0.1:\d+)\n',
      client.lines,
    )
    yield client


@pytest.fixture(scope='module')
def servers():
  """The stack of the running server, and its client: a test may end one, and tests run in any order."""
  with contextlib.ExitStack() as stack:
    yield stack, []


@pytest.fixture
def client(servers, url, tmp_path):
  stack, clients = servers
  if not clients or clients[-1].process.poll() is not None:
    clients.append(stack.enter_context(serving(url, tmp_path / 'key')))
  return clients[-1]


def metric(url, name):
  text = httpx.get(f'{url}/metrics', headers={'authorization': 'Bearer secret'}, timeout=20).text
  return float(re.search(rf'^spmd_tasks_{name} (\S+)$', text, re.MULTILINE)[1])


def complete(client, **body):
  return client.completions.create(**{'model': MODEL, 'prompt': 'def ', 'max_tokens': 12} | body)


def test_a_request_generates_the_same_tokens_alone_and_in_a_batch(client):
  bodies = [
    {'prompt': 'x' * (1 + 5 * i % 40), 'seed': i, 'temperature': i % 3 / 2, 'max_tokens': 3 + i, 'logprobs': 2}
    for i in range(12)
  ]
  alone = [complete(client, **body).choices[0] for body in bodies]
  with ThreadPoolExecutor(12) as pool:
    together = list(pool.map(lambda body: complete(client, **body).choices[0], bodies))
  assert [choice.text for choice in together] == [choice.text for choice in alone]
  assert [choice.logprobs.tokens for choice in together] == [choice.logprobs.tokens for choice in alone]


def test_nothing_is_compiled_after_the_warm_up(client, rng):
  """80 requests: long prompts that begin alike, samples, scores, and streams that are left."""

  def draw():
    body = {
      'prompt': 'ab c' * int(rng.integers(1, 12)) + 'de'[int(rng.integers(2)) :],
      'max_tokens': int(rng.integers(1, 16)),
      'temperature': float(rng.choice([0.0, 0.7])),
      'top_p': float(rng.choice([1.0, 0.9])),
      'n': int(rng.integers(1, 3)),
      'logprobs': int(rng.integers(0, 5)),
      'echo': bool(rng.random() < 0.2),
      'stop': [None, 'e', [' ', 'x']][int(rng.integers(3))],
      'stream': bool(rng.random() < 0.2),
      'extra_body': {'top_k': int(rng.integers(0, 50)), 'min_p': float(rng.choice([0.0, 0.1]))},
    }
    return body | {'max_tokens': 0} if body['echo'] and rng.random() < 0.5 else body

  def ask(body):
    answer = complete(client, **body)
    if not body['stream']:
      return all(choice.finish_reason for choice in answer.choices)
    next(iter(answer))
    answer.close()
    return True

  before = metric(client.url, 'reused_prompt_tokens_total')
  with ThreadPoolExecutor(8) as pool:
    assert all(pool.map(ask, [draw() for _ in range(80)]))
  assert metric(client.url, 'reused_prompt_tokens_total') > before
  assert metric(client.url, 'late_compilations') == 0


def test_a_job_in_an_object_store_is_served_like_one_on_disk(job, url, client):
  in_store, on_disk = (load(place, mesh=one_device()) for place in (url, job))
  assert jax.tree.all(jax.tree.map(np.array_equal, in_store.weights, on_disk.weights))
  ids = [TOKENIZER.bos_id, *TOKENIZER.encode('the cat')]
  scored = complete(client, prompt=[ids], max_tokens=0, echo=True, logprobs=1).choices[0].logprobs.token_logprobs
  expected = jax.nn.log_softmax(on_disk.logits([ids])[0, :-1])[np.arange(len(ids) - 1), ids[1:]]
  np.testing.assert_allclose(scored[1:], expected, atol=1e-4)  # float32, on another mesh


def test_sigterm_lets_running_requests_finish(client):
  headers = {'authorization': 'Bearer secret'}
  body = {'model': MODEL, 'prompt': 'a', 'max_tokens': 55, 'n': 8, 'stream': True, 'ignore_eos': True}
  with httpx.stream('POST', f'{client.url}/v1/completions', json=body, headers=headers, timeout=60) as response:
    lines = response.iter_lines()
    first = next(lines)
    client.process.send_signal(signal.SIGTERM)
    rest = [line for line in [first, *lines] if line]
  stdout, stderr = client.process.communicate(timeout=30)
  assert rest[-1] == 'data: [DONE]'
  chunks = [json.loads(line.removeprefix('data: ')) for line in rest[:-1]]
  reasons = [choice['finish_reason'] for chunk in chunks for choice in chunk['choices'] if choice['finish_reason']]
  assert reasons == ['length'] * 8
  assert client.process.returncode == 0, stderr
  assert 'Stopping: ' in stdout
  assert stdout.endswith('Server stopped; requests cut off: 0.\n')
