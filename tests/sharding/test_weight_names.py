"""Patterns select weights by name as `re` does, or are refused; none hangs."""

import re
import sys

import pytest

from spmd_tasks.errors import UserError
from spmd_tasks.sharding.weight_names import check_pattern, compile_pattern, matching_names

NAME = 'stack/layers/' + 'a' * 60 + '/kernel'


@pytest.mark.parametrize(
  'pattern',
  [
    r'attention/(query|value)',
    r'^(?!.*bias).*/kernel$',
    r'(encoder|decoder)/layers_\d+/(self_attention|mlp)/(query|key|value|out|wi|wo)/kernel',
    r'[^]/)]*/.*[a\]]{60}?/(?:kernel|bias)?',
    r'(?P<name>a)(?P=name)\(?',
    '',
  ],
)
def test_python_compiles_usual_patterns(pattern):
  assert compile_pattern(pattern) == re.compile(pattern)


MANY_CHOICES = ['(a+)+b', '.?' * 30 + 'a{60}b', '(a|a)*b', '(a|a)' * 40 + 'b', '(.|a)*b', '.*' * 9 + 'b', '((a?){9})*b']


@pytest.mark.parametrize('pattern', MANY_CHOICES)
def test_patterns_with_many_choices_are_matched_in_linear_time(pattern):
  """Python's `re` would take longer than anyone waits."""
  assert matching_names([pattern], [NAME, 'a' * 90 + 'b'], setting='it') == ['a' * 90 + 'b']


@pytest.mark.parametrize(
  'pattern, remedy',
  [
    *[(pattern, 'google-re2') for pattern in MANY_CHOICES],
    ('a' * 1001, '1001 characters.*at most 1000'),
    ('(' * 490 + ')' * 490, 'not a regular expression'),
    ('a{99999999999}', 'not a regular expression'),
  ],
)
def test_without_re2_they_are_refused(monkeypatch, pattern, remedy):
  monkeypatch.setitem(sys.modules, 're2', None)
  compile_pattern.cache_clear()
  with pytest.raises(UserError, match=f'task.trained .*{remedy}'):
    check_pattern(pattern, 'task.trained')
  compile_pattern.cache_clear()


def test_patterns_that_re2_does_not_support_are_refused():
  with pytest.raises(UserError, match=r'\(\?!x\).*several patterns'):
    check_pattern('(?!x)(a+)+b', 'task.trained')


NAMES = ['stack/layers/attention/query/kernel', 'embedding/table', 'stack/layers/attention/out/kernel']


def test_names_that_match_any_pattern_are_selected():
  assert matching_names(['attention/(query|value)'], NAMES, setting='lora_targets') == NAMES[:1]
  assert matching_names(['table', 'out'], NAMES, setting='lora_targets') == NAMES[1:]


@pytest.mark.parametrize(
  'patterns, message',
  [
    (['table', 'attention/querry'], "'attention/querry'.*similar names are stack/layers/attention/query/kernel"),
    ('table', r"\('table',\)"),
    ((), 'no pattern'),
  ],
)
def test_patterns_that_select_nothing_are_refused(patterns, message):
  with pytest.raises(UserError, match=f'lora_targets .*{message}'):
    matching_names(patterns, NAMES, setting='lora_targets')
