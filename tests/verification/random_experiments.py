"""Random experiments, whose numbers must not depend on their layouts (random_layouts.py).

    settings = draw_settings(random.Random(7))
    job = make_job(settings, {})                       # on one device
    layout = draw_layout(random.Random(8), settings)
    job = make_job(settings, layout)

Settings and layouts are flat dicts of plain values, fields of RandomExperiment. A layout has the settings that must not
change any number: the mesh and its axis rules, the schedule of a pipeline, remat, scan, and the dispatch of experts.
"""

from collections.abc import Mapping
import random
from typing import Any

import fiddle as fdl
import optax

from spmd_tasks.config import resolve
from spmd_tasks.experiment import Job
from spmd_tasks.layers import BlockGroup, FeedForward, GatedFeedForward, LanguageModelLoss, LayerNorm
from spmd_tasks.layers.attention import LearnedPositions
from spmd_tasks.layers.moe import (
  CapacityGather,
  Dropless,
  ExpertChoiceRouter,
  Experts,
  MixtureOfExperts,
  TopKRouter,
)
from spmd_tasks.layers.pipeline import PipelinedStack
from spmd_tasks.layers.recurrent import GatedDeltaNet
from spmd_tasks.learning import Adafactor, AdamW, FromOptax, MultiOptimizer, Muon
from spmd_tasks.recipes import SyntheticLanguageModel
from tests.verification.formed_text import FORMS, FormedText
from tests.verification.random_layouts import rules_of

Settings = dict[str, Any]
GROUPS = ('groups', 'groups_clipped', 'groups_untrained')  # optimizers of groups of weights


class RandomExperiment(SyntheticLanguageModel):
  """A small model in which everything can vary. Fields are named as in the classes that they configure."""

  num_train_steps = 10
  seq_len = 8
  eval_batches = 1
  rules: str = 'dense'  # kind of axis rules, see random_layouts.py

  form: str = 'full'
  norm: str = 'rms'
  tied: bool = True
  rotary: bool = True
  qk_norm: bool = False
  use_bias: bool = False
  causal: bool = True
  window: int | None = None
  normalization: str | float = 'tokens'
  label_smoothing: float = 0.0
  dropout: float = 0.0

  optimizer_name: str = 'adamw'
  ema_decay: float | None = None
  clip_global_norm: float | None = 1.0
  grad_microbatches: int = 1
  accumulation: str = 'mean'

  ffn_kind: str = 'gated'  # plain, gated, dropless, einsum, gather, expert_choice
  is_recurrent: bool = False  # each layer is one with a recurrence, and one with attention
  num_value_heads: int = 2
  num_key_heads: int = 1
  value_head_dim: int = 4
  chunk_tokens: int = 64
  feature_decays: bool = False
  gate_rank: int | None = None
  is_grouped: bool = False  # each layer is a dense block and one with `ffn_kind`
  num_experts: int = 4
  num_selected: int = 2
  normalize_gates: float | None = 1.0
  score_function: str = 'softmax'
  balance_bias: bool = False
  jitter: float = 0.0
  shared_hidden_dims: int | None = None
  load_balance_weight: float = 0.01
  load_balance_shards: int = 1
  divide_by_k: bool = False
  capacity_factor: float = 1.0
  group_size: int | None = None
  priority: str = 'position'

  # Fields of layouts.
  schedule: str | None = None
  num_microbatches: int = 1
  num_repeats: int = 1
  scan: bool = True
  dispatch: str = 'ring'
  ring_attention: bool = False
  balances_tokens: bool = False

  def _norm(self):
    return fdl.Config(LayerNorm) if self.norm == 'layer' else super().block(None).norm

  def _moe(self):
    if self.ffn_kind == 'expert_choice':
      router = fdl.Config(
        ExpertChoiceRouter,
        num_experts=self.num_experts,
        capacity_factor=self.capacity_factor,
        group_size=self.group_size,
        jitter_eps=self.jitter,
      )
    else:
      router = fdl.Config(
        TopKRouter,
        num_experts=self.num_experts,
        num_selected=self.num_selected,
        normalize_gates=self.normalize_gates,
        score_function=self.score_function,
        balance_bias=self.balance_bias,
        jitter_eps=self.jitter,
      )
    if self.ffn_kind == 'dropless':
      computation = fdl.Config(Dropless, dispatch=self.dispatch)
    else:
      computation = fdl.Config(
        CapacityGather,
        capacity_factor=self.capacity_factor,
        min_capacity=1,
        group_size=self.group_size,
        priority=self.priority,
      )
    shared = None
    if self.shared_hidden_dims is not None:
      shared = fdl.Config(GatedFeedForward, hidden_dim=self.shared_hidden_dims, activation='silu')
    return fdl.Config(
      MixtureOfExperts,
      router=router,
      experts=fdl.Config(Experts, num_experts=self.num_experts, hidden_dim=self.hidden_dims),
      computation=computation,
      shared_expert=shared,
      load_balance_shards=self.load_balance_shards,
      load_balance_divide_by_k=self.divide_by_k,
    )

  def ffn(self):
    if self.ffn_kind == 'plain':
      return fdl.Config(FeedForward, hidden_dim=self.hidden_dims, use_bias=self.use_bias)
    if self.ffn_kind == 'gated':
      return super().ffn()
    return self._moe()

  def block(self, ffn):
    block = super().block(ffn)
    block.norm = self._norm()
    block.dropout_rate = self.dropout
    attention = block.attention
    attention.qk_norm, attention.use_bias = self.qk_norm, self.use_bias
    attention.causal, attention.window = self.causal, self.window
    if not self.rotary:
      attention.rotary = None
    if self.ring_attention:
      attention.implementation = 'ring'
    return block

  def stack(self):
    block = self.block(self.ffn())
    if self.is_grouped:
      block = fdl.Config(BlockGroup, blocks=(self.block(super().ffn()), block))
    if self.is_recurrent:
      net = fdl.Config(
        GatedDeltaNet,
        num_heads=self.num_value_heads,
        num_key_heads=self.num_key_heads,
        key_head_dim=6,
        value_head_dim=self.value_head_dim,
        chunk_tokens=self.chunk_tokens,
        feature_decays=self.feature_decays,
        gate_rank=self.gate_rank,
      )
      block = fdl.Config(BlockGroup, blocks=(fdl.copy_with(block, attention=net), block))
    stack = super().stack()
    stack.block = block
    if self.schedule is None:
      stack.scan = self.scan
      return stack
    return fdl.Config(
      PipelinedStack,
      block=block,
      num_layers=self.num_layers,
      num_microbatches=self.num_microbatches,
      schedule=self.schedule,
      num_repeats=self.num_repeats,
      remat_policy=self.remat_policy,
    )

  def loss(self):
    weights = {}
    if self.is_moe:
      weights = {'load_balance_loss': self.load_balance_weight, 'router_z_loss': 1e-3}
    return fdl.Config(
      LanguageModelLoss,
      normalization=self.normalization,
      z_loss_weight=1e-4,
      label_smoothing=self.label_smoothing,
      aux_loss_weights=weights,
    )

  @property
  def is_moe(self) -> bool:
    return self.ffn_kind not in ('plain', 'gated')

  def optimizer(self):
    rate = super().optimizer().learning_rate
    optimizers = {
      'adamw': fdl.Config(AdamW, learning_rate=rate, weight_decay=0.1),
      'adafactor': fdl.Config(Adafactor, learning_rate=rate, min_dim_size_to_factor=6, momentum=0.9),
      'sgd': fdl.Config(
        FromOptax, factory=optax.sgd, learning_rate=rate, arguments={'momentum': 0.9, 'nesterov': True}
      ),
      'muon': fdl.Config(Muon, learning_rate=rate),
      'lamb': fdl.Config(FromOptax, factory=optax.lamb, learning_rate=rate),
      'clipped': fdl.Config(FromOptax, factory=_clipped_adam, learning_rate=rate),
      'optax_adafactor': fdl.Config(FromOptax, factory=_optax_adafactor, learning_rate=rate),
    }
    groups = {
      'groups': (('.*kernel', optimizers['adafactor']), ('', optimizers['adamw'])),
      'groups_clipped': (
        ('.*attention/(query|key)', optimizers['clipped']),
        ('.*attention', optimizers['muon']),
        ('', optimizers['sgd']),
      ),
      # Other weights are not trained.
      'groups_untrained': (('.*attention', optimizers['adamw']), ('.*scale', optimizers['sgd'])),
    }
    if self.optimizer_name in groups:
      return fdl.Config(MultiOptimizer, optimizers=groups[self.optimizer_name])
    return optimizers[self.optimizer_name]

  def task(self):
    cfg = super().task()
    cfg.model.embedding.tied, cfg.model.balances_tokens = self.tied, self.balances_tokens
    cfg.model.final_norm = self._norm()
    if not self.rotary:
      cfg.model.positions = fdl.Config(LearnedPositions, max_len=self.seq_len)
    learner = cfg.learner
    learner.clip_global_norm, learner.ema_decay = self.clip_global_norm, self.ema_decay
    learner.num_microbatches, learner.accumulation = self.grad_microbatches, self.accumulation
    return cfg

  def train_input(self):
    cfg = super().train_input()
    fdl.update_callable(cfg, FormedText)
    cfg.form = self.form
    return cfg


def _optax_adafactor(learning_rate: float) -> optax.GradientTransformation:
  return optax.adafactor(learning_rate, min_dim_size_to_factor=6)


def _clipped_adam(learning_rate: float) -> optax.GradientTransformation:
  return optax.chain(optax.clip_by_global_norm(0.1), optax.adam(learning_rate))


def draw_settings(rng: random.Random) -> Settings:
  """Draws the settings of an experiment that do not depend on the layout. Most dims are not divisible by mesh axes."""
  settings = _draw_settings(rng)
  if not settings.get('is_grouped') and rng.random() < 0.25:
    key_heads = rng.choice([1, 2, 3])
    settings |= {
      'is_recurrent': True,
      'num_layers': min(settings['num_layers'], 3),
      'num_key_heads': key_heads,
      'num_value_heads': key_heads * rng.choice([1, 2, 3]),
      'value_head_dim': rng.choice([3, 4, 10]),
      'chunk_tokens': rng.choice([2, 4, 64]),
      'feature_decays': rng.random() < 0.5,
      'gate_rank': rng.choice([None, 2, 5]),
    }
  return settings


def _draw_settings(rng: random.Random) -> Settings:
  heads, kv_share = rng.choice([(2, 1), (3, 1), (4, 2), (3, 3), (6, 3), (4, 4)])
  batch_size, length = rng.choice([8, 8, 12, 16, 6, 3, 4, 5, 7, 9]), rng.choice([8, 8, 7])
  settings: Settings = {
    'seed': rng.randrange(1000),
    'vocab_size': rng.choice([17, 24, 31, 33]),
    'model_dims': heads * rng.choice([2, 4]) * rng.choice([1, 2]),
    'num_heads': heads,
    'num_kv_heads': heads // kv_share,
    'num_layers': rng.choice([1, 2, 2, 3, 4, 5]),
    'hidden_dims': rng.choice([11, 12, 16, 18, 21]),
    'batch_size': batch_size,
    'seq_len': length,
    'form': rng.choice(FORMS),
    'norm': rng.choice(['rms', 'rms', 'layer']),
    'tied': rng.random() < 0.6,
    'rotary': rng.random() < 0.7,
    'qk_norm': rng.random() < 0.3,
    'use_bias': rng.random() < 0.3,
    'causal': rng.random() < 0.8,
    'normalization': rng.choice(['tokens', 'tokens', 'sum', 'all_tokens', 'sequences', 37.0]),
    'label_smoothing': rng.choice([0.0, 0.1]),
    'optimizer_name': rng.choice(['adamw', 'adafactor', 'sgd', 'muon', 'lamb', 'optax_adafactor', *GROUPS]),
    'ema_decay': rng.choice([None, 0.9]),
    'clip_global_norm': rng.choice([None, 1.0, 0.1]),
    'grad_microbatches': rng.choice([1, 1, *(m for m in range(2, batch_size + 1) if batch_size % m == 0)]),
    'dropout': rng.choice([0.0, 0.0, 0.0, 0.2]),
    'ffn_kind': rng.choice(
      ['plain', 'gated', 'gated', 'dropless', 'dropless', 'capacity', 'capacity', 'expert_choice']
    ),
  }
  settings['window'] = rng.choice([None, None, 3]) if settings['causal'] else None
  if settings['model_dims'] // heads % 2:
    settings['model_dims'] *= 2  # rotary positions rotate pairs
  if settings['grad_microbatches'] > 1:
    settings['accumulation'] = rng.choice(['mean', 'mean', 'sum'])
  if settings['ffn_kind'] in ('plain', 'gated'):
    return settings
  top_k = settings['ffn_kind'] != 'expert_choice'
  experts = rng.choice([2, 3, 4, 5, 6, 8])
  settings |= {
    'num_layers': rng.choice([1, 2, 2, 3]),  # few, because rounding may decide between experts in each layer
    'is_grouped': rng.random() < 0.25,
    'num_experts': experts,
    'shared_hidden_dims': rng.choice([None, None, 7, 10]),
    'load_balance_weight': rng.choice([0.0, 0.01, 0.5]),
    'divide_by_k': rng.random() < 0.3,
    'jitter': rng.choice([0.0, 0.0, 0.0, 0.1]),
    'capacity_factor': rng.choice([0.5, 1.0, 1.25, 2.0, 0.0] if top_k else [1.0, 2.0]),
  }
  rows = batch_size // settings['grad_microbatches']
  if rows > 1:
    settings['load_balance_shards'] = rng.choice([1, 1, 2 if rows % 2 == 0 else 1, rows])
  if settings['ffn_kind'] != 'dropless':
    sizes = [None, None, *([4, 2] if length == 8 else [])] + [length * n for n in (2, rows) if rows % n == 0]
    settings['group_size'] = rng.choice(sizes)
  if top_k:
    settings |= {
      'num_selected': rng.randint(1, min(3, experts)),
      'normalize_gates': rng.choice([None, 1.0, 2.0]),
      'score_function': rng.choice(['softmax', 'sigmoid']),
      'balance_bias': rng.random() < 0.3,
      'priority': rng.choice(['position', 'score']),
    }
  return settings


def make_job(settings: Mapping[str, Any], layout: Mapping[str, Any]) -> Job:
  """Builds the job of the experiment on the layout; {} is one device."""
  fields = dict(settings) | dict(layout)
  if fields['ffn_kind'] == 'capacity':
    fields['ffn_kind'] = 'gather'
  if layout:
    fields['axis_rules'] = tuple(rules_of(layout, settings))
  experiment_class = type('Case', (RandomExperiment,), {'__module__': __name__, **fields})
  return resolve(experiment_class, []).build()
