"""Rules between T5X's arrays and our weights and Adafactor moments: one table of names, for both directions.

    layout = Layout(scanned=False, decoder_only=False)
    table = layout.weights(our_shapes)                       # T5X's `target/` -> our weights
    table.convert_lazily(checkpoint.weights, our_shapes)
    layout.weights(our_shapes, 'v_row', factored)            # T5X's `state/param_states/` -> our v_row

T5X's models have one array per layer, `decoder/layers_0/mlp/wi/kernel` [D, F], or scanned layers in dim 1,
`decoder/decoder/mlp/wi/kernel` [D, L, F]. Heads are joined, [D, H * K], but in `scalable_t5`, scanned or not, a dim of
their own. Flaxformer's mixtures of experts are not scanned, [E, D, F].

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
_WHOLE = {
  'embedding/table': _EMBEDDING,
  'embedding/softmax_kernel': 'decoder/logits_dense/kernel',
  'encoder_position_bias/table': 'encoder/relpos_bias/rel_embedding',
  'position_bias/table': 'decoder/relpos_bias/rel_embedding',
  'encoder_norm/scale': 'encoder/encoder_norm/scale',
  'final_norm/scale': 'decoder/decoder_norm/scale',
}
_STACKED = re.compile(r'(encoder_)?stack/layers/(?:block_(\d+)/)?(.*)')
# Within a layer of the encoder; the decoder's own attention is `self_attention`.
_IN_LAYER = {
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
class _Piece:
  """A weight of T5X, and where it is in ours.

  Attributes:
    theirs: its name.
    slot: of ours: the name, and the layer if T5X's layers are weights of their own.
    labels: of its dims, in T5X's order: 'L', 'E', 'r' and 'c' (rows and columns by T5X's factor rules), or '-'.
    sizes: of its dims.
    ours: the shape of the slot.
    by_rule: whether T5X's factor rules apply; else rows are the smaller dim of two.
  """

  theirs: str
  slot: tuple[Any, ...]
  labels: str
  sizes: tuple[int, ...]
  ours: tuple[int, ...]
  by_rule: bool

  def rule(self, moment: str | None = None) -> Rule:
    """Returns the rule of the weight (None), or of one of its moments, by our name of that."""
    theirs, dropped, ours = moment, '', self.ours
    if moment in ('v_row', 'v_col'):
      separate = self.labels.count('L') + self.labels.count('E')
      sizes: dict[str, int] = {}  # of rows and columns, in their order
      for label, size in zip(self.labels, self.sizes):
        if label in 'rc':
          sizes[label] = sizes.get(label, 1) * size
      matrix = (*self.ours[:separate], *sizes.values())
      smaller, larger = factored_dims(matrix, separate) or (0, 0)
      kept = smaller if moment == 'v_row' else larger
      # The rows of our v_row are the smaller dim; those of T5X's are what its rules say, of two dims the smaller, too.
      label = [*sizes][kept - separate]
      if self.by_rule:
        theirs = 'v_row' if label == 'r' else 'v_col'
      dropped = 'c' if label == 'r' else 'r'
      ours = (*matrix[:separate], matrix[kept])
    left = [i for i, label in enumerate(self.labels) if label not in dropped]
    order = sorted(left, key=lambda i: (self.labels[i] != 'L', i))
    operations: list[Operation] = []
    if order != left:
      operations.append(Transpose(tuple(left.index(i) for i in order)))
    if (before := tuple(self.sizes[i] for i in order)) != ours:
      operations.append(Reshape(before, ours))
    return Rule(self.theirs if theirs is None else f'{self.theirs}/{theirs}', self.slot, *operations)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
  """How T5X names and stacks the weights of a model.

  Attributes:
    scanned: whether layers are one weight, in dim 1.
    heads_apart: whether heads are a dim of their own where layers are weights of their own.
    decoder_only: whether there is no encoder.
    source: what errors call the checkpoint.
  """

  scanned: bool = False
  heads_apart: bool = False
  decoder_only: bool = False
  source: str = 'the checkpoint of T5X'

  @classmethod
  def of(cls, weights: Shapes, source: str) -> 'Layout':
    """Returns the layout of T5X's weights."""
    return cls(
      scanned=any(re.match(r'(encoder/encoder|decoder/decoder)/', name) for name in weights),
      heads_apart=any(re.match(r'.*/layers_\d+/.*/query/', n) and len(a.shape) == 3 for n, a in weights.items()),
      decoder_only=f'decoder/{_EMBEDDING}' in weights,
      source=source,
    )

  def weights(self, ours: Shapes, moment: str | None = None, present: Collection[str] | None = None) -> RuleTable:
    """Returns the rules of all weights, or of one of Adafactor's moments, `v_row`, `v_col`, `v` or `m`.

    Args:
      ours: the weights.
      moment: by our name; T5X's names of it end in its own.
      present: the names of our weights that have it.
    """
    pieces = [piece for piece in self._pieces(ours) if present is None or piece.slot[0] in present]
    return RuleTable(rules=tuple(each.rule(moment) for each in pieces), source=self.source, target='the model')

  def _pieces(self, ours: Shapes) -> Iterator[_Piece]:
    for name, leaf in ours.items():
      shape, match = tuple(leaf.shape), _STACKED.fullmatch(name)
      if name in _WHOLE:
        theirs = _WHOLE[name]
        theirs = f'decoder/{theirs}' if self.decoder_only and theirs == _EMBEDDING else theirs
        yield self._piece(theirs, (name,), shape)
      elif match is None:
        raise UserError(f'T5X has no weight like {name} {list(shape)}: the model is none of its families.')
      else:
        side = 'encoder' if match[1] else 'decoder'
        theirs = _in_layer(match[3], side, gated=name.replace('/up', '/gate') in ours)
        if self.scanned:
          yield self._piece(f'{side}/{side}/{theirs}', (name,), shape, scanned=True)
          continue
        blocks = {found[2] for each in ours if (found := _STACKED.fullmatch(each)) and found[1] == match[1]}
        for i in range(shape[0]):
          layer = i * len(blocks) + int(match[2] or 0)
          yield self._piece(f'{side}/layers_{layer}/{theirs}', (name, i), shape[1:])

  def _piece(self, theirs: str, slot: tuple[Any, ...], shape: tuple[int, ...], *, scanned: bool = False) -> _Piece:
    """Describes T5X's weight for a slot of ours of this shape, [L, ...] if its layers are scanned."""
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
    return _Piece(theirs=theirs, slot=slot, labels=labels, sizes=sizes, ours=shape, by_rule=scanned or len(labels) > 2)


def _in_layer(name: str, side: str, *, gated: bool) -> str:
  for pattern, replacement in _IN_LAYER.items():
    if match := re.fullmatch(pattern, name):
      theirs = match.expand(replacement)
      if gated:
        theirs = theirs.replace('/wi/', '/wi_1/')
      return re.sub('^(pre_|)attention', r'\1self_attention', theirs) if side == 'decoder' else theirs
  raise UserError(f'T5X has no weight like {name} in a layer of its {side}: the model is none of its families.')
