"""Per-example outputs and summaries of losses: the same on 1 and 8 devices, whole or in microbatches, no padding."""

import dataclasses
import json

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tensorboard.backend.event_processing import event_file_loader

from spmd_tasks import Learner, Task, exit_codes
from spmd_tasks.config import resolve
from spmd_tasks.experiment import partition_job
from spmd_tasks.layers import LossOutput
from spmd_tasks.learning import AdamW
from spmd_tasks.programs.evaluator import Evaluator
from spmd_tasks.programs.hooks import TrainHook
from spmd_tasks.runtime.media import Histogram, Image, Table
from tests import binary
from tests.programs.own_experiments import Points, PointsIterator, Regression, Regressor, SquaredError

SEEN = []
MEDIA = {'inputs/x': 'png', 'spread': 'json', 'rows': 'json'}


class WeightedIterator(PointsIterator):
  """The weights under the name that says which rows are padding."""

  def __next__(self):
    batch = super().__next__()
    return batch | {'weights': batch['row_weights']}


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightedPoints(Points):
  """Six rows, which 4 parts of a mesh share unevenly, some of weight 0."""

  batch_size: int = 6

  def element_spec(self):
    spec = super().element_spec()
    return spec | {'weights': spec['row_weights']}

  def make_iterator(self, shard_index=0, shard_count=1):
    return WeightedIterator(self, shard_index, shard_count)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TellingError(SquaredError):
  """The error of each row beside the loss, and summaries of all kinds."""

  def __call__(self, predictions, batch):
    errors = jnp.sum(jnp.square(predictions - batch['y']), axis=-1)
    rows = [{'which': 'first', 'error': errors[0], 'a_label': True}]
    media = {'inputs/x': Image(batch['x']), 'spread': Histogram(batch['x']), 'rows': Table(rows)}
    summaries = {'errors': errors, 'first_x': jnp.mean(batch['x'][:, 0])} | media
    per_example = {'error': errors, 'prediction': predictions}
    return super().__call__(predictions, batch).replace(per_example=per_example, summaries=summaries)


class Remember(TrainHook):
  """Keeps what it sees."""

  wants_examples = True

  def after_step(self, run, outcome):
    SEEN.append((outcome.step, outcome.outputs.examples(), dict(run.evals.examples)))


class Telling(Regression):
  """On data 4 x mdl 2."""

  ici_mesh_shape = (1, 4, 2)
  num_train_steps = 2
  eval_every_steps = 1
  num_microbatches: int = 1

  def task(self):
    learner = fdl.Config(Learner, optimizer=fdl.Config(AdamW, learning_rate=0.03))
    learner.num_microbatches = self.num_microbatches
    return fdl.Config(Task, model=fdl.Config(Regressor), loss=fdl.Config(TellingError), learner=learner)

  def train_input(self):
    return fdl.Config(WeightedPoints)

  def eval_inputs(self):
    return {'held_out': fdl.Config(WeightedPoints, num_batches=2)}

  def hooks(self):
    return [Remember()]


class Silent(Telling):
  """With a loss that returns no outputs."""

  def task(self):
    task = super().task()
    task.loss = fdl.Config(SquaredError)
    return task


def reference(weights, batch):
  up, down = (np.asarray(weights[name], np.float64) for name in ('up', 'down'))
  predictions = np.tanh(batch['x'] @ up) @ down
  return np.square(predictions - batch['y']).sum(-1), predictions


@pytest.mark.parametrize(
  'shape, num_microbatches', [pytest.param((1, 1, 1), 1, marks=pytest.mark.exhaustive), ((1, 4, 2), 3)]
)
def test_rows_are_those_of_the_batch(shape, num_microbatches):
  from spmd_tasks.config import resolve

  overrides = [f'num_microbatches={num_microbatches}']
  job = resolve(f'{__name__}.Telling', overrides).build()
  devices = np.array(jax.devices()[: np.prod(shape)]).reshape(shape)
  model = partition_job(job, jax.sharding.Mesh(devices, ('replica', 'data', 'mdl')))
  model = dataclasses.replace(model, keeps_examples=True)
  state, batch = model.init(0), next(WeightedPoints().make_iterator())
  errors, predictions = reference(jax.device_get(model.to_canonical(state).weights), batch)
  rows = batch['weights'] > 0
  assert 0 < rows.sum() < 6
  _, metrics = model.train_step(state, model.train_step.place(batch))
  outputs = metrics['outputs']
  np.testing.assert_allclose(outputs.examples()['error'], errors[rows], rtol=1e-5)
  np.testing.assert_allclose(outputs.examples()['prediction'], predictions[rows], rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(np.sort(np.ravel(outputs.summaries['errors'])), np.sort(errors), rtol=1e-5)
  np.testing.assert_allclose(outputs.summaries['first_x'], batch['x'][:, 0].mean(), rtol=1e-5)
  first = slice(next(m for m in range(6) if rows[m::num_microbatches].any()), None, num_microbatches)
  np.testing.assert_array_equal(outputs.summaries['inputs/x'].pixels, batch['x'][first])  # of the first microbatch
  np.testing.assert_allclose(outputs.summaries['rows'].rows[0]['error'], errors[first][0], rtol=1e-5)
  assert outputs.is_example.tolist() == rows.tolist()


def values_of(directory):
  [file] = directory.glob('events.out.tfevents.*')
  events = event_file_loader.EventFileLoader(str(file)).Load()
  return {(event.step, value.tag): value for event in events for value in event.summary.value}


def test_they_reach_hooks_metrics_events_and_the_files_of_evals(tmp_path):
  SEEN.clear()
  job = ('--exp', f'{__name__}.Telling', '--job_log_dir', tmp_path / 'job')
  assert binary.run_in_process('--mode', 'train', *job) == exit_codes.OK
  batches = list(WeightedPoints(num_batches=2).make_iterator())
  num_rows = [int((batch['weights'] > 0).sum()) for batch in batches]
  assert [(step, len(examples['error'])) for step, examples, _ in SEEN] == [(1, num_rows[0]), (2, num_rows[1])]
  lines = {line['step']: line for line in binary.metric_lines(tmp_path / 'job')}
  assert lines[2]['first_x'] == pytest.approx(batches[1]['x'][:, 0].mean(), rel=1e-5)
  assert 'errors' not in lines[2]
  events = values_of(tmp_path / 'job')
  assert {(2, name) for name in ('errors', 'inputs/x', 'spread', 'rows')} <= events.keys()
  files = [f'media/{name}/step_00000002.{suffix}' for name, suffix in MEDIA.items()]
  assert sorted(lines[2]['media_files']) == sorted(files)
  assert (tmp_path / 'job' / files[0]).read_bytes() == Image(batches[1]['x']).encode()
  [row] = json.loads((tmp_path / 'job' / files[2]).read_text())
  assert [*row.items()] == [('which', 'first'), ('error', row['error']), ('a_label', True)]

  _, _, evals = SEEN[1]
  weights = np.concatenate([batch['weights'][batch['weights'] > 0] for batch in batches])
  directory = tmp_path / 'job' / 'eval' / 'held_out'
  errors = evals['held_out']['error']
  recorded = {line['step']: line for line in binary.metric_lines(directory)}
  assert sorted(recorded[2]['media_files']) == sorted(files)
  assert (directory / files[0]).read_bytes() == Image(batches[0]['x']).encode()  # of the first batch
  assert recorded[2]['loss'] == pytest.approx(np.average(errors, weights=weights), rel=1e-5)
  tensor = values_of(directory)[2, 'errors'].tensor
  assert np.frombuffer(tensor.tensor_content, np.float64).reshape(-1, 3)[:, 2].sum() == 12  # of both batches
  assert binary.run_in_process('--mode', 'eval', '--write_examples', *job) == exit_codes.OK
  written = [json.loads(line) for line in (directory / 'step_2.jsonl').read_text().splitlines()]
  assert [line['index'] for line in written] == list(range(len(weights)))
  np.testing.assert_allclose([line['error'] for line in written], errors, rtol=1e-6)
  assert len(written[0]['prediction']) == 3


def test_a_loss_without_outputs_has_none_to_write(tmp_path):
  """The file would have no lines."""
  job = resolve(f'{__name__}.Silent').build()
  evaluator = Evaluator(job, partition_job(job), tmp_path, keeps_examples=True)
  with pytest.raises(ValueError, match=r"nothing to write of eval set 'held_out'.*per_example=\{NAME"):
    evaluator.compile(needs_examples=True)


@pytest.mark.parametrize('wrong', [jnp.zeros(()), jnp.zeros(5)])
def test_outputs_that_are_not_one_for_each_row_are_refused(wrong):
  def loss(predictions, batch):
    mean = jnp.mean(predictions - batch['y'])
    return LossOutput(loss=mean, weight=jnp.float32(1), per_example={'wrong': wrong})

  task = Task(model=Regressor(), loss=loss, learner=AdamW(learning_rate=0.1))
  batch = next(Points(batch_size=6).make_iterator())
  variables = task.init_variables(jax.random.key(0), batch)
  with pytest.raises(ValueError, match='one value for each of the 6 rows'):
    task.compute_loss(variables, batch, train=False)
