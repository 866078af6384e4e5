"""Two processes read a model's folder, each the bytes of its shards alone, and write it again as one whole folder."""

import json
from pathlib import Path

from launch import run_ranks
import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.bridges.huggingface.test_folders import write_folder

pytestmark = pytest.mark.exhaustive

WORKER = Path(__file__).with_name('worker_folders.py')


@pytest.mark.parametrize('name', ['qwen3_moe', 'phi3'])  # heads and experts that mdl does not divide; fused kernels
def test_each_process_reads_its_shards_and_the_export_is_whole(name, tmp_path, rng):
  folder, out = tmp_path / 'model', tmp_path / 'again'
  write_folder(folder, name, rng)
  (folder / 'chat_template.jinja').write_text('{{ messages }}')
  command = [str(WORKER), str(folder), str(out)]
  ranks = run_ranks(command, num_processes=2, num_devices=2, log_dir=tmp_path, deadline_s=240)
  assert [rank.returncode for rank in ranks] == [0, 0], [rank.log for rank in ranks]

  for report in (json.loads(Path(f'{out}.{rank}.json').read_text()) for rank in range(2)):
    assert report['own'] < 0.65 * report['total']  # data 2 lies across the processes, and splits all kernels
    assert report['read'] <= report['own'], report

  def tensors(path):
    return {key: value for file in path.glob('*.safetensors') for key, value in load_file(file).items()}

  before, after = tensors(folder), tensors(out)
  assert before.keys() == after.keys()
  for key, value in before.items():
    np.testing.assert_array_equal(after[key], value, err_msg=key)
  assert (out / 'chat_template.jinja').exists()
  assert not list(tmp_path.glob('.again.partial'))
