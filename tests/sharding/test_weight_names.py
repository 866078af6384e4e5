"""Patterns of names of weights, which a stranger's config may have, match as `re` does, or are refused; none hangs."""

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
def test_usual_patterns_are_those_of_python(pattern):
  assert compile_pattern(pattern) == re.compile(pattern)


MANY_CHOICES = ['(a+)+b', '.?' * 30 + 'a{60}b', '(a|a)*b', '(a|a)' * 40 + 'b', '(.|a)*b', '.*' * 9 + 'b', '((a?){9})*b']


@pytest.mark.parametrize('pattern', MANY_CHOICES)
def test_patterns_with_many_choices_are_matched_in_linear_time(pattern):
  """Python's `re` would take longer than anyone waits."""
  assert matching_names([pattern], [NAME, 'a' * 90 + 'b'], setting='it') == ['a' * 90 + 'b']


@pytest.mark.parametrize(
  'pattern, says',
  [
    *[(pattern, 'several patterns, or pip install google-re2') for pattern in MANY_CHOICES],
    ('a' * 1001, 'has 1001 characters: at most 1000'),
    ('(' * 490 + ')' * 490, 'no regular expression'),
    ('a{99999999999}', 'no regular expression'),
  ],
)
def test_without_re2_they_are_refused(monkeypatch, pattern, says):
  monkeypatch.setitem(sys.modules, 're2', None)
  compile_pattern.cache_clear()
  with pytest.raises(UserError, match=f'task.trained has .*{says}'):
    check_pattern(pattern, 'task.trained')
  compile_pattern.cache_clear()


def test_what_re2_lacks_is_refused():
  with pytest.raises(UserError, match=r'write several patterns .RE2 cannot match this one'):
    check_pattern('(?!x)(a+)+b', 'task.trained')
