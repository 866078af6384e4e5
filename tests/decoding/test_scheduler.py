"""The scheduler over a fake engine: slots are used again, ends are seen, nobody is forgotten.

See test_prompt_reading.py for chunks and reuse.
"""

import pytest

from spmd_tasks.decoding import Request
from spmd_tasks.decoding.generated_sequence import GeneratedSequence
from spmd_tasks.decoding.scheduler import Scheduler
from tests.serving.fake_engine import EOS, TOKENIZER, FakeEngine


def sequence(text, max_tokens, *, stop=(), has_logprobs=False, index=0, priority=0):
  ids = tuple(text) if not isinstance(text, str) else tuple(TOKENIZER.encode(text))
  request = Request(ids=ids, max_tokens=max_tokens, stop=stop, stop_ids=(EOS,), priority=priority)
  return GeneratedSequence(request, TOKENIZER.decode, has_logprobs=has_logprobs, index=index)


def run(scheduler, limit=500):
  """All deltas until nothing is left to do, as (step, delta)."""
  deltas = []
  for number in range(limit):
    if not scheduler.has_work:
      return deltas
    deltas += [(number, delta) for delta in scheduler.advance()]
  raise AssertionError(f'still at work after {limit} steps')


def text_of(deltas, wanted):
  return ''.join(delta.text for _, delta in deltas if delta.sequence is wanted)


def test_sequences_that_end_by_length_leave_no_hole_in_the_slots(rng):
  engine = FakeEngine(num_slots=4)
  scheduler = Scheduler(engine)
  scheduler.submit([sequence('a', int(n)) for n in rng.integers(2, 30, size=40)])
  while scheduler.num_queued:
    scheduler.advance()
  assert scheduler.num_slot_steps / (scheduler.num_steps * 4) > 0.95


def test_a_slot_is_used_again_one_step_after_a_stop_token():
  engine = FakeEngine(num_slots=1)
  scheduler = Scheduler(engine)
  first, second = sequence([70, 71, EOS], 50), sequence('b', 2)
  scheduler.submit([first, second])
  deltas = run(scheduler)
  assert (first.finish_reason, first.num_tokens) == ('stop', 3)
  assert text_of(deltas, first) == TOKENIZER.decode([70, 71])
  assert text_of(deltas, second) == 'bb'
  # Its three tokens, the step that was launched before its end was read, then the next one.
  assert [entry[0] for entry in engine.log] == ['prefill', 'step', 'step', 'step', 'prefill', 'step']


def test_the_least_priority_goes_first_and_gives_up_last():
  scheduler = Scheduler(FakeEngine(num_slots=1))
  texts = {
    name: sequence(name, 3, priority=number) for name, number in (('a', 0), ('b', 0), ('c', -1), ('d', 5), ('e', 0))
  }
  scheduler.submit([texts['a']])
  deltas = [(0, delta) for delta in scheduler.advance()]
  scheduler.submit([texts[name] for name in 'bd'])
  scheduler.submit([texts[name] for name in 'ce'])
  deltas += run(scheduler)
  ended = [delta.sequence for _, delta in deltas if delta.finish_reason is not None]
  assert ended == [texts[name] for name in 'acbed']
  # Two texts of 6 blocks in a pool of 8: one begins again, and it is not always the last one that was admitted.
  for priorities, preempted in (((0, 0), 1), ((5, 0), 0)):
    scheduler = Scheduler(FakeEngine(num_slots=2, max_len=32, num_blocks=8))
    both = [sequence(name, 20, priority=number) for name, number in zip('xy', priorities, strict=True)]
    for each in both:
      scheduler.submit([each])
      scheduler.advance()
    ended = [delta.sequence for _, delta in run(scheduler) if delta.finish_reason is not None]
    assert (scheduler.num_preemptions, ended[-1]) == (1, both[preempted])


@pytest.mark.parametrize('place', ['queue', 'slot'])
def test_what_is_cancelled_frees_its_slot_within_two_steps(place):
  engine = FakeEngine(num_slots=1)
  scheduler = Scheduler(engine)
  long, other = sequence('long', 100), sequence('other', 5)
  cancelled = other if place == 'queue' else long
  scheduler.submit([long, other])
  deltas = [(0, delta) for delta in scheduler.advance()]
  scheduler.end([cancelled], 'cancelled')
  scheduler.end([cancelled], 'cancelled')  # once more changes nothing
  num_steps = scheduler.num_steps
  while not (long if place == 'queue' else other).num_tokens:
    deltas += [(0, delta) for delta in scheduler.advance()]
  assert scheduler.num_steps - num_steps <= 2
  if place == 'queue':
    scheduler.end([long], 'cancelled')
  deltas += run(scheduler)
  assert [delta.finish_reason for _, delta in deltas if delta.sequence is cancelled][-1] == 'cancelled'
  assert sum(delta.finish_reason is not None for _, delta in deltas if delta.sequence is cancelled) == 1
  if place != 'queue':
    assert text_of(deltas, other) == 'other'


@pytest.mark.parametrize('outcome', ['cancelled', 'error'])
def test_a_sequence_whose_last_token_is_on_its_way_can_still_end_otherwise(outcome):
  engine = FakeEngine(num_slots=2)
  scheduler = Scheduler(engine, prefill_budget=16)
  short, long = sequence('short', 2), sequence('long', 20)
  scheduler.submit([short, long])
  if outcome == 'error':
    engine.fail_next = RuntimeError('device lost')
  scheduler.advance()
  assert short.finish_reason is None
  if outcome == 'error':
    with pytest.raises(RuntimeError, match='device lost'):
      scheduler.advance()
    deltas = scheduler.recover()
  else:
    scheduler.end([short], 'cancelled')
    deltas = [delta for _, delta in run(scheduler)]
  assert [delta.finish_reason for delta in deltas if delta.sequence is short] == [outcome]
  assert long.finish_reason == ('error' if outcome == 'error' else 'length')


def test_logprobs_come_with_their_text_and_not_behind_a_stop_string():
  scheduler = Scheduler(FakeEngine(num_top=3))
  each = sequence('a stop b', 60, stop=('stop',), has_logprobs=True)
  scheduler.submit([each])
  deltas = [delta for _, delta in run(scheduler)]
  entries = [entry for delta in deltas for entry in delta.logprobs]
  assert [entry.token for entry in entries] == TOKENIZER.encode('a ')
  assert [entry.offset for entry in entries] == [0, 1]
  assert entries[0].logprob == pytest.approx(-entries[0].token / 100)
  assert [token for token, _ in entries[0].top] == [entries[0].token + i for i in range(3)]


def test_all_can_be_ended_and_admission_can_wait():
  scheduler = Scheduler(FakeEngine(num_slots=1))
  sequences = [sequence('abc', 50), sequence('abc', 50)]
  scheduler.submit(sequences)
  assert scheduler.advance(admit=False) == []
  assert scheduler.num_active == 0
  scheduler.advance()
  assert {delta.finish_reason for delta in scheduler.end_all('cut')} == {'cut'}
  assert [each.finish_reason for each in sequences] == ['cut', 'cut']
  assert not scheduler.has_work
