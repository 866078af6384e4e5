"""Sharding: from names on tensor dimensions to layouts on a device mesh.

    mesh = MeshSpec(axis_names=('data', 'mdl'), ici_mesh_shape=(4, 2)).build()
    rules = (('embed', 'data'), ('mlp', 'mdl'))
    spec = split_dims_to_partition_spec(('embed', 'mlp'), mesh.axis_names, rules)  # PartitionSpec('data', 'mdl')

A layer declares each weight with *split dims*: one mesh axis or logical name per dimension. The *axis rules* of an
experiment map logical names to mesh axes. A dimension that its mesh axes do not divide is padded at the boundary of a
step; the layers never see the padding. Inside a step, `constrain` lays out activations by the same rules.

Read specs.py (split dims and axis rules to PartitionSpecs), mesh.py (axis sizes to a Mesh), weights.py (the declaration
of a weight), padding.py (uneven shapes). Then mesh_layouts.py (a mesh and its rules as one field of an experiment),
expert_meshes.py (those with expert parallelism), reductions.py (norms of sharded trees), weight_names.py (patterns of
names) and quantized.py (how weights are held in fewer bits).
"""

from etils import epy

with epy.lazy_api_imports(globals()):
  from spmd_tasks.sharding._mesh_shapes import factorizations, nearest_hybrid_shape, nearest_shapes
  from spmd_tasks.sharding.expert_meshes import DataExpertModelMesh, DataModelMesh, HiddenShardingMesh
  from spmd_tasks.sharding.mesh import MeshSpec
  from spmd_tasks.sharding.mesh_layouts import DEFAULT_AXIS_RULES, MeshAxes, MeshLayout
  from spmd_tasks.sharding.padding import evenly_divided_spec, pad, padded_shape, unpad
  from spmd_tasks.sharding.quantized import (
    Int8,
    NormalFloat4,
    quantize,
    quantized_spec,
    stored_spec,
  )
  from spmd_tasks.sharding.reductions import sum_of_squares, sums_of_squares
  from spmd_tasks.sharding.specs import (
    AxisRules,
    ShardingScope,
    SplitDim,
    SplitDims,
    check_axis_rules,
    constrain,
    context_axis_rules,
    current_platform,
    current_sharding_scope,
    even_spec,
    gather_for_tokens,
    infer_partition_spec_based_on_rank,
    is_split_over_tokens,
    num_parts,
    residual_axis_rules,
    row_axes,
    shard_on_batch_dim_partition_spec,
    sharding_scope,
    spec_axes,
    split_dims_to_partition_spec,
    stage_axis,
    stage_axis_rules,
    without_axis,
  )
  from spmd_tasks.sharding.weight_names import matching_names
  from spmd_tasks.sharding.weights import (
    QUANTIZED_DTYPES,
    SPLIT_BY_DEFAULT,
    STACK_DIM,
    WEIGHT_FACTORS,
    Initializer,
    Quantized,
    WeightBox,
    WeightSpec,
    is_quantized,
    match_fn,
    merge_stacked,
    numbers_spec,
    refuse_plain_weights,
    replicated_spec,
    split_stacked,
    unbox_weights,
    weight_specs,
  )

__all__ = [
  'DEFAULT_AXIS_RULES',
  'QUANTIZED_DTYPES',
  'SPLIT_BY_DEFAULT',
  'STACK_DIM',
  'WEIGHT_FACTORS',
  'AxisRules',
  'DataExpertModelMesh',
  'DataModelMesh',
  'HiddenShardingMesh',
  'Initializer',
  'Int8',
  'MeshAxes',
  'MeshLayout',
  'MeshSpec',
  'NormalFloat4',
  'Quantized',
  'ShardingScope',
  'SplitDim',
  'SplitDims',
  'WeightBox',
  'WeightSpec',
  'check_axis_rules',
  'constrain',
  'context_axis_rules',
  'current_platform',
  'current_sharding_scope',
  'even_spec',
  'evenly_divided_spec',
  'factorizations',
  'gather_for_tokens',
  'infer_partition_spec_based_on_rank',
  'is_quantized',
  'is_split_over_tokens',
  'match_fn',
  'matching_names',
  'merge_stacked',
  'nearest_hybrid_shape',
  'nearest_shapes',
  'num_parts',
  'numbers_spec',
  'pad',
  'padded_shape',
  'quantize',
  'quantized_spec',
  'refuse_plain_weights',
  'replicated_spec',
  'residual_axis_rules',
  'row_axes',
  'shard_on_batch_dim_partition_spec',
  'sharding_scope',
  'spec_axes',
  'split_dims_to_partition_spec',
  'split_stacked',
  'stage_axis',
  'stage_axis_rules',
  'stored_spec',
  'sum_of_squares',
  'sums_of_squares',
  'unbox_weights',
  'unpad',
  'weight_specs',
  'without_axis',
]
