"""Episodes of several turns: their tokens and masks, by hand and by the engine, and a job that learns from one."""

from types import SimpleNamespace

import numpy as np
import pytest

from spmd_tasks import exit_codes
from spmd_tasks.inputs import ByteTokenizer, ChatTemplate
from spmd_tasks.tuning.environments import Episode, Turns
from spmd_tasks.tuning.reward_functions import RewardWorkers, _play
from tests import binary
from tests.tuning.reward_experiments import write_prompts
from tests.tuning.rewards import Calculator, Echo
from tests.tuning.test_rewards import MINIBATCHES, goes_on, numbers, train
from tests.tuning.test_rollout_faults import Sampler

NAME, HERE = 'tests.tuning.rewards', [binary.REPOSITORY]
TEMPLATE = ChatTemplate(
  template='{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}|\n{% endfor %}'
  '{% if add_generation_prompt %}<assistant>{% endif %}',
  stop=('|\n',),
)
RECORD = {'prompt': '2 + 3?', 'answer': '5'}


def play(texts, template=TEMPLATE, **settings):
  """An episode of which the model writes given texts, and what was said about failures."""
  tokenizer, said = ByteTokenizer(), []
  messages = _play(Calculator, RECORD, (), None)[0]
  episode = Episode(messages=messages)
  prompt = tuple(tokenizer.encode(template.render(messages)))

  def completion(ids, text, max_tokens):
    made = tokenizer.encode(text)[:max_tokens]
    request = SimpleNamespace(ids=ids, stop_ids=(tokenizer.eos_id,))
    text, reason = tokenizer.decode(made).partition('|')[0], 'stop' if len(made) < max_tokens else 'length'
    given = {'request': request, 'ids': made, 'logprobs': [-1.0] * len(made), 'text': text, 'finish_reason': reason}
    return SimpleNamespace(**given, expert_ids=None)

  turns = Turns(
    **{'tokenizer': tokenizer, 'template': template, 'stop': (), 'max_tokens': 99, 'max_turns': 9} | settings,
    report=said.append,
    answer=lambda calls: [_play(Calculator, *call) for call in calls],
    complete=lambda turn, wanted: [completion(ids, texts[turn], limit) for _, ids, limit in wanted],
  )
  turns.play([RECORD], [episode], [completion(prompt, texts[0], settings.get('max_tokens', 99))])
  return episode, said


def test_a_conversation_is_what_the_template_writes_and_only_the_model_s_tokens_are_sampled():
  episode, said = play(['calc: 2+3|\n', 'calc: 5+1|\n', '5|\n'])
  turns = ['calc: 2+3', ('tool', '5'), 'calc: 5+1', ('tool', '6'), '5']
  named = [turn if isinstance(turn, tuple) else ('assistant', turn) for turn in turns]
  messages = [{'role': role, 'content': text} for role, text in [('user', RECORD['prompt']), *named]]
  decode = ByteTokenizer().decode
  whole = TEMPLATE.render(messages, add_generation_prompt=False)
  assert decode([*episode.prompt_ids, *episode.ids]) == whole
  sampled = [token for token, own in zip(episode.ids, episode.is_sampled, strict=True) if own]
  assert decode(sampled) == 'calc: 2+3|\ncalc: 5+1|\n5|\n'
  assert episode.logprobs == [-float(own) for own in episode.is_sampled]
  assert (episode.reward, episode.is_cut, said) == (1.0, False, [])


@pytest.mark.parametrize(
  ('settings', 'num_turns'), [({'max_turns': 2}, 2), ({'max_tokens': 40}, 2), ({'max_tokens': 5}, 1)]
)
def test_the_limits_of_turns_and_tokens_cut_an_episode_after_a_text_of_the_model(settings, num_turns):
  episode, _ = play(['calc: 2+3|\n'] * 9, **settings)
  assert (len(episode.turns), episode.is_cut, episode.is_sampled[-1]) == (num_turns, True, True)
  assert len(episode.ids) <= settings.get('max_tokens', 99)


def test_a_template_that_changes_earlier_messages_costs_the_episode_and_is_said():
  template = ChatTemplate(template='{% for m in messages %}{{ loop.revindex }}{{ m.content }}{% endfor %}', stop=('|',))
  episode, (said,) = play(['calc: 2+3|'], template)
  assert np.isnan(episode.reward)
  assert 'writes earlier messages otherwise' in said


@pytest.mark.parametrize('environment', ['Echo', 'Remembering'])
def test_steps_in_processes_are_those_of_the_record_and_the_texts_with_or_without_a_state(environment):
  record, texts = {'prompt': 'Hi'}, ['oka', 'no', 'yes']
  with RewardWorkers(
    [], environment=f'{NAME}:{environment}', num_workers=2, timeout_s=2.0, code_directories=HERE
  ) as workers:
    begun, raised = workers.steps([(record, (), None), ({}, (), None)])
    assert (begun[:3], raised) == (('Hi', 0.0, False), None)
    state, found = begun[3], []
    for turn in range(3):
      ((*given, state),) = workers.steps([(record, texts[: turn + 1], state)])
      found.append(tuple(given))
    assert found == [('[3]', 1.0, False), ('[2]', 0.0, False), ('[3]', 0.0, True)]
    assert workers.steps([(record, ['hang'], begun[3])]) == [None]
    assert workers.num_failed == 2


def test_steps_that_all_fail_are_a_fault_of_the_environment_however_its_episodes_begin():
  record = {'prompt': 'Hi'}
  with RewardWorkers([], environment=f'{NAME}:Silent', num_workers=1, timeout_s=10.0, code_directories=HERE) as workers:
    assert workers.steps([(record, (), None)]) != [None]
    assert workers.broken is None
    assert workers.steps([(record, ['oka'], None)]) == [None]
    assert workers.broken == f'{NAME}:Silent: ValueError: its step returned None, not (messages, reward, done)'


@pytest.mark.slow
def test_the_engine_goes_on_with_episodes_and_agrees_with_the_trainer(monkeypatch):
  """Many tokens end a text here, so that the turns are short, and one program may draw them; or the scheduler does."""
  ends = f'task.decode.eos_ids={list(range(2, 252, 5))}'
  made = {}
  with RewardWorkers([], environment=f'{NAME}:Echo', num_workers=2, timeout_s=10.0, code_directories=HERE) as workers:
    own = {'answer': workers.steps, 'environment': Echo}
    sampler = Sampler(f'environment={NAME}:Echo', 'task.decode.max_stop_ids=50', ends, **own)
    for stop in ((), ('\x00\x00',)):  # a string that does not come makes it the scheduler's
      sampler.sampler.stop = stop
      made[stop] = sampler.complete()
  for stop, episodes in made.items():
    assert {len(each.turns) for each in episodes} >= {1, 2}
    assert all(len(each.ids) <= 12 for each in episodes)
    made[stop] = sampler.settings.rollout_of(episodes, len(episodes))
    assert sampler.mismatch(made[stop]) < 1e-5
  one, other = made.values()
  np.testing.assert_array_equal(one['ids'], other['ids'])
  np.testing.assert_array_equal(one['weights'], other['weights'])
  assert 0 < one['weights'].sum() < sum(len(each.ids) for each in episodes)


@pytest.mark.slow
def test_a_job_learns_from_an_environment_and_goes_on_to_the_same_bits(tmp_path):
  data = write_prompts(tmp_path)
  # The compiled step is that of the job with staleness, which has this cap by default.
  settings = ('reward=', f'environment={NAME}:Echo', f'eval_data={data}', *MINIBATCHES, 'sampler_cap=2.0')
  flags = [flag for each in (*settings, 'checkpoint_every=9') for flag in ('--set', each)]
  flags += ['--num_train_steps', '12']
  assert train(tmp_path / 'whole', data, *flags) == exit_codes.OK
  whole = numbers(tmp_path / 'whole')
  assert goes_on(tmp_path / 'whole', 9, data, *flags) == whole
  assert max(each['sampler_mismatch_max'] or 0 for each in whole.values()) < 1e-4
  assert whole[12]['reward'] > whole[1]['reward'] + 0.2
