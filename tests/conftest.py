"""Every test process gets 8 fake CPU devices; implicit rank promotion raises.

XLA's compilations are most of what the tests wait for. So XLA optimises little, and keeps its programs in one cache for
all processes of a run and for later runs (tests/xla_settings.py). Fake devices have more threads than devices
(spmd_tasks/distributed/initialization.py). Processes that tests start inherit all that, and are forked by one server
(tests/fork_server.py).

Workers (-n) take whole files, so that a file's fixtures are built once, and single cases of the files in `_SPREAD`;
files that share an import or a job go to the same worker.
"""

import collections
import contextlib
import functools
import gc
import os
from pathlib import Path
import shutil
import signal
import sys
import tempfile
import types

from tests import xla_settings

os.environ.update({**xla_settings.ENVIRONMENT, **os.environ})
if 'PYTEST_XDIST_WORKER' not in os.environ:  # workers, and processes that tests start, inherit it
  os.environ['XDG_CONFIG_HOME'] = tempfile.mkdtemp(prefix='spmd_tasks_config_')  # of the key that signs jobs

import jax
import numpy as np
import pytest
from xdist.scheduler import LoadScopeScheduling

from spmd_tasks.distributed import use_fake_devices
from tests import costs, forked, import_graph, shared_models
from tests.store_fixtures import gcs_emulator, s3_emulator, store  # noqa: F401  (one emulator for all directories)

# A process that loads Triton beside TensorFlow aborts, as both bring LLVM; PyTorch does without on a CPU.
sys.modules['triton'] = None  # type: ignore[assignment]  # importing it raises ImportError
sys.modules['sklearn'] = None  # type: ignore[assignment]  # TensorFlow's Keras would import it: 1 s
# TensorBoard's reader takes its own stand-in for TensorFlow where this module exists: 10 s sooner.
sys.modules['tensorboard.compat.notf'] = types.ModuleType('notf')
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as a script's `&` leaves it to all processes of the tests
  signal.signal(signal.SIGINT, signal.default_int_handler)
use_fake_devices(8)
gc.disable()  # until all tests are collected: imports leave no garbage
jax.config.update('jax_numpy_rank_promotion', 'raise')


def pytest_addoption(parser: pytest.Parser) -> None:
  parser.addoption('--all', action='store_true', help='run the cases marked exhaustive too: full products of tables')
  parser.addoption('--fast', action='store_true', help='run only the test files that are cheap, a few CPU seconds each')
  parser.addoption('--changed', action='store_true', help='run only the test files that a change since main can reach')
  parser.addoption('--costs', action='store_true', help='print the CPU seconds of the dearest files and fixtures')


def pytest_configure(config: pytest.Config) -> None:
  """Starts the server that forks processes for the tests: one for all workers of a run; none with --all."""
  config.pluginmanager.register(costs.Costs(config))
  if not hasattr(config, 'workerinput'):
    config.add_cleanup(functools.partial(shutil.rmtree, os.environ['XDG_CONFIG_HOME'], ignore_errors=True))
  if hasattr(config, 'workerinput') or config.getoption('--all') or config.option.collectonly:
    return
  server = contextlib.ExitStack()
  config.add_cleanup(server.close)
  directory = Path(server.enter_context(tempfile.TemporaryDirectory(prefix='spmd_tasks_')))
  server.enter_context(forked.running_server(directory))


# What some tests compare with: the group `torch` of pyproject.toml, several GB.
_REFERENCES = ('torch', 'transformers', 'peft', 'accelerate')
_NO_REFERENCE = 'it compares with PyTorch, transformers or peft, which are not installed'


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item):
  """Skips a test whose fixtures import a reference that is not installed."""
  with _skipping_without_reference():
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item):
  """Skips a test that imports a reference that is not installed."""
  with _skipping_without_reference():
    return (yield)


@contextlib.contextmanager
def _skipping_without_reference():
  try:
    yield
  except ModuleNotFoundError as error:
    if (error.name or '').partition('.')[0] not in _REFERENCES:
      raise
    pytest.skip(_NO_REFERENCE)


def pytest_terminal_summary(terminalreporter) -> None:
  """Says how many tests compare with a reference that is not installed."""
  skipped = [report for report in terminalreporter.stats.get('skipped', ()) if _NO_REFERENCE in str(report.longrepr)]
  if skipped:
    terminalreporter.ensure_newline()
    terminalreporter.write_line(
      f'{len(skipped)} tests were skipped because they compare with PyTorch, transformers or peft: scripts/test '
      '--torch installs these and runs them.'
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
  """Garbage is looked for among what the tests make alone, and seldom: JAX makes much while it traces, little garbage.

  That is a sixth of the time that tracing takes.
  """
  gc.freeze()
  gc.enable()
  gc.set_threshold(50_000, 20, 20)


@pytest.hookimpl(tryfirst=True)
def pytest_unconfigure(config: pytest.Config) -> None:
  """Saves what coverage has measured: xdist ends its workers by a signal, before coverage's own exit handler runs."""
  coverage = sys.modules.get('coverage')
  measured = coverage and coverage.Coverage.current()
  if measured:
    measured.save()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
  """Leaves out cases marked exhaustive, unless --all is given. Groups come first, then files with more slow tests.

  With --fast, files that cost more than _FAST_CPU_S are left out; with --changed, those that no change reaches.
  """
  cost = costs.recorded() if config.getoption('--fast') else {}
  reached = import_graph.reached_from(import_graph.changed_files()) if config.getoption('--changed') else None

  def is_selected(item: pytest.Item) -> bool:
    if cost and ('slow' in item.keywords or cost.get(item.nodeid.partition('::')[0], 0) > _FAST_CPU_S):
      return False
    is_reached = reached is None or item.path in reached
    return is_reached and ('exhaustive' not in item.keywords or config.getoption('--all'))

  selected = [item for item in items if is_selected(item)]
  if len(selected) < len(items):
    config.hook.pytest_deselected(items=[item for item in items if not is_selected(item)])
  num_slow = collections.Counter(item.path for item in selected if 'slow' in item.keywords)

  def place(item: pytest.Item) -> tuple:
    scope = _scope(item.nodeid)  # of a group, directories stay together, with what their conftest.py makes
    group = (0, scope, str(item.path.parent)) if scope in _TOGETHER else (1,)
    return *group, -num_slow[item.path]

  items[:] = sorted(selected, key=place)


_FAST_CPU_S = 4  # of a whole file

# Files of long cases that share little. Their cases go to whichever worker is free.
_SPREAD = ('multi_process/test_binary.py', 'multi_process/test_faults.py')
_SPREAD += ('test_docs.py', 'test_scripts.py')


# Files that one worker has, because they share what takes seconds: imports, a finished job, steps that are compiled.
_TOGETHER = {
  'torch': (
    'bridges/test_generation_config.py',
    'bridges/huggingface/test_against_transformers.py',
    'bridges/huggingface/test_encoder_decoders.py',
    'bridges/huggingface/test_nextn_folders.py',
    'bridges/huggingface/test_peft.py',
    'bridges/huggingface/test_published_configs.py',
    'bridges/huggingface/test_quantized.py',
    'bridges/huggingface/test_score_heads.py',
    'evaluation/test_lm_eval.py',
    'inputs/test_as_transformers_does.py',
    'learning/test_muon.py',
    'serving/test_response_templates.py',
    'serving/test_served_scorers.py',
    'tuning/test_assistant_turns.py',
    'tuning/test_policy_loss.py',
    'tuning/test_preference_loss.py',
  ),
  'seqio': (
    'bridges/t5x/test_gin.py',
    'bridges/t5x/test_seqio.py',
    'bridges/t5x/test_seqio_metrics.py',
    'inputs/test_batches.py',
    'inputs/test_tokenizers.py',
  ),
  'Paxml': (
    'bridges/pax/test_learner_variables.py',
    'bridges/pax/test_settings.py',
    'bridges/pax/test_sweeps.py',
  ),
  'a finished job': ('tests/programs/', 'tests/replay/'),
  'a job of rewards': ('tuning/test_environments.py', 'tuning/test_rewards.py'),
  'steps for plans': (
    'planning/test_collectives.py',
    'planning/test_memory_parts.py',
    'planning/test_predicted_time.py',
  ),
  'decode steps': ('decoding/test_decode_steps.py', 'decoding/test_drafts.py'),
}


def _scope(nodeid: str) -> str:
  """The file, or the group of files, or the case: what one worker has whole."""
  file = nodeid.partition('::')[0]
  if file.endswith(_SPREAD):
    return nodeid
  return next((name for name, parts in _TOGETHER.items() if any(part in file for part in parts)), file)


class _FilesAndCases(LoadScopeScheduling):
  """Hands out whole files, those that share something together, or single cases of the files in _SPREAD."""

  def _split_scope(self, nodeid: str) -> str:
    return _scope(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log) -> LoadScopeScheduling:
  config.option.loadscopereorder = False  # the order of pytest_collection_modifyitems
  return _FilesAndCases(config, log)


_MAPS = Path('/proc/self/maps')
_MAX_MAPS = 20_000


@pytest.fixture(autouse=True, scope='module')
def compiled_programs_are_given_up():
  """Linux lets a process have 65,530 memory maps, of which a compiled program takes ten; then LLVM dies wordlessly."""
  yield
  if _MAPS.exists() and _MAPS.read_bytes().count(b'\n') > _MAX_MAPS:
    shared_models.forget()
    jax.clear_caches()
    gc.collect()


@pytest.fixture
def rng() -> np.random.Generator:
  return np.random.default_rng(0)
