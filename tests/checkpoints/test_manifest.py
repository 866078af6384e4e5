"""Manifests detect every change of a checkpoint's files and of themselves."""

import hashlib
import json

from etils import epath
import pytest

from spmd_tasks.checkpoints.manifest import (
  MANIFEST_FILE,
  CheckpointError,
  DamagedCheckpointError,
  LeafEntry,
  read_manifest,
  write_manifest,
)
from spmd_tasks.checkpoints.verifying import verify_files

LEAVES = (LeafEntry(name='weights/w', shape=(2, 3), dtype='bfloat16'), LeafEntry(name='step', shape=(), dtype='int32'))
FILES = {'state/d/a': b'\x00' * 5000, 'state/b': b'text', 'state/empty': b'', 'input/process_0_of_1.json': b'{}'}


@pytest.fixture
def directory(tmp_path) -> epath.Path:
  for name, data in FILES.items():
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_bytes(data)
  write_manifest(epath.Path(tmp_path), step=7, num_processes=2, leaves=LEAVES)
  return epath.Path(tmp_path)


def verify(directory: epath.Path) -> None:
  verify_files(directory, read_manifest(directory))


def test_an_unchanged_checkpoint_is_intact(directory):
  verify(directory)
  manifest = read_manifest(directory)
  assert (manifest.step, manifest.num_processes, manifest.leaves) == (7, 2, LEAVES)
  assert {entry.path: entry.num_bytes for entry in manifest.files} == {name: len(data) for name, data in FILES.items()}


def test_every_flipped_bit_of_the_manifest_is_detected(directory):
  path = directory / MANIFEST_FILE
  original = path.read_bytes()
  for position in range(len(original)):
    data = bytearray(original)
    data[position] ^= 1 << (position % 8)
    path.write_bytes(bytes(data))
    with pytest.raises(DamagedCheckpointError, match=MANIFEST_FILE):
      read_manifest(directory)


@pytest.mark.parametrize('data', [b'', b'[' * 100_000, b'{"body": {"step": 7}}'])
def test_other_content_is_a_damaged_manifest(directory, data):
  (directory / MANIFEST_FILE).write_bytes(data)
  with pytest.raises(DamagedCheckpointError, match='digest'):
    read_manifest(directory)


def rewrite(directory: epath.Path, **changes: object) -> None:
  """Writes a changed manifest, with its digest computed here rather than by the code under test."""
  body = json.loads((directory / MANIFEST_FILE).read_text())['body'] | changes
  digest = hashlib.sha256(json.dumps(body).encode()).hexdigest()
  (directory / MANIFEST_FILE).write_text(json.dumps({'body': body, 'sha256': digest}, indent=1) + '\n')


def test_another_format_is_refused_but_not_damaged(directory):
  rewrite(directory, format=3, leaves='of an unknown kind', versions={'spmd_tasks': '9.1'})
  with pytest.raises(CheckpointError, match=r'has format 3, .* formats 1 and 2.* spmd_tasks 9\.1'):
    read_manifest(directory)


def test_unknown_fields_of_a_later_version_are_ignored(directory):
  rewrite(directory, added={'x': 1})
  verify(directory)
