"""--mode translate: a Pax experiment becomes a file of ours, which runs; both compute the same from equal weights."""

import re

import pytest

from tests import binary

pytestmark = pytest.mark.slow


def test_a_pax_experiment_becomes_one_of_ours(run_pax, tmp_path):
  path = tmp_path / 'moe_native.py'
  flags = ('--mode', 'translate', '--exp', 'pax_lab.moe_lm.MoeLm', '--out', path, '--num_fake_devices', 8)
  finished = run_pax(*flags)
  assert finished.returncode == 0, finished.stderr
  lines = finished.stdout.splitlines()
  assert f'wrote {path}' in lines
  assert any('ShardedAdafactor; AdamW stands in its place' in line for line in lines)
  theirs, ours, difference = re.search(
    r'the cross-entropy ([\d.]+) and ([\d.]+); .* differ by at most (\S+)\.$', lines[-1]
  ).groups()
  assert abs(float(theirs) - float(ours)) < 1e-5
  assert float(difference) < 1e-5

  job = tmp_path / 'job'
  finished = run_pax(
    *('--exp', 'moe_native.MoeLm', '--experiment_path', tmp_path, '--mode', 'train', '--job_log_dir', job),
    *('--num_fake_devices', 8, '--num_train_steps', 2, '--set', 'log_every_steps=1'),
  )
  assert finished.returncode == 0, finished.stderr
  assert list(binary.column(job, 'loss')) == [1, 2]

  again = run_pax(*flags)
  assert again.returncode == 2
  assert f'{path} exists: choose another file by --out' in again.stderr


@pytest.mark.exhaustive
def test_a_bfloat16_experiment_is_compared_too(run_pax, tmp_path):
  """Its batches are cast like its weights, or Praxis' loops over layers refuse them."""
  path = tmp_path / 'bfloat16_native.py'
  flags = ('--mode', 'translate', '--exp', 'pax_cases.transformers.Bfloat16', '--out', path, '--num_fake_devices', 4)
  finished = run_pax(*flags)
  assert finished.returncode == 0, finished.stderr
  theirs, ours = map(float, re.search(r'the cross-entropy ([\d.]+) and ([\d.]+);', finished.stdout).groups())
  assert abs(theirs - ours) < 2e-3


@pytest.mark.exhaustive
def test_what_has_weights_and_no_counterpart_is_listed(run_pax, tmp_path):
  path = tmp_path / 'glam_native.py'
  finished = run_pax('--mode', 'translate', '--exp', 'pax_cases.families.Glam', '--out', path, '--num_fake_devices', 4)
  assert finished.returncode == 0, finished.stderr
  _, _, lists = finished.stdout.partition('Not translated, so the outputs differ:\n')
  missing, _, rest = lists.partition('Not translated, so training differs:\n')
  attention = 'LanguageModel.lm_tpl.stacked_transformer_tpl.block.transformer_layer_params_tpl.tr_atten_tpl'
  assert [line.strip() for line in missing.splitlines()] == [
    f'{attention}.output_proj_use_nhd_shape=True',
    f"{attention}.relative_bias_tpl='RelativeBias'",
    f'{attention}.attention_extra_logit=0.0',
    f'{attention}.proj_tpl.attention_combine_dims=True',
  ]
  assert 'Not compared, because something with weights is not translated' in rest
  assert 'relative_bias.wrb' in rest
  assert 'class Glam(' in path.read_text()


def test_an_experiment_of_ours_needs_no_translation(run_pax, tmp_path):
  finished = run_pax('--mode', 'translate', '--exp', 'synthetic.Uneven', '--out', tmp_path / 'file.py')
  assert finished.returncode == 2
  assert 'is not an experiment of Pax: there is nothing to translate' in finished.stderr
  assert not list(tmp_path.iterdir())
