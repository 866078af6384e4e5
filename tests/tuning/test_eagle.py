"""EAGLE-3 heads: their numbers against float64 NumPy, training on meshes and after a restart, and drafts."""

import dataclasses
import shutil

from etils import epath
from flax import traverse_util
import jax
import numpy as np
import pytest

from spmd_tasks.bridges.huggingface import open_folder
from spmd_tasks.bridges.huggingface.origin import state_from_folder
from spmd_tasks.checkpoints.manifest import read_manifest
from spmd_tasks.config import resolve
from spmd_tasks.decoding import DecodeSteps, Request, SamplingParams, generate
from spmd_tasks.experiment import partition_job
from spmd_tasks.experiments import pipeline, t5
from spmd_tasks.learning.frozen_weights import fill_in, without_frozen
from spmd_tasks.programs.upcycling import find_origins
from spmd_tasks.runtime import DecodeSettings
from spmd_tasks.tuning import add_head
from spmd_tasks.tuning.eagle import default_layers
from tests import binary
from tests.model_folders import write_llama
from tests.runtime.loss_curves import assert_same_run, reference, runner
from tests.tuning.eagle_jobs import OfConfig

JOB = 'tests.tuning.eagle_jobs.SmallHead'
NUM, DECAY, LAYERS = 3, 0.8, (1, 1, 2)


@pytest.fixture(scope='module')
def base(tmp_path_factory):
  return write_llama(tmp_path_factory.mktemp('base') / 'llama')


@pytest.fixture(scope='module')
def models(base):
  """(model, padded variables) by mesh, and the true weights in float64 by name."""
  made = {}
  for shape in ((1, 1, 1), (1, 2, 4)):
    job = resolve(JOB, [f'model={base}', f'ici_mesh_shape={shape}']).build()
    model = partition_job(job, job.experiment.mesh_spec().build(jax.devices()[: int(np.prod(shape))]))
    state = state_from_folder(model, open_folder(base), 0)
    made[shape] = model, state.variables
  weights = jax.device_get(made[1, 1, 1][1])['params']
  flat = {jax.tree_util.keystr(p, simple=True, separator='/'): w for p, w in jax.tree.leaves_with_path(weights)}
  return made, {name: np.asarray(weight, np.float64) for name, weight in flat.items()}


class Reference:
  """The formulas, of one row: `logits` [T, V] of the model, and `guesses` [N, T, V], of which token t has guess n + 1
  of the token n + 2 places on.
  """

  def __init__(self, weights, ids, segments):
    self.weights, self.segments, length = weights, segments, len(ids)
    starts = np.array([np.flatnonzero(segments == each)[0] for each in segments])
    self.positions = np.arange(length) - starts
    table = weights['embedding/table']
    x, features = table[ids], []
    for layer in range(2):
      own = {n.removeprefix('stack/layers/'): w[layer] for n, w in weights.items() if n.startswith('stack/')}
      x, _ = self._block(own, x, [], 0)
      features += [x] * LAYERS.count(layer + 1)
    self.logits = self._logits('final_norm/scale', x)
    head = {n.removeprefix('eagle/'): w for n, w in weights.items() if n.startswith('eagle/')}
    hidden, kept, self.guesses = np.concatenate(features, axis=-1) @ head['features/kernel'], [], []
    for number in range(NUM):
      following = table[np.append(ids[number + 1 :], np.zeros(number + 1, int))]
      halves = _norm(following, head['embedding_norm/scale']), _norm(hidden, head['hidden_norm/scale'])
      x, own = self._block(head, np.concatenate(halves, axis=-1) @ head['projection/kernel'], kept, number)
      kept.append(own)
      self.guesses.append(self._logits('eagle/final_norm/scale', x))
      hidden = _norm(x, head['final_norm/scale'])

  def _logits(self, norm, x):
    return _norm(x, self.weights[norm]) @ self.weights['embedding/softmax_kernel']

  def _block(self, own, x, kept, moved):
    """X behind a block, with its keys and values; those of `kept`, of guesses before, a token sees in its own place."""
    y = _norm(x, own['attention_norm/scale'])
    query, key, value = (np.einsum('td,dhk->thk', y, own[f'attention/{n}/kernel']) for n in ('query', 'key', 'value'))
    query, key = (_rotate(each, self.positions + moved) for each in (query, key))
    attended = np.zeros_like(query)
    for t in range(len(x)):
      first = [s for s in range(t + 1) if self.segments[s] == self.segments[t]]
      every = [*kept, (key, value)]
      keys, values = (np.concatenate([every[0][i][first], *(each[i][[t]] for each in every[1:])]) for i in range(2))
      scores = np.einsum('hk,sk->hs', query[t], keys[:, 0]) / np.sqrt(query.shape[-1])
      weights = np.exp(scores - scores.max(-1, keepdims=True))
      attended[t] = (weights / weights.sum(-1, keepdims=True)) @ values[:, 0]
    x = x + np.einsum('thk,hkd->td', attended, own['attention/out/kernel'])
    y = _norm(x, own['ffn_norm/scale'])
    gate, up = y @ own['ffn/gate/kernel'], y @ own['ffn/up/kernel']
    return x + (gate / (1 + np.exp(-gate)) * up) @ own['ffn/down/kernel'], (key, value)


def _norm(x, scale):
  return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def _rotate(x, positions):
  half = x.shape[-1] // 2
  angles = positions[:, None, None] * 10_000.0 ** -(np.arange(half) / half)
  first, second = x[..., :half], x[..., half:]
  return np.concatenate(
    [first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles)], axis=-1
  )


def losses_of(weights, batch):
  """The weighted sum of each guess's cross-entropies with the model, and how many are right of how many; [N] each."""
  losses, right, counts = np.zeros((3, NUM))
  for ids, segments, own in zip(batch['ids'], batch['segment_ids'], batch['weights']):
    made = Reference(weights, ids, segments)
    for t in range(16):
      for number in range(min(NUM, t)):
        if segments[t - number - 1] != segments[t] or not own[t]:
          continue
        told, guess = made.logits[t], made.guesses[number][t - number - 1]
        log_probs = guess - guess.max() - np.log(np.sum(np.exp(guess - guess.max())))
        probabilities = np.exp(told - told.max()) / np.sum(np.exp(told - told.max()))
        losses[number] -= probabilities @ log_probs
        right[number] += np.argmax(told) == np.argmax(guess)
        counts[number] += 1
  return losses, right, counts


def test_losses_their_gradient_and_acceptance_are_those_of_float64(models):
  """On data 2 x mdl 4, padded; of the gradient its product with one direction, by a difference."""
  made, weights = models
  model, variables = made[1, 2, 4]
  rng = np.random.default_rng(0)
  ids = rng.integers(3, 259, (8, 16)).astype(np.int32)
  segments = np.ones_like(ids)
  segments[:, 7:], segments[1, 13:] = 2, 0  # a second document, and padding
  weight = ((rng.random(ids.shape) < 0.7) & (segments > 0)).astype(np.float32)
  positions = np.where(np.arange(16) < 7, np.arange(16), np.arange(16) - 7)[None].repeat(8, 0).astype(np.int32)
  batch = {'ids': ids, 'labels': np.roll(ids, -1, 1), 'weights': weight, 'segment_ids': segments}
  batch['segment_pos'] = positions

  def compute(variables, batch):
    def loss(trained):
      output = model.task.compute_loss({'params': fill_in(trained, variables['params'])}, batch, train=False)
      return output.loss, output.metrics

    return jax.value_and_grad(loss, has_aux=True)(without_frozen(variables['params'], model.weight_specs))

  step = model.batch_step('gradients', batch, compute)
  (loss, metrics), gradient = step(variables, step.place(batch))
  losses, right, counts = losses_of(weights, batch)
  of_guesses = DECAY ** np.arange(NUM) / weight.sum()
  np.testing.assert_allclose(loss, losses @ of_guesses, rtol=1e-5)
  found = [metrics[f'acceptance_{number + 1}'] for number in range(NUM)]
  np.testing.assert_allclose(found, np.stack([right / counts, counts], axis=1), rtol=1e-5)
  flat = traverse_util.flatten_dict(gradient, sep='/')
  flat = {name: np.asarray(each, np.float64) for name, each in flat.items() if each is not None}
  assert len(flat) == 14
  direction = {name: rng.normal(size=each.shape) for name, each in flat.items()}
  ends = [losses_of(weights | {n: weights[n] + h * d for n, d in direction.items()}, batch)[0] for h in (1e-5, -1e-5)]
  expected = (ends[0] - ends[1]) @ of_guesses / 2e-5
  np.testing.assert_allclose(sum(np.sum(each * direction[name]) for name, each in flat.items()), expected, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize('shape', [(1, 1, 1), pytest.param((1, 2, 4), marks=pytest.mark.exhaustive)])
def test_drafts_change_no_text_and_are_right_where_the_formulas_say(models, shape):
  """Greedy and drawn texts, some read in chunks and begun alike; of those of short prompts, which go on in a second
  block, each guess is checked.
  """
  made, weights = models
  model, variables = made[shape]
  rng, allowed = np.random.default_rng(1), (11, 12)
  bias = tuple((token, 30.0) for token in allowed)
  start = tuple(rng.integers(3, 259, 20).tolist())
  requests = [
    Request(ids=(*start[: length - 1], 11), max_tokens=24 - length if length < 9 else 8, logit_bias=bias, seed=seed,
            sampling=SamplingParams(temperature=0.0 if length < 9 else 1.0))
    for seed, length in enumerate((3, 8, 20, 5, 19, 4, 6))
  ]  # fmt: skip
  settings = DecodeSettings(max_len=32, num_slots=4, prefill_rows=2, prefill_chunk=16, min_bucket=16, eos_ids=())
  steps = DecodeSteps(model, dataclasses.replace(settings, num_drafts=NUM))
  steps.step_rows = steps.step_rows[-1:]  # each number of rows is a program
  steps.draft_sizes = lambda num_slots: (num_slots * (NUM + 1),)
  texts, without = (
    dict(generate(steps, variables, [dataclasses.replace(each, num_drafts=num) for each in requests], decode=str))
    for num in (None, 0)
  )
  assert [texts[i].ids for i in range(7)] == [without[i].ids for i in range(7)]
  assert not any(without[i].num_drafted for i in range(7))
  accepted = drafted = 0
  for index, request in enumerate(requests):
    if len(request.ids) > 8:
      continue
    tokens = np.array([*request.ids, *texts[index].ids])
    reference, newest, wanted = Reference(weights, tokens, np.ones_like(tokens)), len(request.ids), [0, 0]
    greedy = np.array(allowed)[np.argmax(reference.logits[:, allowed], axis=-1)]
    assert greedy[newest - 1 : -1].tolist() == texts[index].ids
    while (num := min(NUM, len(tokens) - newest - 2)) >= 0:
      likeliest = [allowed[np.argmax(reference.guesses[n][newest - 1, list(allowed)])] for n in range(num)]
      is_right = [*(likeliest == tokens[newest + 1 : newest + 1 + num]), False]
      wanted[0], wanted[1] = wanted[0] + is_right.index(False), wanted[1] + num
      newest += 1 + is_right.index(False)
    assert [texts[index].num_accepted, texts[index].num_drafted] == wanted
    accepted, drafted = accepted + wanted[0], drafted + wanted[1]
  assert 10 < accepted < drafted - 4


@pytest.mark.slow
def test_a_job_saves_the_head_alone_and_goes_on_exactly(base, tmp_path):
  job, again = tmp_path / 'job', tmp_path / 'again'
  flags = ('--mode', 'train', '--exp', JOB, '--set', f'model={base}', '--job_log_dir')
  assert binary.run_in_process(*flags, job) == 0
  losses = binary.column(job, 'loss')
  names = [leaf.name for leaf in read_manifest(epath.Path(job) / 'checkpoints/checkpoint_00000004').leaves]
  saved = [name for name in names if name.startswith('weights/')]
  assert len(saved) == 14
  assert all(name.startswith('weights/eagle/') for name in saved)
  shutil.copytree(job, again)
  shutil.rmtree(again / 'checkpoints/checkpoint_00000004')
  (again / 'newest_checkpoint.json').write_text('{"step": 2}\n')
  assert binary.run_in_process(*flags, again) == 0
  lines = binary.metric_lines(again)
  assert {line['step']: line['loss'] for line in lines[4:]} == {step: losses[step] for step in (3, 4)}
  assert losses[4] < losses[1]
  assert {f'acceptance_{n}' for n in (1, 2, 3)} <= {*lines[0]}


@pytest.mark.slow
@pytest.mark.exhaustive
def test_one_loss_curve_and_one_state():
  assert_same_run(runner(OfConfig, (1, 2, 4)), reference(OfConfig))


def test_a_job_of_the_model_may_be_where_the_frozen_weights_are_from():
  assert not find_origins([], {'eagle/projection/kernel': (2, 1), 'eagle/final_norm/scale': (1,)})


@pytest.mark.parametrize('num_layers, layers', [(1, (1, 1, 1)), (2, (1, 1, 2)), (6, (2, 3, 5)), (32, (2, 16, 29))])
def test_layers_that_are_read(num_layers, layers):
  assert tuple(default_layers(num_layers)) == layers


@pytest.mark.parametrize(
  'setting, says',
  [
    ('feature_layers=(1,2,3)', r'feature_layers=\(1, 2, 3\) must'),
    ('num_guesses=0', 'num_guesses=0 must'),
    ('num_guesses=9999', 'num_guesses=9999 must .* less than seq_len'),
    ('task.model.num_guesses=0', 'num_guesses=0 must'),
    ('guess_decay=0', 'decay=0.0 of'),
    ('guess_decay=inf', 'decay=inf of'),
  ],
)
def test_what_no_head_can_be_is_one_sentence(base, setting, says):
  with pytest.raises(ValueError, match=says):
    resolve(JOB, [f'model={base}', setting]).build()


@pytest.mark.parametrize('experiment', [pipeline.StdlibTiny, t5.V11Tiny])
def test_models_without_a_place_for_a_head_are_refused(experiment):
  with pytest.raises(ValueError, match='leave pipeline stages, an encoder and other blocks out'):
    add_head(experiment().task(), (1, 2), hidden_dim=32, num_heads=4)
