"""Loads a job's model into Python, such as a notebook, for its weights, logits and generated text, on any mesh.

from spmd_tasks import load

lm = load('runs/tiny')                                    # the newest checkpoint, on all devices
lm = load('models/llama')                                 # or a Hugging Face model folder, or hf://org/name
lm.generate(['import '], max_tokens=40, temperature=0.8)  # the same texts as --mode decode_once
lm.chat('How warm is it?', max_tokens=40)                 # one message or a conversation, by the chat template
lm.generate(['import '], adapter='french')                # if the experiment has `adapters`
lm.logits(ids)                                            # float32 [B, T, V]
lm.model.apply(lm.variables, {'ids': ids})               # the Linen module itself
"""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import dataclasses
import functools
import itertools
import json
from typing import Any

from etils import epath
import flax.linen as nn
import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
import numpy as np
import numpy.typing as npt

from spmd_tasks.activity import doing
from spmd_tasks.config import resolve
from spmd_tasks.config.from_saved import from_json
from spmd_tasks.config.saved_config import read_saved_config
from spmd_tasks.decoding import DecodeSteps, Prompt, generate
from spmd_tasks.decoding.decode_model import check_reads_tokens
from spmd_tasks.decoding.draft_model import DraftModel
from spmd_tasks.decoding.generation import search
from spmd_tasks.decoding.prompts import PromptTokenizer, chat_prompt, check_prompt
from spmd_tasks.decoding.sampling import prompt_seed
from spmd_tasks.decoding.scoring import TextScore, score_texts
from spmd_tasks.distributed.initialization import skip_absent_tpu
from spmd_tasks.errors import UserError
from spmd_tasks.experiment import Job, partition_job
from spmd_tasks.extensions import call, formats
from spmd_tasks.files import is_remote, read_text
from spmd_tasks.inputs import Tokenizer
from spmd_tasks.inputs.tokenizer_files import FileTokenizer
from spmd_tasks.layers import EncoderDecoderLm
from spmd_tasks.programs.job_directory import CheckpointRecord
from spmd_tasks.programs.restored_weights import mesh_of_all_devices, restore_evaluation_variables
from spmd_tasks.runtime import PartitionedModel
from spmd_tasks.runtime.compilation import StepsByShape
from spmd_tasks.runtime.partition import EvaluationStep
from spmd_tasks.runtime.task import Variables
from spmd_tasks.sharding import padding
from spmd_tasks.sharding.explicit_axes import with_axis_type
from spmd_tasks.sharding.specs import even_spec
from spmd_tasks.store_files import local_folder, place_to_read


@doing('loading the model')
def load(
  job_log_dir: epath.PathLike,
  *,
  step: int | None = None,
  mesh: Mesh | Sequence[int] | None = None,
  overrides: Sequence[str] = (),
  experiment_path: Sequence[epath.PathLike] = (),
) -> 'LoadedModel':
  """Loads the model of a training job, which may still be running; writes nothing.

  Args:
    job_log_dir: the job's directory, with its config.json and checkpoints; or a Hugging Face model folder.
    step: the checkpoint's step; None is the newest.
    mesh: the sizes of the experiment's mesh axes, such as (1, 4, 2), or a jax Mesh with these axes. Default: the mesh
      of `overrides`; else the saved mesh if it fits the number of devices; else one axis of all devices.
    overrides: `path=value` changes of the saved config, such as 'task.decode.num_slots=2'.
    experiment_path: directories from which the experiment's module may be imported, if it is neither registered nor
      imported already.

  Raises:
    UserError: the directory has no valid config.json, its experiment may not be imported, or the mesh does not fit the
      devices or the model.
    CheckpointError: there is no such checkpoint, or it is damaged.
  """
  skip_absent_tpu()
  directory = place_to_read(job_log_dir)
  if not (directory / 'config.json').exists():
    raise UserError(f'{directory} has no config.json, so it is not a job: correct the path, or train first.')
  if is_remote(directory) and 'experiment' not in json.loads(read_text(directory / 'config.json')):
    directory = local_folder(directory)  # a folder of another format
  recognized = filter(None, (call(fmt.recognize, directory) for fmt in formats() if fmt.recognize))
  name, format_overrides = next(recognized, (None, ()))
  if name is not None:
    job = resolve(name, [*format_overrides, *overrides]).build()
  else:
    job = from_json(read_saved_config(directory / 'config.json'), overrides, experiment_path).build()
  if mesh is None:
    mesh = mesh_of_all_devices(job.experiment, overrides)
  elif not isinstance(mesh, Mesh):
    mesh = dataclasses.replace(job.experiment.mesh_spec(), ici_mesh_shape=tuple(mesh), dcn_mesh_shape=None).build()
  partitioned = partition_job(job, mesh)
  with contextlib.closing(CheckpointRecord(directory).open_checkpoints(read_only=True)) as checkpointer:
    part = job.task.decoding_variables
    restored = restore_evaluation_variables(partitioned, checkpointer, step, part, experiment=job.experiment)
  return LoadedModel(job=job, step=restored.step, partitioned=partitioned, padded_variables=restored.variables)


def load_draft(job: Job, model: PartitionedModel) -> DraftModel | None:
  """Loads `task.decode.draft_model` onto the mesh of the job's model; returns None if it is not set.

  Raises a UserError: it cannot be loaded, or its tokens differ.
  """
  path = job.task.as_task('text generation').decode.draft_model
  if not path:
    return None
  assert isinstance(model.mesh, Mesh)
  folder, _, overrides = path.partition('?')
  draft = load(folder, mesh=model.mesh, overrides=overrides.split('&') if overrides else ())
  if not _same_tokens(job.tokenizer, draft.job.tokenizer):
    raise UserError(f'draft_model={path!r} has other tokens than {job.name}: choose a model with the same tokenizer.')
  dtype = draft.job.task.as_task('a draft model').decode.weights_dtype
  return DraftModel(model=draft.partitioned, variables=draft.padded_variables, weights_dtype=dtype)


def _same_tokens(own: Tokenizer | None, other: Tokenizer | None) -> bool:
  """Returns whether two tokenizers have the same vocabulary, even if their files differ; true if one is None."""
  if own is None or other is None or own.fingerprint() == other.fingerprint():
    return True
  if not (isinstance(own, FileTokenizer) and isinstance(other, FileTokenizer)):
    return False
  return own.vocabulary() == other.vocabulary()


def _tokens_of(number: int, text: Any) -> tuple[list[int], list[int]]:
  """Returns the tokens of a text to score, lists of integers."""
  if isinstance(text, Sequence | np.ndarray) and not isinstance(text, str) and len(text) == 2:
    context, continuation = map(np.asarray, text)
    if all(part.ndim == 1 and (part.dtype.kind in 'iu' or not part.size) for part in (context, continuation)):
      return context.tolist(), continuation.tolist()
  raise UserError(
    f'text {number} to score must be (tokens of a context, tokens of its continuation), not {text!r:.100}: encode '
    'texts with `tokenizer.encode`.'
  )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class LoadedModel:
  """A model with a checkpoint's weights on a mesh; `load` creates it.

  Attributes:
    job: the built experiment.
    step: the step of the checkpoint.
    partitioned: the partitioned model.
    padded_variables: the model's variables as they are stored on the mesh. `params` are the weights, averaged if the
      task evaluates with averaged weights.
  """

  job: Job
  step: int
  partitioned: PartitionedModel
  padded_variables: Variables

  def __repr__(self) -> str:
    axes = ' x '.join(f'{name} {size}' for name, size in self.partitioned.mesh.shape.items())
    return f'LoadedModel({self.job.name}, step {self.step}, {self.num_parameters:,} parameters, mesh {axes})'

  @property
  def num_parameters(self) -> int:
    """The number of parameters of the model, without padding."""
    return self.partitioned.total_num_params

  @property
  def model(self) -> nn.Module:
    """The Linen module, for `lm.model.apply(lm.variables, {'ids': ids})`."""
    return self.job.task.model

  @property
  def mesh(self) -> Mesh | AbstractMesh:
    """The mesh of `variables`, with the task's axis types: call a model that needs them in `jax.set_mesh(mesh)`."""
    mesh = self.partitioned.mesh
    return with_axis_type(mesh, AxisType.Explicit) if self.job.task.explicit_axes else mesh

  @property
  def tokenizer(self) -> Tokenizer | None:
    """The tokenizer of the job's inputs; None if they have none."""
    return self.job.tokenizer

  @functools.cached_property
  def variables(self) -> Variables:
    """The model's variables in their true shapes, by collection; `params` are the weights.

    Trees of jax arrays, sharded over the dimensions that the mesh divides evenly. Arrays without padding share their
    memory with `padded_variables`; the others are copied once.
    """
    model, mesh = self.partitioned, self.mesh

    def unpadded(x, true, spec):
      if x.shape != true.shape:
        even = padding.evenly_divided_spec(true.shape, spec, mesh.shape)
        sharding = NamedSharding(model.mesh, even)
        x = jax.jit(lambda x: padding.unpad(x, true), out_shardings=sharding)(x)
      if mesh is model.mesh:
        return x
      return jax.device_put(x, NamedSharding(mesh, even_spec(spec, true.shape, mesh.shape)))

    return jax.tree.map(unpadded, self.padded_variables, model.abstract_state.variables, model.state_specs.variables)

  @property
  def weights(self) -> Any:
    """The weights in their true shapes: `variables['params']`."""
    return self.variables['params']

  def logits(self, ids: npt.ArrayLike, encoder_ids: npt.ArrayLike | None = None) -> jax.Array:
    """Returns float32 logits [B, T, V] of tokens [B, T], by the forward pass of evaluation.

    Each row is one document. No token is added: put the tokenizer's `bos_id` first, as training rows have it. Logits at
    t predict token t + 1. Each new [B, T] is compiled once.

    Encoder-decoders: the encoder reads all of `encoder_ids` [B, S], and `ids` begin with the decoder's start token.
    Prefix language models: the prefix is empty.
    """
    arrays = {'ids': np.asarray(ids)} | ({} if encoder_ids is None else {'encoder_ids': np.asarray(encoder_ids)})
    for name, array in arrays.items():
      if array.ndim != 2 or not array.size or not np.issubdtype(array.dtype, np.integer):
        raise UserError(
          f'{name} {array.dtype}{list(array.shape)} must be integers [batch, length], not empty: put a single text in '
          'a list.'
        )
    check_reads_tokens(self.job.train_input.element_spec(), self.job.task.decode)
    if isinstance(self.model, EncoderDecoderLm) != (encoder_ids is not None):
      remedy = 'give encoder_ids' if encoder_ids is None else 'leave encoder_ids out'
      has = 'an encoder' if encoder_ids is None else 'no encoder'
      raise UserError(f'{self.job.name} has {has}: {remedy}.')
    batch = {name: array.astype(np.int32) for name, array in arrays.items()}
    step = self._forward_steps.of(batch)
    logits = step.with_variables(self.padded_variables, step.place(batch))['logits']
    for name, array in arrays.items():
      if array.size and not 0 <= array.min() <= array.max() < logits.shape[-1]:
        raise UserError(
          f'{name} from {array.min()} to {array.max()} must be in the vocabulary, [0, {logits.shape[-1]}).'
        )
    return logits

  @property
  def max_len(self) -> int:
    """The maximum length of a generated or scored text: `task.decode.max_len`, or else the training length."""
    return self._decoder[0].max_len

  def generate(
    self,
    prompts: Sequence[str | Prompt],
    *,
    max_tokens: int | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    adapter: str | None = None,
  ) -> list[str]:
    """Generates a completion of each prompt, the same as --mode decode_once.

    Args:
      prompts: texts, to which the token for the beginning of text is prepended; or Prompts, with their own settings.
      max_tokens, temperature, top_k, top_p: for prompts that are texts; None is the default of `task.decode`.
      seed: of the sampling; None is the experiment's. Each prompt has its own noise, by its position in the list.
      adapter: the name of one of the experiment's `adapters`; None is the model without an adapter.

    Raises a UserError: the job has no tokenizer, or a prompt does not fit the model.
    """
    prompts = [prompts] if isinstance(prompts, str) else list(prompts)

    def as_prompt(number: int, prompt: str | Prompt) -> Prompt:
      if isinstance(prompt, Prompt):
        return prompt
      if not isinstance(prompt, str):
        remedy = 'give tokens as Prompt(prompt_ids=...)'
        raise UserError(f'prompt {number + 1} must be a text or a Prompt, not {prompt!r:.100}: {remedy}.')
      own_seed = None if seed is None else prompt_seed(seed, number)
      sampling: Any = {'temperature': temperature, 'top_k': top_k, 'top_p': top_p, 'seed': own_seed}
      return Prompt(prompt=prompt, max_tokens=max_tokens, **sampling, adapter=adapter)

    texts = dict(self.complete(list(itertools.starmap(as_prompt, enumerate(prompts)))))
    return [texts[number] for number in range(len(prompts))]

  def chat(
    self,
    messages: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any] | Sequence[Mapping[str, Any]]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_variables: Mapping[str, Any] = {},
    max_tokens: int | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    adapter: str | None = None,
  ) -> list[str]:
    """Generates the assistant's answer to each conversation, the same as the server's.

    The experiment's chat template formats the conversation: the model folder's template, or a plain transcript. Answers
    end where the template ends a turn.

    Args:
      messages: a conversation: one message of the user as a text, or a message or a list of messages with `role` and
        `content`. Or several conversations: a list of texts, or of lists of messages.
      tools: descriptions of functions that the answers may call, in the format of OpenAI's API.
      template_variables: other variables of the template, such as {'enable_thinking': False}.
      max_tokens, temperature, top_k, top_p, seed, adapter: as in `generate`.

    Raises a UserError: as `generate`, or the template refuses the messages.
    """
    check_reads_tokens(self.job.train_input.element_spec(), self.job.task.decode)
    if self.tokenizer is None:
      raise UserError(f'{self.job.name} cannot chat, because its inputs have no tokenizer: give them one.')
    conversations: Any = [messages] if isinstance(messages, str | Mapping) else list(messages)
    if conversations and all(isinstance(message, Mapping) for message in conversations):
      conversations = [conversations]
    template = self.job.experiment.chat_template()
    settings: Any = {'temperature': temperature, 'top_k': top_k, 'top_p': top_p, 'adapter': adapter}
    settings |= {'max_tokens': max_tokens, 'tools': tools, 'variables': template_variables}
    prompts = []
    for number, turns in enumerate(conversations):
      turns = [{'role': 'user', 'content': turns}] if isinstance(turns, str) else turns
      if isinstance(turns, Mapping) or not all(isinstance(turn, Mapping) and 'role' in turn for turn in turns):
        raise UserError(
          f'conversation {number + 1} must be a text or a list of messages, each with role and content, not '
          f'{turns!r:.100}.'
        )
      own_seed = None if seed is None else prompt_seed(seed, number)
      prompts.append(chat_prompt(turns, template, self.tokenizer, seed=own_seed, **settings))
    return self.generate(prompts)

  def complete(self, prompts: Sequence[Prompt]) -> Iterator[tuple[int, str]]:
    """Yields (index of the prompt, its completion) as completions finish.

    Raises a UserError: as `generate`, or a prompt has an `n` above 1.
    """
    steps, tokenizer, variables = self._decoder
    requests, matchers = [], []
    for number, prompt in enumerate(prompts):
      where = f'prompt {number + 1}'
      prompt = check_prompt(prompt, where)
      if prompt.n not in (None, 1):
        raise UserError(f'{where} has n={prompt.n}, but each prompt gets one completion here: repeat the prompt.')
      requests.append(tokenizer.request(prompt, where, number)[0])
      matchers.append(tokenizer.matcher(prompt, where))
    constraints = matchers if any(matcher is not None for matcher in matchers) else None
    if steps.settings.num_beams > 1:
      for number, beams in search(steps, variables, requests, decode=tokenizer.decode):
        yield number, beams[0].text
    else:
      for number, completion in generate(steps, variables, requests, decode=tokenizer.decode, matchers=constraints):
        yield number, completion.text

  def score(
    self, texts: Sequence[tuple[Sequence[int], Sequence[int]]], *, num_rows: int = 8, adapter: str | None = None
  ) -> Iterator[tuple[int, TextScore]]:
    """Yields (index of the text, log-probabilities of its continuation), longest texts first.

    The weights are stored as for generation (`task.decode.weights_dtype`).

    Args:
      texts: (tokens of a context, at least one; tokens of its continuation). No token is added: put the tokenizer's
        `bos_id` first if training rows have it.
      num_rows: the number of texts in a batch.
      adapter: as in `generate`.

    Raises a UserError: a text is not two sequences of tokens, is too long, or has tokens outside the vocabulary.
    """
    steps, tokenizer, variables = self._decoder
    number = 0 if adapter is None else tokenizer.adapter_number(adapter, 'score')
    tokens = [_tokens_of(i + 1, text) for i, text in enumerate(texts)]
    return score_texts(steps, variables, tokens, num_rows=num_rows, adapter=number)

  @functools.cached_property
  def _forward_steps(self) -> StepsByShape[EvaluationStep]:
    return StepsByShape(self.partitioned.forward_step)

  @functools.cached_property
  @doing('preparing to generate text')
  def _decoder(self) -> tuple[DecodeSteps, PromptTokenizer, Variables]:
    steps = DecodeSteps(self.partitioned, draft=load_draft(self.job, self.partitioned))
    tokenizer = PromptTokenizer(steps=steps, tokenizer=self.tokenizer, seed=self.job.experiment.seed)
    return steps, tokenizer, steps.storage.store(self.padded_variables, free=False)
