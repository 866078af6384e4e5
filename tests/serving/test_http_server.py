"""The HTTP server with a fake engine: answers, streams, logprobs, tokens, invalid fields, limits, the API key."""

import base64
import json
import socket
import threading

import pytest

from spmd_tasks.errors import UserError
from spmd_tasks.inputs import FolderTokenizer
from spmd_tasks.serving.mode import server_settings
from tests.model_folders import write_tokenizer
from tests.serving.fake_engine import TOKENIZER, FakeEngine
from tests.serving.served import ASK, CHAT, COMPLETIONS, HELLO, events, metric, serving, wait_for


@pytest.fixture(scope='module')
def client():
  with serving() as served, served.client() as client:
    yield client


# --- what it answers ---


def test_a_text_prompt_begins_with_bos_and_echo_repeats_it(client):
  body = client.post(COMPLETIONS, json=HELLO | {'prompt': 'ab', 'max_tokens': 6, 'echo': True}).json()
  assert body['usage']['prompt_tokens'] == 3
  assert body['choices'][0]['text'] == 'ab' + 'abab'  # bos is a token of the fake's circle, and no text


def test_several_prompts_and_samples(client):
  prompts = [TOKENIZER.encode('ab'), TOKENIZER.encode('xyz')]
  body = client.post(COMPLETIONS, json=HELLO | {'prompt': prompts, 'n': 2, 'max_tokens': 3}).json()
  assert [choice['text'] for choice in body['choices']] == ['aba', 'aba', 'xyz', 'xyz']
  assert [choice['index'] for choice in body['choices']] == [0, 1, 2, 3]
  counts = {'prompt_tokens': 5, 'completion_tokens': 12, 'total_tokens': 17}
  assert body['usage'] == counts | {'prompt_tokens_details': {'cached_tokens': 0}}


def test_streams_are_the_same_text_in_pieces(client):
  with client.stream('POST', COMPLETIONS, json=HELLO | {'stream': True, 'n': 2}) as response:
    assert response.headers['content-type'].startswith('text/event-stream')
    chunks = events(response)
  for index in (0, 1):
    choices = [chunk['choices'][0] for chunk in chunks if chunk['choices'][0]['index'] == index]
    assert ''.join(choice['text'] for choice in choices) == 'hellohe'
    assert [choice['finish_reason'] for choice in choices if choice['finish_reason']] == ['length']
  assert len({chunk['id'] for chunk in chunks}) == 1


def test_a_chat_stream_begins_with_the_role_and_counts_at_the_end(client):
  body = ASK | {'stream': True, 'stream_options': {'include_usage': True}}
  with client.stream('POST', CHAT, json=body) as response:
    chunks = events(response)
  assert chunks[0]['choices'][0]['delta'] == {'role': 'assistant', 'content': ''}
  assert {chunk['object'] for chunk in chunks} == {'chat.completion.chunk'}
  assert chunks[-1]['choices'] == []
  assert chunks[-1]['usage']['completion_tokens'] == 4


def test_stop_strings_end_the_text_before_them(client):
  body = client.post(COMPLETIONS, json=HELLO | {'stop': 'lo', 'max_tokens': 50}).json()
  assert body['choices'][0] == {'index': 0, 'text': 'hel', 'finish_reason': 'stop', 'logprobs': None}


def test_models_health_readiness_metrics_and_the_page(client):
  assert [card['id'] for card in client.get('/v1/models').json()['data']] == ['fake.Model']
  assert client.get('/v1/models/fake.Model').json()['step'] == 7
  assert client.get('/v1/models/other').status_code == 404
  assert client.get('/health').status_code == client.get('/ready').status_code == 200
  page = client.get('/')
  assert 'const models = ["fake.Model"];' in page.text
  assert "default-src 'none'" in page.headers['content-security-policy']
  client.post(COMPLETIONS, json=HELLO)
  text = client.get('/metrics').text
  for line in text.splitlines():
    assert line.startswith('# ') or (len(line.rpartition(' ')[0]) and float(line.rpartition(' ')[2]) >= 0)
  assert metric(client, 'generated_tokens_total') >= 7
  assert 'spmd_tasks_http_requests_total{route="/v1/completions",status="200"} ' in text


@pytest.mark.parametrize('max_tokens', [0, 2])
def test_echo_with_logprobs_scores_the_prompt_whole_and_streamed(client, max_tokens):
  prompt = 'a prompt of three chunks'
  body = HELLO | {'prompt': TOKENIZER.encode(prompt), 'logprobs': 2, 'echo': True, 'max_tokens': max_tokens}
  choice = client.post(COMPLETIONS, json=body).json()['choices'][0]
  text = prompt + prompt[:max_tokens]
  assert choice['text'] == text
  logprobs = choice['logprobs']
  assert logprobs['tokens'] == list(text)
  assert logprobs['text_offset'] == list(range(len(text)))
  assert logprobs['token_logprobs'][0] is logprobs['top_logprobs'][0] is None
  assert logprobs['token_logprobs'][1:] == pytest.approx([-token / 100 for token in TOKENIZER.encode(text)[1:]])
  assert [next(iter(top)) for top in logprobs['top_logprobs'][1:]] == list(text[1:])
  with client.stream('POST', COMPLETIONS, json=body | {'stream': True}) as response:
    choices = [chunk['choices'][0] for chunk in events(response)]
  assert ''.join(chunk['text'] for chunk in choices) == choice['text']
  streamed = [choice['logprobs'] for choice in choices if choice['logprobs']]
  assert {name: [entry for chunk in streamed for entry in chunk[name]] for name in logprobs} == logprobs


def test_cached_prompt_tokens_are_reused_and_counted(client):
  asked = HELLO | {'prompt': 'a system prompt that many requests share', 'n': 2}
  before = metric(client, 'reused_prompt_tokens_total')
  cached = [client.post(COMPLETIONS, json=asked).json()['usage']['prompt_tokens_details'] for _ in range(2)]
  assert cached == [{'cached_tokens': 0}, {'cached_tokens': 40}]
  assert metric(client, 'reused_prompt_tokens_total') == before + 3 * 40
  salted = [client.post(COMPLETIONS, json=asked | {'cache_salt': 'one'}).json() for _ in range(2)]
  assert [body['usage']['prompt_tokens_details']['cached_tokens'] for body in salted] == [0, 40]
  assert salted[0]['choices'] == salted[1]['choices']


def test_logprobs_of_chats_in_both_forms(client):
  body = ASK | {'logprobs': True, 'top_logprobs': 1}
  content = client.post(CHAT, json=body).json()['choices'][0]['logprobs']['content']
  assert [entry['token'] for entry in content] == ['', *'use']  # bos adds no text
  assert content[1]['bytes'] == [ord('u')]
  assert [len(entry['top_logprobs']) for entry in content] == [1] * 4
  with client.stream('POST', CHAT, json=body | {'stream': True}) as response:
    chunks = events(response)
  streamed = [entry for c in chunks if c['choices'][0]['logprobs'] for entry in c['choices'][0]['logprobs']['content']]
  assert streamed == content


# --- the tokenizer ---


def test_tokenize_and_detokenize_round_trip(client):
  text = 'héllo'
  answer = client.post('/tokenize', json={'prompt': text, 'add_special_tokens': False, 'model': 'fake.Model'}).json()
  assert answer == {'tokens': TOKENIZER.encode(text), 'count': 6, 'max_model_len': 128}
  assert client.post('/detokenize', json={'tokens': answer['tokens']}).json() == {'prompt': text}
  with_bos = client.post('/tokenize', json={'prompt': text}).json()['tokens']
  assert with_bos == [TOKENIZER.bos_id, *TOKENIZER.encode(text)]
  long = client.post('/tokenize', json={'prompt': 'x' * 20_000, 'add_special_tokens': False}).json()
  assert long['count'] == 20_000


def test_special_tokens_have_names(client):
  info = client.get('/tokenizer_info').json()
  assert (info['bos_token'], info['eos_token']) == ('token_id:1', 'token_id:2')
  assert 'assistant' in info['chat_template']
  assert client.post('/tokenize', json={'prompt': info['eos_token']}).json()['tokens'] == [2]
  assert client.post('/tokenize', json={'prompt': '', 'add_special_tokens': False}).json()['tokens'] == []


def test_special_tokens_of_a_folder_are_named_by_their_text(tmp_path):
  tokenizer = FolderTokenizer(path=str(write_tokenizer(tmp_path)))
  with serving(tokenizer=tokenizer) as served, served.client() as client:
    info = client.get('/tokenizer_info').json()
    assert (info['bos_token'], info['eos_token'], info['pad_token']) == ('<s>', '</s>', '<pad>')
    for name in ('bos_token', 'eos_token'):
      asked = {'prompt': info[name], 'add_special_tokens': False}
      assert client.post('/tokenize', json=asked).json()['tokens'] == tokenizer.encode(info[name])
    assert client.post('/detokenize', json={'tokens': [1, *tokenizer.encode('the cat')]}).json()['prompt'] == (
      '<s>the cat'
    )


# --- what a client can get wrong ---

BAD = [
  (COMPLETIONS, {'model': 'gpt-4'}, 404, 'model'),
  (COMPLETIONS, {'prompt': [259]}, 400, 'prompt'),
  (COMPLETIONS, {'prompt': 'a' * 500}, 400, 'prompt'),
  (COMPLETIONS, {'max_tokens': 0}, 400, 'max_tokens'),
  (COMPLETIONS, {'max_tokens': 124}, 400, 'max_tokens'),
  (COMPLETIONS, {'n': 9, 'prompt': ['a', 'b']}, 400, 'n'),
  (COMPLETIONS, {'echo': True, 'max_tokens': -1}, 400, 'max_tokens'),
  (COMPLETIONS, {'stop_token_ids': [3, 4, 5, 6]}, 400, 'stop_token_ids'),
  (COMPLETIONS, {'stream_options': {'include_usage': True}}, 400, 'stream_options'),
  (CHAT, {'messages': [{'role': 'user', 'content': [{'type': 'image_url'}]}]}, 400, 'messages[0].content[0].type'),
  (CHAT, {'top_logprobs': 1}, 400, 'top_logprobs'),
  ('/tokenize', {'prompt': None}, 400, 'prompt'),
  ('/detokenize', {'tokens': 'x'}, 400, 'tokens'),
  ('/detokenize', {'tokens': [259]}, 400, 'tokens'),
]


@pytest.mark.parametrize('path, change, status, param', BAD, ids=lambda value: str(value)[:40])
def test_an_error_names_the_invalid_field(client, path, change, status, param):
  body = {COMPLETIONS: HELLO, CHAT: ASK}.get(path, {}) | change
  response = client.post(path, content=json.dumps(body), headers={'content-type': 'application/json'})
  error = response.json()['error']
  assert (response.status_code, error['param']) == (status, param), error
  assert error['message'].startswith((param, repr(param)))


@pytest.mark.parametrize(
  'content, headers, status',
  [
    (b'{', {}, 400),
    (b'[' * 100_000, {}, 400),
    (b'{}', {'content-type': 'text/plain'}, 415),
    (b'x' * 2_000_001, {}, 413),
    (b'{}', {'host': 'evil.example'}, 403),
  ],
  ids=lambda value: str(value)[:30],
)
def test_invalid_bodies_are_rejected(client, content, headers, status):
  response = client.post(COMPLETIONS, content=content, headers={'content-type': 'application/json'} | headers)
  assert response.status_code == status
  assert response.json()['error']['message']


def test_a_chunked_body_is_limited_too(client):
  response = client.post(
    COMPLETIONS, content=(b'x' * 100_000 for _ in range(30)), headers={'content-type': 'application/json'}
  )
  assert response.status_code == 413


@pytest.mark.parametrize('method, path, status', [('GET', '/nothing', 404), ('GET', CHAT, 405), ('POST', '/', 405)])
def test_other_paths_and_methods_are_json_errors(client, method, path, status):
  response = client.request(method, path)
  assert response.status_code == status
  assert response.json()['error']['message']


@pytest.mark.parametrize(
  'path, message',
  [
    ('/chat/completions', "there is no such path; nearest: '/v1/chat/completions'."),
    ('/v1/embeddings', 'needs a model of vectors or scores (hf.Scorer), and this one writes text.'),
    ('/a/b', 'there is no such path.'),
  ],
)
def test_an_unknown_path_gets_the_nearest_one(client, path, message):
  assert client.post(path, json={}).json()['error']['message'].endswith(message)


# --- the key ---


def test_every_route_requires_the_key():
  right = base64.b64encode(b'anyone:secret').decode()
  with serving(api_key='secret') as served, served.client() as client:
    for path in ('/', '/health', '/metrics', '/nothing', COMPLETIONS):
      for header in (None, 'Bearer wrong', 'Bearer secret2', 'Basic !!!', 'secret', 'Bearer \xe9'):
        headers = {} if header is None else {'authorization': header.encode('latin-1')}
        response = client.get(path, headers=headers)
        assert (path, response.status_code) == (path, 401)
        assert response.json()['error']['type'] == 'authentication_error'
      for header in ('Bearer secret', f'Basic {right}'):
        assert client.get(path, headers={'authorization': header}).status_code != 401, path


def test_a_request_with_two_keys_is_refused():
  with serving(api_key='secret') as served, served.client() as client:
    for headers in (
      [('authorization', 'Bearer wrong'), ('authorization', 'Bearer secret')],
      [('Authorization', 'x')] * 2,
    ):
      response = client.get('/health', headers=headers)
      assert (response.status_code, response.json()['error']['code']) == (400, 'ambiguous_key')


def test_no_salt_gives_access_to_another_clients_cached_prompts(tmp_path):
  (tmp_path / 'keys').write_text('secret\nk-own own own_cache=1\nk-one one\nk-two two\n')
  settings = server_settings(api_key_file=str(tmp_path / 'keys'))
  with (
    serving(FakeEngine(max_len=512), api_key=settings.api_key, client_keys=settings.client_keys) as served,
    served.client() as client,
  ):

    def is_cached(key, salt):
      asked = HELLO | {'prompt': 'a prompt of 16 or more tokens', 'cache_salt': salt}
      answer = client.post(COMPLETIONS, json=asked, headers={'authorization': f'Bearer {key}'}).json()
      return answer['usage']['prompt_tokens_details']['cached_tokens'] > 0

    # Every key and salt twice: the first time nothing is there, whatever the others have sent before.
    salts = ['s', 'k-own s', 'own s', "('own', 's')", 'k-own ', "('one', 's')"]
    for key in ('k-own', 'k-one', 'k-two', 'secret'):
      assert [(salt, is_cached(key, salt), is_cached(key, salt)) for salt in salts] == [(s, False, True) for s in salts]
    assert [is_cached(key, '') for key in ('secret', 'k-one', 'k-own', 'k-own')] == [False, True, False, True]


def test_clients_have_keys_of_their_own(tmp_path):
  file = tmp_path / 'keys'
  file.write_text('secret\nk-one one own_cache=1\n\nk-two two\n')
  settings = server_settings(api_key_file=str(file))
  with (
    serving(FakeEngine(max_len=512), api_key=settings.api_key, client_keys=settings.client_keys) as served,
    served.client() as client,
  ):

    def ask(key, path=COMPLETIONS, **fields):
      return client.post(path, json=HELLO | fields, headers={'authorization': f'Bearer {key}'})

    assert ask('k-three').status_code == 401
    assert ask('k-one', '/admin/publish').status_code == 403
    assert ask('k-one', priority=-1).json()['error']['param'] == 'priority'
    assert ask('k-one', priority=1).status_code == ask('secret', priority=-1).status_code == 200
    asked = [ask(key, prompt='a prompt of 16 or more tokens').json() for key in ('secret', 'secret', 'k-one', 'k-one')]
    cached = [body['usage']['prompt_tokens_details']['cached_tokens'] for body in asked]
    assert cached == [0, cached[1], 0, cached[1]] != [0] * 4
    assert ask('k-two', max_tokens=100, ignore_eos=True).status_code == 200
    num_tokens = 100 + len(HELLO['prompt'][0])
    metrics = client.get('/metrics', headers={'authorization': 'Bearer secret'}).text
    assert f'spmd_tasks_client_tokens_total{{client="two"}} {num_tokens}.0' in metrics


@pytest.mark.parametrize(
  'content, message',
  [
    ('two words\n', 'must be a key'),
    ('secret\nk-one\n', 'must be KEY NAME'),
    ('secret\nk-one one max_tokens=7\n', 'must be KEY NAME'),
    ('secret\nsecret one\n', 'same key twice'),
    ('secret\nk-one one\nk-two one\n', 'same name twice'),
  ],
)
def test_invalid_key_files_are_rejected(tmp_path, content, message):
  (tmp_path / 'keys').write_text(content)
  with pytest.raises(UserError, match=message):
    server_settings(api_key_file=str(tmp_path / 'keys'))


# --- under load, and at the end ---


def test_a_full_queue_is_429_at_once():
  gate = threading.Event()
  with serving(FakeEngine(num_slots=1, gate=gate), max_queued=2) as served, served.client() as client:
    waiting = [threading.Thread(target=client.post, args=(COMPLETIONS,), kwargs={'json': HELLO}) for _ in range(3)]
    for number, thread in enumerate(waiting):
      thread.start()
      # The first one is in the slot, and its step waits at the gate.
      wait_for(lambda number=number: metric(client, 'queued_sequences') == number)
      wait_for(lambda: metric(client, 'active_slots') == 1)
    num_steps = metric(client, 'decode_steps_total')
    response = client.post(COMPLETIONS, json=HELLO)
    assert response.status_code == 429
    assert metric(client, 'decode_steps_total') == num_steps  # the refusal did not wait for the step at the gate
    assert int(response.headers['retry-after']) >= 1
    assert response.json()['error']['code'] == 'queue_full'
    assert client.post(COMPLETIONS, json=HELLO | {'n': 3}).status_code == 400  # even an empty queue has no room for it
    gate.set()
    for thread in waiting:
      thread.join(10)


@pytest.mark.parametrize('stream', [True, False])
def test_a_disconnected_client_frees_its_slot(stream):
  gate = threading.Event()
  body = json.dumps(HELLO | {'max_tokens': 90_000, 'stream': stream}).encode()
  head = f'POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n'
  with serving(FakeEngine(num_slots=1, gate=gate, max_len=100_000)) as served, served.client() as client:
    with socket.create_connection((client.base_url.host, client.base_url.port)) as leaving:
      leaving.sendall(f'{head}Content-Length: {len(body)}\r\n\r\n'.encode() + body)
      wait_for(lambda: metric(client, 'active_slots') == 1)
    wait_for(lambda: metric(client, 'request_seconds_count') == 1)  # the server has noticed the disconnect
    gate.set()
    wait_for(lambda: metric(client, 'active_slots') == 0)
    assert metric(client, 'decode_steps_total') <= 3
    assert client.post(COMPLETIONS, json=HELLO).json()['choices'][0]['text'] == 'hellohe'


def test_a_failed_step_is_an_error_only_for_its_own_clients():
  with serving(FakeEngine(num_slots=1)) as served, served.client() as client:
    served.engine.fail_next = RuntimeError('secret details')
    response = client.post(COMPLETIONS, json=HELLO)
    assert response.status_code == 500
    assert 'secret' not in response.text
    served.engine.fail_next = RuntimeError('secret details')
    with client.stream('POST', COMPLETIONS, json=HELLO | {'stream': True}) as response:
      assert events(response)[-1]['error']['code'] == 'engine_failed'
    assert client.post(COMPLETIONS, json=HELLO).status_code == 200
    assert client.get('/health').status_code == 200


def test_repeated_failures_end_the_server():
  engine = FakeEngine()
  engine.step = None  # a TypeError, each time
  with serving(engine) as served, served.client() as client:
    for _ in range(3):
      assert client.post(COMPLETIONS, json=HELLO).status_code == 500
    served.thread.join(10)
  assert isinstance(served.codes[0], TypeError)


def test_a_stuck_step_makes_health_fail():
  gate = threading.Event()
  with serving(FakeEngine(gate=gate), stuck_s=0.1) as served, served.client() as client:
    waiting = threading.Thread(target=client.post, args=(COMPLETIONS,), kwargs={'json': HELLO})
    waiting.start()
    wait_for(lambda: client.get('/health').status_code == 503)
    gate.set()
    waiting.join(10)
    assert client.get('/health').status_code == 200


def test_draining_finishes_requests_within_the_limit_and_cuts_the_rest():
  gate = threading.Event()
  engine = FakeEngine(num_slots=2, gate=gate, max_len=10_000_000)
  with serving(engine, drain_s=1.0) as served, served.client() as client:
    long, short = HELLO | {'max_tokens': 9_000_000, 'stream': True}, HELLO | {'stream': True}
    with (
      client.stream('POST', COMPLETIONS, json=long) as first,
      client.stream('POST', COMPLETIONS, json=short) as second,
    ):
      served.stop.set()
      assert 'Stopping: ' in served.lines.get(timeout=5)
      assert client.get('/ready').status_code == 503
      assert client.get('/health').status_code == 200
      refused = client.post(COMPLETIONS, json=HELLO)
      assert refused.status_code == 503
      assert refused.headers['retry-after']
      gate.set()
      assert events(second)[-1]['choices'][0]['finish_reason'] == 'length'
      assert events(first)[-1]['error']['code'] == 'cut'
    served.thread.join(10)
  assert served.codes == [0]


def test_ready_comes_after_the_warm_up():
  warm = threading.Event()
  engine = FakeEngine()
  engine.warm_up = lambda: warm.wait(10)
  with serving(engine, wait=False) as served, served.client() as client:
    assert client.get('/health').status_code == 200
    waiting = client.get('/ready')
    assert (waiting.status_code, waiting.json()['message']) == (503, 'The server is warming up.')
    assert client.post(COMPLETIONS, json=HELLO).status_code == 503
    warm.set()
    assert 'Serving fake.Model' in served.lines.get(timeout=5)
    assert client.get('/ready').status_code == 200
