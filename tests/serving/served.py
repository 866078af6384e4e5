"""Runs servers for tests: with a fake engine in a thread of the test process, or with the real binary."""

from collections.abc import Iterator
import contextlib
import dataclasses
import json
import os
import queue
import re
import threading
import time

import httpx
import jax
from jax.sharding import Mesh
import numpy as np
import openai

from spmd_tasks.decoding.constraints import Grammars
from spmd_tasks.inputs import ChatTemplate
from spmd_tasks.runtime import DecodeSettings
from spmd_tasks.serving.requests import ServedModel
from spmd_tasks.serving.server import listen, run_server, url_of
from spmd_tasks.serving.settings import ServerSettings
from spmd_tasks.serving.tracing import RequestTracer
from tests import binary
from tests.serving.fake_engine import TOKENIZER, FakeEngine

MODEL = ServedModel(
  name='fake.Model',
  created=1,
  step=7,
  tokenizer=TOKENIZER,
  chat_template=ChatTemplate(),
  settings=DecodeSettings(num_top_logprobs=2),
  max_len=128,
  vocab_size=TOKENIZER.vocab_size,
  grammars=Grammars(TOKENIZER, vocab_size=TOKENIZER.vocab_size, end_ids=(TOKENIZER.eos_id,)),
)


def model_of(steps, tokenizer, **fields) -> ServedModel:
  """A model of compiled steps."""
  grammars = Grammars(tokenizer, vocab_size=steps.vocab_size, end_ids=())
  sizes = {'max_len': steps.max_len, 'vocab_size': steps.vocab_size, 'adapters': steps.adapter_names}
  return dataclasses.replace(MODEL, tokenizer=tokenizer, settings=steps.settings, grammars=grammars, **sizes | fields)


def one_device() -> Mesh:
  """The mesh of a model that is loaded beside a server."""
  return Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), ('replica', 'data', 'mdl'))


COMPLETIONS, CHAT = '/v1/completions', '/v1/chat/completions'
HELLO = {'model': 'fake.Model', 'prompt': [TOKENIZER.encode('hello')], 'max_tokens': 7}
ASK = {'model': 'fake.Model', 'messages': [{'role': 'user', 'content': 'hi'}], 'max_tokens': 4}


@dataclasses.dataclass(kw_only=True)
class Served:
  """A running server; `lines` receives its announcements, and `codes` its exit code or exception when it ends."""

  url: str
  engine: FakeEngine
  stop: threading.Event
  lines: queue.Queue
  thread: threading.Thread
  codes: list

  def client(self, **settings) -> httpx.Client:
    return httpx.Client(base_url=self.url, timeout=20, **settings)


@contextlib.contextmanager
def serving(
  engine: FakeEngine | None = None,
  *,
  max_len: int = 128,
  wait: bool = True,
  restore=None,
  leave=os._exit,
  chat_template: ChatTemplate = MODEL.chat_template,
  tokenizer=TOKENIZER,
  adapters: tuple[str, ...] = (),
  model: ServedModel | None = None,
  tracer: RequestTracer | None = None,
  **settings,
) -> Iterator[Served]:
  engine = engine or FakeEngine(max_len=max_len)
  limits = ServerSettings(**{'port': 0, 'drain_s': 5.0} | settings)
  sock = listen(limits)
  stop, lines, codes = threading.Event(), queue.Queue(), []
  if model is None:
    model = dataclasses.replace(MODEL, max_len=engine.max_len, chat_template=chat_template, adapters=adapters)
    model = dataclasses.replace(model, tokenizer=tokenizer, vocab_size=tokenizer.vocab_size)

  def run():
    try:
      code = run_server(
        engine, model, limits, sock, restore=restore, announce=lines.put, stop=stop, leave=leave, tracer=tracer
      )
      codes.append(code)
    except Exception as error:
      codes.append(error)

  thread = threading.Thread(target=run)
  thread.start()
  try:
    if wait:
      assert f'Serving {model.name}' in lines.get(timeout=120)
    yield Served(url=url_of(sock), engine=engine, stop=stop, lines=lines, thread=thread, codes=codes)
  finally:
    if (gate := getattr(engine, 'gate', None)) is not None:
      gate.set()
    stop.set()
    thread.join(20)
    assert not thread.is_alive()


def events(response):
  """The JSON of each event; the last one must be [DONE]."""
  data = [line.removeprefix('data: ') for line in response.iter_lines() if line]
  assert data[-1] == '[DONE]'
  return [json.loads(text) for text in data[:-1]]


def metric(client, name) -> float:
  """The value of a metric; `name` is without its prefix, but with its labels. 0 if it has not been counted."""
  lines = client.get('/metrics').text.splitlines()
  return next((float(line.split()[-1]) for line in lines if line.startswith(f'spmd_tasks_{name} ')), 0.0)


def wait_for(condition, limit_s=10.0):
  end = time.monotonic() + limit_s
  while not condition():
    assert time.monotonic() < end, f'not so after {limit_s} s'
    time.sleep(0.005)


@contextlib.contextmanager
def client_of_binary(*arguments, num_devices=2, api_key='none'):
  """An openai client of the real binary, which serves at a free port; it has the process and the lines of its start."""
  devices = ('--num_fake_devices', num_devices, '--ici_mesh_shape', f'1,1,{num_devices}')
  process = binary.start_binary(*arguments, '--mode', 'serve', '--port', 0, *devices)
  try:
    lines = []
    while not lines or 'Serving' not in lines[-1]:
      lines.append(process.stdout.readline())
      assert lines[-1], (lines, process.communicate(timeout=60))
    url = re.search(r'http://\S+', lines[-1])[0]
    with openai.OpenAI(base_url=f'{url}/v1', api_key=api_key, max_retries=0, timeout=120) as client:
      client.process, client.url, client.lines = process, url, ''.join(lines)
      yield client
  finally:
    process.kill()
    process.communicate()
