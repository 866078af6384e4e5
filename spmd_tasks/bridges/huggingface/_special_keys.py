"""Keys of a config.json that say several things at once: experts, latent attention, Gemma's and Phi's own, and T5's."""

import dataclasses

from spmd_tasks.bridges.huggingface._config_keys import ACTIVATIONS, Config, Values
from spmd_tasks.bridges.huggingface._decoder import Decoder, Latent, Mixture, Routing
from spmd_tasks.errors import UserError

_UNBOUNDED = 2**31 - 1  # the `expert_capacity` that drops nothing


@dataclasses.dataclass(frozen=True)
class MixtureKeys:
  """Experts in every layer, all of one size: Mixtral, Qwen-MoE, OLMoE.

  Attributes:
    num_experts: the key; `aliases` are other names for it.
    default_experts, default_selected: what the family has.
    hidden_dim: the key of F of an expert, and the family's default.
    normalized_key: whether gates are divided by their sum; None: always.
    use_bias: whether the router and the experts have biases.
  """

  num_experts: str
  aliases: tuple[str, ...]
  default_experts: int
  default_selected: int
  hidden_dim: tuple[str, int]
  normalized_key: str | None = 'norm_topk_prob'
  use_bias: bool = False

  def read(self, config: Config, known: Values) -> Values:
    num_experts = self.default_experts
    for key in (self.num_experts, *self.aliases):
      num_experts = config.read(key, int, num_experts)
    is_normalized = self.normalized_key is None or config.read(self.normalized_key, bool, False)
    routing = Routing(
      num_experts=num_experts,
      num_selected=config.read('num_experts_per_tok', int, self.default_selected),
      normalize_gates=1.0 if is_normalized else None,
      use_bias=self.use_bias,
    )
    mixture = Mixture(routing=routing, hidden_dim=config.read(self.hidden_dim[0], int, self.hidden_dim[1]))
    return {'mixture': mixture, 'mixed': (True,) * known['num_layers']}

  def write(self, decoder: Decoder) -> Values:
    mixture = decoder.mixture
    if mixture is None or not all(decoder.mixed):
      raise UserError('not every layer has experts.')
    normalized = (
      {} if self.normalized_key is None else {self.normalized_key: mixture.routing.normalize_gates is not None}
    )
    return {
      self.num_experts: mixture.routing.num_experts,
      'num_experts_per_tok': mixture.routing.num_selected,
      self.hidden_dim[0]: mixture.hidden_dim,
      **normalized,
    }


@dataclasses.dataclass(frozen=True)
class SharedMixtureKeys:
  """Experts beside shared ones, after some dense layers: DeepSeek and GLM-4-MoE.

  Attributes:
    num_experts, num_selected, num_shared, hidden_dim, num_dense: the family's defaults.
    gate_scale, groups: its defaults of `routed_scaling_factor`, and of `n_group` and `topk_group`.
    is_sigmoid: whether scores are sigmoids with a bias (DeepSeek-V3), or a softmax (DeepSeek-V2).
  """

  num_experts: int
  num_selected: int | None
  num_shared: int
  hidden_dim: int
  num_dense: int
  gate_scale: float
  groups: tuple[int | None, int | None]
  is_sigmoid: bool

  def read(self, config: Config, known: Values) -> Values:
    num_experts = config.read('n_routed_experts', int, config.read('num_local_experts', int, self.num_experts))
    num_selected = config.read('num_experts_per_tok', int, self.num_selected)
    if num_selected is None:
      raise UserError(f'{config.path} has no num_experts_per_tok, which its family needs.')
    num_groups = config.read('n_group', int, self.groups[0]) or 1
    num_selected_groups = config.read('topk_group', int, self.groups[1])
    score = 'sigmoid' if self.is_sigmoid else 'softmax'
    methods = ('noaux_tc',) if self.is_sigmoid else ('greedy', 'group_limited_greedy')
    method = config.read('topk_method', str, methods[0])
    if method not in methods or config.read('scoring_func', str, score) != score:
      raise config.error('topk_method', f'must be {" or ".join(methods)}, with scoring_func {score!r}')
    if num_groups == 1 or method == 'greedy':
      num_groups, num_selected_groups = 1, None
    if config.read('moe_layer_freq', int, 1) != 1:
      raise config.error('moe_layer_freq', 'must be 1')
    normalized = config.read('norm_topk_prob', bool, self.is_sigmoid)
    if normalized and not self.is_sigmoid:
      raise config.error('norm_topk_prob', 'must be False, as transformers ignores it')
    hidden_dim = config.read('moe_intermediate_size', int, self.hidden_dim)
    routing = Routing(
      num_experts=num_experts,
      num_selected=num_selected,
      normalize_gates=1.0 if normalized else None,
      score_function=score,
      gate_scale=config.read('routed_scaling_factor', float, self.gate_scale),
      balance_bias=self.is_sigmoid,
      num_groups=num_groups,
      num_selected_groups=num_selected_groups,
      group_score='top2_sum' if self.is_sigmoid else 'max',
    )
    mixture = Mixture(
      routing=routing,
      hidden_dim=hidden_dim,
      shared_dim=hidden_dim * config.read('n_shared_experts', int, self.num_shared),
    )
    num_dense = config.read('first_k_dense_replace', int, self.num_dense)
    return {'mixture': mixture, 'mixed': tuple(layer >= num_dense for layer in range(known['num_layers']))}

  def write(self, decoder: Decoder) -> Values:
    mixture = decoder.mixture
    if mixture is None or mixture.shared_dim is None or mixture.shared_dim % mixture.hidden_dim:
      raise UserError('there are no experts beside shared ones whose size is a multiple of theirs.')
    num_dense = decoder.mixed.index(True)
    grouped = mixture.routing.num_selected_groups is not None
    method = {} if self.is_sigmoid else {'topk_method': 'group_limited_greedy' if grouped else 'greedy'}
    return {
      'n_routed_experts': mixture.routing.num_experts,
      'num_experts_per_tok': mixture.routing.num_selected,
      'moe_intermediate_size': mixture.hidden_dim,
      'n_shared_experts': mixture.shared_dim // mixture.hidden_dim,
      'first_k_dense_replace': num_dense,
      'routed_scaling_factor': mixture.routing.gate_scale,
      'norm_topk_prob': mixture.routing.normalize_gates is not None,
      'n_group': mixture.routing.num_groups,
      'topk_group': mixture.routing.num_selected_groups or 1,
      **method,
    }


@dataclasses.dataclass(frozen=True)
class LatentKeys:
  """The sizes of DeepSeek's latent attention, by the family's defaults."""

  def read(self, config: Config, known: Values) -> Values:
    has_rank = config.values.get('q_lora_rank', 1536) is not None
    latent = Latent(
      query_rank=config.read('q_lora_rank', int, 1536) if has_rank else config.read('q_lora_rank', int, None),
      kv_rank=config.read('kv_lora_rank', int, 512),
      nope_head_dim=config.read('qk_nope_head_dim', int, 128),
      rope_head_dim=config.read('qk_rope_head_dim', int, 64),
      value_head_dim=config.read('v_head_dim', int, 128),
    )
    for key, value in (
      ('head_dim', latent.rope_head_dim),
      ('qk_head_dim', latent.nope_head_dim + latent.rope_head_dim),
    ):
      if config.read(key, int, value) != value:
        raise config.error(key, f'follows from other keys and must be {value}')
    return {'latent': latent}

  def write(self, decoder: Decoder) -> Values:
    latent = decoder.latent
    if latent is None:
      raise UserError('the attention has no latent vectors.')
    return {
      'q_lora_rank': latent.query_rank,
      'kv_lora_rank': latent.kv_rank,
      'qk_nope_head_dim': latent.nope_head_dim,
      'qk_rope_head_dim': latent.rope_head_dim,
      'v_head_dim': latent.value_head_dim,
      'head_dim': latent.rope_head_dim,
    }


@dataclasses.dataclass(frozen=True)
class QueryScale:
  """`query_pre_attn_scalar`: attention logits are divided by its root."""

  default: int = 256

  def read(self, config: Config, known: Values) -> Values:
    return {'softmax_scale': config.read('query_pre_attn_scalar', float, float(self.default)) ** -0.5}

  def write(self, decoder: Decoder) -> Values:
    scale = decoder.head_dim**-0.5 if decoder.softmax_scale is None else decoder.softmax_scale
    number = scale**-2
    return {'query_pre_attn_scalar': round(number) if abs(number - round(number)) < 1e-9 * number else number}


@dataclasses.dataclass(frozen=True)
class OriginalLength:
  """Phi-3's `original_max_position_embeddings`, which `Rope` reads."""

  default: int

  def read(self, config: Config, known: Values) -> Values:
    return {}

  def write(self, decoder: Decoder) -> Values:
    scaling = None if decoder.rotary is None else decoder.rotary.scaling
    return {'original_max_position_embeddings': getattr(scaling, 'original_length', self.default)}


# `feed_forward_proj`: the name -> activation and whether there is a gate.
_T5_ACTIVATIONS = {
  **{name: (ours, False) for name, ours in ACTIVATIONS.items()},
  **{f'gated-{name}': (ours, True) for name, ours in ACTIVATIONS.items() if name != 'gelu'},
  'gated-gelu': ('gelu', True),  # which is not the `gelu` of transformers there
}


@dataclasses.dataclass(frozen=True)
class T5FeedForward:
  """`feed_forward_proj` of T5's families, by the family's default; `dense_act_fn` and `is_gated_act` repeat it."""

  default: str

  def read(self, config: Config, known: Values) -> Values:
    name = config.read('feed_forward_proj', str, self.default)
    if name not in _T5_ACTIVATIONS:
      raise config.error('feed_forward_proj', f'must be one of {", ".join(_T5_ACTIVATIONS)}')
    activation, gated = _T5_ACTIVATIONS[name]
    for key, is_same in (
      ('dense_act_fn', ACTIVATIONS.get(config.read('dense_act_fn', str, name.split('-')[-1])) == activation),
      ('is_gated_act', config.read('is_gated_act', bool, gated) == gated),
    ):
      if not is_same and config.has(key):
        raise config.error(key, f'must be that of feed_forward_proj = {name!r}')
    return {'activation': activation, 'gated': gated}

  def write(self, decoder: Decoder) -> Values:
    wanted = decoder.activation, decoder.gated
    same = [name for name, each in _T5_ACTIVATIONS.items() if each == wanted]
    if not same:
      raise UserError(f'activation = {wanted[0]!r}, {"with" if wanted[1] else "without"} a gate, has no name in T5.')
    return {'feed_forward_proj': 'gated-gelu' if 'gated-gelu' in same else same[0]}


@dataclasses.dataclass(frozen=True)
class T5Logits:
  """`tie_word_embeddings`, which the files overrule, and whether the logits are divided by sqrt(D).

  transformers ties all of T5's families but Switch, whatever a config says, unless the files have both tensors.

  Attributes:
    scaled: whether the family divides; None: as the keys say.
    has_key: whether the key for that is `scale_decoder_outputs`; else it is `tie_word_embeddings`, which counts in any
      case where the former is absent.
  """

  scaled: bool | None = None
  has_key: bool = False

  def read(self, config: Config, known: Values) -> Values:
    tied = config.read('tie_word_embeddings', bool, True)
    scaled = tied if self.scaled is None else self.scaled
    if self.has_key:
      scaled = config.read('scale_decoder_outputs', bool, scaled)
    return {'tied': tied, 'scale_logits': scaled}

  def write(self, decoder: Decoder) -> Values:
    if self.has_key:
      return {'tie_word_embeddings': decoder.tied, 'scale_decoder_outputs': decoder.scale_logits}
    return {'tie_word_embeddings': decoder.tied if self.scaled is not None else decoder.scale_logits}


@dataclasses.dataclass(frozen=True)
class SwitchKeys:
  """The experts of Switch: in every n-th layer of a stack, each for at most `expert_capacity` tokens of a row."""

  _SIDES = (('encoder', 'num_encoder_layers', 'encoder_mixed'), ('decoder', 'num_layers', 'mixed'))

  def read(self, config: Config, known: Values) -> Values:
    values: Values = {}
    for side, num_layers, mixed in self._SIDES:
      layers, num_sparse = known[num_layers], config.read(f'num_sparse_{side}_layers', int, 3)
      step = layers // num_sparse if num_sparse > 0 else layers
      if config.read(f'{side}_sparse_step', int, step) != step:
        raise config.error(f'{side}_sparse_step', f'follows from other keys and must be {step}')
      values[mixed] = tuple(step == 1 or (step > 0 and layer % step == 1) for layer in range(layers))
    routing = Routing(num_experts=config.read('num_experts', int, 8), num_selected=1, normalize_gates=None)
    capacity = config.read('expert_capacity', int, 64)
    row_capacity = None if capacity >= _UNBOUNDED else capacity
    return values | {'mixture': Mixture(routing=routing, hidden_dim=known['hidden_dim'], row_capacity=row_capacity)}

  def write(self, decoder: Decoder) -> Values:
    mixture = decoder.mixture
    if mixture is None:
      raise UserError('no layer has experts.')
    return {
      'num_sparse_encoder_layers': sum(decoder.encoder_mixed),
      'num_sparse_decoder_layers': sum(decoder.mixed),
      'num_experts': mixture.routing.num_experts,
      'expert_capacity': _UNBOUNDED if mixture.row_capacity is None else mixture.row_capacity,
    }
