"""A Praxis language model and its translation compute the same logits; Praxis itself is the reference.

Weights are random, so that every bias and scale counts. The tolerance is float32's rounding over the layers.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

from flax import traverse_util
import jax
import numpy as np
import pytest

from spmd_tasks.bridges.pax import install_shims, translate_language_model
from spmd_tasks.bridges.pax._native_experiment import translate_learning_rate
from spmd_tasks.bridges.pax._praxis_layers import Report, Settings
from spmd_tasks.errors import UserError
from spmd_tasks.layers import BlockGroup, TransformerStack
from spmd_tasks.layers.pipeline import PipelinedStack
from spmd_tasks.sharding.weights import unbox_weights

install_shims()
from praxis import base_hyperparams, base_layer, layers, optimizers, pax_fiddle, py_utils, schedules  # noqa: E402
from praxis.layers import (  # noqa: E402
  activations,
  grouped_query_attention,
  multi_query_attention,
  transformer_models,
)

Config = pax_fiddle.Config
VOCAB, MODEL_DIM = 17, 12
SEGMENT_IDS = np.array([[1] * 5 + [2] * 3, [1] * 8, [1] * 6 + [0] * 2, [1] * 4 + [2] * 4], np.int32)
SEGMENT_POS = np.array([[*range(5), *range(3)], range(8), [*range(6), 0, 0], [*range(4)] * 2], np.int32)
IDS = np.random.default_rng(0).integers(1, VOCAB, SEGMENT_IDS.shape).astype(np.int32)


@dataclasses.dataclass
class Parts:
  """The configs of a small Praxis language model, to be changed in place."""

  model: Any
  lm: Any
  stack: Any
  layer: Any
  attention: Any
  ffn: Any


def language_model(change: Callable[[Parts], None], num_layers: int = 1, repeat: int = 2) -> Any:
  """A model of `num_layers` layers, `repeat` times (0: not repeated), after `change`."""
  model = Config(layers.LanguageModel, name='lm')
  lm = model.lm_tpl.set(packed_input=True, model_dims=MODEL_DIM, vocab_size=VOCAB)
  stack = Config(
    layers.StackedTransformer,
    model_dims=MODEL_DIM,
    hidden_dims=20,
    num_layers=num_layers,
    num_heads=3,
    dim_per_head=4,
  )
  lm.stacked_transformer_tpl = stack
  if repeat:
    lm.stacked_transformer_tpl = Config(layers.StackedTransformerRepeated, block=stack, x_times=repeat)
  layer = stack.transformer_layer_params_tpl
  change(Parts(model, lm, stack, layer, layer.tr_atten_tpl, layer.tr_fflayer_tpl))
  return model


def as_pax_lab(p: Parts) -> None:
  p.lm.softmax_tpl.set(scale_sqrt_depth=True, soft_cap_logits=3.0)
  p.attention.set(atten_logit_cap=2.0, use_bias=False, combine_qkv=True)
  p.ffn.set(activation_tpl=Config(layers.GELU), use_gated_activation=True)


def rotary_and_rms(p: Parts) -> None:
  p.lm.set(position_emb_tpl=None, final_ln_tpl=Config(layers.RmsNorm))
  p.lm.separate_embedding_tpl = Config(layers.Embedding, scale_sqrt_depth=True)
  p.lm.softmax_tpl = Config(layers.FullSoftmax)
  p.stack.num_heads = 2  # so that the head dim is not D / H
  p.attention.set(use_rotary_position_emb=True, internal_enable_per_dim_scale=False)
  p.attention.combine_qkv = True
  norm = Config(layers.RmsNorm, direct_scale=False, epsilon=1e-5)
  p.layer.ln_tpl = norm
  p.ffn.set(ln_tpl=norm.clone(), has_bias=False, activation_tpl=Config(layers.SiLU))


def primer(p: Parts) -> None:
  p.lm.position_emb_tpl = Config(layers.TrainablePositionalEmbedding, max_seq_length=16)
  p.lm.softmax_tpl = Config(layers.GShardSharedEmbeddingSoftmax)
  p.layer.norm_policy = 'primer_hybrid'
  p.ffn.activation_tpl = Config(activations.SquaredReLU)
  p.attention.set(use_bias=False, internal_enable_query_scale=False)


def multi_query(p: Parts) -> None:
  p.layer.tr_atten_tpl = Config(
    multi_query_attention.MultiQueryDotProductAttention, use_rotary_position_emb=True, atten_logit_cap=2.0
  )


def grouped(p: Parts) -> None:
  p.stack.num_heads = 4
  p.layer.tr_atten_tpl = Config(multi_query_attention.MultiQueryDotProductAttention, num_kv_heads=2)


def llama(num_kv_heads: int, **settings: Any) -> Callable[[Parts], None]:
  def change(p: Parts) -> None:
    p.lm.set(position_emb_tpl=None)
    p.stack.num_heads = 4
    p.layer.tr_atten_tpl = Config(
      grouped_query_attention.GroupedQueryAttention, num_kv_heads=num_kv_heads, rope_min_max_timescales=(1, 500)
    )
    p.layer.tr_atten_tpl.set(**settings)

  return change


def bidirectional(p: Parts) -> None:
  p.model.model_type = transformer_models.LanguageModelType.BIDIRECTIONAL


def experts(*moe_layers: int, gating: str = 'top2', **settings: Any) -> Callable[[Parts], None]:
  def change(p: Parts) -> None:
    p.stack.set(num_experts=4, num_groups=2, moe_layers=moe_layers, gating_func=gating)
    p.stack.moe_layer_tpl.set(activation_tpl=Config(layers.GELU), hidden_dims=24, **settings)

  return change


def pipeline(is_repeated: bool = False) -> Callable[[Parts], None]:
  def change(p: Parts) -> None:
    stage = Config(layers.StackedTransformerRepeated, block=p.stack, x_times=2) if is_repeated else p.stack
    p.lm.stacked_transformer_tpl = Config(
      layers.PipelinedTransformer, pipeline_stage=stage, num_pipeline_stages=2, num_pipeline_microbatches=2
    )

  return change


def unchanged(p: Parts) -> None:
  del p


CASES: dict[str, tuple[Any, type]] = {
  'defaults': (lambda: language_model(unchanged), TransformerStack),
  'as in pax_lab, not repeated': (lambda: language_model(as_pax_lab, 3, 0), TransformerStack),
  'rotary, RMS norm, own softmax': (lambda: language_model(rotary_and_rms, 2), TransformerStack),
  'primer, learned positions': (lambda: language_model(primer), TransformerStack),
  'multi-query': (lambda: language_model(multi_query), TransformerStack),
  'grouped-query': (lambda: language_model(grouped), TransformerStack),
  'grouped-query with rotary positions, as Llama 2 of Pax': (lambda: language_model(llama(2)), TransformerStack),
  'the same with one key head, caps and a temperature': (
    lambda: language_model(llama(1, use_bias=False, atten_logit_cap=2.0, atten_temp=1.5)),
    TransformerStack,
  ),
  'bidirectional': (lambda: language_model(bidirectional), TransformerStack),
  'experts': (lambda: language_model(experts(0)), TransformerStack),
  'experts in every second layer': (lambda: language_model(experts(1, gating='dense_top2'), 2), BlockGroup),
  'a first dense layer, experts without room': (
    lambda: language_model(
      experts(1, 2, unadjusted_expert_capacity_factor=1.0, expert_capacity_dim=None, use_gated_activation=True), 3, 0
    ),
    BlockGroup,
  ),
  'pipelined': (lambda: language_model(pipeline(), 2, 0), PipelinedStack),
  'repeated in stages': (lambda: language_model(pipeline(is_repeated=True), 1, 0), PipelinedStack),
}
IN_EVERY_RUN = (
  'rotary, RMS norm, own softmax',
  'the same with one key head, caps and a temperature',
  'a first dense layer, experts without room',
  'pipelined',
)


def flat(tree: Any, separator: str) -> dict[str, Any]:
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {jax.tree_util.keystr(path, simple=True, separator=separator): leaf for path, leaf in leaves}


def praxis_batch() -> Any:
  paddings = (SEGMENT_IDS == 0).astype(np.float32)
  return py_utils.NestedMap(
    ids=IDS,
    labels=IDS,
    paddings=paddings,
    weights=1 - paddings,
    segment_ids=SEGMENT_IDS,
    segment_pos=SEGMENT_POS,
  )


@jax.numpy_rank_promotion('allow')  # Praxis promotes ranks everywhere
def weights_and_logits(config: Any) -> tuple[dict[str, Any], np.ndarray]:
  """Random weights of a Praxis model by name, and its logits."""
  model = base_hyperparams.instantiate(config)
  context = base_layer.JaxContext.HParams(do_eval=True)
  shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), praxis_batch())
  with base_layer.JaxContext.new_context(hparams=context):
    declared = model.abstract_init_with_metadata(shapes)['params']
  rng = np.random.default_rng(1)
  draw = lambda p: (0.3 * rng.normal(size=(*(p.repeat_prefix or ()), *p.shape))).astype(np.float32)
  weights = jax.tree.map(draw, declared)

  @jax.jit
  def logits(weights, batch):
    with base_layer.JaxContext.new_context(hparams=context):
      predictions, _ = model.apply({'params': weights}, batch, method=model.compute_predictions, mutable=['aux_loss'])
    return predictions.logits

  return flat(weights, '.'), np.asarray(logits(weights, praxis_batch()))


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore')  # of Praxis
@pytest.mark.parametrize(
  'name', [name if name in IN_EVERY_RUN else pytest.param(name, marks=pytest.mark.exhaustive) for name in CASES]
)
def test_logits_agree_and_the_weights_go_back(name):
  config, kind = CASES[name][0](), CASES[name][1]
  translation = translate_language_model(config, IDS.shape)
  assert not translation.missing
  stack = translation.model.stack
  assert isinstance(stack.block if kind is BlockGroup else stack, kind)
  given, expected = weights_and_logits(config)
  batch = {'ids': IDS, 'segment_ids': SEGMENT_IDS, 'segment_pos': SEGMENT_POS}
  abstract = flat(unbox_weights(jax.eval_shape(translation.model.init, jax.random.key(0), batch)['params']), '/')
  translation.table.check(given, abstract)
  weights = translation.table.convert(given, abstract)
  tree = traverse_util.unflatten_dict(weights, sep='/')
  actual = jax.jit(translation.model.apply)({'params': tree}, batch)['logits']
  is_token = SEGMENT_IDS > 0  # what padding computes reaches no token, and differs
  np.testing.assert_allclose(np.asarray(actual)[is_token], expected[is_token], atol=1e-5)
  back = translation.table.inverse().convert(weights, given)
  assert back.keys() == given.keys()
  for weight, array in back.items():
    np.testing.assert_allclose(array, given[weight], rtol=0, atol=1e-6)  # 1 + scale, rounded


@pytest.mark.parametrize(
  'change, missing, training_only',
  [
    (lambda p: p.attention.set(dconv_qkv=True), ['tr_atten_tpl.dconv_qkv=True'], []),
    (lambda p: p.attention.proj_tpl.set(attention_combine_dims=True), ['proj_tpl.attention_combine_dims=True'], []),
    (lambda p: p.layer.set(norm_policy='post'), ["norm_policy='post': only 'pre' and 'primer_hybrid'"], []),
    (lambda p: p.ffn.set(residual_weight=0.5), ['tr_fflayer_tpl.residual_weight=0.5'], []),
    (llama(2, rope_min_max_timescales=(2, 500)), ['tr_atten_tpl.rope_min_max_timescales=(2, 500)'], []),
    (lambda p: p.stack.set(atten_dropout_prob=0.1), [], ['block.atten_dropout_prob=0.1']),
    (
      experts(0, gating_logit_cap=5.0),
      ['moe_layer_tpl.gating_logit_cap=5.0'],
      ['the load balance loss counts both choices'],
    ),
  ],
  ids=['convolution', 'combined dims', 'post-norm', 'residual weight', 'timescale', 'dropout', 'router cap'],
)
def test_what_ours_cannot_express_is_listed(change, missing, training_only):
  translation = translate_language_model(language_model(change), IDS.shape)
  for found, wanted in ((translation.missing, missing), (translation.training_only, training_only)):
    assert len(found) == len(wanted), found
    assert all(part in line for line, part in zip(found, wanted, strict=True)), found


@pytest.mark.parametrize('name', ['LinearRampupCosineDecay', 'LinearRampupExponentialDecay'])
@pytest.mark.parametrize('warmup_steps, decay_start', [(3, 5), (3, 3), (0, 2)])
def test_learning_rates_agree_at_every_step(name, warmup_steps, decay_start):
  schedule = pax_fiddle.Config(
    getattr(schedules, name), warmup_steps=warmup_steps, decay_start=decay_start, decay_end=9, min_ratio=0.1, max=0.5
  )
  optimizer = pax_fiddle.Config(optimizers.Adam, learning_rate=0.3, lr_schedule=schedule)
  report = Report()
  learning_rate = translate_learning_rate(Settings(optimizer, 'optimizer', report))
  assert not report.training
  theirs = [0.3 * schedule.Instantiate().value_at(jax.numpy.int32(step)) for step in range(12)]
  np.testing.assert_allclose([learning_rate(step) for step in range(12)], theirs, rtol=1e-6, atol=1e-8)


def test_a_setting_that_nothing_knows_is_listed():
  class LayerNormOfANewerPraxis(layers.LayerNorm):
    new_setting: bool = False

  LayerNormOfANewerPraxis.__module__, LayerNormOfANewerPraxis.__name__ = 'praxis.layers.normalizations', 'LayerNorm'
  model = language_model(lambda p: p.lm.set(final_ln_tpl=Config(LayerNormOfANewerPraxis, new_setting=True)))
  assert translate_language_model(model).missing == ('LanguageModel.lm_tpl.final_ln_tpl.new_setting=True',)


def test_a_layer_of_the_users_own_is_refused_by_name():
  class OwnFeedForward(layers.TransformerFeedForward):
    pass

  model = language_model(lambda p: p.layer.set(tr_fflayer_tpl=Config(OwnFeedForward)))
  with pytest.raises(UserError, match=r'tr_fflayer_tpl: .*OwnFeedForward has no counterpart here'):
    translate_language_model(model)
