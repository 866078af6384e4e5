"""The scheduler over a fake engine: slots are used again, ends are seen, nobody is forgotten; and prompts in chunks.

The fake engine's tokens come from what is in its cache: a wrong slot, or chunks of other weights, give other texts.
"""

import dataclasses

import numpy as np
import pytest

from spmd_tasks.decoding import Request
from spmd_tasks.decoding.generated_sequence import GeneratedSequence
from spmd_tasks.decoding.scheduler import Scheduler
from tests.serving.fake_engine import EOS, TOKENIZER, FakeEngine


def sequence(text, max_tokens, **fields):
  """Of a text, or of tokens."""
  ids = tuple(TOKENIZER.encode(text) if isinstance(text, str) else text)
  request = Request(ids=ids, max_tokens=max_tokens, stop_ids=(EOS,), **fields)
  return GeneratedSequence(request, TOKENIZER.decode, has_logprobs=True)


def run(scheduler, *sequences):
  """Submits, and advances until nothing is left to do; returns all deltas."""
  scheduler.submit(sequences)
  deltas = []
  for _ in range(1000):
    if not scheduler.has_work:
      return deltas
    deltas += scheduler.advance()
  raise AssertionError('still at work')


def text_of(deltas, wanted):
  return ''.join(delta.text for delta in deltas if delta.sequence is wanted)


def circle(text, num, shift=0):
  """What the fake answers: the prompt's tokens in a circle, moved by its weights and the number of the adapter."""
  tokens = [token + shift for token in TOKENIZER.encode(text)]
  return TOKENIZER.decode([tokens[i % len(tokens)] for i in range(num)])


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
  deltas = run(scheduler, first, second)
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
  deltas = scheduler.advance()
  scheduler.submit([texts[name] for name in 'bd'])
  deltas += run(scheduler, texts['c'], texts['e'])
  ended = [delta.sequence for delta in deltas if delta.finish_reason is not None]
  assert ended == [texts[name] for name in 'acbed']
  # Two texts of 6 blocks in a pool of 8: one begins again, and it is not always the last one that was admitted.
  for priorities, preempted in (((0, 0), 1), ((5, 0), 0)):
    scheduler = Scheduler(FakeEngine(num_slots=2, max_len=32, num_blocks=8))
    both = [sequence(name, 20, priority=number) for name, number in zip('xy', priorities, strict=True)]
    for each in both:
      scheduler.submit([each])
      scheduler.advance()
    ended = [delta.sequence for delta in run(scheduler) if delta.finish_reason is not None]
    assert (scheduler.num_preemptions, ended[-1]) == (1, both[preempted])


@pytest.mark.parametrize('place', ['queue', 'slot'])
def test_what_is_cancelled_frees_its_slot_within_two_steps(place):
  engine = FakeEngine(num_slots=1)
  scheduler = Scheduler(engine)
  long, other = sequence('long', 100), sequence('other', 5)
  cancelled = other if place == 'queue' else long
  scheduler.submit([long, other])
  deltas = scheduler.advance()
  scheduler.end([cancelled], 'cancelled')
  scheduler.end([cancelled], 'cancelled')  # once more changes nothing
  num_steps = scheduler.num_steps
  while not (long if place == 'queue' else other).num_tokens:
    deltas += scheduler.advance()
  assert scheduler.num_steps - num_steps <= 2
  if place == 'queue':
    scheduler.end([long], 'cancelled')
  deltas += run(scheduler)
  ends = [delta.finish_reason for delta in deltas if delta.sequence is cancelled and delta.finish_reason]
  assert ends == ['cancelled']
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
    deltas = run(scheduler)
  assert [delta.finish_reason for delta in deltas if delta.sequence is short] == [outcome]
  assert long.finish_reason == ('error' if outcome == 'error' else 'length')


def test_logprobs_come_with_their_text_and_not_behind_a_stop_string():
  scheduler = Scheduler(FakeEngine(num_top=3))
  entries = [entry for delta in run(scheduler, sequence('a stop b', 60, stop=('stop',))) for entry in delta.logprobs]
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


# --- prompts in chunks ---


@pytest.mark.parametrize(
  'seed', [*range(12), *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(12, 24))]
)
def test_any_schedule_gives_each_sequence_the_tokens_it_has_alone(seed):
  rng = np.random.default_rng(seed)
  engine = FakeEngine(
    num_slots=int(rng.integers(3, 7)),
    prefill_rows=1 + seed % 3,
    prefill_chunk=int(rng.choice([4, 8])),
    can_reuse=seed % 10 != 9,
    num_snapshots=(1 + seed // 2 % 2) * (seed % 3),  # in some, a prefill takes more of them than there are
    max_len=120,
    num_parts=1 + seed // 2 % 2,
    num_blocks=(1 + seed // 2 % 2) * int(rng.integers(30, 60)) if seed % 4 else None,
  )
  scheduler = Scheduler(engine, prefill_budget=None if seed % 2 else int(rng.integers(1, 60)))
  documents = [''.join(rng.choice(list('abcdefgh'), size=40)) for _ in range(2)]
  sequences, texts, shifts, pool = [], {}, {}, scheduler._pool

  def note(deltas):
    shifts.update({delta.sequence: engine.weights for delta in deltas if delta.finish_reason})
    for chunks, of_part, free in zip(pool._with_snapshots, pool._chunks, pool._free_snapshots, strict=True):
      assert all(of_part.get(chunk.key) is chunk for chunk in chunks)  # what was evicted or forgotten keeps none
      assert len(chunks) + len(free) == engine.num_snapshots // engine.num_parts

  for _ in range(200):
    event = rng.random()
    if event < 0.25:
      text = documents[int(rng.integers(2))][: int(rng.integers(1, 41))]
      text += ''.join(rng.choice(list('xyz'), size=int(rng.integers(0, 12))))
      new = [
        sequence(text, int(rng.integers(1, 60)), score_prompt=event < 0.03, adapter=int(rng.integers(0, 1 + seed % 3)))
        for _ in range(rng.integers(1, 3))
      ]
      sequences += new
      texts.update(dict.fromkeys(new, text))
      scheduler.submit(new)
    elif event < 0.3 and sequences:
      scheduler.end([sequences[int(rng.integers(len(sequences)))]], 'cancelled')
    elif event < 0.32:
      while scheduler.num_active:
        note(scheduler.advance(admit=False))
      engine.weights += 1
    elif event < 0.33:
      note(scheduler.recover())
    note(scheduler.advance())
  while scheduler.has_work:
    note(scheduler.advance())

  for each in sequences:
    expected = circle(texts[each], each.request.max_tokens, shifts[each] + each.request.adapter)
    assert expected.startswith(each.text)
    assert each.finish_reason != 'length' or each.text == expected
    assert not (each.request.score_prompt and each.num_reused)
  assert {each.finish_reason for each in sequences} >= {'length', 'cancelled'}
  assert scheduler.num_used_blocks == 0
  assert scheduler.num_generated_tokens == sum(each.num_tokens for each in sequences)
  assert (scheduler.num_reused_tokens > 0) == engine.can_reuse


@pytest.mark.parametrize(
  'num_snapshots, reused',
  [
    (0, [0, 16, 16, 24, 24, 32]),  # without states
    (4, [0, 0, 16, 24, 24, 32]),  # the second prompt has a snapshot taken where it leaves the first one
    (1, [0, 0, 0, 16, 24, 32]),
  ],
)
def test_prompts_continue_from_snapshots_of_what_they_have_in_common(num_snapshots, reused):
  engine = FakeEngine(num_snapshots=num_snapshots)
  scheduler, sequences = Scheduler(engine), []
  texts = [f'sixteen letters.{end}' for end in ('first end', 'other end', 'third')]
  texts += [texts[1], f'{texts[1]}, next turn', f'{texts[1]}, next turn']
  for text in texts:
    sequences.append(sequence(text, 12))
    assert text_of(run(scheduler, sequences[-1]), sequences[-1]) == circle(text, 12)
  assert [each.num_reused for each in sequences] == reused
  assert scheduler.num_reused_tokens == sum(reused)
  engine.weights += 1
  again = sequence(texts[0], 4)
  assert text_of(run(scheduler, again), again) == circle(texts[0], 4, 1)
  assert again.num_reused == 0


def test_a_long_prompt_holds_up_nobody_for_longer_than_a_chunk():
  engine = FakeEngine(num_slots=4)
  scheduler = Scheduler(engine)
  run(scheduler, sequence('short', 30), sequence('a long prompt of forty characters, and 8', 4), sequence('next', 4))
  kinds = ''.join(entry[0][0] for entry in engine.log)
  assert kinds.startswith('ps' * 7 + 'sss')
  assert [entry[1] for entry in engine.log if entry[0] == 'prefill'] == [(0,), *[(1,)] * 5, (2,)]


def test_the_budget_is_of_padded_tokens_and_one_prefill_is_always_read():
  engine = FakeEngine(num_slots=4)
  scheduler = Scheduler(engine, prefill_budget=12)  # chunks of 8 and buckets of 4
  run(scheduler, *(sequence(text, 20) for text in ('abc', 'abcdefghij', 'k', 'l')))
  kinds = ''.join(entry[0][0] for entry in engine.log)
  assert kinds.startswith('ppsppps')


def test_what_is_cancelled_in_the_middle_of_its_prompt_leaves_its_slot_and_its_chunks():
  engine = FakeEngine(num_slots=1)
  scheduler = Scheduler(engine)
  text = 'a long prompt of forty characters, and 8'
  first, second = sequence(text, 50), sequence(text, 50)
  scheduler.submit([first, second])
  scheduler.advance()
  scheduler.advance()
  scheduler.end([first], 'cancelled')
  assert scheduler.num_active == 0
  run(scheduler)
  assert second.num_reused == 16
  assert second.text == circle(text, 50)
  assert scheduler.num_chunks == 2 + 3
  assert (scheduler.num_prompt_tokens, scheduler.num_reused_tokens) == (40, 16)


def test_prompts_share_the_blocks_of_whole_chunks_also_with_texts_that_go_on():
  engine = FakeEngine(num_slots=4)
  scheduler = Scheduler(engine)
  run(scheduler, sequence('a system prompt and one', 2))
  again, beside = (sequence(f'a system prompt {text}', 40) for text in ('again', 'beside'))
  scheduler.submit([again, beside])
  scheduler.advance()
  assert (again.num_reused, beside.num_reused) == (16, 0)  # one prefill a step
  scheduler.advance()
  assert beside.num_reused == 16
  assert scheduler.num_used_blocks == 4 + 2 + 2  # of the two chunks, and of the end of each text
  longer, shorter = sequence('a system prompt again, and much more', 40), sequence('a system task', 40)
  other = GeneratedSequence(dataclasses.replace(longer.request, cache_key='of another user'), TOKENIZER.decode)
  run(scheduler, shorter, longer, other)
  assert (shorter.num_reused, longer.num_reused, other.num_reused) == (8, 16, 0)
  assert scheduler.num_used_blocks == 0


def test_what_is_evicted_was_not_used_for_the_longest_time_and_a_prompt_loses_its_end_first():
  engine = FakeEngine(num_slots=2, max_len=40, num_blocks=10)
  scheduler = Scheduler(engine)
  run(scheduler, sequence('the first of the prompts', 1), sequence('a second', 1))  # 6 blocks in 3 chunks, and 2
  run(scheduler, sequence('the first again', 1))
  run(scheduler, sequence('x' * 30, 1))  # 8 blocks: also those of ' prompts', 'of the' and 'a second'
  again = [sequence(text, 1) for text in ('the first of the prompts!', 'a second one')]
  for each in again:
    run(scheduler, each)
  assert [each.num_reused for each in again] == [8, 0]


def test_a_prompt_that_is_scored_is_read_whole_and_by_itself():
  engine = FakeEngine(num_slots=4, prefill_rows=4)
  scheduler = Scheduler(engine)
  text = 'a prompt of some chunks'
  run(scheduler, sequence(text, 1))
  scored, only = sequence(text, 3, score_prompt=True), sequence(text, 0, score_prompt=True)
  other = sequence('other', 3)
  run(scheduler, scored, only, other)
  tokens = TOKENIZER.encode(text)
  for each in (scored, only):
    prompt = each.logprobs[: len(tokens)]
    assert [entry.token for entry in prompt] == tokens
    assert [entry.logprob for entry in prompt] == [None, *(pytest.approx(-token / 100) for token in tokens[1:])]
    assert [entry.offset for entry in prompt] == list(range(-len(tokens), 0))
    assert each.num_reused == 0
  assert [entry.token for entry in scored.logprobs[len(tokens) :]] == tokens[:3]
  assert (only.text, only.num_tokens, only.finish_reason) == ('', 0, 'length')
  again = sequence(text, 1)
  run(scheduler, again)
  assert again.num_reused == 16
