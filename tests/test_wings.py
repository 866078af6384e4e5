"""Wings are found by entry points: one that fails is named and hides no other. docs/extending.md runs a whole one."""

from importlib.metadata import EntryPoint

import pytest

from spmd_tasks import wings
from spmd_tasks.wings import Format, Mode, Wing

GOOD = Wing(
  name='good', modes=(Mode(name='good', help='is', run=lambda command: 3),), formats=(Format(name='g', help=''),)
)
NOT_A_WING = 'text'


@pytest.fixture
def installed(monkeypatch):
  def install(**values):
    points = [EntryPoint(name=name, value=value, group=wings.ENTRY_POINTS) for name, value in values.items()]
    monkeypatch.setattr(wings.metadata, 'entry_points', lambda group: points)
    wings.wings.cache_clear()

  yield install
  wings.wings.cache_clear()


@pytest.mark.parametrize(
  'value, reason',
  [
    ('no_such_module:WING', "No module named 'no_such_module'"),
    (f'{__name__}:NO_SUCH_NAME', 'NO_SUCH_NAME'),
    (f'{__name__}:NOT_A_WING', "'text' is no Wing"),
  ],
)
def test_a_wing_that_fails_is_named_and_hides_no_other(value, reason, installed, capsys):
  installed(bad=value, good=f'{__name__}:GOOD')
  assert wings.wings() == (GOOD,)
  assert [each.name for each in wings.formats()] == ['g']
  said = capsys.readouterr().err
  assert said.count('\n') == 1
  assert said.startswith(f'spmd-tasks: wing bad ({value}) cannot be loaded: ')
  assert reason in said


def test_each_wing_may_change_a_job_or_refuse_it(monkeypatch):
  added = [Wing(name=name, prepare_job=lambda job, mode, place, name=name: f'{job} {name} {mode}') for name in 'ab']
  monkeypatch.setattr(wings, 'wings', lambda: (GOOD, *added))
  assert wings.prepare_job('job', 'train', '/') == 'job a train b train'
