"""Exports a model as a folder that `transformers` loads, or its adapters as a folder that `peft` loads.

    spmd-tasks --mode export --format hf --job_log_dir runs/tuned --out models/tuned
    spmd-tasks --mode export --format hf --exp hf.Model --set model=models/llama --out models/again
    spmd-tasks --mode export --format peft --job_log_dir runs/lora --out models/adapter

The folder has the job's evaluation weights (averaged, if the job averages), with low-rank adapters merged; with
`--format peft`, only the adapters. One tensor is in memory at a time.
"""

from collections.abc import Callable, Mapping
import contextlib
import dataclasses
import functools
import json
import os
from pathlib import Path
import shutil
import sys
from typing import Any

from etils import epath
import jax
from jax.sharding import Mesh
import numpy as np
from tqdm import tqdm

from spmd_tasks import exit_codes
from spmd_tasks.adapters.adapted_weights import adapters_of
from spmd_tasks.adapters.merging import merge_adapters
from spmd_tasks.bridges._lazy_arrays import LazyArray, lazy_array
from spmd_tasks.bridges._rules import RuleTable
from spmd_tasks.bridges.huggingface._config_keys import Values, is_inert
from spmd_tasks.bridges.huggingface._decoder import Decoder
from spmd_tasks.bridges.huggingface._describe import describe_model, model_slots
from spmd_tasks.bridges.huggingface._families import FAMILIES, Family
from spmd_tasks.bridges.huggingface._folder import CONFIG_FILE, Folder, weights_on_mesh
from spmd_tasks.bridges.huggingface._peft import export_adapter
from spmd_tasks.bridges.huggingface._safetensors import MAX_SHARD_BYTES, check_free, dtype_of, new_folder, write_tensors
from spmd_tasks.bridges.huggingface.base_digest import folder_digest
from spmd_tasks.bridges.huggingface.origin import FolderOrigin
from spmd_tasks.bridges.huggingface.sentence_transformers import write_pooling
from spmd_tasks.command import OpenJob
from spmd_tasks.distributed import is_primary
from spmd_tasks.distributed.watchdog import watch_steps
from spmd_tasks.errors import UserError
from spmd_tasks.experiment import Job, partition_job
from spmd_tasks.files import write_durably
from spmd_tasks.inputs import ChatTemplate
from spmd_tasks.inputs.tokenizer_files import read_json_object
from spmd_tasks.layers import EncoderDecoderLm
from spmd_tasks.programs.job_directory import CheckpointRecord
from spmd_tasks.programs.restored_weights import restore_evaluation_variables
from spmd_tasks.runtime import DecodeSettings, PartitionedModel

_HEAD = 'embedding/softmax_kernel'
_MORE_TEMPLATES = 'additional_chat_templates'
_COPIED = (
  *('tokenizer.json', 'tokenizer_config.json', 'special_tokens_map.json', 'added_tokens.json', 'tokenizer.model'),
  'spiece.model',
  *('vocab.json', 'merges.txt', 'vocab.txt', 'generation_config.json', 'chat_template.jinja', 'chat_template.json'),
  _MORE_TEMPLATES,
)


def export_model(
  opened: OpenJob, target: epath.Path, *, step: int | None, mesh: Mesh, only_adapters: bool = False
) -> int:
  """Writes a checkpoint as a Hugging Face model folder; returns the exit code OK.

  Every process reads its shards, and process 0 writes.

  Args:
    opened: the job.
    target: the folder to write, which must not exist.
    step: the step of the checkpoint; None for the newest.
    mesh: the mesh to read the checkpoint on.
    only_adapters: whether to write only the adapters, as a folder of `peft`.

  Raises:
    CheckpointError: there is no such checkpoint, or it is damaged.
    UserError: the format cannot express the model, or the target exists.
  """
  job, job_log_dir, emergency = opened.job, opened.directory, opened.emergency
  local = Path(os.fspath(target))
  task = job.task.as_task('--mode export')
  check_free(local)
  model = partition_job(job, mesh)
  origin = job.experiment.origin()
  limit_s = job.experiment.first_step_timeout_s
  with (
    emergency.on_failure(),
    watch_steps(job_log_dir / 'export', emergency, timeout_s=limit_s, first_step_timeout_s=limit_s) as watchdog,
    tqdm(unit='tensor', file=sys.stderr, disable=not is_primary() or not sys.stderr.isatty()) as bar,
  ):
    folder = origin.open() if isinstance(origin, FolderOrigin) else None
    if only_adapters and folder is None:
      raise UserError(f'{job.name} does not start from a folder, which `peft` needs as the base: use --format hf.')
    with contextlib.closing(CheckpointRecord(job_log_dir).open_checkpoints(read_only=True)) as checkpointer:
      is_changed = adapters_of(task.model) or task.frozen_dtype  # even before the first step
      if folder is not None and not step and not is_changed and checkpointer.is_fresh():
        restored, weights = 0, folder.lazy_weights(job.task.model, model.canonical_state.weights)
      else:
        variables, restored, _ = restore_evaluation_variables(model, checkpointer, step, experiment=job.experiment)
        params = variables['params']
        if not only_adapters:  # also dequantizes
          params = merge_adapters(model, params)
        weights = weights_on_mesh(model, params)

    if only_adapters:
      assert folder is not None
      digest = folder_digest(str(folder.path))
      num = export_adapter(local, job.task.model, weights, base=folder, digest=digest, is_writer=is_primary())
      if is_primary():
        print(f'exported step {restored} to {target}: adapters of {num} modules', flush=True)
      return exit_codes.OK

    def on_tensor(done: int, total: int) -> None:
      bar.total = total
      bar.update()
      watchdog.beat(restored, 'export')

    path = getattr(job.tokenizer, 'path', None)
    tokenizer_file = Path(path) if path and Path(path).name == 'tokenizer.json' else None
    architecture = export_folder(
      local,
      job.task.model,
      weights,
      origin=folder,
      settings=_settings(job),
      finish=functools.partial(_write_other_files, job, model),
      tokenizer_file=tokenizer_file if folder is None else None,
      is_writer=is_primary(),
      on_tensor=on_tensor,
    )
  if is_primary():
    print(f'exported step {restored} to {target}: {architecture}', flush=True)
  return exit_codes.OK


export_adapters = functools.partial(export_model, only_adapters=True)


def _settings(job: Job) -> Mapping[str, Any]:
  """Returns the keys of config.json that do not follow from the model."""
  lengths = [spec.shape[1] for spec in job.train_input.element_spec().values() if len(spec.shape) > 1]
  tokenizer = job.tokenizer
  ids = {} if tokenizer is None else {'bos_token_id': tokenizer.bos_id, 'eos_token_id': tokenizer.eos_id}
  if isinstance(job.task.model, EncoderDecoderLm):  # has no maximum length
    decode = job.task.decode or DecodeSettings()
    ends = {'eos_token_id': decode.eos_ids[0]} if decode.eos_ids else {}
    start = {'decoder_start_token_id': decode.start_id, 'pad_token_id': getattr(tokenizer, 'pad_id', 0)}
    return ids | ends | start
  return ids | {'max_position_embeddings': max(lengths)} if lengths else ids


def _write_other_files(job: Job, model: PartitionedModel, folder: Path) -> None:
  """Writes the end-of-text tokens, the chat template and the pooling."""
  _write_eos_ids(job, folder)
  _write_chat_template(job, folder)
  _write_pooling(job, model, folder)


def _write_eos_ids(job: Job, folder: Path) -> None:
  """Writes the job's end-of-text tokens as `eos_token_id` to generation_config.json and config.json."""
  is_scorer = getattr(getattr(job.task.model, 'embedding', None), 'num_labels', None) is not None
  if is_scorer or isinstance(job.task.model, EncoderDecoderLm):
    return
  decode, tokenizer = job.task.decode or DecodeSettings(), job.tokenizer
  ends = list(decode.end_ids(None if tokenizer is None else tokenizer.eos_id))
  config = read_json_object(str(folder / CONFIG_FILE))
  names = ('bos_token_id', 'eos_token_id', 'pad_token_id')
  inherited = {name: config[name] for name in names if config.get(name) is not None}
  for name, absent in (('generation_config.json', inherited), (CONFIG_FILE, {})):
    values = read_json_object(str(folder / name)) or absent
    are_same = sorted(np.atleast_1d(values.get('eos_token_id') or []).tolist()) == sorted(ends)
    if are_same and (folder / name).exists():
      continue
    if ends and not are_same:
      values['eos_token_id'] = ends if len(ends) > 1 else ends[0]
    write_durably(folder / name, json.dumps(values, indent=2, sort_keys=True) + '\n')


def _write_chat_template(job: Job, folder: Path) -> None:
  """Writes the chat template of a job unless the folder already has it."""
  template, has_tokenizer = job.experiment.chat_template(), (folder / 'tokenizer.json').exists()
  if template == ChatTemplate() or not has_tokenizer:
    return
  names = ('template', 'tool_template')
  own = ChatTemplate.from_folder(str(folder))
  if own is not None and all(getattr(own, name) == getattr(template, name) for name in names):
    return
  (folder / 'chat_template.json').unlink(missing_ok=True)
  shutil.rmtree(folder / _MORE_TEMPLATES, ignore_errors=True)
  path = folder / 'tokenizer_config.json'
  config = read_json_object(str(path))
  if config.pop('chat_template', None):
    write_durably(path, json.dumps(config, indent=2, ensure_ascii=False) + '\n')
  write_durably(folder / 'chat_template.jinja', template.template)
  if template.tool_template is not None:
    (folder / _MORE_TEMPLATES).mkdir()
    write_durably(folder / _MORE_TEMPLATES / 'tool_use.jinja', template.tool_template)


def _write_pooling(job: Job, model: PartitionedModel, folder: Path) -> None:
  """Writes the files of sentence-transformers if the job trains an embedding model."""
  embedding = getattr(job.task.model, 'embedding', None)
  if embedding is not None and getattr(embedding, 'num_labels', None) == 0 and hasattr(job.experiment, 'text_reading'):
    length = model.input_layout.spec['ids'].shape[1]
    write_pooling(folder, job.experiment.text_reading(), embedding.embed_dim, length)


def export_folder(
  target: Path,
  model: Any,
  weights: Mapping[str, LazyArray],
  *,
  origin: Folder | None = None,
  tokenizer_file: Path | None = None,
  settings: Mapping[str, Any] = {},
  finish: Callable[[Path], None] = lambda folder: None,
  dtype: str | None = None,
  max_shard_bytes: int = MAX_SHARD_BYTES,
  is_writer: bool = True,
  on_tensor: Callable[[int, int], None] = lambda done, total: None,
) -> str:
  """Writes a folder; returns the name of the model's class in `transformers`.

  Args:
    target: the folder to write, which must not exist.
    model: a LanguageModel.
    weights: the model's weights by name, in the checkpoint layout.
    origin: the folder from which the model was initialized. Its family is used, and its tokenizer, generation config,
      chat template and inert settings are copied.
    tokenizer_file: a tokenizer.json to copy if there is no origin.
    settings: keys of config.json that do not affect the model, such as `eos_token_id`.
    finish: called with the folder to write further files.
    dtype: the dtype of the tensors; None for the origin's, or float32.
    max_shard_bytes, is_writer: see `write_tensors`.
    on_tensor: called after each tensor with the number of written tensors and of all tensors.

  Raises a UserError if no family can express the model, or the target exists.
  """
  if is_writer:
    check_free(target)
  decoder = describe_model(model)
  origin = None if origin is None else origin.with_nextn_heads(decoder.num_nextn)
  try:
    family, keys = _family_of(decoder, origin)
  except UserError:
    if decoder.scale_logits or decoder.tied or not decoder.num_encoder_layers:
      raise
    # In transformers, UMT5 always divides logits by sqrt(D); to express logits without that, scale the head by sqrt(D).
    decoder = dataclasses.replace(decoder, scale_logits=True)
    family, keys = _family_of(decoder, origin)
    weights = {**weights, _HEAD: weights[_HEAD] * decoder.embed_dim**0.5}
  tensors = _tensors(model, weights, decoder, family, origin, dtype)
  with new_folder(target, is_writer) as folder:
    if is_writer:
      config = _config(family, keys, origin, settings, tensors)
      write_durably(folder / CONFIG_FILE, json.dumps(config, indent=2, sort_keys=True) + '\n')
      copied = [] if origin is None else [origin.path / name for name in _COPIED]
      for path in [*copied, *([] if tokenizer_file is None else [tokenizer_file])]:
        if path.is_dir():
          shutil.copytree(path, folder / path.name)
        elif path.exists():
          shutil.copyfile(path, folder / path.name)
      finish(folder)
    writing = write_tensors(folder, tensors, is_writer=is_writer, max_shard_bytes=max_shard_bytes)
    for done, _ in enumerate(writing, 1):
      on_tensor(done, len(tensors))
  return family.architecture_of(decoder)


def _family_of(decoder: Decoder, origin: Folder | None) -> tuple[Family, Values]:
  """Returns the origin's family, or else the first that can express the Decoder, and the keys of config.json."""
  if origin is not None:
    return origin.family, origin.family.write(decoder)
  reasons = []
  for family in FAMILIES.values():
    try:
      return family, family.write(decoder)
    except UserError as error:
      reasons.append(f'{family.architecture}: {error}')
  raise UserError('no Hugging Face model is like this one:\n  ' + '\n  '.join(reasons))


def _tensors(
  model: Any, weights: Mapping[str, Any], decoder: Decoder, family: Family, origin: Folder | None, dtype: str | None
) -> dict[str, LazyArray]:
  table = RuleTable(rules=family.rules(decoder, model_slots(model)), source='the folder', target='the model').inverse()
  names = [slot.name for rule in table.rules for slot in rule.target]
  stored_dtype = (lambda name: 'float32') if origin is None else origin.stored_dtype
  dtypes = {name: jax.ShapeDtypeStruct((), dtype_of(dtype or stored_dtype(name))) for name in names}
  tensors = table.convert_lazily(weights, dtypes)
  table.check(weights, tensors)
  if family.writes_copies and not decoder.scale_logits:
    tensors |= dict.fromkeys(family.table_copies, tensors[family.names.table])
  copies = family.nextn_copies(decoder) if origin is None else origin.nextn_copies
  tensors |= {name: tensors[first] for name, first in copies.items()}
  tensors |= {name: lazy_array(np.float32(value)) for name, value in family.constant_tensors(decoder).items()}
  return tensors if origin is None else tensors | origin.unused_nextn_tensors | origin.constants


def _config(
  family: Family, keys: Values, origin: Folder | None, settings: Mapping[str, Any], tensors: Mapping[str, LazyArray]
) -> Values:
  if origin is None:  # without these keys, transformers uses the defaults of the family's own vocabulary
    settings = {'bos_token_id': None, 'eos_token_id': None, 'pad_token_id': None, **settings}
  origin_config: Mapping[str, Any] = {} if origin is None else origin.config
  inert = {
    key: value for key, value in origin_config.items() if is_inert(key) and key not in ('auto_map', 'torch_dtype')
  }
  if len(inert.get('id2label') or ()) == len(keys.get('id2label', ())):  # keep the names of the labels
    keys = {key: value for key, value in keys.items() if key not in ('id2label', 'label2id')}
  if origin is not None and family.nextn is not None and origin.unused_nextn_tensors:  # these heads are copied
    keys = keys | {key: origin_config[key] for key in (family.nextn.key,) if key in origin_config}
  model_type = next(name for name, known in FAMILIES.items() if known.architecture == family.architecture)
  largest = max(tensors.values(), key=lambda tensor: np.prod(tensor.shape))
  return {**settings, **inert, **keys, 'model_type': model_type, 'dtype': largest.dtype.name}
