"""The declared part of XLA's schema agrees with XLA's own, which TensorFlow's package has as generated modules."""

import ast
import importlib.util
from pathlib import Path

from google.protobuf import any_pb2, descriptor_pb2, descriptor_pool, duration_pb2, timestamp_pb2
from google.protobuf.descriptor import FieldDescriptor
import pytest

from spmd_tasks.planning.hlo_schema import DTYPES, NEW_FIELDS_FROM, schema

_NESTED = {
  'InstructionSequence': 'HloScheduleProto.InstructionSequence',
  'AliasEntryProto': 'HloInputOutputAliasProto.AliasEntryProto',
  'SubAxis': 'AxisRefProto.SubAxis',
  'MeshAxis': 'MeshProto.MeshAxis',
}
_NEWER = {('MeshProto', 'iota_device_ids'), *(('Iota', name) for name in ('reshape_dims', 'transpose_perm'))}


@pytest.fixture(scope='module')
def xla():
  """XLA's messages, from the descriptors in the generated modules: importing these would import TensorFlow."""
  pool = descriptor_pool.DescriptorPool()
  for module in (any_pb2, duration_pb2, timestamp_pb2):
    pool.AddSerializedFile(module.DESCRIPTOR.serialized_pb)
  folder = Path(importlib.util.find_spec('tensorflow').origin).parent / 'compiler' / 'xla'
  for name in ('service/metrics_pb2.py', 'xla_data_pb2.py', 'service/hlo_pb2.py'):
    calls = (node for node in ast.walk(ast.parse((folder / name).read_text())) if isinstance(node, ast.Call))
    serialized = next(call.args[0] for call in calls if getattr(call.func, 'attr', '') == 'AddSerializedFile')
    pool.Add(descriptor_pb2.FileDescriptorProto.FromString(ast.literal_eval(serialized)))
  return pool


def test_every_declared_field_has_xlas_number_and_type(xla):
  checked = 0
  for name, message in schema().items():
    for field in message.DESCRIPTOR.fields:
      if (name, field.name) in _NEWER:
        continue
      theirs = xla.FindMessageTypeByName(f'xla.{_NESTED.get(name, name)}').fields_by_name[field.name]
      kind = FieldDescriptor.TYPE_INT32 if theirs.type == FieldDescriptor.TYPE_ENUM else theirs.type
      declared = (field.number, field.type, field.is_repeated)
      assert declared == (theirs.number, kind, theirs.is_repeated), theirs.full_name
      checked += 1
  assert checked > 60


def test_dtypes_are_xlas(xla):
  theirs = xla.FindEnumTypeByName('xla.PrimitiveType').values
  assert {value.number: value.name.lower() for value in theirs if value.number} == DTYPES


def test_fields_that_count_as_new_are_new(xla):
  for name, first in NEW_FIELDS_FROM.items():
    newest = max(xla.FindMessageTypeByName(f'xla.{name}').fields_by_number)
    assert newest < first, f'{name} has field {newest}: decide whether a plan must read it, then raise NEW_FIELDS_FROM'
