"""Describes the fields of XLA's HloModuleProto that a plan reads.

    schema()['HloModuleProto'].FromString(serialized)

No package below a gigabyte has XLA's schema, so the messages are declared here, in the syntax of protocol buffers, with
XLA's names and numbers. A field that is not declared is skipped when a message is read. Messages that XLA nests in
others are declared beside them, and enums are integers: neither changes the encoding. The tests compare every field
with the schema in TensorFlow's package.
"""

from collections.abc import Mapping
import functools
import re
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_MESSAGES = """
message HloModuleProto {
  repeated HloComputationProto computations = 3;
  int64 entry_computation_id = 6;
  HloScheduleProto schedule = 7;
  HloInputOutputAliasProto input_output_alias = 8;
}
message HloScheduleProto { map<int64, InstructionSequence> sequences = 1; }
message InstructionSequence { repeated int64 instruction_ids = 1; }
message HloInputOutputAliasProto { repeated AliasEntryProto entries = 1; }
message AliasEntryProto { repeated int64 output_shape_index = 1; }
message HloComputationProto {
  string name = 1;
  repeated HloInstructionProto instructions = 2;
  int64 id = 5;
  int64 root_id = 6;
}
message HloInstructionProto {
  string name = 1;
  string opcode = 2;
  ShapeProto shape = 3;
  OpMetadata metadata = 7;
  LiteralProto literal = 8;
  int64 parameter_number = 9;
  int64 tuple_index = 13;
  Window window = 15;
  ConvolutionDimensionNumbers convolution_dimension_numbers = 16;
  int64 channel_id = 26;
  string custom_call_target = 28;
  DotDimensionNumbers dot_dimension_numbers = 30;
  int64 id = 35;
  repeated int64 operand_ids = 36;
  repeated int64 called_computation_ids = 38;
  bytes backend_config = 43;
  repeated ReplicaGroup replica_groups = 49;
  repeated SourceTarget source_target_pairs = 52;
  string comparison_direction = 63;
  FrontendAttributes frontend_attributes = 68;
  repeated OutputOperandAliasing output_operand_aliasing = 74;
  CollectiveDeviceListProto collective_device_list = 87;
  IotaReplicaGroupListProto iota_collective_device_list = 92;
  MeshAxesReplicaGroupListProto mesh_axes_replica_group_list = 93;
}
message OpMetadata { string op_name = 2; }
message FrontendAttributes { map<string, string> map = 1; }
message OutputOperandAliasing { repeated int64 output_shape_index = 1; int64 operand_index = 2; }
message ShapeProto {
  int32 element_type = 2;
  repeated int64 dimensions = 3;
  repeated ShapeProto tuple_shapes = 4;
  LayoutProto layout = 5;
}
message LayoutProto { repeated int64 minor_to_major = 1; repeated TileProto tiles = 6; int64 memory_space = 8; }
message TileProto { repeated int64 dimensions = 1; }
message LiteralProto {
  bytes u8s = 3;
  repeated int32 s32s = 4;
  repeated int64 s64s = 5;
  repeated uint32 u32s = 6;
  repeated uint64 u64s = 7;
  bytes s8s = 15;
  bytes u16s = 16;
  bytes s16s = 17;
}
message DotDimensionNumbers { repeated int64 lhs_contracting_dimensions = 1; }
message ConvolutionDimensionNumbers {
  int64 kernel_input_feature_dimension = 3;
  repeated int64 kernel_spatial_dimensions = 6;
  int64 output_batch_dimension = 9;
  int64 output_feature_dimension = 10;
  repeated int64 input_spatial_dimensions = 11;
  repeated int64 output_spatial_dimensions = 12;
}
message Window { repeated WindowDimension dimensions = 1; }
message WindowDimension { int64 stride = 2; int64 padding_low = 3; int64 window_dilation = 5; int64 base_dilation = 6; }
message SourceTarget { int64 source = 1; int64 target = 2; }
message ReplicaGroup { repeated int64 replica_ids = 1; }
message CollectiveDeviceListProto {
  repeated ReplicaGroup replica_groups = 1;
  IotaReplicaGroupListProto iota_replica_group_list = 2;
}
message IotaReplicaGroupListProto {
  int64 num_replica_groups = 1;
  int64 num_devices_per_group = 2;
  repeated int64 iota_reshape_dims = 3;
  repeated int32 iota_transpose_perm = 4;
}
message MeshAxesReplicaGroupListProto { MeshProto mesh = 1; repeated AxisRefProto axes = 2; }
message AxisRefProto { int64 mesh_axis_index = 1; SubAxis sub_axis_info = 2; }
message SubAxis { int64 pre_size = 1; int64 size = 2; }
message MeshProto { repeated MeshAxis axes = 1; repeated int64 device_ids = 2; Iota iota_device_ids = 3; }
message MeshAxis { string name = 1; int64 size = 2; }
message Iota { repeated int64 reshape_dims = 1; repeated int64 transpose_perm = 2; }
"""

# XLA numbers the fields of a message upwards: from these on they are newer than this file.
NEW_FIELDS_FROM = {'HloInstructionProto': 98, 'MeshProto': 4}

# XLA's PrimitiveType, by number.
DTYPES: Mapping[int, str] = {
  **{1: 'pred', 2: 's8', 3: 's16', 4: 's32', 5: 's64', 6: 'u8', 7: 'u16', 8: 'u32', 9: 'u64', 10: 'f16', 11: 'f32'},
  **{12: 'f64', 13: 'tuple', 14: 'opaque_type', 15: 'c64', 16: 'bf16', 17: 'token', 18: 'c128', 19: 'f8e5m2'},
  **{20: 'f8e4m3fn', 21: 's4', 22: 'u4', 23: 'f8e4m3b11fnuz', 24: 'f8e5m2fnuz', 25: 'f8e4m3fnuz', 26: 's2', 27: 'u2'},
  **{28: 'f8e4m3', 29: 'f8e3m4', 30: 's1', 31: 'u1', 32: 'f4e2m1fn', 33: 'f8e8m0fnu', 34: 'buffer'},
}

_MESSAGE = re.compile(r'message (\w+) \{([^}]*)\}')
_FIELD = re.compile(r'(repeated )?(?:map<(\w+), (\w+)>|(\w+)) (\w+) = (\d+);')
_Field = descriptor_pb2.FieldDescriptorProto


@functools.cache
def schema() -> Mapping[str, Any]:
  """Returns the classes of the messages by name."""
  file = descriptor_pb2.FileDescriptorProto(name='spmd_tasks/hlo.proto', package='xla', syntax='proto3')
  for name, fields in _MESSAGE.findall(_MESSAGES):
    message = file.message_type.add(name=name)
    for repeated, key, value, kind, field, number in _FIELD.findall(fields):
      if key:  # a map is a list of messages of a key and its value
        kind = f'{name}.{field.title()}Entry'
        entry = message.nested_type.add(name=f'{field.title()}Entry')
        entry.options.map_entry = True
        _add_field(entry, 'key', 1, key)
        _add_field(entry, 'value', 2, value)
      _add_field(message, field, int(number), kind, is_repeated=bool(repeated or key))
  pool = descriptor_pool.DescriptorPool()  # its own: TensorFlow registers messages of these names
  pool.Add(file)
  messages = (pool.FindMessageTypeByName(f'xla.{message.name}') for message in file.message_type)
  return {message.name: message_factory.GetMessageClass(message) for message in messages}


def _add_field(message: Any, name: str, number: int, kind: str, is_repeated: bool = False) -> None:
  field = message.field.add(name=name, number=number)
  field.label = _Field.LABEL_REPEATED if is_repeated else _Field.LABEL_OPTIONAL
  scalar = getattr(_Field, f'TYPE_{kind.upper()}', None)
  field.type = _Field.TYPE_MESSAGE if scalar is None else scalar
  if scalar is None:
    field.type_name = f'.xla.{kind}'
