"""SeqIO tasks and mixtures as inputs (SeqIoInput) and prompts (SeqIoPrompts), and their metrics (SeqIoMetrics).

    SeqIoInput(task='my_task', modules=('my_lab.tasks',), lengths={'inputs': 512, 'targets': 114}, batch_size=128)

SeqIO itself reads, preprocesses, packs and converts, so batches have the same numbers as in T5X, under our names. Its
pipelines have no random access: to resume, the input reads from the beginning, and compares the last batch with the
one of the interrupted job.

Shapes: B global batch, T targets (in a prefix language model, inputs and targets), S inputs.
"""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
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

# SeqIO's name of a feature -> our name and dtype.
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
  """Imports SeqIO, with TensorFlow limited to the CPU. Raises a UserError if it is not installed."""
  require('t5x', 'seqio', wants='a SeqIO task')
  import_tensorflow()
  import seqio

  return seqio


def contract_batch(features: Mapping[str, np.ndarray]) -> base.Batch:
  """Converts the features of a SeqIO feature converter, [B, T] and [B, S], to a batch.

  Features that are not packed have no segments; as in T5X's masks, tokens 0 are padding.
  """
  batch = {
    name: np.asarray(features[feature]).astype(dtype)
    for feature, (name, dtype) in _FEATURES.items()
    if feature in features
  }
  for prefix, tokens in (('', 'labels'), ('encoder_', 'encoder_ids')):
    if tokens in batch and f'{prefix}segment_ids' not in batch:
      is_token = batch[tokens] > 0
      batch[f'{prefix}segment_ids'] = is_token.astype(np.int32)
      batch[f'{prefix}segment_pos'] = np.where(is_token, np.arange(is_token.shape[1], dtype=np.int32), 0)
  return batch


def import_modules(modules: Sequence[str]) -> None:
  """Imports the modules that register tasks. Raises a UserError if an import fails."""
  for name in modules:
    try:
      importlib.import_module(name)
    except Exception as error:
      is_missing = isinstance(error, ModuleNotFoundError) and error.name == name
      place = '' if is_missing else f' ({place_of_error(error)})'
      raise UserError(
        f'the module {name}, which should register SeqIO tasks, cannot be imported: {type(error).__name__}: {error}'
        f'{place}. Correct it, or add its directory with --experiment_path DIR.'
      ) from error


def find_task(name: str, modules: Sequence[str] = ()) -> Any:
  """Returns the SeqIO task or mixture with a name. Raises a UserError if it is not registered."""
  seqio = import_seqio()
  import_modules(modules)
  try:
    return seqio.get_mixture_or_task(name)
  except ValueError as error:
    raise UserError(
      f'SeqIO has no task or mixture {name!r}: add the module that registers it to `modules`, or in a gin setup set '
      '--gin.MIXTURE_OR_TASK_MODULE="\'my_lab.tasks\'".'
    ) from error


def tokenizer_of_vocabulary(vocabulary: Any) -> Tokenizer:
  """Returns the tokenizer with the ids of a SeqIO vocabulary."""
  kind, extra_ids = type(vocabulary).__name__, vocabulary.extra_ids
  if kind == 'ByteVocabulary':
    return T5ByteTokenizer(extra_ids=extra_ids)
  if kind == 'SentencePieceVocabulary':
    return SentencePieceTokenizer(path=vocabulary.sentencepiece_model_file, extra_ids=extra_ids)
  if kind == 'PassThroughVocabulary':
    return IdTokenizer(vocab_size=vocabulary.vocab_size, eos_id=vocabulary.eos_id or 1)
  raise UserError(
    f'the SeqIO vocabulary is a {kind}, which must be a ByteVocabulary, SentencePieceVocabulary or '
    'PassThroughVocabulary.'
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeqIoInput:
  """The examples of a SeqIO task or mixture, converted by SeqIO for an architecture.

  Attributes:
    task: the name in SeqIO's registry.
    modules: modules to import first, because they register the task. They must be installed or on the search path
      (--experiment_path).
    lengths: the length of each feature in a row (T5X's task_feature_lengths); None for the length of the longest
      example, which requires `packing=False` and reads all examples.
    split: the split of the data source.
    batch_size: the global batch size.
    architecture: `encoder_decoder`, `prefix_lm` (inputs and targets in one row, bidirectional attention in the inputs)
      or `decoder_only` (only targets).
    packing: whether to pack several examples into a row.
    loss_on_targets_only: whether a prefix language model has no loss on inputs.
    prefix_is_causal: whether a prefix language model has causal attention in the inputs, like T5X's DecoderOnlyModel
      without `inputs_bidirectional_attention`.
    shuffle: whether SeqIO shuffles the examples, differently in each epoch.
    seed: the seed of shuffling and of SeqIO's preprocessors.
    num_epochs: the number of epochs; None for an infinite input.
    max_batches: the maximum number of batches. With several epochs, rows are repeated until there are that many.
    skip_batches: the number of batches to skip at the beginning, such as those that an earlier run trained on.
    num_shards: the number of shards of the files, each of which provides the same number of rows of a batch; the number
      of hosts in T5X. Batches depend on it, and not on the number of processes.
    use_cached: whether SeqIO uses preprocessed data from its cache directories.
    trim_output_features: whether SeqIO trims examples to `lengths`.
    task_metrics: whether an eval set computes the task's metric_fns. It then must not be a mixture, and have each
      example once, in a row of its own (`packing=False`, `num_epochs=1`).
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
      raise UserError('lengths = None requires packing = False.')
    if not all(isinstance(length, int) and length > 0 for length in (self.lengths or {}).values()):
      raise UserError(f'lengths = {dict(self.lengths or {})} must be positive integers.')
    if self.num_shards > 1 and self.num_epochs is not None:
      raise UserError(
        f'num_shards = {self.num_shards} must be 1 with num_epochs = {self.num_epochs}, because shards have different '
        'lengths.'
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
    """The SeqIO vocabulary of the inputs."""
    return self._task.output_features['inputs'].vocabulary

  @functools.cached_property
  def feature_lengths(self) -> dict[str, int]:
    """The length of each feature in a row, by its name in SeqIO."""
    names = ('targets',) if self.architecture == 'decoder_only' else ('inputs', 'targets')
    if self.lengths is not None:
      if {*names} != {*self.lengths}:
        features = ' and '.join(names)
        raise UserError(f'lengths = {dict(self.lengths)} must have {features} for architecture {self.architecture!r}.')
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
      encoder_spec = jax.ShapeDtypeStruct((self.batch_size, lengths['inputs']), np.int32)
      spec |= dict.fromkeys(('encoder_ids', 'encoder_segment_ids', 'encoder_segment_pos'), encoder_spec)
    return spec

  def _examples(self, lengths: Mapping[str, int] | None, shard: int = 0) -> Any:
    """Returns the tf.data.Dataset of the task's examples."""
    seqio = import_seqio()
    if self.split not in self._task.splits:
      splits = ', '.join(sorted(self._task.splits))
      raise UserError(f'SeqIO task {self.task} has no split {self.split!r}: choose one of {splits}.')
    with self._seqio_errors():
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

  @contextlib.contextmanager
  def _seqio_errors(self) -> Iterator[None]:
    """Raises a UserError if SeqIO cannot make the dataset, for example because a preprocessor fails."""
    try:
      yield
    except UserError:
      raise
    except Exception as error:
      lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ['']
      is_traced = lines[0].startswith('in user code')  # TensorFlow then adds the stack; the error is the last line
      message = lines[-1] if is_traced else f'{type(error).__name__}: {" ".join(lines)}'
      raise UserError(
        f'SeqIO cannot make the dataset of {self.task} ({message.rstrip(".")}): correct the data, the preprocessors or '
        'the output_features of the task, or the architecture and lengths.'
      ) from error

  def converter(self) -> Any:
    """Returns SeqIO's feature converter."""
    options = {'loss_on_targets_only': self.loss_on_targets_only} if self.architecture == 'prefix_lm' else {}
    converter = getattr(import_seqio(), f'{ARCHITECTURES[self.architecture]}FeatureConverter')
    return converter(pack=self.packing, **options)

  def features(self, shard: int = 0) -> Any:
    """Returns the tf.data.Dataset of a shard's converted rows, in deterministic order."""
    lengths = self.feature_lengths
    options = import_tensorflow().data.Options()
    options.deterministic = True
    examples = self._examples(lengths, shard)
    with self._seqio_errors():
      dataset = self.converter()(examples, task_feature_lengths=lengths).with_options(options)
    return dataset.repeat() if self.max_batches is not None and (self.num_epochs or 1) > 1 else dataset

  @functools.cached_property
  def judge(self) -> Any:
    """Computes the task's metrics; None if it has none, or the input does not have each example once."""
    is_whole = self.num_epochs == 1 and self.max_batches is None and not self.skip_batches and not self.packing
    if not (is_whole and self.task_metrics and getattr(self._task, 'metric_objs', None)):
      return None
    return SeqIoMetrics(examples=self)

  def make_iterator(self, shard_index: int = 0, shard_count: int = 1) -> 'SeqIoIterator':
    return SeqIoIterator(self, base.shard_rows(self.batch_size, shard_index, shard_count))

  def reshard_states(self, states: Sequence[base.State], shard_count: int) -> list[base.State]:
    digests = {name: value for state in states for name, value in state['digests'].items()}
    return [{**states[0], 'digests': digests}] * shard_count

  def identity(self) -> dict[str, Any]:
    """Returns the settings that affect the batches, as JSON."""
    names = 'task split batch_size architecture packing loss_on_targets_only shuffle seed num_epochs skip_batches '
    names += 'num_shards use_cached trim_output_features'
    return {'kind': 'seqio', **{name: getattr(self, name) for name in names.split()}, 'lengths': self.feature_lengths}


class SeqIoIterator(base.InputIterator):
  """Iterates over the rows of one process."""

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
    """Reads the next rows of the shards, padded at the end of the data, and stores their digests."""
    assert self._streams is not None
    parts, settings = [], self._settings
    for shard, stream in self._streams.items():
      try:
        features = next(stream)
      except StopIteration:
        if settings.num_epochs is None and settings.max_batches is None:
          raise UserError(
            f'split {settings.split!r} of SeqIO task {settings.task} ended after {self._num_batches} batches, although '
            'SeqIO repeats it: it has no examples, or is a mixture with such a task. Correct its data, or leave out '
            'the tasks without examples.'
          ) from None
        raise
      except Exception as error:
        message = str(error).partition('\nTraceback')[0]  # TensorFlow may append the stack of a preprocessor
        raise JobError(
          f'reading batch {self._num_batches} of SeqIO task {settings.task} failed: {type(error).__name__}: {message}'
        ) from error
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
    logging.info('Reading SeqIO task %s from its beginning to batch %d.', self._settings.task, self._num_batches)
    self._open(self._settings.skip_batches + self._num_batches - 1)
    try:
      self._read()
    except StopIteration:
      self._digests = {}
    if not self._digests or not self._digests.items() <= state['digests'].items():
      self.close()
      raise UserError(
        f'batch {self._num_batches - 1} of SeqIO task {self._settings.task} differs from when the job was saved: its '
        'data or preprocessors have changed, or use random numbers without a seed of SeqIO. Restore them, or start a '
        'new job.'
      )

  def close(self) -> None:
    self._streams = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TfExampleInput(SeqIoInput):
  """Texts in TFRecord files of tf.train.Examples, without targets, which T5X can infer from.

  Attributes:
    paths: files, or glob patterns.
    inputs_key: the feature with the text.
    sentencepiece_model_file: the model of the vocabulary; None for bytes.
    extra_ids: the number of extra ids of the vocabulary.
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
      raise UserError(f'paths = {self.paths} match no file: correct them.')
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


def make_prompt(features: Mapping[str, Any], number: int, max_tokens: int) -> Prompt:
  """Returns the prompt of an example.

  Args:
    features: the features [T] of the example's row, as a SeqIO feature converter returns them.
    number: the number of the example, which becomes the id of the prompt.
    max_tokens: the maximum number of tokens to generate for an encoder-decoder. A prefix language model reads the token
      0 and the inputs, and generates until the row is full.

  Raises:
    UserError: the row has no inputs.
  """
  if 'encoder_input_tokens' in features:
    ids = np.trim_zeros(features['encoder_input_tokens'], 'b')
  elif 'decoder_causal_attention' in features:
    row = features['decoder_input_tokens']
    ids = row[: int(features['decoder_causal_attention'].sum())]
    max_tokens = len(row) - len(ids) + 1
  else:
    raise UserError("architecture = 'decoder_only' has no inputs to decode from: use 'prefix_lm' with their length.")
  if not len(ids):
    raise UserError(f'example {number} of the SeqIO task has no inputs to decode from: remove it from the task.')
  return Prompt(prompt_ids=tuple(ids.tolist()), max_tokens=max_tokens, id=number)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeqIoPrompts:
  """The inputs of a SeqIO task as prompts.

  Attributes:
    examples: a SeqIoInput with `packing=False` and `num_epochs`.
    n: the number of continuations per prompt.
  """

  examples: Any
  n: int = 1

  def __post_init__(self):
    if self.examples.packing or self.examples.num_epochs is None:
      raise UserError('examples of SeqIoPrompts must have packing = False and num_epochs = 1.')

  def read(self) -> list[Prompt]:
    """Returns the prompts with their texts; `id` is the number of the example, from 0 on."""
    examples, prompts = self.examples, []
    for number, features in enumerate(examples.features().as_numpy_iterator()):
      prompt = make_prompt(features, number, examples.feature_lengths['targets'])
      text = examples.inputs_vocabulary.decode([token for token in prompt.prompt_ids or () if token])
      prompts.append(dataclasses.replace(prompt, prompt=text if isinstance(text, str) else None, n=self.n))
    if not prompts:
      raise UserError(f'split {examples.split} of SeqIO task {examples.task} has no examples: choose another split.')
    return prompts


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefixPrompts:
  """Adds the start and end-of-text tokens to prompts, as T5X's decoder-only models read inputs."""

  source: PromptSource
  tokenizer: Tokenizer
  start_id: int = 0

  def read(self) -> list[Prompt]:
    """Returns the prompts of the source; prompts with ids are unchanged."""
    return [self._add_ids(prompt) for prompt in self.source.read()]

  def _add_ids(self, prompt: Prompt) -> Prompt:
    if prompt.prompt is None or prompt.prompt_ids is not None:
      return prompt
    ids = (self.start_id, *self.tokenizer.encode(prompt.prompt), self.tokenizer.eos_id)
    return dataclasses.replace(prompt, prompt_ids=ids)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeqIoMetrics:
  """Computes the metric_fns of a SeqIO task with SeqIO's Evaluator, as T5X's InferenceEvaluator does.

  Predict metrics use the tokens that the model generates from the inputs, score metrics the log-probability of each
  example's targets. SeqIO decodes, postprocesses and calls the functions.

  Attributes:
    examples: a SeqIoInput of one task, with each example once, in a row of its own.
  """

  examples: Any

  def __post_init__(self):
    if self._kinds() - {1, 2, 3}:
      raise UserError(
        f'SeqIO task {self.examples.task} has a metric of intermediate values of the model, which is not supported: '
        'remove it from the task, or set task_metrics = False.'
      )

  def _kinds(self) -> set[int]:  # of seqio.metrics.ModelOutputType
    task = find_task(self.examples.task, self.examples.modules)
    return {int(metric.model_output_type) for metric in task.metric_objs}

  @property
  def wants_texts(self) -> bool:
    return bool(self._kinds() & {1, 3})

  @property
  def wants_scores(self) -> bool:
    return 2 in self._kinds()

  @functools.cached_property
  def _evaluator(self) -> Any:
    examples = self.examples
    return import_seqio().Evaluator(
      examples.task,
      examples.converter(),
      eval_split=examples.split,
      use_cached=examples.use_cached,
      seed=examples.seed,
      sequence_length=examples.lengths and examples.feature_lengths,
      shuffle=examples.shuffle,
      async_compute_metrics=False,
    )

  def prompts(self) -> list[Prompt]:
    """Returns the prompt of each example."""
    numbered = self._evaluator.cached_model_datasets[self.examples.task].as_numpy_iterator()
    max_tokens = self.examples.feature_lengths['targets']
    return [make_prompt(features, int(index), max_tokens) for index, features in numbered]

  def metrics(self, step: int, texts: Sequence[Completion] | None, scores: np.ndarray | None) -> dict[str, float]:
    """Returns the task's scalar metrics. Raises a JobError if a metric fails.

    Args:
      step: the train step.
      texts: the completion of each prompt, if `wants_texts`.
      scores: the log-probability of each example's targets, if `wants_scores`.
    """

    def predict(_: Any) -> tuple[list[tuple[int, list[int]]], dict[str, list[float]]]:
      assert texts is not None
      width = max(len(text.ids) for text in texts)
      rows = [(index, text.ids + [0] * (width - len(text.ids))) for index, text in enumerate(texts)]
      return rows, {'scores': [sum(text.logprobs) if text.score is None else text.score for text in texts]}

    def score(dataset: Any) -> list[tuple[int, float]]:
      assert scores is not None
      return [(index, float(scores[index])) for index in range(int(dataset.cardinality()))]

    try:
      future, _ = self._evaluator.evaluate(
        compute_metrics=True,
        step=step,
        predict_fn=lambda dataset: predict(dataset)[0],
        predict_with_aux_fn=predict,
        score_fn=score,
      )
      values = future.result()[self.examples.task]
    except Exception as error:  # in the user's metric_fn or postprocessor
      raise JobError(
        f'the metrics of SeqIO task {self.examples.task} failed: {type(error).__name__}: {error}'
      ) from error
    numbers = {name: getattr(value, 'value', value) for name, value in values.items()}
    return {name: float(value) for name, value in numbers.items() if isinstance(value, float | int | np.number)}
