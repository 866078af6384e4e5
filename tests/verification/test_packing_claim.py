"""The claim `packing` finds each planted leak and names its layer, and holds for the sound twins."""

import contextlib

import jax.numpy as jnp
import pytest

from spmd_tasks.experiments.lm import HybridTiny
from spmd_tasks.layers import losses
from spmd_tasks.layers.losses import total_loss_of_heads
from spmd_tasks.verification import Bench
from spmd_tasks.verification.mode import CLAIMS
from tests.runtime.loss_curves import source_of
from tests.verification import planted_leaks

MIXER = 'stack/layers/mixer ({}), layer 1 of 1'
LAYERS = {
  'NoMask': MIXER.format('LeakingAttention'),
  'WindowAcross': MIXER.format('LeakingAttention'),
  'Columns': 'positions (ColumnPositions)',
  'Sinks': MIXER.format('SharedTokens'),
  'Convolution': MIXER.format('ShortConvolution'),
  'Forgetful': MIXER.format('Recurrence'),
  'Halo': MIXER.format('HaloConvolution'),
  'Backward': 'the backward pass of stack/layers/mixer',
  'Nnx': 'mixers/1 (NnxConvolution)',
  'LossAcross': 'the loss (NextTokenLoss)',
}


def decide(experiment, num_devices=1):
  """Returns the verdict of the first case that does not hold, or of the last one."""
  with contextlib.closing(Bench(source_of(experiment), num_devices=num_devices)) as bench:
    for case in CLAIMS['packing'].cases(bench):
      verdict = case.decide(bench)
      if verdict.status != 'held':
        break
  return verdict


# These leak forward on one device, as others do.
EXHAUSTIVE = ('NoMask', 'WindowAcross', 'Columns', 'Sinks', 'Convolution')


@pytest.mark.parametrize(
  'name', [pytest.param(name, marks=[pytest.mark.exhaustive] * (name in EXHAUSTIVE)) for name in LAYERS]
)
def test_a_planted_leak_is_found_and_named(name):
  verdict = decide(getattr(planted_leaks, name), 2 if name == 'Halo' else 1)
  assert verdict.status == 'BROKEN', verdict.detail
  assert verdict.failure['layer'] == LAYERS[name]
  assert verdict.failure['smallest_mesh'] == ({'context': 2} if name == 'Halo' else {})


def test_rows_have_several_chunks_of_a_recurrence():
  source = source_of(HybridTiny)
  assert source.base.task.model.stack.block.blocks[0].attention.chunk_tokens == 64
  with contextlib.closing(Bench(source, num_devices=1)) as bench:
    one_device = next(iter(CLAIMS['packing'].cases(bench))).settings[0]
    job, _ = bench.source.resolve(one_device.overrides)
  chunk = job.task.model.stack.block.blocks[0].attention.chunk_tokens
  assert 4 * chunk <= bench.source.base.train_input.seq_len


def test_a_head_that_predicts_the_next_document_is_found(monkeypatch):
  def ignores_documents(heads, batch, shares):
    return total_loss_of_heads(heads, {**batch, 'segment_ids': jnp.ones_like(batch['segment_ids'])}, shares)

  monkeypatch.setattr(losses, 'total_loss_of_heads', ignores_documents)
  verdict = decide(planted_leaks.Heads)
  assert verdict.status == 'BROKEN', verdict.detail
  assert verdict.failure['leaf'].startswith('nextn_loss')
  assert verdict.failure['layer'] == 'the loss (LanguageModelLoss)'


def test_heads_that_look_ahead_are_sound():
  assert decide(planted_leaks.Heads).status == 'held'


def sound(experiment):
  """The experiment without its leak."""
  return type(experiment.__name__, (experiment,), {'leaks': False, '__module__': __name__})


SOUND = {name: sound(getattr(planted_leaks, name)) for name in LAYERS}
globals().update(SOUND)  # configs name classes by their module


# By default the heads above hold; and Halo on one device, else that would be the smallest mesh of its leak.
@pytest.mark.exhaustive
@pytest.mark.parametrize('name', LAYERS)
def test_the_claim_holds_without_the_leak(name):
  verdict = decide(SOUND[name], 2 if name == 'Halo' else 1)
  assert verdict.status == 'held', verdict.detail
