"""A plan.json written by hand, after lm.Dense1B on v5e:8x4, with every part that the page can show."""

from typing import Any

from spmd_tasks.layers.pipeline import Schedule
from spmd_tasks.planning.plan import _ticks

GIB = 2**30


def sample_plan() -> dict[str, Any]:
  """A plan that does not fit."""
  mesh = {'replica': 1, 'data': 8, 'mdl': 4}
  weights = [
    _weight('embedding/table', [32000, 2048], ['vocab', 'embed'], [['mdl'], ['data']], mesh),
    _weight('final_norm/scale', [2048], ['norm'], [[]], mesh, why="axis_rules map 'norm' to no mesh axis"),
    _weight(
      'stack/layers/attention/key/kernel',
      [24, 2048, 8, 128],
      ['layers', 'embed', 'kv_heads', 'head_dim'],
      [[], ['data'], ['mdl'], []],
      mesh,
    ),
    _weight(
      'stack/layers/attention/query/kernel',
      [24, 2048, 16, 128],
      ['layers', 'embed', 'heads', 'head_dim'],
      [[], ['data'], ['mdl'], []],
      mesh,
    ),
    _weight(
      'stack/layers/attention/out/kernel',
      [24, 6, 128, 2048],
      ['layers', 'heads', 'head_dim', 'embed'],
      [[], ['mdl'], [], ['data']],
      mesh,
      padded=[24, 8, 128, 2048],
      why='6 heads are padded to 8: mdl has 4 parts',
    ),
    _weight(
      'stack/layers/ffn/gate/kernel', [24, 2048, 5632], ['layers', 'embed', 'mlp'], [[], ['data'], ['mdl']], mesh
    ),
    _weight(
      'stack/layers/ffn/down/kernel', [24, 5632, 2048], ['layers', 'mlp', 'embed'], [[], ['mdl'], ['data']], mesh
    ),
    _weight(
      'stack/layers/ffn_norm/scale',
      [24, 2048],
      ['layers', 'norm'],
      [[], []],
      mesh,
      why="axis_rules map 'norm' to no mesh axis",
    ),
  ]
  return {
    'experiment': 'lm.Dense1B',
    'target': 'v5e:8x4',
    'num_devices': 32,
    'num_slices': 1,
    'compiler': 'tpu',
    'notes': [],
    'chip': 'v5e',
    'step': 'train',
    'chip_figures': {'name': 'v5e', 'peak_flops': 1.97e14, 'hbm_bandwidth': 8.19e11, 'hbm_bytes': int(15.75 * GIB)},
    'steps': {'train': {'fits': False}},
    'mesh': mesh,
    'dcn_mesh': None,
    'fits': False,
    'hbm_bytes': int(15.75 * GIB),
    'peak_bytes': int(55.8 * GIB),
    'argument_bytes': int(0.46 * GIB),
    'temp_bytes': int(55.3 * GIB),
    'padding_bytes': 300 * 2**20,
    'out_of_memory': {
      'needed_bytes': int(55.8 * GIB),
      'available_bytes': int(15.75 * GIB),
      'message': 'RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 55.80G of 15.75G hbm.',
    },
    'memory': {
      'weights': int(0.14 * GIB),
      'optimizer': int(0.28 * GIB),
      'batch': 2**20,
      'gradients': int(0.14 * GIB),
      'activations': int(46.1 * GIB),
      'temporaries': int(8.9 * GIB),
      'program': int(0.03 * GIB),
    },
    'largest': [
      {
        'name': 'fusion.12',
        'op_name': 'jit(train_step)/transpose/stack/layers/ffn/gate',
        'shape': [24, 64, 2048, 1408],
        'dtype': 'bf16',
        'bytes': int(8.25 * GIB),
      },
      {
        'name': 'fusion.17',
        'op_name': 'jit(train_step)/stack/layers/ffn/up',
        'shape': [24, 64, 2048, 1408],
        'dtype': 'bf16',
        'bytes': int(8.25 * GIB),
      },
      {
        'name': 'fusion.31',
        'op_name': 'jit(train_step)/stack/layers/attention/query',
        'shape': [24, 64, 2048, 4, 128],
        'dtype': 'bf16',
        'bytes': int(3 * GIB),
      },
    ],
    'predicted_step_s': 3.91,
    'predicted_step_low_s': 3.2,
    'predicted_step_high_s': 4.9,
    'predicted_mfu': 0.387,
    'tokens_per_s_per_chip': 8380.0,
    'compile_seconds': 52.3,
    'roofline': {
      'flops': 2.98e14,
      'hbm_bytes': 1.6e12,
      'ici_bytes': 4.1e10,
      'dcn_bytes': 0,
      'host_bytes': 0,
      'compute_s': 1.51,
      'hbm_s': 1.95,
      'ici_s': 0.45,
      'dcn_s': 0.0,
      'host_s': 0.0,
    },
    'time_by_kind': {'cycles': 3.2, 'kernel': 0.42, 'ici': 0.29},
    'top_operations': [
      {
        'name': 'fusion.231',
        'op_name': 'jit(train_step)/transpose(stack)/layers/attention/softmax',
        'seconds': 0.93,
        'share': 0.24,
        'count': 24,
      },
      {
        'name': 'fusion.88',
        'op_name': 'jit(train_step)/stack/layers/attention/scores',
        'seconds': 0.61,
        'share': 0.156,
        'count': 24,
      },
      {
        'name': 'convolution.4',
        'op_name': 'jit(train_step)/stack/layers/ffn/gate/dot_general',
        'seconds': 0.22,
        'share': 0.056,
        'count': 72,
      },
    ],
    'collectives': [
      _collective('all_gather', ['data'], 5.8e6, 168, True, 'stack/layers/ffn/gate/kernel'),
      _collective('reduce_scatter', ['data'], 5.8e6, 168, False, 'stack/layers/ffn/gate/kernel'),
      _collective('all_reduce', ['mdl'], 2.6e8, 96, False, 'stack/layers/attention/out'),
      _collective('all_reduce', ['replica', 'data'], 8.0, 4, False, 'loss'),
      _collective('all_reduce', ['replica'], 3.2e7, 1, True, 'gradients', network='dcn'),
    ],
    'weights': weights,
    'pipeline': None,
    'suggestions': [
      _trial(['task.learner.num_microbatches=8'], True, 9.1, 4.02, 'gradients are accumulated'),
      _trial(['remat_policy=full', 'task.learner.num_microbatches=4'], True, 7.4, 4.60, 'recomputes more'),
      _trial(['task.learner.num_microbatches=4'], False, 17.6, None, 'gradients are accumulated'),
      _trial(['remat_policy=full'], False, 24.9, None, 'recomputes more'),
    ],
    'assumptions': [
      "Cycles are the compiler's own, at 1.5 GHz; loops are counted by their trips.",
      'A link carries 45 GB/s in each direction; collectives reach all of it.',
      'Kernels run at 60%: jit(train_step)/transpose(jvp(LanguageModel))/stack/while/body/closed_call/attention.',
    ],
    'versions': {'jax': '0.10.2', 'libtpu': '0.0.42.1'},
  }


def pipelined_plan() -> dict[str, Any]:
  """A plan that fits, over 4 stages in 4 slices."""
  schedule = Schedule(num_stages=4, num_microbatches=8, num_repeats=2)
  mesh = {'replica': 1, 'stage': 4, 'data': 32, 'mdl': 4}

  kernel = _weight(
    'stack/layers/ffn/up/kernel', [80, 8192, 28672], ['layers', 'embed', 'mlp'], [['stage'], ['data'], ['mdl']], mesh
  )
  return {
    **sample_plan(),
    'experiment': 'pipeline.Dense70B',
    'target': '4x v5p:8x8x2',
    'num_devices': 512,
    'num_slices': 4,
    'mesh': mesh,
    'dcn_mesh': {'replica': 1, 'stage': 4, 'data': 1, 'mdl': 1},
    'fits': True,
    'out_of_memory': None,
    'hbm_bytes': int(95 * GIB),
    'suggestions': [],
    'weights': [kernel],
    'pipeline': {
      'stages': 4,
      'microbatches': 8,
      'schedule': 'circular',
      'repeats': 2,
      'ticks': [_ticks('circular', schedule, stage) for stage in range(4)],
      'bubble': schedule.bubble_fraction,
    },
  }


def _weight(name, shape, split_dims, spec, mesh, padded=None, why=None) -> dict[str, Any]:
  stored, parts, used = 4, 1, set()
  for size in padded or shape:
    stored *= size
  for axis in (axis for axes in spec for axis in axes):
    parts *= mesh[axis]
    used.add(axis)
  true = 4
  for size in shape:
    true *= size
  return {
    'name': name,
    'shape': shape,
    'dtype': 'float32',
    'split_dims': [[dim] if dim else [] for dim in split_dims],
    'spec': spec,
    'padded_shape': padded or shape,
    'waste': 1 - true / stored,
    'bytes_per_device': stored // parts,
    'why': why,
    'replicated_over': [axis for axis, size in mesh.items() if size > 1 and axis not in used],
  }


def _collective(kind, axes, num_bytes, count, is_asynchronous, op_name, network='ici') -> dict[str, Any]:
  return {
    'kind': kind,
    'axes': axes,
    'bytes_per_device': num_bytes,
    'count': count,
    'network': network,
    'is_asynchronous': is_asynchronous,
    'op_name': op_name,
    'dtype': 'bf16',
    'shape': [],
  }


def _trial(setting, fits, gib, seconds, note) -> dict[str, Any]:
  return {'setting': setting, 'fits': fits, 'peak_bytes': gib * GIB, 'predicted_step_s': seconds, 'note': note}
