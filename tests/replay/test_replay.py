"""Past steps are replayed bit for bit, and the first step that differs from the record is found."""

import contextlib
import dataclasses
import json
import math
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from spmd_tasks import exit_codes
from spmd_tasks.checkpoints import Checkpointer
from spmd_tasks.config import resolve
from spmd_tasks.experiment import partition_job
from spmd_tasks.learning import AdamW, Learner
from spmd_tasks.replay.statistics import GradientLearner, gradient_state
from spmd_tasks.runtime import TrainState
from spmd_tasks.sharding import WeightSpec
from tests import binary
from tests.programs.small_jobs import SMALL
from tests.replay.replayed_jobs import TEXTS


def train(directory, experiment, *flags):
  code = binary.run_in_process('--exp', experiment, '--mode', 'train', '--job_log_dir', directory, *flags)
  assert code == exit_codes.OK
  return directory


def replay(directory, out, *flags):
  """Runs a replay; returns its exit code and report."""
  code = binary.run_in_process('--mode', 'replay', '--job_log_dir', directory, '--out', out, *flags)
  return code, json.loads(out.read_text())


@pytest.fixture(scope='module')
def dense(tmp_path_factory):
  """A dense job of eight steps; the batch before step 5 was skipped, because its loss was infinite."""
  directory = tmp_path_factory.mktemp('dense') / 'job'
  return train(directory, SMALL, '--set', 'train_input.spikes={"4": "inf"}', '--num_train_steps', 8)


@pytest.fixture(
  scope='module',
  params=[
    'tests.programs.test_mixture_jobs.Mixed',
    'tests.replay.replayed_jobs.PipelinedExperts',
  ],
)
def mixture(request, tmp_path_factory):
  """A job of twelve steps on a mixture of inputs, with two layers and two microbatches."""
  flags = ('--set', 'num_layers=2', '--set', 'checkpoint_every=4', '--num_train_steps', 12)
  return train(tmp_path_factory.mktemp('mixture') / 'job', request.param, *flags)


def norm_of(statistics):
  return math.hypot(*(norm for leaf in statistics.values() for norm in np.ravel(leaf['norm'])))


def test_a_step_is_replayed_and_inspected(dense, tmp_path, capsys):
  code, report = replay(dense, tmp_path / 'out.json', '--step', 5)
  record = {line['step']: line for line in binary.metric_lines(dense)}
  assert (code, report['checkpoint'], report['departs']) == (exit_codes.OK, 4, False)
  assert report['metrics'].items() <= record[5].items()
  assert report['metrics']['loss'] == record[5]['loss']
  skipped, step = report['attempts']
  assert step['skipped'] is None
  assert 'is not finite' in skipped['skipped']
  assert not math.isfinite(float(skipped['loss']))
  assert step['loss'] == pytest.approx(record[5]['loss'], rel=1e-6)
  assert sum(np.sum(leaf['nan']) for leaf in skipped['gradients'].values()) > 0
  # The step's own program reported the same norms, without padding.
  assert norm_of(step['gradients']) == pytest.approx(record[5]['grad_norm'], rel=1e-5)
  assert norm_of(step['weights']) == pytest.approx(record[4]['weight_norm'], rel=1e-5)
  (activations,) = step['activations'].values()  # the residual stream [1, 8, 8, 6], without padding
  assert len(activations['norm']) == 1
  assert 0 < activations['max'][0] < activations['norm'][0] < math.sqrt(8 * 8 * 6) * activations['max'][0]
  assert 0 < norm_of(step['updates']) < 0.1 * norm_of(step['weights'])
  assert 'every bit of the metrics agrees with the record' in capsys.readouterr().out


def test_skipped_batches_of_own_arrays_are_inspected(tmp_path, capsys):
  """The learner has optional parts of state: an average, and the recent steps that a spike is compared with."""
  job = train(tmp_path / 'job', 'tests.replay.replayed_jobs.OwnArrays')
  code, report = replay(job, tmp_path / 'out.json', '--step', 4)
  nan, spike, step = report['attempts']
  assert (code, report['checkpoint'], step['skipped']) == (exit_codes.OK, 2, None)
  assert nan['skipped'].endswith('is not finite')
  assert spike['skipped'].endswith('is above learner.spike_threshold')
  assert [row['from'] for row in nan['rows']] == [[f'epoch 0, batches[3], row {row}'] for row in range(8)]
  assert [row['not_finite'] for row in nan['rows']] == [{'inputs': 1} if row == 2 else {} for row in range(8)]
  shown = capsys.readouterr()
  assert "values that are not finite: 'inputs' in row 2 (1)" in shown.out
  assert f'`--mode replay --job_log_dir {job} --step 4` shows its rows' in shown.err
  assert norm_of(step['gradients']) == pytest.approx(binary.metric_lines(job)[3]['grad_norm'], rel=1e-5)


@pytest.mark.parametrize(
  'learner',
  [
    Learner(optimizer=optax.adam(0.1), ema_decay=0.9, ema_warmup=True, spike_threshold=6.0),
    Learner(optimizer=AdamW(learning_rate=0.1), state_on_host=True, num_microbatches=2),
    Learner(optimizer=optax.MultiSteps(optax.adam(0.1), 2)),
    Learner(optimizer=optax.contrib.schedule_free_adamw(0.1)),
    Learner(optimizer=optax.contrib.reduce_on_plateau()),
  ],
  ids=['average and spikes', 'on the host', 'accumulated', 'schedule-free', 'plateau'],
)
def test_gradients_need_no_state_of_the_learner(learner):
  weights, specs = {'w': jnp.ones(3)}, {'w': WeightSpec(shape=(3,), init=None)}
  zero = jnp.zeros((), jnp.int32)
  state = TrainState(step=zero, rng=zero, weights=weights, learner=learner.init(weights, specs))
  assert jax.tree.structure(gradient_state(state).learner) == jax.tree.structure(
    GradientLearner(learner).init(weights, specs)
  )


def test_the_load_that_moves_a_balance_bias_is_not_a_gradient():
  spec = WeightSpec(shape=(3,), init=None)
  specs = {'bias': dataclasses.replace(spec, tags=('balance_bias',)), 'w': spec}
  grads = {'bias': jnp.array([24.0, -12.0, -12.0]), 'w': jnp.arange(3.0)}
  learner = GradientLearner(Learner(optimizer=optax.adam(0.1)))
  weights = jax.tree.map(jnp.ones_like, grads)
  shown, *_ = learner.update(grads, 0.0, 0, learner.init(weights, specs), weights, specs)
  np.testing.assert_array_equal(shown['bias'], 0)
  np.testing.assert_array_equal(shown['w'], grads['w'])


def test_a_state_is_compared_with_its_checkpoint(dense, tmp_path, capsys):
  """A flipped bit in the checkpoint is found, unless a tolerance allows other bits."""
  code, report = replay(dense, tmp_path / 'out.json', '--from', 6, '--to', 6)
  (step,) = report['steps']
  assert (code, step['different_leaves'], step['digest']) == (exit_codes.OK, [], step['saved_digest'])
  other = tmp_path / 'other'
  shutil.copytree(dense, other, ignore=shutil.ignore_patterns('checkpoints'))
  canonical = partition_job(resolve(SMALL).build()).canonical_state
  saved = Checkpointer(dense / 'checkpoints', read_only=True).restore(canonical, 6)
  scale = saved.state.weights['final_norm']['scale']
  bits = np.asarray(scale).view(np.uint32) ^ np.eye(1, scale.size, 3, dtype=np.uint32)[0]
  saved.state.weights['final_norm']['scale'] = jax.device_put(bits.view(np.float32), scale.sharding)
  with contextlib.closing(Checkpointer(other / 'checkpoints')) as checkpointer:
    checkpointer.save(6, saved.state, saved.input_state)
  code, report = replay(dense, tmp_path / 'out.json', '--from', 6, '--to', 6, '--against', other)
  (step,) = report['steps']
  assert (code, step['differences']) == (exit_codes.FAILED, {})
  assert step['different_leaves'] == ['weights/final_norm/scale']
  capsys.readouterr()
  code, report = replay(dense, tmp_path / 'out.json', '--step', 6, '--against', other, '--tolerance', '1e-6')
  assert (code, report['departs']) == (exit_codes.OK, False)
  assert 'the metrics agree within a relative difference of 1e-06 with the record' in capsys.readouterr().out


def test_the_first_step_that_differs_is_found(dense, tmp_path, capsys):
  other = tmp_path / 'other'
  shutil.copytree(dense, other, ignore=shutil.ignore_patterns('checkpoints'))
  lines = binary.metric_lines(dense)
  for line in lines[5:]:  # steps 6 to 8
    line['loss'] = math.nextafter(line['loss'], 0)
  (other / 'metrics.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))
  code, report = replay(dense, tmp_path / 'out.json', '--from', 3, '--to', 8, '--against', other)
  assert (code, report['first_departure'], report['checkpoint']) == (exit_codes.FAILED, 6, 2)
  assert list(report['steps'][-1]['differences']) == ['loss']
  assert len(report['steps']) == 4
  shown = capsys.readouterr().out
  assert 'step 6 is the first that differs' in shown
  assert 'These differences have the size of rounding, as between two meshes' in shown
  settings = ('--against', other, '--metric', 'loss', '--tolerance', '1e-12')
  assert replay(dense, tmp_path / 'out.json', '--from', 3, '--to', 8, *settings)[0] == exit_codes.OK


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_rows_of_a_mixture_are_described(mixture, tmp_path):
  """Steps from the beginning pass two checkpoints; the rows of one step agree with its texts."""
  code, report = replay(mixture, tmp_path / 'out.json', '--from', 1, '--to', 9)
  assert code == exit_codes.OK
  assert all(step['is_recorded'] for step in report['steps'])
  assert [step['step'] for step in report['steps'] if 'digest' in step] == [4, 8]
  code, report = replay(mixture, tmp_path / 'out.json', '--step', 11)
  assert (code, report['checkpoint'], report['is_recorded']) == (exit_codes.OK, 8, True)
  (attempt,) = report['attempts']
  assert {len(leaf['norm']) for name, leaf in attempt['gradients'].items() if name.startswith('stack')} == {2}
  rows = attempt['rows']
  assert [row['row'] for row in rows] == list(range(8))
  assert {row['source'] for row in rows} == {'made_up', 'texts'}
  text = '\n'.join(json.loads(line)['text'] for line in TEXTS.read_text().splitlines())
  for row in rows:
    assert (row['source'] == 'texts') == any(TEXTS.name in origin for origin in row['from'])
    if row['source'] == 'texts':
      assert sum(row['tokens_per_document']) <= 8  # fewer at the end of an epoch
      assert len(row['tokens_per_document']) > 1 or row['begins'] in text


@pytest.mark.parametrize(
  'flags, message',
  [
    ((), 'needs either --step N'),
    (('--step', 0), 'must be at least 1'),
    (('--from', 5, '--to', 4), 'must be steps with 1 <= from <= to'),
    (('--step', 9), 'step 9 must be at most num_train_steps of the job, 8'),
    (('--from', 5, '--to', 5, '--metric', 'no_such'), "--metric 'no_such' is not in"),
  ],
)
def test_invalid_flags_are_refused(dense, flags, message, capsys):
  assert binary.run_in_process('--mode', 'replay', '--job_log_dir', dense, *flags) == exit_codes.USAGE
  assert message in capsys.readouterr().err
