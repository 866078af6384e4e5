"""SeqIoInput: a SeqIO task or mixture by name, as an input whose position is data, as prompts, and with its metrics.

    SeqIoInput(task='my_task', modules=('my_lab.tasks',), lengths={'inputs': 512, 'targets': 114}, batch_size=128)

SeqIO itself reads, preprocesses, packs and converts, so a batch has the numbers that T5X's has, under our names. Its
pipelines have no random access: a position is found again by reading as many batches, and the last one is compared with
what the job has trained on. `SeqIoPrompts` decodes the examples, and `TaskJudge` computes the task's metric_fns.

Legend: B global batch size, T length of the targets (in a prefix language model, of both), S of the inputs.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import functools
import importlib
from typing import Any

from absl import logging
import jax
import numpy as np

from spmd_tasks.decoding import Prompt
from spmd_tasks.decoding.generation import Completion
from spmd_tasks.decoding.prompts import PromptSource
from spmd_tasks.errors import JobError, UserError
from spmd_tasks.extensions import require
from spmd_tasks.inputs import IdTokenizer, SentencePieceTokenizer, T5ByteTokenizer, Tokenizer, base
from spmd_tasks.inputs.batches import digest, import_tensorflow
from spmd_tasks.user_code import place_of_error

ARCHITECTURES = {'encoder_decoder': 'EncDec', 'prefix_lm': 'PrefixLM', 'decoder_only': 'LM'}  # SeqIO's converters

# SeqIO's name of a feature, ours, and our dtype.
_FEATURES = {
  'decoder_input_tokens': ('ids', np.int32),
  'decoder_target_tokens': ('labels', np.int32),
  'decoder_loss_weights': ('weights', np.float32),
  'decoder_segment_ids': ('segment_ids', np.int32),
  'decoder_positions': ('segment_pos', np.int32),
  'decoder_causal_attention': ('prefix_mask', np.int32),
  'encoder_input_tokens': ('encoder_ids', np.int32),
  'encoder_segment_ids': ('encoder_segment_ids', np.int32),
  'encoder_positions': ('encoder_segment_pos', np.int32),
}


def import_seqio() -> Any:
  """Imports SeqIO, and that TensorFlow, without the accelerators. Raises a UserError where it is not installed."""
  require('t5x', 'seqio', wants='a SeqIO task')
  import_tensorflow()
  import seqio

  return seqio


def contract_batch(features: Mapping[str, np.ndarray]) -> base.Batch:
  """Makes a batch of ours of the features of one of SeqIO's converters, [B, T] and [B, S].

  Features that are not packed have no segments: as in T5X's masks, padding is where the token is 0.
  """
  given = [(features[theirs], name, dtype) for theirs, (name, dtype) in _FEATURES.items() if theirs in features]
  batch = {name: np.asarray(rows).astype(dtype) for rows, name, dtype in given}
  for prefix, tokens in (('', 'labels'), ('encoder_', 'encoder_ids')):
    if tokens in batch and f'{prefix}segment_ids' not in batch:
      is_token = batch[tokens] > 0
      batch[f'{prefix}segment_ids'] = is_token.astype(np.int32)
      batch[f'{prefix}segment_pos'] = np.where(is_token, np.arange(is_token.shape[1], dtype=np.int32), 0)
  return batch


def import_modules(modules: Sequence[str]) -> None:
  """Imports the modules that register tasks, as SeqIO's users do. Raises a UserError that names one that fails."""
  for name in modules:
    try:
      importlib.import_module(name)
    except Exception as error:
      raise UserError(
        f'the module {name}, which should register SeqIO tasks, cannot be imported: {type(error).__name__}: {error} '
        f'({place_of_error(error)}). Correct it; --experiment_path DIR names the directory that holds it.'
      ) from error


def find_task(name: str, modules: Sequence[str] = ()) -> Any:
  """Returns the registered SeqIO task or mixture of a name. Raises a UserError where there is none."""
  seqio = import_seqio()
  import_modules(modules)
  try:
    return seqio.get_mixture_or_task(name)
  except ValueError as error:
    raise UserError(
      f'SeqIO knows no task or mixture {name!r}: name the module that registers it in `modules` (of a gin setup: '
      '--gin.MIXTURE_OR_TASK_MODULE="\'my_lab.tasks\'").'
    ) from error


def tokenizer_of_vocabulary(vocabulary: Any) -> Tokenizer:
  """Returns a tokenizer of ours with the ids of one of SeqIO's vocabularies."""
  kind, extra_ids = type(vocabulary).__name__, vocabulary.extra_ids
  if kind == 'ByteVocabulary':
    return T5ByteTokenizer(extra_ids=extra_ids)
  if kind == 'SentencePieceVocabulary':
    return SentencePieceTokenizer(path=vocabulary.sentencepiece_model_file, extra_ids=extra_ids)
  if kind == 'PassThroughVocabulary':
    return IdTokenizer(vocab_size=vocabulary.vocab_size, eos_id=vocabulary.eos_id or 1)
  known = 'ByteVocabulary, SentencePieceVocabulary and PassThroughVocabulary'
  raise UserError(f'a SeqIO vocabulary of type {kind} has no tokenizer here: {known} have one.')


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeqIoInput:
  """The examples of a SeqIO task or mixture, converted by SeqIO for an architecture.

  Attributes:
    task: the name in SeqIO's registry.
    modules: modules that register it, imported before; they are installed, or on the search path (--experiment_path).
    lengths: the length of each feature in a row (T5X's task_feature_lengths); None: of the longest example, which is
      found by reading all of them, without packing.
    split: of the data source.
    batch_size: of all processes together.
    architecture: `encoder_decoder`, `prefix_lm` (inputs and targets are one row, and inputs see each other) or
      `decoder_only` (targets alone).
    packing: whether a row holds several examples.
    loss_on_targets_only: of a prefix language model: whether inputs have no loss.
    prefix_is_causal: of a prefix language model: whether inputs see only what is before them, as those of T5X's
      DecoderOnlyModel without `inputs_bidirectional_attention`.
    shuffle: whether SeqIO shuffles, by `seed`, which also seeds its preprocessors. Shuffling is anew in each epoch.
    num_epochs: how often the data are read; None: without end.
    max_batches: how many batches at most. With several epochs their rows are repeated until there are as many.
    skip_batches: how many batches at the beginning are left out, as those that an earlier run was trained on.
    num_shards: among how many parts the files are divided, each of which gives as many rows of a batch: as many as T5X
      had hosts. The batches depend on this number, and not on the number of processes.
    use_cached: whether SeqIO takes the preprocessed data of its cache directories.
    trim_output_features: whether SeqIO cuts examples to `lengths`.
    task_metrics: whether, as an eval set, it computes the metric_fns of its task; only where it has each example once,
      in a row of its own (`packing=False`, `num_epochs=1`), and not of a mixture.
  """

  task: str
  batch_size: int
  lengths: Mapping[str, int] | None
  modules: tuple[str, ...] = ()
  split: str = 'train'
  architecture: str = 'encoder_decoder'
  packing: bool = True
  loss_on_targets_only: bool = True
  prefix_is_causal: bool = False
  shuffle: bool = True
  seed: int = 0
  num_epochs: int | None = None
  max_batches: int | None = None
  skip_batches: int = 0
  num_shards: int = 1
  use_cached: bool = False
  trim_output_features: bool = True
  task_metrics: bool = True

  def __post_init__(self):
    if self.architecture not in ARCHITECTURES:
      raise UserError(f'architecture {self.architecture!r} must be one of {", ".join(ARCHITECTURES)}.')
    if self.lengths is None and self.packing:
      raise UserError('lengths = None needs packing = False: rows are then as long as the longest example.')
    if not all(isinstance(each, int) and each > 0 for each in (self.lengths or {}).values()):
      raise UserError(f'lengths = {dict(self.lengths or {})} must be whole numbers above 0.')
    if self.num_shards > 1 and self.num_epochs is not None:
      raise UserError(
        f'num_shards = {self.num_shards} with num_epochs = {self.num_epochs}: the parts would end at different '
        'batches; set num_shards = 1.'
      )
    base.shard_rows(self.batch_size, 0, self.num_shards)

  @functools.cached_property
  def _task(self) -> Any:
    return find_task(self.task, self.modules)

  @functools.cached_property
  def tokenizer(self) -> Tokenizer:
    """The tokenizer of the targets."""
    return tokenizer_of_vocabulary(self._task.output_features['targets'].vocabulary)

  @property
  def inputs_vocabulary(self) -> Any:
    """SeqIO's vocabulary of the inputs."""
    return self._task.output_features['inputs'].vocabulary

  @functools.cached_property
  def feature_lengths(self) -> dict[str, int]:
    """Returns the length of each feature in a row, by SeqIO's name of it."""
    names = ('targets',) if self.architecture == 'decoder_only' else ('inputs', 'targets')
    if self.lengths is not None:
      if {*names} != {*self.lengths}:
        wanted = f'those of {" and ".join(names)}, the features of the architecture {self.architecture}'
        raise UserError(f'lengths = {dict(self.lengths)} must give {wanted}.')
      return {name: int(self.lengths[name]) for name in names}
    longest = dict.fromkeys(names, 1)
    for example in self._examples(None).as_numpy_iterator():
      longest = {name: max(size, len(example[name])) for name, size in longest.items()}
    return longest

  def element_spec(self) -> dict[str, jax.ShapeDtypeStruct]:
    lengths = self.feature_lengths
    width = sum(lengths.values()) if self.architecture == 'prefix_lm' else lengths['targets']
    spec = base.language_model_spec(self.batch_size, width)
    if self.architecture == 'prefix_lm' and not self.prefix_is_causal:
      spec['prefix_mask'] = spec['ids']
    if self.architecture == 'encoder_decoder':
      of_encoder = jax.ShapeDtypeStruct((self.batch_size, lengths['inputs']), np.int32)
      spec |= dict.fromkeys(('encoder_ids', 'encoder_segment_ids', 'encoder_segment_pos'), of_encoder)
    return spec

  def _examples(self, lengths: Mapping[str, int] | None, shard: int = 0) -> Any:
    """Returns the tf.data.Dataset of the task's examples."""
    seqio = import_seqio()
    if self.split not in self._task.splits:
      splits = ', '.join(sorted(self._task.splits))
      raise UserError(f'SeqIO task {self.task} has no split {self.split!r}: it has {splits}.')
    return self._task.get_dataset(
      lengths,
      split=self.split,
      use_cached=self.use_cached,
      shuffle=self.shuffle,
      seed=self.seed,
      shard_info=seqio.ShardInfo(index=shard, num_shards=self.num_shards),
      num_epochs=1 if lengths is None else self.num_epochs,
      trim_output_features=self.trim_output_features,
    )

  def converter(self) -> Any:
    """Returns SeqIO's feature converter."""
    of_prefix = {'loss_on_targets_only': self.loss_on_targets_only} if self.architecture == 'prefix_lm' else {}
    converter = getattr(import_seqio(), f'{ARCHITECTURES[self.architecture]}FeatureConverter')
    return converter(pack=self.packing, **of_prefix)

  def features(self, shard: int = 0) -> Any:
    """Returns the tf.data.Dataset of converted rows, one by one, of a shard; its order is always the same."""
    lengths = self.feature_lengths
    options = import_tensorflow().data.Options()
    options.deterministic = True
    dataset = self.converter()(self._examples(lengths, shard), task_feature_lengths=lengths).with_options(options)
    return dataset.repeat() if self.max_batches is not None and (self.num_epochs or 1) > 1 else dataset

  @functools.cached_property
  def judge(self) -> Any:
    """Computes the metrics of the task, a TaskJudge; None where there are none."""
    is_whole = self.num_epochs == 1 and self.max_batches is None and not self.skip_batches and not self.packing
    if not (is_whole and self.task_metrics and getattr(self._task, 'metric_objs', None)):
      return None
    return TaskJudge(examples=self)

  def make_iterator(self, shard_index: int = 0, shard_count: int = 1) -> 'SeqIoIterator':
    return SeqIoIterator(self, base.shard_rows(self.batch_size, shard_index, shard_count))

  def reshard_states(self, states: Sequence[base.State], shard_count: int) -> list[base.State]:
    digests = {name: value for state in states for name, value in state['digests'].items()}
    return [{**states[0], 'digests': digests}] * shard_count

  def identity(self) -> dict[str, Any]:
    """Returns the settings that decide the batches, as JSON."""
    names = 'task split batch_size architecture packing loss_on_targets_only shuffle seed num_epochs skip_batches '
    names += 'num_shards use_cached trim_output_features'
    return {'kind': 'seqio', **{name: getattr(self, name) for name in names.split()}, 'lengths': self.feature_lengths}


class SeqIoIterator(base.InputIterator):
  """The rows of one process."""

  def __init__(self, settings: SeqIoInput, rows: range):
    self._settings = settings
    self._rows_of_shard = size = settings.batch_size // settings.num_shards
    self._shards = range(rows.start // size, (rows.stop - 1) // size + 1)
    self._rows = slice(rows.start - self._shards.start * size, rows.stop - self._shards.start * size)
    self._streams: dict[int, Iterator[Mapping[str, np.ndarray]]] | None = None
    self._num_batches = 0
    self._digests: dict[str, int] = {}

  def _open(self, num_skipped: int) -> None:
    size = self._rows_of_shard
    self._streams = {
      shard: self._settings.features(shard).batch(size).skip(num_skipped).as_numpy_iterator() for shard in self._shards
    }

  def __next__(self) -> base.Batch:
    settings = self._settings
    if settings.max_batches is not None and self._num_batches >= settings.max_batches:
      raise StopIteration
    if self._streams is None:
      self._open(settings.skip_batches + self._num_batches)
    batch = self._read()
    self._num_batches += 1
    return {name: rows[self._rows] for name, rows in batch.items()}

  def _read(self) -> base.Batch:
    """Reads the next rows of the shards, filled up with padding at the end, and notes their digests."""
    assert self._streams is not None
    parts, settings = [], self._settings
    for shard, stream in self._streams.items():
      try:
        features = next(stream)
      except StopIteration:
        raise
      except Exception as error:
        said = str(error).partition('\nTraceback')[0]  # TensorFlow may quote the stack of a preprocessor
        which = f'batch {self._num_batches} of SeqIO task {settings.task}'
        raise JobError(f'reading {which} failed: {type(error).__name__}: {said}') from error
      part = contract_batch(features)
      if settings.prefix_is_causal:
        part.pop('prefix_mask', None)
      self._digests[str(shard)] = digest(part)
      missing = self._rows_of_shard - len(part['ids'])
      parts.append({name: np.pad(rows, ((0, missing), (0, 0))) for name, rows in part.items()})
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

  def get_state(self) -> base.State:
    return {**self._settings.identity(), 'num_batches': self._num_batches, 'digests': dict(self._digests)}

  def set_state(self, state: base.State) -> None:
    base.check_state(state, self._settings.identity())
    self.close()
    self._num_batches, self._digests = int(state['num_batches']), {}
    if not self._num_batches:
      return
    logging.info('SeqIO task %s is read from its beginning, to batch %d.', self._settings.task, self._num_batches)
    self._open(self._settings.skip_batches + self._num_batches - 1)
    try:
      self._read()
    except StopIteration:
      self._digests = {}
    if not self._digests or not self._digests.items() <= state['digests'].items():
      self.close()
      raise UserError(
        f'batch {self._num_batches - 1} of SeqIO task {self._settings.task} is not what it was when the job was '
        'saved: its data or its preprocessors have changed, or draw random numbers that no seed of SeqIO decides. '
        'Repair that, or begin anew in another job_log_dir.'
      )

  def close(self) -> None:
    self._streams = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TfExampleInput(SeqIoInput):
  """Texts of TFRecord files of tf.train.Examples, as T5X infers from them: a task of its own, without targets.

  Attributes:
    paths: files, or patterns of their names.
    inputs_key: the feature that is the text.
    sentencepiece_model_file: of the vocabulary; None: bytes.
    extra_ids: of the vocabulary.
  """

  task: str = 'infer'
  split: str = 'infer'
  paths: tuple[str, ...] = ()
  inputs_key: str = 'inputs'
  sentencepiece_model_file: str | None = None
  extra_ids: int = 0

  @functools.cached_property
  def _task(self) -> Any:
    seqio, tf = import_seqio(), import_tensorflow()
    files = sorted(set(tf.io.gfile.glob(list(self.paths))))
    if not files:
      raise UserError(f'paths = {self.paths} name no file: correct them.')
    if self.sentencepiece_model_file is None:
      vocabulary = seqio.ByteVocabulary(self.extra_ids)
    else:
      vocabulary = seqio.SentencePieceVocabulary(self.sentencepiece_model_file, self.extra_ids)
    names = {'inputs': self.inputs_key, 'targets': None}
    return seqio.Task(
      self.task,
      source=seqio.TFExampleDataSource({self.split: files}, {self.inputs_key: tf.io.FixedLenFeature([], tf.string)}),
      output_features={name: seqio.Feature(vocabulary) for name in names},
      preprocessors=[
        functools.partial(seqio.preprocessors.rekey, key_map=names),
        seqio.preprocessors.tokenize_and_append_eos,
      ],
    )


def prompt_of(features: Mapping[str, Any], number: int, max_tokens: int) -> Prompt:
  """Makes the prompt of an example of which SeqIO's converters have made the features [T] of a row.

  An encoder reads the inputs, and at most `max_tokens` follow; a prefix language model reads the token 0 and the
  inputs, and writes on until the row is full. Raises a UserError if the row has no inputs.
  """
  if 'encoder_input_tokens' in features:
    ids = np.trim_zeros(features['encoder_input_tokens'], 'b')
  elif 'decoder_causal_attention' in features:
    row = features['decoder_input_tokens']
    ids = row[: int(features['decoder_causal_attention'].sum())]
    max_tokens = len(row) - len(ids) + 1
  else:
    raise UserError("a decoder-only model reads inputs as a prefix: set architecture = 'prefix_lm', with their length.")
  if not len(ids):
    raise UserError(f'example {number} of the SeqIO task has no inputs to decode from: leave it out of the task.')
  return Prompt(prompt_ids=tuple(ids.tolist()), max_tokens=max_tokens, id=number)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeqIoPrompts:
  """The inputs of the examples of a SeqIO task, each in a row of its own.

  `examples`, a SeqIoInput, say of which split, and in which order; they have no packing, and an end (`num_epochs=1`).
  `n` continuations of each are wanted.
  """

  examples: Any
  n: int = 1

  def __post_init__(self):
    if self.examples.packing or self.examples.num_epochs is None:
      raise UserError('examples of SeqIoPrompts need packing = False and num_epochs = 1.')

  def read(self) -> list[Prompt]:
    """Returns the prompts, with their text; `id` is the number of the example, from 0 on."""
    given, prompts = self.examples, []
    for number, features in enumerate(given.features().as_numpy_iterator()):
      prompt = prompt_of(features, number, given.feature_lengths['targets'])
      text = given.inputs_vocabulary.decode([token for token in prompt.prompt_ids or () if token])
      prompts.append(dataclasses.replace(prompt, prompt=text if isinstance(text, str) else None, n=self.n))
    if not prompts:
      raise UserError(f'split {given.split} of SeqIO task {given.task} has no examples.')
    return prompts


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefixPrompts:
  """Texts as T5X's decoder-only models read inputs: the start token, the text, the end of text."""

  source: PromptSource
  tokenizer: Tokenizer
  start_id: int = 0

  def read(self) -> list[Prompt]:
    """Returns the prompts of the source; those that are tokens are left as they are."""
    return [self._as_prefix(prompt) for prompt in self.source.read()]

  def _as_prefix(self, prompt: Prompt) -> Prompt:
    if prompt.prompt is None or prompt.prompt_ids is not None:
      return prompt
    ids = (self.start_id, *self.tokenizer.encode(prompt.prompt), self.tokenizer.eos_id)
    return dataclasses.replace(prompt, prompt_ids=ids)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskJudge:
  """Judges what a model writes by the metric_fns of a SeqIO task, computed by SeqIO's own Evaluator.

  As T5X's InferenceEvaluator: predict metrics get the tokens that the model generates from the inputs, score metrics
  the log-probability of each example's targets. SeqIO reads these, decodes, postprocesses and calls the functions.

  `examples`, a SeqIoInput, are those of one task, each once, in a row of its own.
  """

  examples: Any

  def __post_init__(self):
    if self._kinds() - {1, 2, 3}:
      raise UserError(
        f'SeqIO task {self.examples.task} has a metric of the intermediate values of a model, which are not kept: '
        'leave it out of the task, or set task_metrics = False.'
      )

  def _kinds(self) -> set[int]:  # of seqio.metrics.ModelOutputType
    task = find_task(self.examples.task, self.examples.modules)
    return {int(each.model_output_type) for each in task.metric_objs}

  @property
  def wants_texts(self) -> bool:
    return bool(self._kinds() & {1, 3})

  @property
  def wants_scores(self) -> bool:
    return 2 in self._kinds()

  @functools.cached_property
  def _evaluator(self) -> Any:
    given = self.examples
    return import_seqio().Evaluator(
      given.task,
      given.converter(),
      eval_split=given.split,
      use_cached=given.use_cached,
      seed=given.seed,
      sequence_length=given.lengths and given.feature_lengths,
      shuffle=given.shuffle,
      async_compute_metrics=False,
    )

  def prompts(self) -> list[Prompt]:
    """Returns the prompt of each example."""
    numbered = self._evaluator.cached_model_datasets[self.examples.task].as_numpy_iterator()
    max_tokens = self.examples.feature_lengths['targets']
    return [prompt_of(features, int(index), max_tokens) for index, features in numbered]

  def metrics(self, step: int, texts: Sequence[Completion] | None, scores: np.ndarray | None) -> dict[str, float]:
    """Returns the task's metrics that are numbers. Raises a JobError where a metric fails."""

    def predict(_: Any) -> tuple[list[tuple[int, list[int]]], dict[str, list[float]]]:
      assert texts is not None
      width = max(len(each.ids) for each in texts)
      rows = [(index, each.ids + [0] * (width - len(each.ids))) for index, each in enumerate(texts)]
      return rows, {'scores': [sum(each.logprobs) if each.score is None else each.score for each in texts]}

    def score(dataset: Any) -> list[tuple[int, float]]:
      assert scores is not None
      return [(index, float(scores[index])) for index in range(int(dataset.cardinality()))]

    try:
      found, _ = self._evaluator.evaluate(
        compute_metrics=True,
        step=step,
        predict_fn=lambda dataset: predict(dataset)[0],
        predict_with_aux_fn=predict,
        score_fn=score,
      )
      values = found.result()[self.examples.task]
    except Exception as error:  # of a metric_fn or a postprocessor of the user's
      raise JobError(
        f'the metrics of SeqIO task {self.examples.task} failed: {type(error).__name__}: {error}'
      ) from error
    numbers = {name: getattr(value, 'value', value) for name, value in values.items()}
    return {name: float(value) for name, value in numbers.items() if isinstance(value, float | int | np.number)}
