"""`--mode verify --claims kernels` finds the kernels of a step, and names a wrong one."""

import dataclasses
import json
from types import SimpleNamespace

from etils import epath
import jax
import jax.numpy as jnp
import pytest

from spmd_tasks import main
from spmd_tasks.config import resolve
from spmd_tasks.errors import UserError
from spmd_tasks.extensions import prepare_job
from spmd_tasks.layers.attention import implementations
from spmd_tasks.layers.attention._blockwise import attend_blockwise
from spmd_tasks.layers.attention._plain import AttentionOptions
from spmd_tasks.layers.moe.grouped_matmul import GROUPED_MATMUL_BACKENDS, multiply_by_loop
from spmd_tasks.planning.targets import parse_target
from spmd_tasks.verification import _kernel_claims
from spmd_tasks.verification._kernel_claims import _Attention, _decide, _GroupedMatmul, _kernels_of_step

BENCH = SimpleNamespace(
  seed=0, source=SimpleNamespace(flags=('--exp', 'lm.Mine'), paths_ending=lambda name: [f'task.{name}'])
)
PRODUCTS = _GroupedMatmul(
  name='megablox', num_rows=90, num_groups=5, num_in=64, num_out=64, dtype='bfloat16', weight_dtype='bfloat16'
)
ATTENTION = _Attention(
  name='splash',
  length=100,
  num_heads=2,
  num_kv_heads=1,
  head_dim=16,
  value_dim=16,
  dtype='bfloat16',
  has_documents=True,
  has_sinks=False,
  options=AttentionOptions(window=30),
)


@pytest.mark.parametrize(
  'kernel',
  [
    dataclasses.replace(PRODUCTS, num_in=136, num_out=72),
    dataclasses.replace(PRODUCTS, name='triton'),
    dataclasses.replace(ATTENTION, has_sinks=True, options=AttentionOptions(window=30, logit_cap=5.0)),
  ],
  ids=str,
)
def test_sound_kernels_hold(kernel):
  verdict = _decide(BENCH, kernel)
  assert verdict.status == 'held', verdict


def with_gradients(change):
  """Returns the sound product of groups, with other gradients (rows, matrices)."""

  @jax.custom_vjp
  def multiply(rows, weights, group_sizes):
    return multiply_by_loop(rows, weights, group_sizes)

  def backward(saved, cotangent):
    rows, weights, group_sizes = saved
    _, pull_back = jax.vjp(lambda *x: multiply_by_loop(*x, group_sizes), rows, weights)
    return *change(*pull_back(cotangent), rows, group_sizes), None

  multiply.defvjp(lambda *x: (multiply(*x), x), backward)
  return multiply


def empty_groups_are_not_zeroed(d_rows, d_weights, rows, group_sizes):
  return d_rows, jnp.where((group_sizes == 0)[:, None, None], 0.25, d_weights).astype(d_weights.dtype)


def one_row_too_many(d_rows, d_weights, rows, group_sizes):
  """The row after each group contributes to the gradient of the group's matrix."""
  after = jnp.nan_to_num(rows)[jnp.minimum(jnp.cumsum(group_sizes), len(rows) - 1)]
  return d_rows, (d_weights + after[:, :, None] * 0.1).astype(d_weights.dtype)


def accumulated_in_bfloat16(rows, weights, group_sizes):
  group = jnp.minimum(jnp.searchsorted(jnp.cumsum(group_sizes), jnp.arange(len(rows)), 'right'), len(weights) - 1)

  def add(k, total):
    return (total + rows[:, k, None] * weights[group, k]).astype(jnp.bfloat16)

  return jax.lax.fori_loop(0, rows.shape[1], add, jnp.zeros((len(rows), weights.shape[2]), jnp.bfloat16))


def attention_with(**changes):
  def attend(heads, options, **_):
    return attend_blockwise(heads, dataclasses.replace(options, **changes))

  return attend


@pytest.mark.parametrize(
  'multiply, part',
  [
    (with_gradients(lambda d_rows, d_weights, *_: (d_rows, d_weights.swapaxes(1, 2))), 'the gradient of matrices'),
    (with_gradients(empty_groups_are_not_zeroed), 'the gradient of matrices'),
    pytest.param(with_gradients(one_row_too_many), 'the gradient of matrices', marks=pytest.mark.exhaustive),
    (accumulated_in_bfloat16, 'the result'),
  ],
  ids=['transposed gradient', 'empty group', 'one row too many', 'dtype of the sum'],
)
def test_a_wrong_grouped_matmul_is_named(multiply, part, monkeypatch):
  monkeypatch.setitem(GROUPED_MATMUL_BACKENDS, 'megablox', multiply)
  verdict = _decide(BENCH, PRODUCTS)
  assert verdict.status == 'BROKEN'
  assert verdict.failure['kernel'] == 'megablox'
  assert verdict.failure['leaf'].startswith(part)
  assert verdict.failure['settings'] == ['task.backend=loop']
  assert verdict.notes[0].endswith('--set task.backend=loop')


@pytest.mark.parametrize(
  'attend',
  [attention_with(window=31), attention_with(softmax_scale=1.0)],  # below, one without a mask
  ids=['mask off by one', 'scale missing'],
)
def test_a_wrong_attention_is_named(attend, monkeypatch):
  monkeypatch.setattr(implementations, 'attend_by_splash', attend)
  verdict = _decide(BENCH, ATTENTION)
  assert verdict.status == 'BROKEN'
  assert verdict.failure['kernel'] == 'splash'
  assert verdict.failure['settings'] == ['task.implementation=blockwise']


def test_the_kernels_of_a_step_have_the_shapes_of_one_device():
  job = resolve('moe.StdlibTiny', ['dtype=bfloat16']).build()
  mesh_spec = _kernel_claims._own_mesh(job, 8)
  tpu, gpu = (_kernels_of_step(job, parse_target(name).abstract_mesh(mesh_spec)) for name in ('v5e:1x1', 'h200:1'))
  assert {kernel.name for kernel in tpu} == {'splash', 'megablox'}
  assert {kernel.name for kernel in gpu} == {'cudnn', 'triton'}
  experiment = job.experiment
  attention = next(kernel for kernel in tpu if kernel.name == 'splash')
  assert attention.length == experiment.seq_len
  assert {(kernel.num_in, kernel.num_out) for kernel in tpu if kernel.name == 'megablox'} == {
    (kernel.num_in, kernel.num_out) for kernel in gpu if kernel.name == 'triton'
  }


def test_the_mode_reports_each_kernel_and_a_job_does_not_train_with_a_wrong_one(capsys, monkeypatch, tmp_path):
  settings = ['seq_len=24', 'num_layers=1']
  flags = ['--exp', 'lm.StdlibTiny', '--mode', 'verify', '--claims', 'kernels', '--job_log_dir', str(tmp_path)]
  flags += [word for setting in settings for word in ('--set', setting)]
  with monkeypatch.context() as planted:
    planted.setattr(implementations, 'attend_by_splash', attention_with(causal=False))
    assert main.run(flags) == 1
  _, _, summary = capsys.readouterr().out.strip().rpartition('\n')
  assert [failure['kernel'] for failure in json.loads(summary)['failures']] == ['splash']

  directory, plainly = epath.Path(tmp_path), 'task.model.stack.block.attention.implementation=blockwise'
  job, plain_job = resolve('lm.StdlibTiny', settings).build(), resolve('lm.StdlibTiny', [*settings, plainly]).build()
  monkeypatch.setattr('jax.default_backend', lambda: 'gpu')
  assert prepare_job(job, 'train', directory)  # splash is for TPUs
  monkeypatch.setattr('jax.default_backend', lambda: 'tpu')
  with pytest.raises(UserError, match=f'the kernel splash wrong.*: take the plain computation, --set {plainly}, or'):
    prepare_job(job, 'train', directory)
  assert prepare_job(plain_job, 'train', directory)
  assert prepare_job(job, 'preview', None)  # has no directory
  monkeypatch.undo()

  assert main.run(flags) == 0  # the kernel is mended
  *lines, summary = capsys.readouterr().out.splitlines()
  assert any(line.startswith('held') and 'splash, attention of 24 tokens' in line for line in lines)
  assert json.loads(summary)['held'] == 1
  monkeypatch.setattr('jax.default_backend', lambda: 'tpu')
  assert prepare_job(job, 'train', directory)
