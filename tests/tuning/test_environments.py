"""Episodes of several turns: their tokens and masks, with scripted texts and with the engine, and a job that learns."""

from types import SimpleNamespace

import numpy as np
import pytest

from spmd_tasks import UserError, exit_codes
from spmd_tasks.inputs import ByteTokenizer, ChatTemplate
from spmd_tasks.tuning.environments import Episode, Turns, stop_strings
from spmd_tasks.tuning.reward_functions import RewardWorkers, _play
from tests import binary
from tests.tuning.reward_experiments import write_prompts
from tests.tuning.rewards import Calculator, Echo
from tests.tuning.test_rewards import MINIBATCHES, metrics_by_step, train
from tests.tuning.test_rollout_faults import Sampler

NAME, HERE = 'tests.tuning.rewards', [binary.REPOSITORY]
TEMPLATE = ChatTemplate(
  template='{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}|\n{% endfor %}'
  '{% if add_generation_prompt %}<assistant>{% endif %}',
  stop=('|\n',),
)
RECORD = {'prompt': '2 + 3?', 'answer': '5'}


def play(texts, template=TEMPLATE, **settings):
  """Plays an episode in which the model writes `texts`; returns it, and the reports of failures."""
  tokenizer, reports = ByteTokenizer(), []
  messages = _play(Calculator, RECORD, (), None)[0]
  episode = Episode(messages=messages)
  prompt = tuple(tokenizer.encode(template.render(messages)))

  def completion(ids, text, max_tokens):
    tokens = tokenizer.encode(text)[:max_tokens]
    return SimpleNamespace(
      request=SimpleNamespace(ids=ids, stop_ids=(tokenizer.eos_id,)),
      ids=tokens,
      logprobs=[-1.0] * len(tokens),
      text=tokenizer.decode(tokens).partition('|')[0],
      finish_reason='stop' if len(tokens) < max_tokens else 'length',
      expert_ids=None,
    )

  turns = Turns(
    **{'tokenizer': tokenizer, 'template': template, 'stop': (), 'max_tokens': 99, 'max_turns': 9} | settings,
    report=reports.append,
    answer=lambda calls: [_play(Calculator, *call) for call in calls],
    complete=lambda turn, episodes: [completion(ids, texts[turn], limit) for _, ids, limit in episodes],
  )
  turns.play([RECORD], [episode], [completion(prompt, texts[0], settings.get('max_tokens', 99))])
  return episode, reports


def test_an_episode_is_the_rendered_conversation_and_marks_the_model_s_tokens_as_sampled():
  episode, reports = play(['calc: 2+3|\n', 'calc: 5+1|\n', '5|\n'])
  turns = ['calc: 2+3', ('tool', '5'), 'calc: 5+1', ('tool', '6'), '5']
  named = [turn if isinstance(turn, tuple) else ('assistant', turn) for turn in turns]
  messages = [{'role': role, 'content': text} for role, text in [('user', RECORD['prompt']), *named]]
  decode = ByteTokenizer().decode
  whole = TEMPLATE.render(messages, add_generation_prompt=False)
  assert decode([*episode.prompt_ids, *episode.ids]) == whole
  sampled = [token for token, is_sampled in zip(episode.ids, episode.is_sampled, strict=True) if is_sampled]
  assert decode(sampled) == 'calc: 2+3|\ncalc: 5+1|\n5|\n'
  assert episode.logprobs == [-float(is_sampled) for is_sampled in episode.is_sampled]
  assert (episode.reward, episode.is_cut, reports) == (1.0, False, [])


@pytest.mark.parametrize(
  ('settings', 'num_turns'), [({'max_turns': 2}, 2), ({'max_tokens': 40}, 2), ({'max_tokens': 5}, 1)]
)
def test_limits_of_turns_and_tokens_end_an_episode_after_a_text_of_the_model(settings, num_turns):
  episode, _ = play(['calc: 2+3|\n'] * 9, **settings)
  assert (len(episode.turns), episode.is_cut, episode.is_sampled[-1]) == (num_turns, True, True)
  assert len(episode.ids) <= settings.get('max_tokens', 99)


def test_a_template_that_changes_earlier_messages_is_reported_and_costs_the_episode():
  template = ChatTemplate(template='{% for m in messages %}{{ loop.revindex }}{{ m.content }}{% endfor %}', stop=('|',))
  episode, (report,) = play(['calc: 2+3|'], template)
  assert np.isnan(episode.reward)
  assert 'renders messages differently' in report


@pytest.mark.parametrize('environment', ['Echo', 'Remembering'])
def test_steps_in_processes_depend_only_on_the_record_and_the_texts(environment):
  record, texts = {'prompt': 'Hi'}, ['oka', 'no', 'yes']
  with RewardWorkers(
    [], environment=f'{NAME}:{environment}', num_workers=2, timeout_s=2.0, code_directories=HERE
  ) as workers:
    first, failed = workers.steps([(record, (), None), ({}, (), None)])
    assert (first[:3], failed) == (('Hi', 0.0, False), None)
    state, answers = first[3], []
    for turn in range(3):
      ((*answer, state),) = workers.steps([(record, texts[: turn + 1], state)])
      answers.append(tuple(answer))
    assert answers == [('[3]', 1.0, False), ('[2]', 0.0, False), ('[3]', 0.0, True)]
    assert workers.steps([(record, ['hang'], first[3])]) == [None]
    assert workers.num_failed == 2


def test_stop_strings_are_a_text_or_several():
  stops = ('</end>', ('a', '</end>'), ['a'], ())
  strings = [stop_strings(type('Mine', (), {'stop': stop})) for stop in stops]
  assert strings == [('</end>',), ('a', '</end>'), ('a',), ()]
  assert stop_strings(None) == ()
  for stop in ('', ('a', ''), (3,), 3):
    with pytest.raises(UserError, match='`stop` of Mine must be texts'):
      stop_strings(type('Mine', (), {'stop': stop}))


def test_an_environment_whose_steps_all_fail_is_broken_even_if_its_resets_succeed():
  record = {'prompt': 'Hi'}
  with RewardWorkers([], environment=f'{NAME}:Silent', num_workers=1, timeout_s=10.0, code_directories=HERE) as workers:
    assert workers.steps([(record, (), None)]) != [None]
    assert workers.broken is None
    assert workers.steps([(record, ['oka'], None)]) == [None]
    assert workers.broken == f'{NAME}:Silent: ValueError: its step returned None, not (messages, reward, done)'


@pytest.mark.slow
@pytest.mark.exhaustive  # the job below compares sampler and trainer too
def test_the_engine_continues_episodes_and_agrees_with_the_trainer(monkeypatch):
  """Many tokens end a text, so that turns are short; one program samples them, or the scheduler does."""
  ends = f'task.decode.eos_ids={list(range(2, 252, 5))}'
  rollouts = []
  with RewardWorkers([], environment=f'{NAME}:Echo', num_workers=2, timeout_s=10.0, code_directories=HERE) as workers:
    environment = {'answer': workers.steps, 'environment': Echo}
    sampler = Sampler(f'environment={NAME}:Echo', 'task.decode.max_stop_ids=50', ends, **environment)
    for stop in ((), ('\x00\x00',)):  # a stop string requires the scheduler; this one never occurs
      sampler.sampler.stop = stop
      episodes = sampler.complete()
      assert {len(episode.turns) for episode in episodes} >= {1, 2}
      assert all(len(episode.ids) <= 12 for episode in episodes)
      rollouts.append(sampler.settings.rollout_of(episodes, len(episodes)))
      assert sampler.mismatch(rollouts[-1]) < 1e-5
  one, other = rollouts
  np.testing.assert_array_equal(one['ids'], other['ids'])
  np.testing.assert_array_equal(one['weights'], other['weights'])
  assert 0 < one['weights'].sum() < sum(len(episode.ids) for episode in episodes)


@pytest.mark.slow
def test_a_job_learns_from_an_environment(tmp_path):
  """Of its resumes test_rewards.py has the claim: the sampler and the position in the prompts are the same."""
  data = write_prompts(tmp_path)
  # With this cap the job uses the same compiled step as the job with staleness.
  settings = ('reward=', f'environment={NAME}:Echo', f'eval_data={data}', *MINIBATCHES, 'sampler_cap=2.0')
  flags = [flag for setting in settings for flag in ('--set', setting)]
  flags += ['--num_train_steps', '12']
  assert train(tmp_path / 'job', data, *flags) == exit_codes.OK
  metrics = metrics_by_step(tmp_path / 'job')
  assert max(each['sampler_mismatch_max'] or 0 for each in metrics.values()) < 1e-4
  assert metrics[12]['reward'] > metrics[1]['reward'] + 0.2
