"""First mistakes of a new user: what is clear is taken; all else is one sentence, and nothing is written."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tasks import exit_codes, main
from spmd_tasks.config import resolve
from spmd_tasks.experiment import partition_job
from spmd_tasks.layers import LossOutput
from spmd_tasks.layers.losses import as_loss_output
from tests.programs import mistaken_experiments

MODULE = 'tests.programs.mistaken_experiments'
HERE = 'mistaken_experiments.py:'
MESH = 'ici_mesh_shape=1,4,2'

MISTAKES = [
  ('loss=number', ['returned 1.5', 'scalar jax.Array', '(mean, metrics)', 'LossOutput']),
  ('loss=per_row', ['returned float32[8]', 'jnp.mean']),
  ('loss=metric_per_row', ["the metric 'error' as float32[8]", 'jnp.mean']),
  ('loss=metric_by_number', ["the metrics {'mean': float32[], 1: float32[]}", 'a dict by name, a string, without']),
  ('loss=wrong_key', ["KeyError: 'labels'", "['row_weights', 'x', 'y']", HERE]),
  (
    'loss=float',
    ['ConcretizationTypeError', HERE, 'correct that code, which runs inside jax.jit: use jnp, and no float()'],
  ),
  ('loss=library', ['softmax_cross_entropy_with_integer_labels(predictions, batch) fails']),
  ('model=NoCompact', ['NoCompact(batch) fails with AssignSubModuleError', '@compact', HERE]),
  ('model=TakesArray', ["'dict' object has no attribute 'reshape'", '(row_weights, x, y)', HERE]),
  ('model=NoCall', ['NoCall has no method __call__']),
  ('model=ForgottenInit', ['super().__post_init__()']),
  ('what=class', ['the class Plain itself', 'an instance of a flax.linen.Module']),
  ('what=attribute', ["no attribute 'widht'", HERE]),
  ('what=list', ['a batch of train_input is a int', 'a dict of arrays by name']),
  ('what=shards', ['train_input.make_iterator() fails with TypeError', 'shard_index']),
  ('what=eval_files', ["no JSON lines file matches 'none*.jsonl'"]),
  ('what=byte_order', ["input 'y' has the dtype >f4", 'byte order']),
  ('how=dense', ['ffn/Dense_0/bias of a stacked layer', 'Linear or declare_weight']),
  ('how=shape', ['the ffn Feed returned float32[2,4,7]', 'float32[2,4,8]', '(array, {name: Statistics})']),
  ('how=number', ["{'balance': float32[]}"]),
  ('how=nothing', ['returned None']),
]


@pytest.mark.parametrize('change, words', MISTAKES, ids=[change for change, _ in MISTAKES])
def test_a_mistake_is_one_sentence_and_nothing_is_written(change, words, tmp_path, capsys):
  name = 'OwnFeed' if change.startswith('how') else 'Mistaken'
  directory = tmp_path / 'job'
  flags = ('--mode', 'train', '--job_log_dir', directory, '--set', MESH, '--set', change)
  assert main.run([str(flag) for flag in ('--exp', f'{MODULE}.{name}', *flags)]) == 2  # shares nothing that is kept
  sentence = capsys.readouterr().err
  assert sentence.count('\n') == 1
  assert [word for word in words if word not in sentence] == []
  assert not directory.exists()


@pytest.mark.parametrize('change', ['loss=with_metrics', 'loss=with_weights', 'model=Plain', 'how=array'])
def test_what_is_clear_is_taken(change):
  name = 'OwnFeed' if change.startswith('how') else 'Mistaken'
  model = partition_job(resolve(f'{MODULE}.{name}', [MESH, change]).build())
  assert model.train_step.lower().out_info[1]['loss'].shape == ()


def test_a_mean_over_rows_weighs_as_many_rows_as_there_are():
  mean = jnp.float32(0.5)
  output = as_loss_output(None, (mean, {'a': mean, 'b': (mean, 3)}), 8)
  assert (float(output.weight), float(output.metrics['a'][1]), float(output.metrics['b'][1])) == (8, 8, 3)
  assert as_loss_output(None, LossOutput(loss=mean, weight=2, metrics={'a': mean}), 8).metrics['a'][1] == 2


@pytest.mark.parametrize('field', ['metrics', 'per_example', 'summaries'])
@pytest.mark.parametrize('value', [{1: jnp.ones(8)}, {('a', 'b'): jnp.ones(8)}, [jnp.ones(8)]])
def test_what_a_loss_returns_beside_its_mean_has_names(field, value):
  with pytest.raises(ValueError, match=f'{field}.*give a dict by name, a string'):
    as_loss_output(None, LossOutput(loss=jnp.float32(0.5), weight=1, **{field: value}), 8)


def test_numpys_own_dtypes_become_those_of_the_spec_where_they_hold_the_numbers():
  model = partition_job(resolve(f'{MODULE}.OwnFeed', [MESH]).build())
  batch = {name: np.ones(each.shape, each.dtype) for name, each in model.input_layout.spec.items()}
  wide = batch | {'labels': batch['labels'].astype(np.int64), 'weights': batch['weights'].astype(np.float64)}
  assert model.train_step.place(wide)['labels'].dtype == np.int32
  with pytest.raises(
    ValueError, match="'labels' has integers from 1099511627776 to 1099511627776, which do not fit in int32"
  ):
    model.train_step.place(batch | {'labels': wide['labels'] << 40})
  with pytest.raises(ValueError, match='labels'):
    model.train_step.place(batch | {'labels': wide['weights']})


# --- own code that ends the process, or fails as it runs ---


@pytest.mark.parametrize(
  'place, code',
  [(place, '0') for place in ('init', 'task', 'model', 'loss', 'batch', 'prepare', 'after_step')]
  + [('batch', code) for code in ('', '42', 'done')],
)
def test_an_exit_in_own_code_is_an_error_that_names_the_place(place, code, tmp_path, capsys, monkeypatch):
  monkeypatch.setitem(mistaken_experiments.END, 'at', f'{place}:{code}')
  flags = ('--exp', f'{MODULE}.Ending', '--mode', 'train', '--job_log_dir', str(tmp_path / 'job'), '--set', MESH)
  assert main.run(flags) == exit_codes.EXITED
  sentence = capsys.readouterr().err
  shown = {'': '', 'done': "'done'"}.get(code, code)
  assert re.search(rf'spmd-tasks: sys\.exit\({shown}\) was called \(.*{HERE}\d+\) before the end of the', sentence)
  assert 'Traceback' not in sentence


def test_an_error_in_a_hook_is_its_sentence_before_its_traceback(tmp_path, capsys, monkeypatch):
  monkeypatch.setitem(mistaken_experiments.END, 'at', 'after_step:raise')
  flags = ('--exp', f'{MODULE}.Ending', '--mode', 'train', '--job_log_dir', str(tmp_path / 'job'), '--set', MESH)
  assert main.run(flags) == exit_codes.FAILED
  said = capsys.readouterr().err.partition('spmd-tasks: ')[2]
  assert re.match(rf'OSError: the disk of the hook is full \(.*{HERE}\d+\); the traceback follows\.\nTraceback', said)
