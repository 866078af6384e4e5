"""Jobs that train low-rank adapters: their checkpoints, exports, and how they load and resume."""

import json
import shutil

from etils import epath
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from spmd_tasks import load
from spmd_tasks.bridges.huggingface import open_folder
from spmd_tasks.bridges.huggingface.origin import state_from_folder
from spmd_tasks.checkpoints.manifest import read_manifest
from spmd_tasks.config import resolve
from spmd_tasks.experiment import partition_job
from tests import binary
from tests.model_folders import write_llama

JOB = 'tests.tuning.low_rank_jobs.Small'
IDS = np.random.default_rng(0).integers(3, 250, (2, 12))


def run(mode, directory, *flags):
  return binary.run_in_process('--mode', mode, '--job_log_dir', directory, *flags)


@pytest.fixture(scope='module')
def base(tmp_path_factory):
  return write_llama(tmp_path_factory.mktemp('base') / 'llama')


@pytest.fixture(scope='module')
def job(base, tmp_path_factory):
  """A job of four steps, with checkpoints of steps 2 and 4. Tests must not change it."""
  directory = tmp_path_factory.mktemp('low_rank') / 'job'
  assert run('train', directory, '--exp', JOB, '--set', f'model={base}') == 0
  return directory


@pytest.fixture(scope='module')
def logits(job):
  with jax.default_matmul_precision('highest'):
    return np.asarray(load(job).logits(IDS))


def test_it_starts_with_the_numbers_of_its_base_bit_for_bit(base, logits):
  at_start = {}
  for experiment in (JOB, f'{JOB}OfAll'):
    model = partition_job(resolve(experiment, [f'model={base}']).build())
    step = model.forward_step({'ids': jax.ShapeDtypeStruct(IDS.shape, np.int32)})
    state = state_from_folder(model, open_folder(base), 0)
    at_start[experiment] = np.asarray(step(state, step.place({'ids': IDS.astype(np.int32)}))['logits'])
  np.testing.assert_array_equal(*at_start.values())
  assert np.abs(logits - at_start[JOB]).max() > 1e-3  # after training


def test_the_job_reports_how_many_parameters_are_trained(job):
  assert ', 2,816 of them trained' in (job / 'parameters.txt').read_text()


def test_a_checkpoint_has_only_the_adapters_and_names_their_base(base, job):
  checkpoint = epath.Path(job) / 'checkpoints/checkpoint_00000004'
  names = [leaf.name for leaf in read_manifest(checkpoint).leaves if leaf.name.startswith('weights/')]
  assert len(names) == 14
  assert all('lora_' in name for name in names)
  about = json.loads((checkpoint / 'base.json').read_text())
  assert about['folder'] == str(base)
  assert len(about['sha256']) == 64


def test_another_base_is_refused(base, job, tmp_path, capsys):
  other = tmp_path / 'other'
  shutil.copytree(base, other)
  tensors = load_file(other / 'model.safetensors')
  save_file({name: tensor * 1.01 for name, tensor in tensors.items()}, other / 'model.safetensors')
  assert run('eval', job, '--set', f'model={other}') == 2
  said = capsys.readouterr().err.strip().splitlines()[-1]
  assert f'has adapters of the base {base}' in said
  assert 'use the folder' in said


def test_a_merged_export_computes_the_same(base, job, logits, tmp_path):
  assert run('export', job, '--format', 'hf', '--out', tmp_path / 'merged') == 0
  assert load_file(tmp_path / 'merged/model.safetensors').keys() == load_file(base / 'model.safetensors').keys()
  with jax.default_matmul_precision('highest'):
    merged = np.asarray(load(tmp_path / 'merged', overrides=('seq_len=16',)).logits(IDS))
  np.testing.assert_allclose(merged, logits, rtol=0, atol=1e-5 * np.abs(logits).max())


def test_adapters_are_exported_to_peft_and_read_back_bit_for_bit(base, job, logits, tmp_path, capsys):
  assert run('export', job, '--format', 'peft', '--out', tmp_path / 'adapter') == 0
  config = json.loads((tmp_path / 'adapter/adapter_config.json').read_text())
  assert (config['r'], config['lora_alpha'], config['peft_type']) == (4, 16.0, 'LORA')
  assert config['target_modules'] == sorted(f'{name}_proj' for name in ('q', 'k', 'v', 'o', 'gate', 'up', 'down'))
  tensors = load_file(tmp_path / 'adapter/adapter_model.safetensors')
  assert len(tensors) == 2 * 2 * 7
  assert tensors['base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight'].shape == (4, 24)
  flags = ('--exp', JOB, '--set', f'model={base}', '--set', f'adapter={tmp_path / "adapter"}')
  assert run('eval', tmp_path / 'job', *flags) == 0
  assert run('eval', job) == 0
  ours, theirs = (binary.column(path / 'eval/valid', 'loss') for path in (tmp_path / 'job', job))
  assert ours[0] == theirs[4]
  file = tmp_path / 'adapter/base.json'
  file.write_text(json.dumps(json.loads(file.read_text()) | {'sha256': '1' * 64}))
  capsys.readouterr()
  assert run('eval', tmp_path / 'other', *flags) == 2
  assert f'adapter has adapters of the base {base} with the digest 111111111111, but' in capsys.readouterr().err


def test_a_pattern_that_matches_no_weight_is_refused(base, tmp_path, capsys):
  flags = ('--exp', JOB, '--set', f'model={base}', '--set', 'lora_targets=("attention/querry",)')
  assert run('train', tmp_path / 'job', *flags) == 2
  said = capsys.readouterr().err.strip()
  assert "'attention/querry', which matches no weight" in said
  assert 'stack/layers/attention/query/kernel' in said
  assert not (tmp_path / 'job').exists()


# dtype -> dtypes and shapes of the values and the scales of a query's kernel [2, 24, 3, 8]; tolerance of logits.
QUANTIZED = {
  'int8': ('int8', (2, 24, 3, 8), 'float32', (2, 1, 3, 8), 0.2),
  'nf4_double': ('uint8', (2, 12, 3, 8), 'uint8', (2, 1, 3, 8), 0.6),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize('dtype', QUANTIZED)
def test_a_quantized_base_is_close_trains_resumes_and_is_exported(dtype, base, logits, tmp_path):
  """Values and scales are frozen and padded like kernels; a merged export computes the same numbers."""
  flags = ('--exp', JOB, '--set', f'model={base}', '--set', f'base_dtype={dtype}')
  assert run('train', tmp_path / 'job', *flags) == 0
  model = partition_job(resolve(JOB, [f'model={base}', f'base_dtype={dtype}']).build())
  kernel = model.abstract_state.weights['stack']['layers']['attention']['query']['kernel']
  assert kernel.shape == (2, 24, 3, 8)
  storage = (str(kernel.values.dtype), kernel.values.shape, str(kernel.scales.dtype), kernel.scales.shape)
  assert storage == QUANTIZED[dtype][:4]
  assert ', 2,816 of them trained' in (tmp_path / 'job/parameters.txt').read_text()
  with jax.default_matmul_precision('highest'):
    ours = np.asarray(load(tmp_path / 'job').logits(IDS))
  assert np.std(ours - logits) < QUANTIZED[dtype][4] * np.std(logits)  # the adapters were trained differently, too
  again = binary.copy_at(tmp_path / 'job', 2, tmp_path / 'again')
  assert run('train', again, *flags) == 0
  assert binary.column(again, 'loss') == binary.column(tmp_path / 'job', 'loss')
  assert run('export', tmp_path / 'job', '--format', 'hf', '--out', tmp_path / 'merged') == 0
  with jax.default_matmul_precision('highest'):
    merged = np.asarray(load(tmp_path / 'merged', overrides=('seq_len=16',)).logits(IDS))
  np.testing.assert_allclose(merged, ours, rtol=0, atol=2e-5 * np.abs(ours).max())
