"""Experiment classes are found by name, and wrong names get the nearest ones."""

from pathlib import Path
import re
import sys
import time

import pytest
import small_experiments

from spmd_tasks import experiments
from spmd_tasks.config import listing, registry
from spmd_tasks.experiment import Experiment

EXPERIMENT = '''
from spmd_tasks.config.registry import register
from spmd_tasks.experiment import Experiment

@register
class Mine(Experiment):
  """My own.

  With a second paragraph.
  """

  def task(self):
    return 'task'

  def train_input(self):
    return 'input'
'''


@pytest.fixture
def directory(tmp_path, monkeypatch):
  """An empty current directory, whose modules are unloaded afterwards."""
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(sys, 'path', list(sys.path))
  monkeypatch.setattr(registry, '_registry', {})
  before = set(sys.modules)
  yield tmp_path
  for name in set(sys.modules) - before:
    file = getattr(sys.modules[name], '__file__', None)
    if file and Path(file).is_relative_to(tmp_path):
      del sys.modules[name]


@pytest.mark.parametrize('name', ['Small', 'Built'])  # Small is registered
def test_a_class_is_found_by_its_name(name):
  assert registry.get(f'small_experiments.{name}') is getattr(small_experiments, name)


def test_a_class_has_one_name():
  class InThePackage(small_experiments.Small):
    pass

  InThePackage.__module__ = 'spmd_tasks.experiments.lm'
  assert registry.name_of(InThePackage) == 'lm.InThePackage'
  InThePackage.__module__ = 'mine.lm'
  assert registry.name_of(InThePackage) == 'mine.lm.InThePackage'


def test_the_current_directory_is_searched(directory):
  (directory / 'own_in_cwd.py').write_text(EXPERIMENT)
  package = directory / 'own_package'
  package.mkdir()
  (package / '__init__.py').write_text('')
  (package / 'deeper.py').write_text(EXPERIMENT)
  for name in ('own_in_cwd.Mine', 'own_package.deeper.Mine'):
    cls = registry.get(name)
    assert issubclass(cls, Experiment)
    assert registry.name_of(cls) == name
    assert registry.get(registry.name_of(cls)) is cls


@pytest.mark.parametrize(
  'name, message',
  [
    ('nonsense', r"unknown experiment 'nonsense'.*--list"),
    ('no_such_module.Small', r"unknown experiment 'no_such_module.Small'"),
    ('small_experiments.Smal', r"unknown experiment 'small_experiments.Smal'. Nearest: small_experiments.Small"),
    ('../etc/passwd', 'unknown experiment'),
    ('', 'unknown experiment'),
    ('small_experiments.Task', 'small_experiments.Task is not an experiment'),
  ],
)
def test_the_error_about_an_unknown_name_has_the_nearest(name, message):
  with pytest.raises(ValueError, match=message):
    registry.get(name)


@pytest.mark.parametrize('name', ['x' * 1_000_000, 'lm.' + 'x' * 1_000_000, 'x.' * 500_000 + 'X'])
def test_a_name_of_a_million_characters_is_refused_quickly(name):
  began = time.monotonic()
  with pytest.raises(registry.UnknownExperimentError) as caught:
    registry.get(name)
  assert time.monotonic() - began < 5
  assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
  'name, nearest',
  [
    ('synthetc.Tiny', 'synthetic.Tiny, '),
    ('spmd_task.recipes.DenseLanguageModel', 'spmd_tasks.recipes.DenseLanguageModel. '),
    ('own_package.depeer.Mine', 'own_package.deeper.Mine. '),
    ('own_package.deeper', 'own_package.deeper.Mine. '),
    ('HERE/own_package/deeper.py', 'own_package.deeper.CLASS. '),
    ('HERE/own_package/deeper.py:Mine', 'own_package.deeper.Mine. '),
    ('/elsewhere/deeper.py', 'deeper.CLASS with --experiment_path /elsewhere. '),
  ],
)
def test_the_error_about_a_typo_in_a_module_has_the_nearest_names(directory, name, nearest):
  (directory / 'own_package').mkdir()
  (directory / 'own_package' / '__init__.py').write_text('')
  (directory / 'own_package' / 'deeper.py').write_text(EXPERIMENT)
  with pytest.raises(registry.UnknownExperimentError, match=rf'Nearest: .*{nearest}'):
    registry.get(name.replace('HERE', str(Path.cwd())))


@pytest.mark.parametrize(
  'source, message',
  [
    ('x = 1\ny = 1 / 0\n', r'importing broken_\d fails with ZeroDivisionError: .*broken_\d.py:2'),
    ('import no_such_package_of_mine\n', r"No module named 'no_such_package_of_mine' \(.*broken_\d.py:1\)"),
    ('x = = 1\n', r'fails with SyntaxError: .*broken_\d.py:1'),
    (EXPERIMENT.replace('"""My own.', '"""').replace('With a second paragraph.', ''), r'has no docstring'),
    (EXPERIMENT.replace('def task', 'hooks: int = 3\n  def task'), r'define `def hooks\(self\)`.*broken_\d.py:6'),
  ],
)
def test_a_bug_in_a_module_is_reported_with_its_line(directory, source, message, request):
  name = f'broken_{request.node.callspec.indices["source"]}'
  (directory / f'{name}.py').write_text(source)
  with pytest.raises(ValueError, match=message):
    registry.get(f'{name}.Mine')


def test_classes_of_two_modules_may_have_the_same_name(directory):
  class Twice(small_experiments.Small):
    """First."""

  other = type('Twice', (small_experiments.Small,), {'__doc__': 'Second.', '__module__': f'elsewhere.{__name__}'})
  assert registry.register(Twice) is registry.register(Twice) is Twice
  assert registry.register(other) is other
  assert registry.get(f'{__name__}.Twice') is Twice
  assert registry.get(f'elsewhere.{__name__}.Twice') is other


def test_the_list_is_read_from_the_source(tmp_path, monkeypatch):
  (tmp_path / '__init__.py').write_text('')
  (tmp_path / 'own.py').write_text(EXPERIMENT + '\nclass NotRegistered(Mine):\n  """Base."""\n')
  (tmp_path / 'another.py').write_text('raise ValueError\n\n@registry.register\nclass B(A):\n  """One line."""\n')
  monkeypatch.setattr(listing, 'DIRECTORY', tmp_path)
  assert listing.list_experiments() == [('another.B', 'One line.'), ('own.Mine', 'My own.')]


# --- experiments of other packages, by entry points ---


@pytest.fixture
def installed(directory, monkeypatch):
  """Installs packages with entry points in the current directory: `installed({'vision': 'their_package.vision'})`."""

  def install(points: dict[str, str], distribution: str = 'theirs') -> None:
    info = directory / 'site' / f'{distribution}-1.0.dist-info'
    info.mkdir(parents=True)
    (info / 'METADATA').write_text(f'Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n')
    lines = [f'{name} = {value}\n' for name, value in points.items()]
    (info / 'entry_points.txt').write_text(f'[{experiments.ENTRY_POINTS}]\n' + ''.join(lines))

  package = directory / 'site' / 'their_package' / 'deeper'
  package.mkdir(parents=True)
  (package.parent / '__init__.py').write_text('raise ValueError("imported for a list")')
  (package / 'vision.py').write_text(EXPERIMENT)
  (directory / 'site' / 'their_module.py').write_text(EXPERIMENT)
  monkeypatch.syspath_prepend(str(directory / 'site'))
  return install


def listed_of_others():
  """The listed experiments of other packages."""
  ours = {path.stem for path in experiments.DIRECTORY.glob('*.py')}
  return [item for item in listing.list_experiments() if item[0].partition('.')[0] not in ours]


def test_experiments_of_other_packages_are_listed_without_importing_them(installed):
  installed({'vision': 'their_package.deeper.vision', 'speech': 'their_module'})
  assert listed_of_others() == [('speech.Mine', 'My own.'), ('vision.Mine', 'My own.')]
  cls = registry.get('speech.Mine')
  assert registry.name_of(cls) == 'their_module.Mine'  # also found without the entry point
  assert registry.get('their_module.Mine') is cls


def test_the_error_of_an_entry_point_is_reported(installed, directory):
  installed({'vision': 'their_package.deeper.vision', 'gone': 'not_there.at_all'})
  assert 'cannot be listed: the source of not_there.at_all' in dict(listed_of_others())['gone.*']
  with pytest.raises(ValueError, match=r'vision.Mine cannot be loaded: .* fails with ValueError: imported for a list'):
    registry.get('vision.Mine')
  with pytest.raises(ValueError, match=r"gone.Mine cannot be loaded: .* No module named 'not_there'"):
    registry.get('gone.Mine')


def test_an_unreadable_entry_point_hides_no_other(installed, directory):
  (directory / 'site' / 'torn.py').write_text('class Torn(:')
  installed({'torn': 'torn', 'speech': 'their_module'})
  listed = dict(listed_of_others())
  assert 'speech.Mine' in listed
  assert re.search(r'cannot be listed: .*torn\.py', listed['torn.*'])


def test_two_entry_points_of_one_name_are_listed_by_their_modules(installed):
  installed({'speech': 'their_module', 'lm': 'their_module'})
  installed({'speech': 'their_package.deeper.vision'}, distribution='others')
  assert [name for name, _ in listed_of_others()] == ['their_module.Mine', 'their_package.deeper.vision.Mine']
  assert registry.get('lm.StdlibTiny').__module__ == 'spmd_tasks.experiments.lm'
  with pytest.raises(ValueError, match=r"both registered as 'speech': write for example their_module.Mine"):
    registry.get('speech.Mine')


# --- a package called experiments ---


def test_in_our_checkout_the_path_of_a_class_names_the_same_class(directory, monkeypatch):
  monkeypatch.chdir(experiments.DIRECTORY.parent)
  assert registry.get('experiments.lm.StdlibTiny') is registry.get('lm.StdlibTiny')


def test_every_listed_experiment_is_found_and_documented():
  for name, line in listing.list_experiments():
    assert line.strip(), name
    assert registry.name_of(registry.get(name)) == name
