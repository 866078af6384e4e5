"""What a package that is not installed would do is answered by the one command that installs it."""

import importlib.util
from pathlib import Path
import re
import sys
import tomllib

from etils import epath
import pytest

from spmd_tasks import main
from spmd_tasks.decoding.prompts import PromptFile
from spmd_tasks.errors import UserError
from spmd_tasks.files import absolute_path
from spmd_tasks.inputs import BpeTokenizer, Parquet
from spmd_tasks.runtime.metrics import make_writer

EXTRAS = tomllib.loads((Path(__file__).parents[1] / 'pyproject.toml').read_text())['project']['optional-dependencies']


@pytest.fixture
def bare(monkeypatch):
  """None of the extras' packages can be found."""
  wanted = {re.split(r'[<>=\[]', package)[0].replace('-', '_') for extra in EXTRAS.values() for package in extra}
  find_spec = importlib.util.find_spec
  for name in wanted:
    monkeypatch.delitem(sys.modules, name, raising=False)
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None if name in wanted else find_spec(name))


def test_a_server(bare, tmp_path, capsys):
  assert main.run(['--mode', 'serve', '--job_log_dir', str(tmp_path)]) == 2
  assert (
    "--mode serve needs starlette, which is not installed: pip install 'spmd-tasks[serve]'" in capsys.readouterr().err
  )


@pytest.mark.parametrize(
  'extra, use',
  [
    ('huggingface', lambda place: BpeTokenizer(path=f'{place}/tokenizer.json').vocab_size),
    ('parquet', lambda place: Parquet(pattern=f'{place}/*.parquet').open()),
    ('stores', lambda place: absolute_path('gs://no-bucket/job')),
    ('tf-data', lambda place: PromptFile(path=f'{place}/prompts.tfrecord').read()),
  ],
)
def test_what_an_experiment_uses(bare, tmp_path, extra, use):
  with pytest.raises(UserError, match=rf"not installed: pip install 'spmd-tasks\[{extra}\]'"):
    use(tmp_path)
  assert extra in EXTRAS


def test_without_tensorboard_metrics_are_written_all_the_same(bare, tmp_path):
  writer = make_writer(epath.Path(tmp_path), trackers=('tensorboard',), primary=True)
  writer.write(1, {'loss': 2.0})
  writer.close()
  assert [path.name for path in tmp_path.iterdir()] == ['metrics.jsonl']
