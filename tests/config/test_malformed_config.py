"""A saved config that was edited, or another file, is resolved or refused in one sentence."""

import contextlib
import json
import random
from typing import Any

import pytest
from small_experiments import Small

from spmd_tasks import exit_codes
from spmd_tasks.config import resolve, to_json
from spmd_tasks.config.from_saved import from_json
from spmd_tasks.config.saved_config import read_saved_config
from spmd_tasks.errors import UserError, user_error_code
from tests import binary

SMALL = {'experiment': 'small_experiments.Small', 'overrides': {}, 'config': {}}


@pytest.mark.parametrize(
  'saved',
  [
    None,
    [],
    {},
    {'experiment': 'small_experiments.Small'},
    SMALL | {'experiment': ['small_experiments.Small']},
    SMALL | {'overrides': [1]},
    SMALL | {'config': {'seed': {'float': 5}}},
    SMALL | {'config': {'eval_inputs': {'symbol': 'builtins:dict', 'keys': [[]]}}},
    SMALL | {'config': {'seed': {'unheard': 'of'}}},
    SMALL | {'overrides': {'seed': {'unheard': 'of'}}},
  ],
  ids=str,
)
def test_other_json_is_refused(saved):
  with pytest.raises(ValueError, match='not a saved config'):
    from_json(saved)


def test_the_error_about_a_missing_file_has_its_path_once():
  message = 'config /no/config.json cannot be read: No such file or directory. Give the config.json of a job_log_dir.'
  with pytest.raises(UserError, match=f'^{message}$'):
    read_saved_config('/no/config.json')


@pytest.mark.parametrize(
  'path, value, message',
  [
    ('seed', 'abc', "seed is 'abc' and should be of type int"),
    ('seed', True, 'seed is True and should be of type int'),
    ('num_layers', 0.5, 'num_layers is 0.5 and should be of type int'),
    ('ici_mesh_shape', [1, 'x', 2], r"ici_mesh_shape is \(1, 'x', 2\) and should be of type tuple\[int, ...\]"),
    ('axis_rules', [5], r'axis_rules is \(5,\) and should be of type'),
    ('task', 5, 'task was 5 and is small_experiments:Task now'),
    (
      'task.reduction',
      {'enum': 'small_experiments:Reduction', 'name': 'MAX'},
      'task.reduction was MAX and is MEAN now',
    ),
  ],
)
def test_a_value_of_another_type_is_refused_by_its_path(path, value, message):
  saved = to_json(resolve(Small))
  saved['config'][path] = value
  with pytest.raises(ValueError, match=message):
    from_json(saved)


def test_the_binary_prints_one_sentence(tmp_path, capsys):
  for text in ('{"experiment": ', '[]', json.dumps(SMALL | {'config': []}), '[' * 100_000):
    file = tmp_path / 'config.json'
    file.write_text(text)
    assert binary.run_in_process('--config', file, '--print_config') == exit_codes.USAGE
    message = capsys.readouterr().err
    assert message.startswith('spmd-tasks: ')
    assert message.count('\n') == 1


def test_names_in_a_file_cannot_forge_lines_or_control_the_terminal(tmp_path, capsys):
  base, evil = to_json(resolve(Small)), '\x1b[2J\r\u202ex\nspmd-tasks: all is well'
  changes = [
    {'experiment': evil},
    {'experiment': f'a/{evil}'},
    {'config': base['config'] | {evil: 1}},
    {'config': base['config'] | {evil: {'unheard': 'of'}}},
    {'config': base['config'] | {'seed': evil}},
    {'config': base['config'] | {'task': {'symbol': evil}}},
    {'config': base['config'] | {'task': {'object': evil, 'repr': evil}}},
    {'config': base['config'] | {'task.reduction': {'enum': evil, 'name': evil}}},
  ]
  for change in changes:
    (tmp_path / 'config.json').write_text(json.dumps(base | change))
    assert binary.run_in_process('--config', tmp_path / 'config.json', '--print_config') == exit_codes.USAGE
    message = capsys.readouterr().err
    assert message.count('\n') == 1, message
    assert message.strip().isprintable(), message


BAD_VALUES = [
  (
    'warmup_fraction',
    {'float': 'nan'},
    r'task\(\) of .* fails with ValueError: .*NaN.*correct the fields .*warmup',
  ),
  ('warmup_fraction', {'float': 'inf'}, r'task\(\) of .* fails with OverflowError: .*\(.*warmup_fraction\)'),
  ('decode_inputs', -1, r'decode_inputs was -1 and is \{\} now'),
  ('decode_inputs', {'dict': {'a': 1}}, 'decode_inputs was'),
  ('eval_inputs', None, 'eval_inputs was None'),
  ('task.learner.optimizer.learning_rate', None, 'learning_rate'),
  ('task.learner.optimizer.learning_rate', 'a', 'learning_rate'),
  ('task.learner.optimizer.learning_rate', [[]], 'learning_rate'),
  ('task.learner.optimizer.momentum_dtype', '', "task.learner.optimizer: its fields give TypeError: data type ''"),
  ('task.learner.optimizer.momentum_dtype', 'a.b', 'task.learner.optimizer: its fields give TypeError'),
]


@pytest.mark.parametrize('path, value, message', BAD_VALUES)
def test_a_value_that_fails_in_the_build_is_refused_by_its_path(path, value, message):
  saved = to_json(resolve('lm.StdlibTiny'))
  saved['config'][path] = value
  with pytest.raises(UserError, match=message):
    from_json(saved).build()


def test_any_value_in_any_field_is_resolved_or_refused():
  rng, base = random.Random(0), to_json(resolve('lm.StdlibTiny'))
  values = [None, -1, 0, {'float': 'nan'}, {'float': '-inf'}, 10**30, '', 'x' * 1000, [], [[]], {'dict': {}}, 'float33']
  for path in rng.sample(sorted(base['config']), 60):
    saved = base | {'config': base['config'] | {path: rng.choice(values)}}
    with contextlib.suppress(UserError):
      from_json(saved).build()


JUNK = [None, True, -1, 3, 0.5, float('nan'), '', 'task', [], [1, 'a', None], {}, {'a': 1}]
JUNK += [{'float': 'inf'}, {'float': []}, {'list': [1]}, {'list': 3}, {'dict': {'a': 2}}, {'dict': []}]
JUNK += [{'dtype': 'bfloat16'}, {'dtype': 3}, {'enum': 'x', 'name': []}, {'object': 'x:Y'}]
JUNK += [{'symbol': 'builtins:dict', 'keys': ['a']}, {'symbol': 'a:b', 'keys': [[]]}, {'symbol': 3}]


def mutated(saved: dict[str, Any], rng: random.Random) -> dict[str, Any]:
  """The saved config with one value replaced, removed or added."""
  saved = json.loads(json.dumps(saved))

  def containers(value):
    if isinstance(value, (dict, list)) and value:
      yield value
      for item in value.values() if isinstance(value, dict) else value:
        yield from containers(item)

  node = rng.choice(list(containers(saved)))
  key = rng.choice(list(node) if isinstance(node, dict) else range(len(node)))
  match rng.choice(['replace', 'replace', 'remove', 'add']):
    case 'remove':
      del node[key]
    case 'add' if isinstance(node, dict):
      node[rng.choice(['', 'more', 'task.', 'task.model.more'])] = rng.choice(JUNK)
    case _:
      node[key] = rng.choice(JUNK)
  return saved


def test_one_wrong_value_anywhere_is_resolved_or_refused():
  saved = to_json(resolve(Small))
  rng = random.Random(0)
  codes, other_errors = [], []
  for _ in range(200):
    try:
      from_json(mutated(saved, rng)).build()
      codes.append(exit_codes.OK)
    except ValueError as error:
      codes.append(user_error_code(error))
      other_errors += [str(error)] if codes[-1] is None else []
  assert all('must not be above' in message for message in other_errors)  # the experiment's own check of `low`
  assert {exit_codes.OK, exit_codes.USAGE} <= set(codes)
