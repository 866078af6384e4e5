"""Bases of tuning on conversations and on pairs of answers: the data, its template and the loss.

Which weights are trained is left to another base:

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
  """Tunes the model of a folder on conversations; the loss is on what the assistant says."""

  # Files for training and, if given, for evaluation: JSON lines, Parquet or Arrow (glob patterns) whose records have
  # `messages`. A mapping from names to files gives the sources of a mixture, or several eval sets.
  data: Files | Mapping[str, Files] = ''
  eval_data: Files | Mapping[str, Files] = ''
  # The share of rows of each source of a mixture, in proportion to their sum.
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
    """The template of `chat_template_file`, else the folder's; without one, a plain transcript."""
    if not self.chat_template_file:
      return super().chat_template()
    given = ChatTemplate.from_file(str(local_folder(self.chat_template_file)))
    special = FolderTokenizer(path=str(self.folder.path)).special_tokens
    return dataclasses.replace(
      given,
      bos_token=special.get('bos_token', ''),
      eos_token=special.get('eos_token', ''),
      writes_bos=True,
    )

  def source(self, split: str) -> fdl.Config:
    """The conversations of a split, 'train' or 'valid'."""
    return self._source(self._files(split))

  def train_input(self) -> fdl.Config:
    settings = {'seed': self.seed}
    if not isinstance(self.data, Mapping):
      if self.data_weights:
        raise UserError(
          f'data_weights = {dict(self.data_weights)} are of sources by name, but data = {self.data!r} has none: give '
          'data as {"name": "FILE", ...}, or leave data_weights out.'
        )
      return self._examples(self.source('train'), **settings)
    if sorted(self.data) != sorted(self.data_weights):
      raise UserError(
        f'data has the sources {sorted(self.data)}, but data_weights {sorted(self.data_weights)}: give each source its '
        'part of the rows, such as data_weights={"chats": 0.7, "code": 0.3}.'
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
    given = self.data if split == 'train' else self.eval_data
    if not given:
      raise UserError(f'{type(self).__name__} needs its data: --set data=FILE, in JSON lines, Parquet or Arrow.')
    assert not isinstance(given, Mapping)
    return given

  def _examples(self, source: fdl.Config, *, made_by: Any = ConversationInput, **settings: Any) -> fdl.Config:
    return fdl.Config(
      made_by,
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
  """Tunes the model of a folder on pairs of a chosen and a rejected answer (DPO, IPO, ORPO), or on judged ones (KTO).

  The files' records have `prompt`, `chosen` and `rejected`: texts, or lists of messages. Both answers of a pair, each
  behind the prompt, share a row of `seq_len` tokens. Those of KTO have `prompt`, `completion` and `label`.
  """

  # The reference model: 'start', the weights that training starts from, evaluated in one pass before the first step; or
  # 'base', the frozen model under low-rank adapters, evaluated in every step.
  reference: str = 'start'
  # The kind of loss, 'sigmoid' (DPO), 'ipo', 'orpo' or 'kto'; beta, how strongly the model is held to the reference;
  # whether log-probabilities are divided by the tokens of an answer; how much good and bad answers count in KTO.
  preference_loss: str = 'sigmoid'
  beta: float = 0.1
  length_normalized: bool = False
  label_smoothing: float = 0.0
  good_weight: float = 1.0
  bad_weight: float = 1.0

  seq_len: int = 4096
  learning_rate: float = 1e-6

  def loss(self) -> fdl.Config:
    """The loss on pairs."""
    compared = reference_from(self.reference)
    adapter = getattr(self, 'adapter', '')  # a field of LowRankTuning
    if self.reference == 'base' and adapter:
      raise UserError(
        f"reference = 'base' is {self.model} without the adapter {adapter} that training starts from: merge that "
        "into a folder first (--mode export --format hf), or leave reference = 'start'."
      )
    names = ('beta', 'length_normalized', 'label_smoothing', 'good_weight', 'bad_weight')
    settings = {name: getattr(self, name) for name in names}
    return fdl.Config(PreferenceLoss, kind=self.preference_loss, reference_from=compared, **settings)

  def _source(self, files: Files) -> fdl.Config:
    source: Any = JudgedAnswers if self.preference_loss == 'kto' else Preferences
    return fdl.Config(source, pattern=files)

  def _examples(self, source: fdl.Config, **settings: Any) -> fdl.Config:
    free = {'reference_free': True} if self.preference_loss == 'orpo' else {}
    return super()._examples(source, made_by=PreferenceInput, **settings, **free)


# The source of a recipe's `score_loss`.
_SCORED: Mapping[str, Any] = {
  'bradley_terry': RewardPairs,
  'classification': LabeledTexts,
  'regression': LabeledTexts,
  'contrastive': SimilarTexts,
}


class ScoreTuning(InstructionTuning):
  """Tunes the model of a folder to score texts (rewards, classes, numbers), or to give similar ones similar vectors.

  A folder of a language model gets a head of zeros; one of `ForSequenceClassification` keeps its own.
  """

  # 'bradley_terry' on pairs of a chosen and a rejected answer, 'classification' or 'regression' on texts with a
  # `label`, or 'contrastive' on pairs of an `anchor` and a `positive`; see ScoreLoss for what else is set here.
  score_loss: str = 'bradley_terry'
  num_labels: int = 1  # of the head; 0: the vector of a text is that of its tokens
  pooling: str = 'last'  # 'last' or 'mean': of the vectors of a text's tokens
  center_weight: float = 0.0
  similarity_scale: float = 20.0

  @functools.cached_property
  def folder(self) -> Folder:
    """The folder, with a head for scores."""
    folder = self.open_folder()
    found = folder.decoder.num_labels
    if found is None and not folder.decoder.num_encoder_layers:
      return folder.with_score_head(self.num_labels)
    if found != self.num_labels:
      raise UserError(f'num_labels = {self.num_labels}, but {self.model} has {found}: set num_labels, or take another.')
    return folder

  def text_reading(self) -> TextReading:
    """How a server reads texts: as in training. The scores of classes become probabilities."""
    return TextReading(
      labels=label_names(self.folder.config, self.num_labels),
      pooling=self.pooling,  # type: ignore[arg-type]
      normalize=not self.num_labels,
      activation='softmax' if self.num_labels > 1 else 'none',
    )

  def loss(self) -> fdl.Config:
    """The loss on scores."""
    if (self.score_loss == 'contrastive') and self.packing:
      raise UserError("score_loss = 'contrastive' takes one pair a row: set packing=False.")
    if self.score_loss != 'contrastive' and self.pooling != 'last':
      raise UserError(
        f"pooling = {self.pooling!r} is of score_loss = 'contrastive': transformers and reward=FOLDER score the last "
        "token: set pooling='last'."
      )
    least, most = {'contrastive': (0, 0), 'classification': (2, math.inf)}.get(self.score_loss, (1, 1))
    if not least <= self.num_labels <= most:
      wanted = f'{least}' if least == most else f'{least} or more'
      raise UserError(f'num_labels = {self.num_labels}, but score_loss = {self.score_loss!r} needs {wanted}: set it.')
    return fdl.Config(ScoreLoss, kind=self.score_loss, center_weight=self.center_weight, scale=self.similarity_scale)

  def _source(self, files: Files) -> fdl.Config:
    if self.score_loss not in _SCORED:
      raise UserError(f'score_loss = {self.score_loss!r} must be one of {", ".join(map(repr, _SCORED))}.')
    classes = {'num_classes': self.num_labels} if self.score_loss == 'classification' else {}
    return fdl.Config(_SCORED[self.score_loss], pattern=files, **classes)

  def _examples(self, source: fdl.Config, **settings: Any) -> fdl.Config:
    return super()._examples(source, made_by=ScoredInput, **settings, pooling=self.pooling)


class FolderScorer(ScoreTuning):
  """The model of a folder that scores or embeds texts, as it is: of ForSequenceClassification or sentence-transformers.

  It has no data: it is served or exported, and not trained. `seq_len` is the length of the longest text.
  """

  seq_len: int = 512

  @functools.cached_property
  def folder(self) -> Folder:
    folder = self.open_folder()
    return folder if folder.decoder.num_labels is not None else folder.with_score_head(0)

  def text_reading(self) -> TextReading:
    """As the folder's files say."""
    return read_text_reading(self.folder)

  def loss(self) -> fdl.Config:
    return fdl.Config(ScoreLoss, kind='regression')  # never computed

  def _files(self, split: str) -> Files:
    return self.data or 'none'  # type: ignore[return-value]

  def _source(self, files: Files) -> fdl.Config:
    return fdl.Config(LabeledTexts, pattern=files)
