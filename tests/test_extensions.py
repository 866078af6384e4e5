"""Extensions are found by entry points; docs/extending.md runs one."""

from importlib.metadata import EntryPoint

import pytest

from spmd_tasks import extensions
from spmd_tasks.extensions import Extension, Format, Mode

GOOD = Extension(
  name='good', modes=(Mode(name='good', help='is', run=lambda command: 3),), formats=(Format(name='g', help=''),)
)
NOT_A_EXTENSION = 'text'


@pytest.fixture
def installed(monkeypatch):
  def install(**values):
    points = [EntryPoint(name=name, value=value, group=extensions.ENTRY_POINTS) for name, value in values.items()]
    monkeypatch.setattr(extensions.metadata, 'entry_points', lambda group: points)
    extensions.extensions.cache_clear()

  yield install
  extensions.extensions.cache_clear()


@pytest.mark.parametrize(
  'value, reason',
  [
    ('no_such_module:EXTENSION', "No module named 'no_such_module'"),
    (f'{__name__}:NO_SUCH_NAME', 'NO_SUCH_NAME'),
    (f'{__name__}:NOT_A_EXTENSION', "'text' is not an Extension"),
  ],
)
def test_a_broken_extension_is_reported_and_disables_no_other(value, reason, installed, capsys):
  installed(bad=value, good=f'{__name__}:GOOD')
  assert extensions.extensions() == (GOOD,)
  assert [fmt.name for fmt in extensions.formats()] == ['g']
  message = capsys.readouterr().err
  assert message.count('\n') == 1
  assert message.startswith(f'spmd-tasks: extension bad ({value}) cannot be loaded: ')
  assert reason in message


def test_each_extension_may_change_a_job_or_refuse_it(monkeypatch):
  added = [
    Extension(name=name, prepare_job=lambda job, mode, place, name=name: f'{job} {name} {mode}') for name in 'ab'
  ]
  monkeypatch.setattr(extensions, 'extensions', lambda: (GOOD, *added))
  assert extensions.prepare_job('job', 'train', '/') == 'job a train b train'
