"""Sharding: from names on tensor dimensions to layouts on a device mesh.

    mesh = MeshSpec(axis_names=('data', 'mdl'), ici_mesh_shape=(4, 2)).build()
    rules = (('embed', 'data'), ('mlp', 'mdl'))
    spec = split_dims_to_partition_spec(('embed', 'mlp'), mesh.axis_names, rules)  # PartitionSpec('data', 'mdl')

A layer declares each weight with *split dims*: one mesh axis or logical name per dimension. The *axis rules* of an
experiment map logical names to mesh axes. A dimension that its mesh axes do not divide is padded at the step boundary;
layers never see the padding. Inside a step, `constrain` shards activations by the same rules.

Start with specs.py (split dims and axis rules to PartitionSpecs), axis_rules.py (the default rules), mesh.py (axis
sizes to a Mesh), weights.py (the declaration of a weight) and padding.py (uneven shapes). Then read expert_meshes.py
(expert parallelism), granules.py (devices in slices and tori), reductions.py (norms of sharded trees), weight_names.py
(weights by regular expressions) and quantized.py (8 and 4 bits).
"""

from spmd_tasks.lazy_exports import lazy_exports

with lazy_exports(globals()):
  from spmd_tasks.sharding.axis_rules import (
    DEFAULT_AXIS_RULES,
    context_axis_rules,
    residual_axis_rules,
    stage_axis_rules,
  )
  from spmd_tasks.sharding.expert_meshes import DataExpertModelMesh, DataModelMesh, HiddenShardingMesh
  from spmd_tasks.sharding.mesh import MeshAxes, MeshLayout, MeshSpec
  from spmd_tasks.sharding.padding import evenly_divided_spec
  from spmd_tasks.sharding.specs import (
    AxisRules,
    SplitDims,
    constrain,
    infer_partition_spec_based_on_rank,
    shard_on_batch_dim_partition_spec,
    split_dims_to_partition_spec,
  )
  from spmd_tasks.sharding.weights import WeightSpec
