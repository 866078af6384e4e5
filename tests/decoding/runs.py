"""Models with compiled decode steps, which tests share: uneven dims on meshes, and full forward passes beside them."""

import functools
import zlib

import fiddle as fdl
import jax
import numpy as np
import pytest
import scipy.special

from spmd_tasks.decoding import DecodeSteps, cached_attention, generate
from spmd_tasks.decoding.draft_model import DraftModel
from spmd_tasks.decoding.generation import Completion
from spmd_tasks.experiments.synthetic import Uneven
from spmd_tasks.layers import BlockGroup, StackSequence, TransformerStack
from spmd_tasks.layers.moe import Dropless
from spmd_tasks.layers.pipeline import PipelinedStack
from spmd_tasks.runtime import DecodeSettings, PartitionedModel
from spmd_tasks.sharding import DEFAULT_AXIS_RULES, stage_axis_rules
from tests.runtime.family_experiments import Families
from tests.runtime.hybrid_experiments import Hybrid, HybridExperts
from tests.runtime.loss_curves import make_model
from tests.runtime.moe_experiments import ExpertAxis

MAX_LEN = 16
CHUNK = 4
SETTINGS = DecodeSettings(
  max_len=MAX_LEN,
  num_slots=3,
  max_cache_tokens=28,  # texts of max_len in all slots have 48: some must begin again
  prefill_rows=2,
  prefill_chunk=CHUNK,
  min_bucket=CHUNK,
  num_top_logprobs=2,
)


class Staged(Uneven):
  """3 layers over 2 stages, whose axis has the name of the dim; in bfloat16."""

  dtype = 'bfloat16'
  mesh_axis_names = ('replica', 'layers', 'data', 'mdl')
  ici_mesh_shape = (1, 2, 2, 2)
  axis_rules = stage_axis_rules(DEFAULT_AXIS_RULES, 'layers')
  num_layers = 3

  def stack(self):
    return fdl.Config(PipelinedStack, block=self.block(self.ffn()), num_layers=self.num_layers, num_microbatches=4)


class Windowed(Uneven):
  """Layers with a window, chunks and neither; one key/value head for 3; sinks."""

  num_layers = 1
  num_kv_heads = 1

  def stack(self):
    blocks = [self.block(self.ffn()) for _ in range(3)]
    blocks[0].attention.window, blocks[1].attention.chunk = 3, 6
    for block in blocks:
      block.attention.sinks = True
    windows, last = fdl.Config(BlockGroup, blocks=tuple(blocks[:2])), blocks[2]
    stacks = tuple(fdl.Config(TransformerStack, block=block, num_layers=1) for block in (windows, last))
    return fdl.Config(StackSequence, stacks=stacks)


class InPasses(ExpertAxis):
  """Experts that training computes in passes of bounded buffers; generation has buffers for all tokens."""

  def computation(self):
    return fdl.Config(Dropless, dispatch='padded_all_to_all', capacity_factor=1.25, overflow='passes')


class TwoHeads(Uneven):
  """With heads that predict further tokens, as they are drawn at first."""

  num_nextn_predict_layers = 2


class HybridHeads(Hybrid):
  """With heads that predict further tokens by a recurrent layer and attention of their own."""

  num_nextn_predict_layers = 2


class HybridInPasses(HybridExperts, ExpertAxis):
  """Recurrent layers, a window of 3 tokens with sinks, and experts on an axis of their own, in passes for training."""

  computation = InPasses.computation

  def block(self, ffn):
    group = super().block(ffn)
    group.blocks[1].attention.window, group.blocks[1].attention.sinks = 3, True
    return group


MESHES = {
  'one device': (Uneven, (1, 1, 1)),
  'data 2 x mdl 4': (Uneven, (1, 2, 4)),
  'windows': (Windowed, (1, 1, 1)),
  'mdl 4': (Uneven, (1, 1, 4)),
  'windows on data 2 x mdl 4': (Windowed, (1, 2, 4)),
  'data 2 x expert 4': (InPasses, (1, 2, 4, 1)),
  'layers 2 x data 2': (Staged, (1, 2, 2, 1)),
  'latent attention, then windows and experts, on data 2 x mdl 4': (Families, (1, 1, 2, 4)),
  'latent attention, then windows and experts': (Families, (1, 1, 1, 1)),
  'recurrent layers': (Hybrid, (1, 1, 1)),
  'recurrent layers on data 2 x mdl 4': (Hybrid, (1, 2, 4)),
  'recurrent layers, windows and experts on data 2 x expert 2 x mdl 2': (HybridInPasses, (1, 2, 2, 2)),
  'recurrent layers, 2 heads': (HybridHeads, (1, 1, 1)),
  '2 heads': (TwoHeads, (1, 1, 1)),
  '2 heads on data 2 x mdl 4': (TwoHeads, (1, 2, 4)),
}


def draw(model: PartitionedModel, seed: int):
  """Weights that give logits of about 1; those of a seed are the same on every mesh. Nothing is compiled."""

  def drawn(path, weight):
    if 'norm' in (name := jax.tree_util.keystr(path)):
      return np.ones(weight.shape, weight.dtype)
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    return rng.normal(0, Uneven.model_dims**-0.5, weight.shape).astype(weight.dtype)

  return jax.tree_util.tree_map_with_path(drawn, model.abstract_state.weights)


def place(model: PartitionedModel, weights):
  """The variables of true weights: padded, on the mesh."""

  def padded(x, leaf):
    return jax.device_put(np.pad(x, [(0, more - size) for size, more in zip(x.shape, leaf.shape)]), leaf.sharding)

  return {'params': jax.tree.map(padded, weights, model.padded_state.variables['params'])}


class Run:
  """A model with compiled steps, whose weights numpy draws."""

  def __init__(self, name: str, meshes=MESHES):
    experiment, shape = meshes[name]
    self.model, _ = make_model(experiment, shape)
    self.true_weights = draw(self.model, 0)
    self.variables = place(self.model, self.true_weights)
    self.scores_prompts = name == 'one device'
    # Logits of about 1, of which sums in another order cost some of bfloat16's steps (1/256 there).
    self.atol = 0.05 if experiment is Staged else 1e-4
    self.apply = jax.jit(self.model.task.model.apply)

  @functools.cached_property
  def steps(self) -> DecodeSteps:
    # One model alone has programs for fewer busy slots.
    steps = DecodeSteps(self.model, SETTINGS) if self.scores_prompts else self.few_programs(SETTINGS)
    steps.compile(score_prompts=self.scores_prompts)
    return steps

  def few_programs(self, settings: DecodeSettings, **given) -> DecodeSteps:
    """New steps without programs for fewer busy slots and drafts: each takes its time to compile."""
    steps = DecodeSteps(self.model, settings, **given)
    step, draft_row_counts = steps.step, steps.step.draft_row_counts
    step.row_counts = step.row_counts[-1:]
    step.draft_row_counts = lambda num_rows: draft_row_counts(num_rows)[-1:]
    return steps

  def generate(self, requests) -> list[Completion]:
    done = dict(generate(self.steps, self.variables, requests, decode=lambda tokens: ''))
    return [done[index] for index in range(len(requests))]

  def logits(self, ids) -> np.ndarray:
    """[T, V], of a full forward pass without a cache, mesh or neighbours."""
    row = np.zeros((1, MAX_LEN), np.int32)
    row[0, : len(ids)] = ids
    return np.asarray(self.apply({'params': self.true_weights}, {'ids': row})['logits'])[0, : len(ids)]

  def logprobs(self, ids) -> np.ndarray:
    return scipy.special.log_softmax(self.logits(ids), axis=-1)


make_run = functools.cache(Run)


def draft_of(run: Run, noise: float) -> DraftModel:
  """The model itself, or with noise in its weights, as a draft model."""
  blur = lambda weight, other: weight + noise * np.std(weight) * other / max(np.std(other), 1e-9)
  weights = jax.tree.map(blur, run.true_weights, draw(run.model, 1)) if noise else run.true_weights
  return DraftModel(model=run.model, variables=place(run.model, weights))


@pytest.fixture(autouse=True, scope='module')
def short_blocks():
  with pytest.MonkeyPatch.context() as patch:
    patch.setitem(cached_attention._BLOCK, 'cpu', 5)  # entries of the cache that a step reads at a time
    yield
