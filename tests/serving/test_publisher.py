"""Publishing weights while requests run: no request is dropped, and none mixes tokens of two checkpoints."""

from concurrent.futures import ThreadPoolExecutor
import threading
import time

from spmd_tasks import exit_codes
from spmd_tasks.serving import server
from tests.serving.fake_engine import TOKENIZER, FakeEngine
from tests.serving.served import metric, serving, wait_for

KEY = {'authorization': 'Bearer secret'}
ASK = {'model': 'fake.Model', 'prompt': TOKENIZER.encode('abc'), 'max_tokens': 6}


def restore(step):
  """Gives (weights, step); FakeEngine adds its weights to its tokens."""
  if step == 404:
    raise ValueError('there is no checkpoint of step 404')
  return (1, 9) if step is None else (step, step)


def text(response):
  return response.json()['choices'][0]['text']


def test_running_sequences_keep_their_weights_and_queued_ones_get_the_new():
  gate = threading.Event()
  engine = FakeEngine(num_slots=2, gate=gate)
  with serving(engine, restore=restore, api_key='secret') as served, served.client(headers=KEY) as client:
    with ThreadPoolExecutor(8) as pool:
      begun = pool.submit(client.post, '/v1/completions', json=ASK | {'n': 2})
      wait_for(lambda: metric(client, 'active_slots') == 2)
      published = pool.submit(client.post, '/admin/publish', json={'step': 2})
      time.sleep(0.1)
      waiting = [pool.submit(client.post, '/v1/completions', json=ASK) for _ in range(3)]
      time.sleep(0.1)
      assert not published.done()
      gate.set()
      assert [choice['text'] for choice in begun.result().json()['choices']] == ['abcabc'] * 2
      assert published.result().json() == {'model': 'fake.Model', 'step': 2}
      assert [text(future.result()) for future in waiting] == ['cdecde'] * 3
    assert client.get('/v1/models/fake.Model').json()['step'] == 2


def test_newest_unpublish_and_publish_again():
  engine = FakeEngine()
  with serving(engine, restore=restore, api_key='secret') as served, served.client(headers=KEY) as client:
    assert client.post('/admin/publish', json={}).json()['step'] == 9
    assert text(client.post('/v1/completions', json=ASK)) == 'bcdbcd'
    assert client.post('/admin/unpublish', json={}).status_code == 200
    assert engine.weights is None
    assert client.get('/v1/models').json()['data'] == []
    assert client.get('/ready').status_code == client.post('/v1/completions', json=ASK).status_code == 503
    assert client.get('/health').status_code == 200
    assert client.post('/admin/publish', json={'step': 0}).status_code == 200
    assert text(client.post('/v1/completions', json=ASK)) == 'abcabc'


def test_failed_publishing_changes_nothing():
  with serving(restore=restore, api_key='secret') as served, served.client(headers=KEY) as client:
    for body, status in ({'step': 404}, 409), ({'step': -1}, 400), ({'step': '3'}, 400), ({'path': '/etc'}, 400):
      response = client.post('/admin/publish', json=body)
      assert (body, response.status_code) == (body, status)
      assert response.json()['error']['message']
      assert text(client.post('/v1/completions', json=ASK)) == 'abcabc'


def test_shutdown_does_not_wait_for_a_checkpoint_being_read(monkeypatch):
  monkeypatch.setattr(server, '_CLOSE_LIMIT_S', 0.1)
  is_reading, may_end, left = threading.Event(), threading.Event(), []

  def restore(step):
    is_reading.set()
    assert may_end.wait(10)
    return step, step

  with (
    serving(restore=restore, leave=left.append, api_key='secret') as served,
    served.client(headers=KEY) as client,
    ThreadPoolExecutor() as pool,
  ):
    pool.submit(client.post, '/admin/publish', json={'step': 2})
    assert is_reading.wait(5)
    served.stop.set()
    served.thread.join(5)
    assert not served.thread.is_alive()
    may_end.set()
  assert left == [exit_codes.OK]


def test_publishing_requires_an_api_key():
  with serving(restore=restore) as served, served.client() as client:
    for path in ('/admin/publish', '/admin/unpublish'):
      assert client.post(path, json={}).status_code == 403
    assert text(client.post('/v1/completions', json=ASK)) == 'abcabc'
