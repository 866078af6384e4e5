"""A short campaign, and its judge: it must find what it is there to find."""

import dataclasses

import numpy as np
import pytest

from spmd_tasks.decoding import Request, SamplingParams
from spmd_tasks.decoding.generated_sequence import GeneratedSequence, TokenLogprob
from tests.decoding import campaign
from tests.decoding.runs import make_run


@pytest.mark.slow
@pytest.mark.exhaustive  # by default test_decode_steps.py has a random mix of 200 requests
def test_a_world_without_faults():
  found = campaign.run_world(seed=0, world=51, num_requests=12, num_cancellations=40)
  assert (found['wrong'], found['leaked_blocks'], found['late_compilations'], found['faults']) == (0, 0, 0, [])
  assert found['cancelled'] >= 40 < found['texts']
  assert found['preemptions'] > 0


@pytest.fixture(scope='module')
def right():
  """A judge, a request, and the entries of its tokens by full forward passes."""
  run, ids = make_run('one device'), [3, 14, 15]
  request = Request(ids=tuple(ids), max_tokens=6, sampling=SamplingParams(presence_penalty=0.5))
  entries = []
  for _ in range(request.max_tokens):
    text = [*ids, *(entry.token for entry in entries)]
    logits, logprobs = run.logits(text)[-1], run.logprobs(text)[-1]
    token = int(np.argmax(logits - 0.5 * np.isin(np.arange(len(logits)), text[len(ids) :])))
    entries.append(TokenLogprob(token=token, offset=0, text='', logprob=float(logprobs[token]), top=()))
  return campaign.Judge(run), request, entries


def changed(entries, **fields):
  return [*entries[:2], dataclasses.replace(entries[2], **fields), *entries[3:]]


@pytest.mark.parametrize(
  'change, message',
  [
    (lambda request, entries: (request, entries), None),
    (lambda request, entries: (request, changed(entries, logprob=entries[2].logprob + 1e-3)), 'position 5: '),
    (lambda request, entries: (dataclasses.replace(request, stop_ids=(entries[1].token,)), entries), 'number 1 ends'),
    (lambda request, entries: (dataclasses.replace(request, max_tokens=7), entries), 'ended by length'),
    (lambda request, entries: (dataclasses.replace(request, sampling=SamplingParams(temperature=1.0)), entries), 'not'),
    (lambda request, entries: (request, entries[:-1]), 'ended by length'),
  ],
)
def test_the_judge_finds(right, change, message):
  judge, request, entries = right
  request, entries = change(request, entries)
  text = GeneratedSequence(request, campaign.TOKENIZER.decode)
  text.logprobs, text.finish_reason = entries, 'length'
  text._text.text = campaign.TOKENIZER.decode([entry.token for entry in entries])
  fault = judge.fault_of(text, None)
  assert fault is None if message is None else message in fault
