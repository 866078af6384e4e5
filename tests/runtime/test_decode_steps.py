"""Generation on meshes: the tokens of a full forward pass without a cache, whatever runs beside a request and wherever.

Dense, experts and a pipeline, with dims that the mesh does not divide; 3 slots over a data axis of 2.
"""

import dataclasses
import functools

import fiddle as fdl
import jax
import numpy as np
import pytest

from spmd_tasks.decoding.generation import Completion, generate, search
from spmd_tasks.decoding.requests import GREEDY, Request
from spmd_tasks.decoding.settings import DecodeSettings, prefill_buckets
from spmd_tasks.experiment import DEFAULT_AXIS_RULES
from spmd_tasks.experiments.synthetic import Uneven
from spmd_tasks.layers.pipeline import PipelinedStack
from spmd_tasks.runtime.compilation import CompilationCounter
from spmd_tasks.runtime.decode_steps import DecodeSteps
from spmd_tasks.sharding.stage_axis import stage_axis_rules
from tests.runtime.loss_curves import make_model
from tests.runtime.moe_experiments import ExpertAxis

MAX_LEN = 16
SETTINGS = DecodeSettings(max_len=MAX_LEN, num_slots=3, prefill_rows=2, min_bucket=8, num_top_logprobs=2)
LENGTHS = (3, 1, 9, 5, 12, 4, 2)


class Staged(Uneven):
  """3 layers over 2 stages."""

  mesh_axis_names = ('replica', 'stage', 'data', 'mdl')
  ici_mesh_shape = (1, 2, 2, 2)
  axis_rules = stage_axis_rules(DEFAULT_AXIS_RULES)
  num_layers = 3

  def stack(self):
    return fdl.Config(PipelinedStack, block=self.block(self.ffn()), num_layers=self.num_layers, num_microbatches=4)


MESHES = {
  'one device': (Uneven, (1, 1, 1)),
  'data 2 x mdl 4': (Uneven, (1, 2, 4)),
  'data 2 x expert 4': (ExpertAxis, (1, 2, 4, 1)),
  'stage 2 x data 2 x mdl 2': (Staged, (1, 2, 2, 2)),
}
SLOW = {'stage 2 x data 2 x mdl 2'}
ALL_MESHES = [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in MESHES]


def make_requests(**fields) -> list[Request]:
  rng = np.random.default_rng(3)
  return [
    Request(ids=tuple(rng.integers(1, 257, length).tolist()), max_tokens=min(6, MAX_LEN - length), **fields)
    for length in LENGTHS
  ]


class Run:
  """A model with compiled steps; weights of one seed."""

  def __init__(self, name: str):
    experiment, shape = MESHES[name]
    self.model, _ = make_model(experiment, shape)
    state = self.model.init(0)
    self.weights = state.weights
    canonical = jax.device_get(self.model.to_canonical(state)).weights
    self.true_weights = jax.tree.map(
      lambda w, true: w.reshape(true.shape), canonical, self.model.abstract_state.weights
    )
    self.steps = DecodeSteps(self.model, SETTINGS)
    self.scores_prompts = name == 'one device'
    self.steps.compile(score_prompts=self.scores_prompts)
    self.apply = jax.jit(self.model.task.model.apply)

  def generate(self, requests) -> list[Completion]:
    done = dict(generate(self.steps, self.weights, requests, decode=lambda tokens: ''))
    return [done[index] for index in range(len(requests))]

  def logprobs(self, ids) -> np.ndarray:
    """[T, V], of a full forward pass without a cache, mesh or neighbours."""
    row = np.zeros((1, MAX_LEN), np.int32)
    row[0, : len(ids)] = ids
    logits = self.apply({'params': self.true_weights}, {'ids': row})['logits']
    return np.asarray(jax.nn.log_softmax(logits))[0, : len(ids)]


make_run = functools.cache(Run)


@pytest.mark.parametrize('name', ALL_MESHES)
def test_greedy_batched_is_alone_is_the_full_forward_pass(name):
  run = make_run(name)
  requests = make_requests(score_prompt=run.scores_prompts)
  with CompilationCounter() as compilations:
    together = run.generate(requests)
    alone = [run.generate([request])[0] for request in requests[:3]]
  assert compilations.num_programs == 0
  assert [c.ids for c in alone] == [c.ids for c in together[:3]]
  for request, completion in zip(requests, together, strict=True):
    assert len(completion.ids) == request.max_tokens
    text = list(request.ids) + completion.ids
    logprobs = run.logprobs(text)
    predicted = logprobs[len(request.ids) - 1 : -1]
    assert completion.ids == np.argmax(predicted, axis=-1).tolist()
    np.testing.assert_allclose(completion.logprobs, np.max(predicted, axis=-1), atol=1e-4)
    for top, row in zip(completion.top_logprobs, predicted, strict=True):
      assert list(top) == np.argsort(-row)[:2].tolist()
    if not run.scores_prompts:
      continue
    scores = [0.0, *(logprobs[i, token] for i, token in enumerate(request.ids[1:]))]
    np.testing.assert_allclose(completion.prompt_logprobs, scores, atol=1e-4)


def test_a_sample_is_of_weights_prompt_and_seed():
  sampling = GREEDY | {'temperature': 1.5, 'top_p': 0.95}
  requests = make_requests(seed=5) + make_requests(seed=5)[:1] + make_requests(seed=6)[:1]
  requests = [dataclasses.replace(r, sampling=sampling) for r in requests]
  requests.append(dataclasses.replace(requests[0], sample=1))
  drawn = [[c.ids for c in make_run(name).generate(requests)] for name in ('one device', 'data 2 x mdl 4')]
  assert drawn[0] == drawn[1]
  backwards = make_run('data 2 x mdl 4').generate(requests[::-1])
  assert [c.ids for c in backwards[::-1]] == drawn[0]
  again, other_seed, other_sample = drawn[0][-3:]
  assert drawn[0][0] == again
  assert drawn[0][0] != other_seed != other_sample != drawn[0][0]


def test_stop_tokens_and_strings_end_a_sequence_and_free_its_slot():
  run = make_run('one device')
  requests = make_requests()
  whole = run.generate(requests)
  stop_ids = [c.ids[2] for c in whole]
  stopped = run.generate([dataclasses.replace(r, stop_ids=(i,)) for r, i in zip(requests, stop_ids, strict=True)])
  for before, after, stop_id in zip(whole, stopped, stop_ids, strict=True):
    assert after.ids == before.ids[: before.ids.index(stop_id) + 1]
    assert after.finish_reason == 'stop'

  def decode(tokens):
    return ''.join(f'<{token}>' for token in tokens)

  by_text = [dataclasses.replace(r, stop=(f'<{i}>',)) for r, i in zip(requests, stop_ids, strict=True)]
  done = dict(generate(run.steps, run.weights, by_text, decode=decode))
  for index, before in enumerate(whole):
    end = before.ids.index(stop_ids[index])
    assert done[index].text == decode(before.ids[:end])
    assert (done[index].ids, done[index].finish_reason) == (before.ids[: end + 1], 'stop')


def test_no_tokens_wanted_scores_the_prompt():
  run = make_run('one device')
  request = dataclasses.replace(make_requests(score_prompt=True)[0], max_tokens=0)
  (completion,) = run.generate([request])
  assert (completion.ids, completion.finish_reason) == ([], 'length')
  assert len(completion.prompt_logprobs) == len(request.ids)


@pytest.mark.parametrize('name', ['one device', pytest.param('data 2 x mdl 4', marks=pytest.mark.slow)])
def test_beams_have_true_scores_and_beat_greedy(name):
  run = make_run(name)
  settings = dataclasses.replace(SETTINGS, num_beams=3, min_bucket=MAX_LEN, length_penalty=0.0)
  requests = make_requests()[:3]
  steps = DecodeSteps(run.model, settings)
  greedy = run.generate(requests)
  for index, beams in search(steps, run.weights, requests, decode=lambda tokens: ''):
    ids = requests[index].ids
    assert len({tuple(beam.ids) for beam in beams}) == 3
    for beam in beams:
      rows = run.logprobs([*ids, *beam.ids])[len(ids) - 1 : -1]
      np.testing.assert_allclose(beam.score, rows[np.arange(len(beam.ids)), beam.ids].sum(), atol=1e-3)
    assert beams[0].score >= sum(greedy[index].logprobs) - 1e-3


def test_buckets():
  assert prefill_buckets(4, 16) == (4, 8, 16)
  assert prefill_buckets(5, 20) == (5, 8, 16, 20)
  assert prefill_buckets(64, 16) == (16,)


@pytest.mark.parametrize(
  'fields, message',
  [
    ({'num_slots': 0}, 'num_slots=0'),
    ({'prefill_rows': 9}, 'prefill_rows=9 must be at most num_slots=8'),
    ({'temperature': -1.0}, 'temperature=-1.0'),
    ({'top_p': 1.5}, 'top_p=1.5'),
    ({'min_p': -0.5}, 'min_p=-0.5'),
    ({'top_k': -1}, 'top_k=-1'),
    ({'repetition_penalty': 0.0}, 'repetition_penalty=0.0'),
    ({'num_top_logprobs': -1}, 'num_top_logprobs=-1'),
  ],
)
def test_impossible_settings_are_errors(fields, message):
  with pytest.raises(ValueError, match=message):
    DecodeSettings(**fields)
