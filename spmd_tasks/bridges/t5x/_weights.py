"""Rules between T5X's arrays and our weights and Adafactor moments, in both directions.

    layout = Layout(scanned=False, decoder_only=False)
    table = layout.weights(our_shapes)                       # T5X's `target/` -> our weights
    table.convert_lazily(checkpoint.weights, our_shapes)
    layout.weights(our_shapes, 'v_row', factored)            # T5X's `state/param_states/` -> our v_row

T5X's models have one array per layer, `decoder/layers_0/mlp/wi/kernel` [D, F], or scanned layers in dim 1,
`decoder/decoder/mlp/wi/kernel` [D, L, F]. Heads are joined, [D, H * K], except in `scalable_t5`, where they have a dim
of their own. Flaxformer's mixtures of experts are not scanned, [E, D, F].

Shapes: L layers, E experts, D model, F hidden, H heads, K head dim.
"""

from collections.abc import Collection, Iterator, Mapping
import dataclasses
import re
from typing import Any

from spmd_tasks.bridges._operations import Operation, Reshape, Transpose
from spmd_tasks.bridges._rules import Rule, RuleTable
from spmd_tasks.errors import UserError
from spmd_tasks.learning.optimizer_specs import factored_dims

Shapes = Mapping[str, Any]  # name -> array or jax.ShapeDtypeStruct

_EMBEDDING = 'token_embedder/embedding'
_UNSTACKED_NAMES = {
  'embedding/table': _EMBEDDING,
  'embedding/softmax_kernel': 'decoder/logits_dense/kernel',
  'encoder_position_bias/table': 'encoder/relpos_bias/rel_embedding',
  'position_bias/table': 'decoder/relpos_bias/rel_embedding',
  'encoder_norm/scale': 'encoder/encoder_norm/scale',
  'final_norm/scale': 'decoder/decoder_norm/scale',
}
_STACKED = re.compile(r'(encoder_)?stack/layers/(?:block_(\d+)/)?(.*)')
# Names in a layer of the encoder; `attention` is called `self_attention` in the decoder.
_LAYER_NAMES = {
  r'attention/position_bias/table': r'relpos_bias/rel_embedding',
  r'attention_norm/scale': r'pre_attention_layer_norm/scale',
  r'attention/(query|key|value|out)/kernel': r'attention/\1/kernel',
  r'cross_attention_norm/scale': r'pre_cross_attention_layer_norm/scale',
  r'cross_attention/(query|key|value|out)/kernel': r'encoder_decoder_attention/\1/kernel',
  r'ffn_norm/scale': r'pre_mlp_layer_norm/scale',
  r'extra_ffn_norm/scale': r'pre_extra_mlp_layer_norm/scale',
  r'(extra_|)ffn/gate/kernel': r'\1mlp/wi_0/kernel',
  r'(extra_|)ffn/up/kernel': r'\1mlp/wi/kernel',
  r'(extra_|)ffn/down/kernel': r'\1mlp/wo/kernel',
  r'ffn/router/kernel': r'mlp/router/router_weights/w/kernel',
  r'ffn/experts/gate': r'mlp/expert/wi_0/kernel',
  r'ffn/experts/up': r'mlp/expert/wi/kernel',
  r'ffn/experts/down': r'mlp/expert/wo/kernel',
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _T5xWeight:
  """A weight of T5X and its slot in our weights.

  Attributes:
    theirs: the name in T5X.
    slot: our name, and the layer if T5X does not scan layers.
    labels: one per dim in T5X: 'L', 'E', 'r' and 'c' (rows and columns by T5X's factor rules), or '-'.
    sizes: the sizes of the dims in T5X.
    ours: the shape of our slot.
    by_rule: whether T5X's factor rules apply; otherwise rows are the smaller of two dims.
  """

  theirs: str
  slot: tuple[Any, ...]
  labels: str
  sizes: tuple[int, ...]
  ours: tuple[int, ...]
  by_rule: bool

  def rule(self, moment: str | None = None) -> Rule:
    """Returns the rule of the weight, or of its moment with our name `moment`."""
    theirs, dropped, ours = moment, '', self.ours
    if moment in ('v_row', 'v_col'):
      separate = self.labels.count('L') + self.labels.count('E')
      sizes: dict[str, int] = {}  # of rows and columns, in order
      for label, size in zip(self.labels, self.sizes):
        if label in 'rc':
          sizes[label] = sizes.get(label, 1) * size
      matrix = (*self.ours[:separate], *sizes.values())
      smaller, larger = factored_dims(matrix, separate) or (0, 0)
      dim = smaller if moment == 'v_row' else larger
      # Our v_row has the smaller dim. T5X's v_row has the dim that its rules name, or without rules the smaller dim.
      label = [*sizes][dim - separate]
      if self.by_rule:
        theirs = 'v_row' if label == 'r' else 'v_col'
      dropped = 'c' if label == 'r' else 'r'
      ours = (*matrix[:separate], matrix[dim])
    dims = [i for i, label in enumerate(self.labels) if label not in dropped]
    order = sorted(dims, key=lambda i: (self.labels[i] != 'L', i))
    operations: list[Operation] = []
    if order != dims:
      operations.append(Transpose(tuple(dims.index(i) for i in order)))
    if (before := tuple(self.sizes[i] for i in order)) != ours:
      operations.append(Reshape(before, ours))
    return Rule(self.theirs if theirs is None else f'{self.theirs}/{theirs}', self.slot, *operations)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
  """How T5X names and stacks the weights of a model.

  Attributes:
    scanned: whether layers are scanned, in dim 1 of a weight.
    heads_apart: whether heads have a dim of their own if layers are not scanned.
    decoder_only: whether there is no encoder.
    source: the name of the checkpoint in errors.
  """

  scanned: bool = False
  heads_apart: bool = False
  decoder_only: bool = False
  source: str = 'the checkpoint of T5X'

  @classmethod
  def of(cls, weights: Shapes, source: str) -> 'Layout':
    """Infers the layout from T5X's weights."""
    queries = [weight for name, weight in weights.items() if re.match(r'.*/layers_\d+/.*/query/', name)]
    return cls(
      scanned=any(re.match(r'(encoder/encoder|decoder/decoder)/', name) for name in weights),
      heads_apart=any(len(query.shape) == 3 for query in queries),
      decoder_only=f'decoder/{_EMBEDDING}' in weights,
      source=source,
    )

  def weights(self, ours: Shapes, moment: str | None = None, present: Collection[str] | None = None) -> RuleTable:
    """Returns the rules of all weights, or of one of Adafactor's moments.

    Args:
      ours: our weights.
      moment: our name of the moment, `v_row`, `v_col`, `v` or `m`; None for the weights.
      present: the names of our weights that have the moment; None for all.
    """
    maps = [weight for weight in self._t5x_weights(ours) if present is None or weight.slot[0] in present]
    rules = tuple(weight.rule(moment) for weight in maps)
    return RuleTable(rules=rules, source=self.source, target='the model')

  def _t5x_weights(self, ours: Shapes) -> Iterator[_T5xWeight]:
    for name, leaf in ours.items():
      shape, match = tuple(leaf.shape), _STACKED.fullmatch(name)
      if name in _UNSTACKED_NAMES:
        theirs = _UNSTACKED_NAMES[name]
        theirs = f'decoder/{theirs}' if self.decoder_only and theirs == _EMBEDDING else theirs
        yield self._t5x_weight(theirs, (name,), shape)
      elif match is None:
        raise UserError(f'the model has {name} {list(shape)}, which no T5X model has: use a model of the T5 families.')
      else:
        side = 'encoder' if match[1] else 'decoder'
        theirs = _t5x_name_in_layer(match[3], side, gated=name.replace('/up', '/gate') in ours)
        if self.scanned:
          yield self._t5x_weight(f'{side}/{side}/{theirs}', (name,), shape, scanned=True)
          continue
        matches = filter(None, map(_STACKED.fullmatch, ours))
        blocks = {other[2] for other in matches if other[1] == match[1]}
        for i in range(shape[0]):
          layer = i * len(blocks) + int(match[2] or 0)
          yield self._t5x_weight(f'{side}/layers_{layer}/{theirs}', (name, i), shape[1:])

  def _t5x_weight(
    self, theirs: str, slot: tuple[Any, ...], shape: tuple[int, ...], *, scanned: bool = False
  ) -> _T5xWeight:
    """Describes T5X's weight for a slot of this shape, [L, ...] if T5X scans its layers."""
    part = shape[1:] if scanned else shape
    is_out = theirs.endswith(('out/kernel', 'wo/kernel'))
    labels, sizes = '-' * len(part), part
    if 'relpos_bias' not in theirs and len(part) > 1:
      experts = '/expert/' in theirs
      matrix = part[experts:]
      labels = 'E' * experts + ('c' * (len(matrix) - 1) + 'r' if is_out else 'r' + 'c' * (len(matrix) - 1))
      if not (scanned or self.heads_apart) and len(matrix) == 3:  # heads are joined
        labels = 'cr' if is_out else 'rc'
        sizes = (matrix[0] * matrix[1], matrix[2]) if is_out else (matrix[0], matrix[1] * matrix[2])
      if theirs.endswith(_EMBEDDING):
        labels = 'cr'
    if scanned:
      at = min(1, len(labels))
      labels, sizes = f'{labels[:at]}L{labels[at:]}', (*sizes[:at], shape[0], *sizes[at:])
    by_rule = scanned or len(labels) > 2
    return _T5xWeight(theirs=theirs, slot=slot, labels=labels, sizes=sizes, ours=shape, by_rule=by_rule)


def _t5x_name_in_layer(name: str, side: str, *, gated: bool) -> str:
  for pattern, replacement in _LAYER_NAMES.items():
    if match := re.fullmatch(pattern, name):
      theirs = match.expand(replacement)
      if gated:
        theirs = theirs.replace('/wi/', '/wi_1/')
      return re.sub('^(pre_|)attention', r'\1self_attention', theirs) if side == 'decoder' else theirs
  raise UserError(f'the {side} has {name} in a layer, which no T5X model has: use a model of the T5 families.')
