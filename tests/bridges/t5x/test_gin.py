"""Reads gin setups of T5X without T5X, and translates them to experiments."""

import ast
import contextlib
import dataclasses
import json
import os
from pathlib import Path
import runpy
import sys

import numpy as np
import pytest

from spmd_tasks import exit_codes
from spmd_tasks.bridges.t5x import SeqIoInput, T5xExperiment, T5xMoeExperiment, T5xOrigin
from spmd_tasks.bridges.t5x._files import open_checkpoint
from spmd_tasks.bridges.t5x._gin import read_setup
from spmd_tasks.bridges.t5x._gin_start import EXPERIMENTS
from spmd_tasks.bridges.t5x._gin_translation import translate
from spmd_tasks.config import resolve, to_json
from spmd_tasks.config.from_saved import from_json
from spmd_tasks.errors import UserError
from spmd_tasks.extensions import expand
from spmd_tasks.flags import all_modes, make_parser
from spmd_tasks.learning import Adafactor
from tests import binary

SUMS = str(Path(__file__).parents[2] / 'data' / 't5x' / 'made_up_sums.gin')
RUN = ['t5x/configs/runs/pretrain.gin']
NEEDED = ["MODEL_DIR = 'x'", "MIXTURE_OR_TASK_NAME = 'sums'", 'TRAIN_STEPS = 5', 'DROPOUT_RATE = 0.1']
NEEDED += ["TASK_FEATURE_LENGTHS = {'inputs': 8, 'targets': 4}"]
PATHS = ["INITIAL_CHECKPOINT_PATH = '/m/checkpoint_10'", "CHECKPOINT_PATH = '/m/checkpoint_10'"]
PATHS += ["EVAL_OUTPUT_DIR = 'e'", "INFER_OUTPUT_DIR = 'e'"]


def translated(files, *bindings, search=()):
  return translate(read_setup(files, [*NEEDED, *bindings], search))


def flags_of(*argv):
  return make_parser(all_modes()).parse_args(list(argv))


def expanded(*argv):
  flags = flags_of('--mode', 'train', '--gin_file', SUMS, *argv)
  assert expand(flags) is None
  return flags


def test_a_setup_is_translated_to_an_experiment(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  flags = expanded('--gin.MODEL_DIR="runs/sums"', "--gin.MIXTURE_OR_TASK_MODULE='made_up_sums_task'")
  assert flags.job_log_dir == 'runs/sums'
  monkeypatch.syspath_prepend(str(Path(SUMS).parent))
  resolved = resolve(flags.exp, [*flags.overrides, 'num_train_steps=7'])
  experiment, parts = resolved.experiment, resolved.parts
  assert type(experiment) is T5xExperiment
  wanted = {'model_dims': 8, 'num_heads': 4, 'head_dim': 3, 'hidden_dims': 16, 'num_encoder_layers': 2, 'num_layers': 2}
  wanted |= {'vocab_size': 384, 'num_train_steps': 7, 'eval_every_steps': 10, 'checkpoint_every': 10}
  wanted |= {'normalization': 'sum', 'z_loss': 0.0001, 'dtype': 'float32'}
  assert {name: getattr(experiment, name) for name in wanted} == wanted
  job = resolved.build()
  data = {'task': 'made_up_sums', 'modules': ('made_up_sums_task',), 'lengths': {'inputs': 32, 'targets': 16}}
  assert job.train_input == SeqIoInput(**data, batch_size=8, shuffle=False)
  assert job.eval_inputs['made_up_sums'].max_batches == 1
  assert parts['task'].loss.normalization == 'sum'
  optimizer = job.task.learner.optimizer
  assert (optimizer.learning_rate.factors, optimizer.momentum_of) == ('constant * rsqrt_decay', 'steps')
  saved = json.loads(json.dumps(to_json(resolved)))
  saved['config']['task_modules'] = {'list': ['a_strangers']}
  with pytest.raises(ValueError, match='a_strangers at task_modules'):
    from_json(saved)


def test_gin_files_alone_cannot_import_modules(tmp_path, monkeypatch):
  """Even if the module is in the current directory, beside the gin file."""
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(sys, 'path', list(sys.path))
  (tmp_path / 'a_strangers.py').write_text(f"open('{tmp_path}/ran', 'w').close()")
  setup = tmp_path / 'setup.gin'
  setup.write_text(Path(SUMS).read_text() + "\nMIXTURE_OR_TASK_MODULE = 'a_strangers'\n")
  flags = ('--mode', 'train', '--gin_file', str(setup), '--gin.MODEL_DIR="runs/sums"')
  with pytest.raises(UserError, match=f'names the module a_strangers, .* add --experiment_path {tmp_path}'):
    expand(flags_of(*flags))
  for own in (['--experiment_path', str(tmp_path)], ["--gin.MIXTURE_OR_TASK_MODULE='a_strangers'"]):
    flags_now = flags_of(*flags, *own)
    assert expand(flags_now) is None
    assert "task_modules=('a_strangers',)" in flags_now.overrides
  assert not (tmp_path / 'ran').exists()
  assert expanded('--gin.MODEL_DIR="runs/sums"').experiment_path == []  # the directory of a gin file is not on sys.path


def test_a_setup_is_written_as_python(tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  flags = flags_of('--gin_file', SUMS, '--gin.MODEL_DIR="x"', '--translate', 'my_sums.py')
  assert expand(flags) == 0
  assert 'wrote my_sums.py: --exp my_sums.MySums' in capsys.readouterr().out
  written = runpy.run_path('my_sums.py')['MySums']
  assert (written.model_dims, written.train_data['task'], written.rate['warmup_steps']) == (8, 'made_up_sums', 10000)
  with pytest.raises(ValueError, match=r'my_sums\.py exists'):
    expand(flags)


def test_a_model_dir_with_checkpoints_of_t5x_continues(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  for step in (0, 10, 20):
    (tmp_path / 'model_dir' / f'checkpoint_{step}').mkdir(parents=True)
  with pytest.raises(ValueError, match='set --job_log_dir'):
    expand(flags_of('--mode', 'train', '--gin_file', SUMS, '--gin.MODEL_DIR="model_dir"'))
  flags = expanded('--gin.MODEL_DIR="model_dir"', '--job_log_dir', 'new', '--set', 'init_from_step=10')
  assert {'init_from=t5x:model_dir', 'init_from_step=20', 'skips_trained_batches=True'} < set(flags.overrides)
  flags = expanded('--gin.MODEL_DIR="model_dir"', '--job_log_dir', 'new', '--gin.TRAIN_STEPS_RELATIVE=5')
  assert 'num_train_steps=25' in flags.overrides
  for skips, number in ((False, 0), (True, 10)):
    settings = {'train_data': {'task': 'a', 'lengths': {}}, 'init_from_step': 10, 'init_from': 't5x:a'}
    experiment = T5xExperiment(**settings, skips_trained_batches=skips)
    assert experiment.train_input().skip_batches == number


@pytest.mark.parametrize(
  'name, fields',
  [
    ('t5/t5_1_0/small', {'model_dims': 512, 'activation': 'relu', 'is_gated': False, 'ties_embedding': True}),
    ('t5/byt5/small', {'vocab_size': 384, 'num_encoder_layers': 12, 'num_layers': 4}),
    ('scalable_t5/mt5/small', {'scanned': True, 'has_bias_per_layer': True, 'remat_policy': 'dots_no_batch'}),
    ('decoder_only/models/base', {'num_layers': 12, 'num_encoder_layers': 0, 'ties_embedding': True}),
    ('contrib/gpu/t5/t5_1_1/small', {'model_dims': 512, 'is_gated': True, 'scanned': False}),
    ('flaxformer/t5_large', {'hidden_dims': 4096, 'is_gated': False, 'ties_embedding': True}),
    ('flaxformer/mt5_xl', {'vocab_size': 250112, 'hidden_dims': 5120, 'ties_embedding': False}),
    ('flaxformer/tokens_choose_large', {'num_experts': 64, 'mixture_every': 4, 'num_selected_experts': 2}),
    ('flaxformer/experts_choose_base', {'experts_choose': True, 'mixture_every': 2, 'num_layers': 12}),
    ('flaxformer/st_moe_xl', {'has_extra_ffn': True, 'mixture_every': 4, 'num_experts': 16, 'capacity_factor': 2.0}),
    ('flaxformer/st_moe_32b', {'model_dims': 5120, 'head_dim': 128, 'num_experts': 64, 'router_z_weight': 0.001}),
    ('flaxformer/switch_base', {'hidden_dims': 3072, 'activation': 'relu', 'max_group_size': 8192}),
    ('flaxformer/switch_c', {'min_capacity': 2, 'mixture_every': 1, 'ties_embedding': False}),
  ],
)
def test_models_of_t5x_are_built_in(name, fields):
  example, _, model = name.partition('/')
  kind = 't5' if 't5' in model else 'moe'
  path = f'flaxformer/t5x/configs/{kind}/models/{model}' if example == 'flaxformer' else f't5x/examples/{name}'
  translation = translated([f'{path}.gin'.replace('examples/contrib', 'contrib'), *RUN])
  assert not translation.missing
  assert fields.items() <= translation.fields.items()
  assert translation.fields['dropout_rate'] == 0.1
  assert translation.fields['dtype'] == 'bfloat16'


def test_scalable_models_without_a_scan_have_a_dim_of_heads():
  files = ['t5x/examples/scalable_t5/t5_1_1/small.gin', *RUN]
  translation = translated(files, 'network.T5Config.scan_layers = False')
  assert not translation.missing
  rules = T5xExperiment(**translation.fields).optimizer().factor_rules
  assert rules == Adafactor.as_t5x(learning_rate=1.0, heads_apart=True).factor_rules


SPARSE = """
from __gin__ import dynamic_registration
from flaxformer.architectures.moe import moe_architecture
from flaxformer.architectures.moe import routing
from flaxformer.components import dense
include 'flaxformer/t5x/configs/moe/models/tokens_choose_tiny.gin'
include 't5x/contrib/moe/configs/runs/finetune.gin'
NUM_MODEL_PARTITIONS = 2
NUM_EXPERTS = 4
NUM_EXPERT_PARTITIONS = 2
ROUTER_Z_LOSS_FACTOR = 0.002
ACTIVATION_DTYPE = 'float32'
EXPERT_DROPOUT_RATE = 0.4
JITTER_NOISE = 0.01
"""
CHECKPOINT = "INITIAL_CHECKPOINT_PATH = '/models/small/checkpoint_1000'"


def test_a_setup_of_mixtures_of_experts(tmp_path):
  (tmp_path / 'sparse.gin').write_text(SPARSE)
  translation = translated(['sparse.gin'], CHECKPOINT, search=[str(tmp_path)])
  assert not translation.missing
  assert any('num_groups_multiple_of' in note for note in translation.notes)
  assert translation.experiment == 'T5xMoeExperiment'
  experiment = T5xMoeExperiment(**translation.fields)
  task = experiment.task()
  wanted = {'num_experts': 4, 'num_groups_multiple_of': 4, 'ici_mesh_shape': (1, -1, 2), 'dtype': 'float32'}
  assert {name: getattr(experiment, name) for name in wanted} == wanted
  assert task.loss.aux_loss_weights == {'load_balance_loss': 0.01, 'router_z_loss': 0.002}
  assert task.learner.expert_grad_scale == 2
  denser = translated(['sparse.gin'], CHECKPOINT, 'NUM_DECODER_SPARSE_LAYERS = 2', search=[str(tmp_path)])
  assert not denser.missing
  model = T5xMoeExperiment(**denser.fields).language_model()
  assert [len(stack.block.blocks) for stack in (model.encoder_stack, model.stack)] == [2, 1]
  assert dict(experiment.axis_rules)['act_embed'] == 'mdl'  # 2-D activations, the default of contrib/moe
  rules = 'partitioning.standard_logical_axis_rules'
  own = "[('my_dim', 'model'), ('expert_mlp', ('expert', 'data')), ('embed', None), ('bad', 'stage')]"
  further = f'MoePjitPartitioner.logical_axis_rules = @{rules}()', f'{rules}.additional_rules = {own}'
  other = translated(['sparse.gin'], CHECKPOINT, *further, search=[str(tmp_path)])
  assert other.fields['axis_rules'][-3:] == (('my_dim', 'mdl'), ('expert_mlp', 'data'), ('embed', None))
  (missing,) = other.missing
  assert "additional_rules has ('bad', 'stage')" in missing
  block = task.model.encoder_stack.block.blocks[1]
  assert (block.ffn.computation.priority, block.ffn.computation.min_capacity) == ('score', 4)
  assert (block.ffn.experts.dropout_rate, block.dropout_rate, block.ffn.router.jitter_eps) == (0.4, 0.1, 0.01)


@pytest.mark.parametrize(
  'lines, wanted',
  [
    ('', {'num_beams': 1, 'length_penalty': 0.6}),
    (
      'models.EncoderDecoderModel.predict_batch_with_aux.num_decodes = 4\ndecoding.beam_search.alpha = 0.8',
      {'num_beams': 4, 'length_penalty': 0.8},
    ),
    (
      'models.EncoderDecoderModel.decode_fn = @decoding.temperature_sample\ndecoding.temperature_sample.topk = 0\n'
      'decoding.temperature_sample.topp = 0.9\ndecoding.temperature_sample.temperature = 0.7',
      {'temperature': 0.7, 'top_k': 0, 'top_p': 0.9},
    ),
    ('models.EncoderDecoderModel.decode_fn = @decoding.temperature_sample', {'temperature': 0.0}),
    ('decoding.beam_search.max_decode_len = 8', 'max_decode_len = 8: is not supported'),
    ('models.EncoderDecoderModel.decode_fn = @my_lab.search', 'only beam_search and temperature_sample'),
  ],
)
def test_decoding_settings_are_translated(lines, wanted):
  translation = translated(['t5x/examples/t5/t5_1_1/tiny.gin', *RUN], *lines.splitlines())
  if isinstance(wanted, str):
    (missing,) = translation.missing
    assert wanted in missing
    return
  assert not translation.missing
  settings = T5xExperiment(**translation.fields).decode_settings()
  assert {name: getattr(settings, name) for name in wanted} == wanted


@pytest.mark.parametrize(
  'number, submesh, mdl', [(2, None, 2), (None, (1, 2, 1, 2), 4), (4, (1, 2, 1, 2), 4), (1, (1, 2, 1, 2), None)]
)
def test_a_submesh_is_translated_to_model_partitions(number, submesh, mdl, tmp_path):
  """The cases of T5X's test_compute_num_model_partitions."""
  (tmp_path / 'sparse.gin').write_text(SPARSE)
  bound = (f'NUM_MODEL_PARTITIONS = {number}', f'MODEL_PARALLEL_SUBMESH = {submesh}', CHECKPOINT)
  if mdl is None:
    with pytest.raises(ValueError, match='bind one of them'):
      translated(['sparse.gin'], *bound, search=[str(tmp_path)])
  else:
    translation = translated(['sparse.gin'], *bound, search=[str(tmp_path)])
    assert translation.fields['ici_mesh_shape'] == (1, -1, mdl)


@pytest.mark.parametrize(
  'line, words',
  [
    ('moe_architecture.SparseEncoderLayer.extra_mlp = @dense.MlpBlock()', 'differ in has_extra_ffn'),
    ('EXPERT_MLP_DIM = 8', 'differs in hidden_dims'),
    ("expert/dense.MlpBlock.activations = ('relu', )", 'differs in activation'),
    ('sparse_decoder/routing.TokensChooseMaskedRouter.batch_prioritized_routing = True', 'would look ahead'),
  ],
)
def test_unsupported_mixtures_are_listed(line, words, tmp_path):
  (tmp_path / 'sparse.gin').write_text(SPARSE + line)
  translation = translated(['sparse.gin'], CHECKPOINT, search=[str(tmp_path)])
  assert translation.missing
  assert all(words in missing for missing in translation.missing)


def test_a_decoder_only_model_reads_inputs_as_a_prefix():
  files, bound = ['t5x/examples/decoder_only/models/base.gin', *RUN], "TASK_FEATURE_LENGTHS = {'targets': 4}"
  assert translated(files, bound).fields['train_data']['architecture'] == 'decoder_only'
  for line, is_causal in (('', True), ('models.DecoderOnlyModel.inputs_bidirectional_attention = True', False)):
    translation = translated(files, *line.splitlines())
    assert not translation.missing
    assert translation.fields['train_data']['architecture'] == 'prefix_lm'
    spec = SeqIoInput(**translation.fields['train_data']).element_spec()
    assert ('prefix_mask' in spec) is not is_causal


def test_other_runs_of_t5x_are_refused():
  for name in ('configs/runs/precompile', 'contrib/moe/configs/runs/precompile', 'configs/runs/export_seqio'):
    with pytest.raises(ValueError, match=r'runs \S*(precompile|save), .*--mode'):
      translated(['t5x/examples/t5/t5_1_1/small.gin', f't5x/{name}.gin'])


def test_fine_tuning_starts_from_a_checkpoint():
  files = ['t5x/examples/t5/t5_1_1/small.gin', 't5x/configs/runs/finetune.gin']
  bound = [CHECKPOINT, 'TRAIN_STEPS_RELATIVE = 50', 'RANDOM_SEED = 3']
  bound += ['partitioning.PjitPartitioner.num_partitions = 2', 'trainer.Trainer.num_microbatches = 4']
  translation = translated(files, *bound)
  assert not translation.missing
  wanted = {'init_from': 't5x:/models/small', 'init_from_step': 1000, 'num_train_steps': 1050}
  wanted |= {'ici_mesh_shape': (1, -1, 2), 'num_microbatches': 4, 'seed': 3}
  assert translation.fields | wanted == translation.fields
  assert translation.fields['rate'] == {'factors': 'constant', 'base': 0.001, 'warmup_steps': 1000}
  first = translated(files, "INITIAL_CHECKPOINT_PATH = '/models/small/checkpoint_0'")
  assert first.fields['init_from'] == 't5x:/models/small/checkpoint_0'
  assert 'init_from_step' not in first.fields


@pytest.mark.parametrize('through_function', [False, True])
def test_assignment_maps_are_translated_to_the_origin(through_function):
  pairs = r"((r'(.*)decoder/logits_dense(.*)', None), (r'state/param_states.*', None))"
  restore = f'utils.RestoreCheckpointConfig.assignment_map = {pairs}'
  if through_function:
    restore = 'utils.RestoreCheckpointConfig.state_transformation_fns = [@state_utils.apply_assignment_map]\n'
    restore += f'state_utils.apply_assignment_map.assignment_map = {pairs}'
  files = ['t5x/examples/t5/t5_1_1/small.gin', 't5x/configs/runs/finetune.gin']
  translation = translated(files, CHECKPOINT, restore, 'utils.RestoreCheckpointConfig.fallback_to_scratch = True')
  assert not translation.missing
  kept = {'assignment_map': (('(.*)decoder/logits_dense(.*)', None),), 'from_scratch': True}
  wanted = T5xOrigin(path='/models/small', step=1000, with_optimizer=False, with_step=True, **kept)
  assert T5xExperiment(**translation.fields).origin() == wanted
  files = ['flaxformer/t5x/configs/moe/models/switch_base.gin', 't5x/contrib/moe/configs/runs/sparse_upcycle.gin']
  (words,) = translated(files, CHECKPOINT).missing
  assert 'UpcycleCheckpointer: start a dense job' in words


def test_texts_in_tfrecord_files_are_prompts(tmp_path):
  files = ['t5x/examples/t5/byt5/small.gin', 't5x/configs/runs/infer_from_tfexample_file.gin']
  bound = [f"TF_EXAMPLE_FILE_PATHS = ['{tmp_path}/*.tfrecord']", "TF_EXAMPLE_FILE_TYPE = 'tfrecord'"]
  bound += ["FEATURE_LENGTHS = {'inputs': 8, 'targets': 4}", "CHECKPOINT_PATH = '/m/checkpoint_10'"]
  bound += ["INFER_OUTPUT_DIR = 'x'", 'infer_script.create_task_from_tfexample_file.inputs_key = "text"']
  model = 'models.EncoderDecoderModel'
  bound += [f'{model}.decode_fn = @decoding.temperature_sample', f'{model}.predict_batch_with_aux.num_decodes = 3']
  translation = translated(files, *bound)
  assert not translation.missing
  import tensorflow as tf

  with tf.io.TFRecordWriter(str(tmp_path / 'a.tfrecord')) as writer:
    for text in (b'90+6', b'1'):
      feature = {'text': tf.train.Feature(bytes_list=tf.train.BytesList(value=[text]))}
      writer.write(tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString())
  overrides = [f'{name}={value}' for name, value in translation.fields.items()]
  job = resolve(f'{EXPERIMENTS}.T5xExperiment', overrides).build()
  prompts = job.decode_inputs['infer'].read()
  assert [(prompt.prompt, prompt.prompt_ids, prompt.n) for prompt in prompts] == [
    ('90+6', (60, 51, 46, 57, 1), 3),
    ('1', (52, 1), 3),
  ]
  assert job.tokenizer.decode([60, 51]) == '90'


@pytest.mark.parametrize(
  'run, output, field', [('eval', 'EVAL_OUTPUT_DIR', 'eval_data'), ('infer', 'INFER_OUTPUT_DIR', 'decode_data')]
)
def test_eval_and_infer_runs_read_a_checkpoint(run, output, field):
  files = ['t5x/examples/t5/t5_1_1/small.gin', f't5x/configs/runs/{run}.gin']
  translation = translated(files, "CHECKPOINT_PATH = '/models/small/checkpoint_1000'", f"{output} = 'x'")
  assert not translation.missing
  assert translation.fields | {'init_from': 't5x:/models/small', 'init_from_step': 1000} == translation.fields
  assert (translation.fields[field]['num_epochs'], translation.fields[field]['packing']) == (1, False)


OF_EVALUATOR = {'EVALUATOR_NUM_EXAMPLES': None, 'EVALUATOR_USE_MEMORY_CACHE': True, 'JSON_WRITE_N_RESULTS': None}


@pytest.mark.parametrize(
  'run, wanted',
  [
    ('pretrain', {'USE_HARDWARE_RNG': False}),
    ('finetune', {'USE_HARDWARE_RNG': False, **OF_EVALUATOR}),
    ('eval', 'EVAL_OUTPUT_DIR is required'),
    ('infer', 'INFER_OUTPUT_DIR is required'),
    ('infer_from_tfexample_file', 'INFER_OUTPUT_DIR is required'),
  ],
)
def test_user_files_can_read_macros_of_t5x(run, wanted, tmp_path):
  names = [wanted.split()[0]] if isinstance(wanted, str) else list(wanted)
  lines = [f"include 't5x/configs/runs/{run}.gin'", *(f'my_lab.report.{name} = %{name}' for name in names)]
  (tmp_path / 'mine.gin').write_text('\n'.join(lines))
  report = read_setup(['mine.gin'], search=[str(tmp_path)]).node('my_lab.report')
  if isinstance(wanted, str):
    with pytest.raises(ValueError, match=f'%{wanted}'):
      report.get(names[0])
  else:
    assert {name: report.get(name) for name in names} == wanted


@pytest.mark.parametrize(
  'binding, words',
  [
    ('train_script.train.model = @my_lab.Model()', 'EncoderDecoderModel, DecoderOnlyModel, Moe'),
    ('train_script.train.model = @my_lab.models.EncoderDecoderModel()', 'MoeEncoderDecoderModel of T5X are'),
    ('train_script.train.trainer_cls = @my_lab.trainer.Trainer', 'only t5x.trainer.Trainer and'),
    ('trainer.Trainer.learning_rate_fn = @my_lab.create_learning_rate_scheduler()', 'only utils.create_learning_rate'),
    ('OPTIMIZER = @optimizers.adamw()', 'only t5x.adafactor.Adafactor'),
    ('network.T5Config.sparse_layers = 2', 'is not supported'),
    ('network.T5Config.scale_attn_logits = True', 'is not scaled'),
    ("network.T5Config.mlp_activations = ('no_such', 'linear')", "'no_such' is not one of"),
  ],
)
def test_unsupported_settings_are_listed_with_the_reason(binding, words):
  (missing,) = translated(['t5x/examples/t5/t5_1_1/small.gin', *RUN], binding).missing
  assert words in missing


@pytest.mark.parametrize(
  'binding, words',
  [
    ('MIXTURE_OR_TASK_SPLIT = "test"', '%MIXTURE_OR_TASK_SPLIT: has no effect'),
    ('utils.SaveCheckpointConfig.dtype = "bfloat16"', 'weights stay in float32'),
    ('my_lab.report.name = "x"', 'my_lab.report: has no effect'),
    ('trian/utils.DatasetConfig.batch_size = 3', 'trian/t5x.utils.DatasetConfig: has no effect'),
    ('train_script.train.inference_evaluator_cls = @my_lab.Evaluator', 'metrics are computed by seqio.Evaluator'),
    ('train_script.train.run_eval_before_training = True', '--mode eval'),
    ('partitioning.PjitPartitioner.params_on_devices = False', 'restores its own shards'),
    ('trainer.Trainer.weight_metrics_computer = @trainer.WeightMetricsComputer()', '--mode replay --step N'),
    ("train_script.train.actions = {'TRAIN': [@trainer.TerminateOnNanAction()]}", 'nonfinite loss'),
    ('models.EncoderDecoderModel.decode_fn = @decoding.temperature_sample\ntrain_script.train.random_seed = 0', None),
  ],
)
def test_differences_that_do_not_affect_numbers_are_noted(binding, words):
  translation = translated(['t5x/examples/t5/t5_1_1/small.gin', *RUN], *binding.splitlines())
  assert not translation.missing
  assert all('seed = None' in note or words in note for note in translation.notes)
  assert words is None or any(words in note for note in translation.notes)


# Values with which T5X would fail with a traceback; the experiment checks other values, such as a batch size of -3.
@pytest.mark.parametrize('value', ["'abc'", '2.5', '[]', '{}', 'None', '(1, 2)', 'True'])
def test_bindings_of_wrong_types_raise_user_errors(value):
  for files in (['t5/t5_1_1/small', 'finetune'], ['decoder_only/models/base', 'eval'], ['t5/byt5/tiny', 'infer']):
    setup = read_setup([f't5x/examples/{files[0]}.gin', f't5x/configs/runs/{files[1]}.gin'], [*NEEDED, *PATHS])
    for place, name in [*(('bindings', name) for name in setup.bindings), *(('macros', name) for name in setup.macros)]:
      changed = {place: {**getattr(setup, place), name: ast.literal_eval(value)}}
      with contextlib.suppress(UserError):
        translate(dataclasses.replace(setup, read=set(), **changed))


def test_setups_with_unsupported_settings_do_not_start(capsys):
  with pytest.raises(ValueError, match=r'1 setting of .* is not supported'):
    expanded('--gin.MODEL_DIR="x"', '--gin.network.T5Config.sparse_layers=2', '--job_log_dir', 'x')
  assert 'network.T5Config.sparse_layers = 2: is not supported' in capsys.readouterr().err


@pytest.mark.parametrize(
  'argv, words',
  [
    (['--gin_file', SUMS], '%MODEL_DIR is required: set --gin.MODEL_DIR=VALUE'),
    (['--gin_file', 'none.gin'], 'the gin file none.gin is not found'),
    (['--gin_file', SUMS, '--gin.TRAIN_STEPS=(3'], r'--gin.TRAIN_STEPS=\(3 has a syntax error of gin'),
    (['--gin_file', SUMS, '--gin.MODEL_DIR=runs/one'], """text needs quotes, as in --gin.MODEL_DIR="'runs/one'"\\.$"""),
    (['--gin_file', SUMS, '--gin.MODEL_DIR=[%MODEL_DIR]'], 'the macro %MODEL_DIR refers to itself'),
    (['--gin.TRAIN_STEPS=3'], 'add --gin_file FILE'),
  ],
)
def test_invalid_setups_raise_user_errors(argv, words):
  with pytest.raises(ValueError, match=words):
    expand(flags_of('--mode', 'train', *argv))


def test_names_and_scopes_are_resolved_as_by_gin(tmp_path):
  """Imports are of one file; short names and later bindings win; references without a scope inherit it."""
  (tmp_path / 'theirs.gin').write_text('from t5x import trainer\ntrainer.Trainer.a = 1')
  lines = ['from my_lab import trainer', "include 'theirs.gin'", 'my_lab.run.cls = @trainer.Trainer()']
  lines += ['trainer.Trainer.a = 2', 'my_lab.run.b = @x/y/part()']
  lines += ['part.inner = @inner', 'x/inner.c = 3', 'inner.c = 4']
  (tmp_path / 'mine.gin').write_text('\n'.join(lines))
  root = read_setup(['mine.gin'], ['run.d = 5', 'my_lab.run.d = 6', 'run.e = 8', 'part.e = 7'], [str(tmp_path)])
  run = root.node('my_lab.run')
  assert (run.get('cls').selector, run.get('cls').get('a')) == ('my_lab.trainer.Trainer', 2)
  assert (run.get('b').get('inner').get('c'), run.get('b').get('e')) == (3, 7)
  assert (run.get('d'), run.get('e'), run.unread()) == (6, 8, [])


def test_invalid_gin_files_raise_user_errors(tmp_path):
  path = tmp_path / 'x.gin'
  itself = os.fsencode(f"include '{path}'")
  for text, words in ((b'\xff', 'cannot be read'), (b'A = ' + b'[' * 5000, 'syntax'), (itself, 'may include itself')):
    path.write_bytes(text)
    with pytest.raises(UserError, match=words):
      read_setup([str(path)])


@pytest.mark.slow
def test_a_model_dir_of_t5x_continues_and_is_exported(tmp_path, monkeypatch):
  """From step 10 to 20, with the checkpoints of `t5x/train.py` as reference; on data 4 x model 2."""
  data = Path(SUMS).parent
  monkeypatch.syspath_prepend(str(data))
  gin = (f"--gin.MODEL_DIR='{data}/model_dir'", "--gin.MIXTURE_OR_TASK_MODULE='made_up_sums_task'")
  mesh = ('--ici_mesh_shape', '1,4,2')
  job = ('--job_log_dir', tmp_path / 'job')
  assert binary.run_in_process('--mode', 'train', '--gin_file', SUMS, *gin, *job, *mesh) == exit_codes.OK
  flags = ('--format', 't5x', '--out', tmp_path / 'out', '--experiment_path', data)
  assert binary.run_in_process('--mode', 'export', *job, *flags) == exit_codes.OK
  exported = open_checkpoint(tmp_path / 'out' / 'checkpoint_20').arrays
  with np.load(data / 'model_dir_step_20.npz') as archive:
    expected = dict(archive)
  assert sorted(exported) == sorted(expected)
  for name in expected:
    ours, theirs = np.asarray(exported[name]), expected[name]
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype), name
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * max(np.abs(theirs).max(), 1e-30), err_msg=name)
