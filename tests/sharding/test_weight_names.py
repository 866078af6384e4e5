"""Which names a prefix selects."""

import pytest

from spmd_tasks.sharding.weight_names import match_fn


@pytest.mark.parametrize(
  'prefix, name, matches',
  [
    ('.*expert', 'stack/layers/ffn/experts/up', True),
    ('stack/', 'stack/layers/ffn/up/kernel', True),
    ('layers', 'stack/layers/ffn/up/kernel', False),  # at the start only
    ('a|stack', 'stack/up', True),
    ('', 'stack/up', False),
    (None, 'stack/up', False),
  ],
)
def test_matches(prefix, name, matches):
  assert match_fn(prefix)(name) == matches
