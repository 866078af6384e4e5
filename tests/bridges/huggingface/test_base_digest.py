"""The digest of a folder is equal for a copy, and differs if a tensor, a name or a setting differs."""

import shutil

import numpy as np
import pytest
from safetensors.numpy import save_file

from spmd_tasks.bridges.huggingface.base_digest import folder_digest
from spmd_tasks.errors import UserError


def change_tensor(folder):
  tensors = {'a': np.ones((8, 64), np.float32), 'b': np.full(3, 2, np.float16)}
  save_file(tensors, folder / 'model-2.safetensors')


CHANGES = {
  'a tensor': change_tensor,
  'a file less': lambda folder: (folder / 'model-1.safetensors').unlink(),
  'the config': lambda folder: (folder / 'config.json').write_text('{"rope_theta": 2}'),
}


@pytest.fixture
def folder(tmp_path):
  folder = tmp_path / 'model'
  folder.mkdir()
  (folder / 'config.json').write_text('{"rope_theta": 1}')
  for shard in (1, 2):
    tensors = {'a': np.full((8, 64), shard, np.float32), 'b': np.zeros(3, np.float16)}
    save_file(tensors, folder / f'model-{shard}.safetensors')
  return folder


@pytest.mark.parametrize('change', CHANGES)
def test_changed_folders_have_other_digests(folder, change, tmp_path):
  before = folder_digest(str(folder))
  assert folder_digest(str(shutil.copytree(folder, tmp_path / 'copy'))) == before
  CHANGES[change](folder)
  assert folder_digest(str(folder)) != before


def test_damaged_files_raise_user_errors(folder):
  (folder / 'model-2.safetensors').write_bytes(bytes(100))
  with pytest.raises(UserError, match=r'model-2\.safetensors .*download it again'):
    folder_digest(str(folder))
