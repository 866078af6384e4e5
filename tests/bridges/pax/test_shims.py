"""Stand-ins of modules that are not installed."""

import importlib

import pytest

from spmd_tasks.bridges.pax._shims import find_stand_in
from spmd_tasks.errors import UserError

# Like modules of T5's users, and paxml.tasks.lm.params.c4.
MODULE = """
import abc
from spmd_tasks.bridges.pax._shims import StandIn

seqio = StandIn('seqio')
VOCABULARY = seqio.SentencePieceVocabulary('/no/such/model')

@seqio.map_over_dataset
def lower(example):
  return example

@seqio.map_over_dataset(num_seeds=1)
def noise(example, seed):
  return example

class Registry(seqio.TaskRegistry):
  @classmethod
  def add_versioned(cls, name: str, source: seqio.Source | None = None) -> list[seqio.Task]:
    return cls.add(name, source=source, preprocessors=[seqio.preprocessors.tokenize, lower, noise])

class Features(seqio.FeatureConverter, abc.ABC):
  def __init__(self, pack: bool):
    self.pack = pack

Registry.add_versioned('mine', seqio.TfdsDataSource(tfds_name='a/b:1.0.0'))
FEATURES = Features(pack=True)
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
  (tmp_path / 'module_with_seqio_tasks.py').write_text(MODULE)
  monkeypatch.syspath_prepend(tmp_path)
  return importlib.import_module('module_with_seqio_tasks')


def test_modules_that_register_tasks_can_be_imported(module):
  assert isinstance(module.VOCABULARY, module.seqio.SentencePieceVocabulary)
  assert not isinstance(3, module.seqio.Task)


@pytest.mark.parametrize(
  'use, words',
  [
    (lambda module: module.VOCABULARY.vocab_size, 'seqio.SentencePieceVocabulary needs seqio, which is not installed'),
    (lambda module: module.lower({}), 'seqio.map_over_dataset needs seqio'),
    (lambda module: module.seqio.get_mixture_or_task('mine'), 'seqio.get_mixture_or_task needs seqio, which'),
  ],
)
def test_using_a_stand_in_raises_a_user_error(module, use, words):
  with pytest.raises(UserError, match=words):
    use(module)


def test_only_missing_modules_have_stand_ins():
  for name in ('t5.data.preprocessors', 'lingvo.core.ops'):
    assert find_stand_in(name) is not None
  for name in ('numpy', 'seqio_of_mine', 'lingvo.core.nested_map', 't5x'):
    assert find_stand_in(name) is None
