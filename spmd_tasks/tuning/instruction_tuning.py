"""Base classes of experiments that tune on conversations, pairs of answers or labels: data, template and loss.

Another base class determines which weights are trained:

    class LoraSft(LowRankTuning, InstructionTuning):
      '''Low-rank adapters, trained on conversations.'''
"""

from collections.abc import Mapping
import dataclasses
import functools
import math
from typing import Any

import fiddle as fdl
from flax.core import FrozenDict

from spmd_tasks.bridges.huggingface import Folder, PretrainedLanguageModel
from spmd_tasks.bridges.huggingface.sentence_transformers import label_names, read_text_reading
from spmd_tasks.decoding.text_scorer import TextReading
from spmd_tasks.errors import UserError
from spmd_tasks.inputs import ChatTemplate, FolderTokenizer, Mixture
from spmd_tasks.store_files import local_folder
from spmd_tasks.tuning.conversations import ConversationInput, Conversations, config_of
from spmd_tasks.tuning.preference_loss import PreferenceLoss, reference_from
from spmd_tasks.tuning.preferences import JudgedAnswers, PreferenceInput, Preferences
from spmd_tasks.tuning.score_loss import ScoreLoss
from spmd_tasks.tuning.scored_texts import LabeledTexts, RewardPairs, ScoredInput, SimilarTexts

Files = str | tuple[str, ...]


class InstructionTuning(PretrainedLanguageModel):
  """Tunes a folder's model on conversations, with the loss on the assistant's text."""

  # Files for training and optionally for evaluation: JSON lines, Parquet or Arrow (glob patterns) whose records have
  # `messages`. A mapping from names to files is a mixture of sources, or several eval sets.
  data: Files | Mapping[str, Files] = ''
  eval_data: Files | Mapping[str, Files] = ''
  # The weights of a mixture's sources: rows are divided in proportion.
  data_weights: Mapping[str, float] = FrozenDict()
  # A Jinja file that replaces the folder's chat template, such as one that marks the assistant's text.
  chat_template_file: str = ''
  # Further variables of the chat template, such as {'enable_thinking': False}.
  template_variables: Mapping[str, Any] = FrozenDict()
  # What to do with a conversation that is longer than a row: 'error', 'truncate' or 'skip'.
  too_long: str = 'error'
  packing: bool = True

  seq_len: int = 2048

  def chat_template(self) -> ChatTemplate:
    """Returns the template of `chat_template_file`, or else the folder's, or else a plain transcript."""
    if not self.chat_template_file:
      return super().chat_template()
    template = ChatTemplate.from_file(str(local_folder(self.chat_template_file)))
    special = FolderTokenizer(path=str(self.folder.path)).special_tokens
    return dataclasses.replace(
      template,
      bos_token=special.get('bos_token', ''),
      eos_token=special.get('eos_token', ''),
      writes_bos=True,
    )

  def source(self, split: str) -> fdl.Config:
    """Returns the config of the conversations of a split, 'train' or 'valid'."""
    return self._source(self._files(split))

  def train_input(self) -> fdl.Config:
    settings = {'seed': self.seed}
    if not isinstance(self.data, Mapping):
      if self.data_weights:
        raise UserError(
          f'data_weights = {dict(self.data_weights)} need named sources, but data = {self.data!r} has none: set data '
          'to {"name": "FILE", ...}, or remove data_weights.'
        )
      return self._examples(self.source('train'), **settings)
    if sorted(self.data) != sorted(self.data_weights):
      raise UserError(
        f'data_weights must have a weight for each source of data, {sorted(self.data)}, but have '
        f'{sorted(self.data_weights)}: set, for example, data_weights={{"chats": 0.7, "code": 0.3}}.'
      )
    sources = {name: self._examples(self._source(files), **settings) for name, files in self.data.items()}
    return fdl.Config(Mixture, sources=sources, weights=dict(self.data_weights), seed=self.seed)

  def eval_inputs(self) -> dict[str, fdl.Config]:
    if not self.eval_data:
      return {}
    settings = {'num_epochs': 1, 'shuffle': False, 'max_batches': self.eval_batches}
    if isinstance(self.eval_data, Mapping):
      return {name: self._examples(self._source(files), **settings) for name, files in self.eval_data.items()}
    return {'valid': self._examples(self.source('valid'), **settings)}

  def _source(self, files: Files) -> fdl.Config:
    return fdl.Config(Conversations, pattern=files)

  def _files(self, split: str) -> Files:
    files = self.data if split == 'train' else self.eval_data
    if not files:
      raise UserError(f'{type(self).__name__} needs data: --set data=FILE, in JSON lines, Parquet or Arrow.')
    assert not isinstance(files, Mapping)
    return files

  def _examples(self, source: fdl.Config, *, input_class: Any = ConversationInput, **settings: Any) -> fdl.Config:
    return fdl.Config(
      input_class,
      source=source,
      tokenizer=self.tokenizer(),
      template=config_of(self.chat_template()),
      template_variables=dict(self.template_variables),
      too_long=self.too_long,
      packing=self.packing,
      batch_size=self.batch_size,
      seq_len=self.seq_len,
      **settings,
    )


class PreferenceTuning(InstructionTuning):
  """Tunes a folder's model on pairs of a chosen and a rejected answer (DPO, IPO, ORPO), or on judged answers (KTO).

  Records have `prompt`, `chosen` and `rejected`, texts or lists of messages; for KTO, `prompt`, `completion` and
  `label`. A row of `seq_len` tokens has both answers of a pair, each after the prompt.
  """

  # The reference model: 'start' is the model that training starts from, evaluated once before the first step; 'base' is
  # the frozen model without its low-rank adapters, evaluated in every step.
  reference: str = 'start'
  # See PreferenceLoss; `preference_loss` is its `kind`: 'sigmoid' (DPO), 'ipo', 'orpo' or 'kto'.
  preference_loss: str = 'sigmoid'
  beta: float = 0.1
  length_normalized: bool = False
  label_smoothing: float = 0.0
  good_weight: float = 1.0
  bad_weight: float = 1.0

  seq_len: int = 4096
  learning_rate: float = 1e-6

  def loss(self) -> fdl.Config:
    """Returns the config of the PreferenceLoss."""
    adapter = getattr(self, 'adapter', '')  # a field of LowRankTuning
    if self.reference == 'base' and adapter:
      raise UserError(
        f"reference = 'base' is {self.model} without adapter = {adapter}, which training starts from: merge the "
        "adapter into a folder first (--mode export --format hf), or set reference='start'."
      )
    names = ('beta', 'length_normalized', 'label_smoothing', 'good_weight', 'bad_weight')
    settings = {name: getattr(self, name) for name in names}
    reference = reference_from(self.reference)
    return fdl.Config(PreferenceLoss, kind=self.preference_loss, reference_from=reference, **settings)

  def _source(self, files: Files) -> fdl.Config:
    source: Any = JudgedAnswers if self.preference_loss == 'kto' else Preferences
    return fdl.Config(source, pattern=files)

  def _examples(self, source: fdl.Config, **settings: Any) -> fdl.Config:
    reference = {'reference_free': True} if self.preference_loss == 'orpo' else {}
    return super()._examples(source, input_class=PreferenceInput, **settings, **reference)


# The source of data for each `score_loss`.
_SCORED: Mapping[str, Any] = {
  'bradley_terry': RewardPairs,
  'classification': LabeledTexts,
  'regression': LabeledTexts,
  'contrastive': SimilarTexts,
}


class ScoreTuning(InstructionTuning):
  """Tunes a folder's model to score texts (rewards, classes, numbers), or to embed similar texts close together.

  A language model gets a score head of zeros; a `ForSequenceClassification` keeps its own head.
  """

  # 'bradley_terry' on pairs of a chosen and a rejected answer, 'classification' or 'regression' on texts with a
  # `label`, or 'contrastive' on pairs of an `anchor` and a `positive`; see ScoreLoss, also for the weights below.
  score_loss: str = 'bradley_terry'
  num_labels: int = 1  # outputs of the head; 0 has no head: a text's vector is pooled from its tokens' features
  pooling: str = 'last'  # whether a text's vector is the 'last' token's, or the 'mean' over its tokens
  center_weight: float = 0.0
  similarity_scale: float = 20.0

  @functools.cached_property
  def folder(self) -> Folder:
    """The folder, with a head for scores."""
    folder = self.open_folder()
    num_labels = folder.decoder.num_labels
    if num_labels is None and not folder.decoder.num_encoder_layers:
      return folder.with_score_head(self.num_labels)
    if num_labels != self.num_labels:
      raise UserError(f'num_labels = {self.num_labels} must be {num_labels}, as in {self.model}: set num_labels.')
    return folder

  def text_reading(self) -> TextReading:
    """Returns how a server computes vectors of texts: as in training, with probabilities for classes."""
    return TextReading(
      labels=label_names(self.folder.config, self.num_labels),
      pooling=self.pooling,  # type: ignore[arg-type]
      normalize=not self.num_labels,
      activation='softmax' if self.num_labels > 1 else 'none',
    )

  def loss(self) -> fdl.Config:
    """Returns the config of the ScoreLoss."""
    if self.score_loss == 'contrastive' and self.packing:
      raise UserError("score_loss = 'contrastive' needs one pair per row: set packing=False.")
    if self.score_loss != 'contrastive' and self.pooling != 'last':
      raise UserError(
        f"pooling = {self.pooling!r} is for score_loss = 'contrastive': other scores use the last token, as in "
        "transformers: set pooling='last'."
      )
    least, most = {'contrastive': (0, 0), 'classification': (2, math.inf)}.get(self.score_loss, (1, 1))
    if not least <= self.num_labels <= most:
      required = f'{least}' if least == most else f'{least} or more'
      raise UserError(f'num_labels = {self.num_labels} must be {required} for score_loss = {self.score_loss!r}.')
    return fdl.Config(ScoreLoss, kind=self.score_loss, center_weight=self.center_weight, scale=self.similarity_scale)

  def _source(self, files: Files) -> fdl.Config:
    if self.score_loss not in _SCORED:
      raise UserError(f'score_loss = {self.score_loss!r} must be one of {", ".join(map(repr, _SCORED))}.')
    classes = {'num_classes': self.num_labels} if self.score_loss == 'classification' else {}
    return fdl.Config(_SCORED[self.score_loss], pattern=files, **classes)

  def _examples(self, source: fdl.Config, **settings: Any) -> fdl.Config:
    return super()._examples(source, input_class=ScoredInput, **settings, pooling=self.pooling)


class FolderScorer(ScoreTuning):
  """Serves or exports a folder's model that scores or embeds texts: ForSequenceClassification or sentence-transformers.

  It has no data and cannot be trained. `seq_len` is the maximum length of a text.
  """

  seq_len: int = 512

  @functools.cached_property
  def folder(self) -> Folder:
    folder = self.open_folder()
    return folder if folder.decoder.num_labels is not None else folder.with_score_head(0)

  def text_reading(self) -> TextReading:
    """Returns how a server computes vectors of texts, from the folder's files."""
    return read_text_reading(self.folder)

  def loss(self) -> fdl.Config:
    return fdl.Config(ScoreLoss, kind='regression')  # never computed

  def _files(self, split: str) -> Files:
    return self.data or 'none'  # type: ignore[return-value]  # never read

  def _source(self, files: Files) -> fdl.Config:
    return fdl.Config(LabeledTexts, pattern=files)
