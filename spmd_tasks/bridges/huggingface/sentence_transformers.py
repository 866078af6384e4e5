"""Reads and writes the files of sentence-transformers: how a text's embedding is pooled from its tokens'.

    reading = read_text_reading(folder)           # from modules.json, 1_Pooling/config.json and config.json
    write_pooling(Path('out'), reading, 768, 512)    # into a folder that `SentenceTransformer` loads

`FolderScorer` reads them, and --mode export writes them beside an embedding model.
"""

from collections.abc import Mapping
import json
from pathlib import Path
from typing import Any

from spmd_tasks.bridges.huggingface._folder import Folder, read_config
from spmd_tasks.decoding.text_scorer import TextReading
from spmd_tasks.errors import UserError
from spmd_tasks.files import write_durably
from spmd_tasks.inputs import FolderTokenizer
from spmd_tasks.inputs.tokenizer_files import read_json_object
from spmd_tasks.inputs.tokenizers import encode_prompt

MODULES = 'modules.json'
_SETTINGS, _POOLING = 'config_sentence_transformers.json', '1_Pooling'
_MODES = {'lasttoken': 'last', 'mean_tokens': 'mean', 'mean': 'mean'}  # -> TextReading.pooling; new files say `mean`
_ACTIVATIONS: dict[str, Any] = {'Identity': 'none', 'Sigmoid': 'sigmoid'}
_KINDS = ('Transformer', 'Pooling', 'Normalize')


def label_names(config: Mapping[str, Any], num_labels: int) -> tuple[str, ...]:
  """Returns the names of the labels in a config.json, or LABEL_0 and so on."""
  names = config.get('id2label') or {}
  names = names if len(names) == num_labels else {}
  return tuple(str(names.get(str(i), f'LABEL_{i}')) for i in range(num_labels))


def read_text_reading(folder: Folder) -> TextReading:
  """Returns how a folder's model scores or embeds texts.

  One label means a score from 0 to 1, as in CrossEncoder of sentence-transformers, unless `problem_type` is
  `regression`. A folder without modules.json embeds a text as the normalized vector of its last token.

  Raises:
    UserError: the files have a module, a pooling mode or an activation that is not supported.
  """
  if num_labels := folder.decoder.num_labels or 0:
    kinds: dict[Any, Any] = {'regression': 'none', 'multi_label_classification': 'sigmoid'}
    activation = kinds.get(folder.config.get('problem_type'), 'softmax' if num_labels > 1 else 'sigmoid')
    name = str((folder.config.get('sentence_transformers') or {}).get('activation_fn') or '')
    activation = _ACTIVATIONS.get(name.rpartition('.')[2]) if name else activation
    if activation is None:
      raise UserError(f'{folder.path} has the activation_fn {name}, which must be one of {", ".join(_ACTIVATIONS)}.')
    return TextReading(labels=label_names(folder.config, num_labels), ends=False, activation=activation)
  if not (folder.path / MODULES).exists():
    return TextReading(normalize=True, ends=False)
  try:
    entries = json.loads((folder.path / MODULES).read_text())
    modules = [(entry['type'].rpartition('.')[2], entry['path']) for entry in entries]
  except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
    raise UserError(f'{folder.path / MODULES} cannot be read ({error!r}): download it again.') from error
  if [kind for kind, _ in modules] not in ([*_KINDS[:2]], [*_KINDS]) or modules[0][1]:
    raise UserError(
      f'{folder.path / MODULES} has the modules {modules}, which must be {", ".join(_KINDS)} in this order, where '
      'Normalize is optional and the model is in the folder itself.'
    )
  pooling = read_config(folder.path / modules[1][1] / 'config.json', 'download the folder again')
  modes = {key.removeprefix('pooling_mode_') for key, value in pooling.items() if value is True and 'mode' in key}
  modes |= {pooling['pooling_mode']} if 'pooling_mode' in pooling else set()
  if len(modes) != 1 or not modes <= _MODES.keys():
    raise UserError(f'{folder.path} has the pooling modes {sorted(modes)}, which must be one of {sorted(_MODES)}.')
  settings = read_json_object(str(folder.path / _SETTINGS))
  prompt = (settings.get('prompts') or {}).get(settings.get('default_prompt_name')) or ''
  if prompt and pooling.get('include_prompt') is False:
    raise UserError(f'{folder.path} has include_prompt = false with the prompt {prompt!r}, which must be true.')
  (mode,) = modes
  return TextReading(pooling=_MODES[mode], normalize=len(modules) == 3, ends=False, prompt=prompt)  # type: ignore[arg-type]


def write_pooling(target: Path, reading: TextReading, num_features: int, max_len: int) -> None:
  """Writes the files of an embedding model with `num_features` features and texts of at most `max_len` tokens.

  If texts end with an end-of-text token, as in training, tokenizer.json gets a post-processor that adds it.
  """
  parts = [(kind, path) for kind, path in zip(_KINDS, ('', _POOLING, '2_Normalize'), strict=True)]
  modules = [
    {'idx': i, 'name': str(i), 'path': path, 'type': f'sentence_transformers.models.{kind}'}
    for i, (kind, path) in enumerate(parts[: 3 if reading.normalize else 2])
  ]
  modes = {f'pooling_mode_{name}': _MODES[name] == reading.pooling for name in ('lasttoken', 'mean_tokens')}
  pooling = {'word_embedding_dimension': num_features, 'pooling_mode_cls_token': False, **modes, 'include_prompt': True}
  settings = {
    'prompts': {'text': reading.prompt} if reading.prompt else {},
    'default_prompt_name': 'text' if reading.prompt else None,
    'similarity_fn_name': 'cosine',
  }
  (target / _POOLING).mkdir(exist_ok=True)
  (target / '2_Normalize').mkdir(exist_ok=True)
  files = {MODULES: modules, f'{_POOLING}/config.json': pooling, _SETTINGS: settings}
  files['sentence_bert_config.json'] = {'max_seq_length': max_len, 'do_lower_case': False}
  for name, value in files.items():
    write_durably(target / name, json.dumps(value, indent=2) + '\n')
  if not reading.ends or not (target / 'tokenizer.json').exists():
    return
  from tokenizers import Tokenizer, processors

  folder_tokenizer = FolderTokenizer(path=str(target))
  tokenizer = Tokenizer.from_file(str(target / 'tokenizer.json'))
  ids = (*encode_prompt(folder_tokenizer, ''), folder_tokenizer.eos_id)
  special_tokens = {str(tokenizer.id_to_token(i)): i for i in ids}
  *prefix, eos = special_tokens
  single, pair = (' '.join([*prefix, *texts, eos]) for texts in (('$A',), ('$A', '$B')))
  tokenizer.post_processor = processors.TemplateProcessing(
    single=single, pair=pair, special_tokens=list(special_tokens.items())
  )
  tokenizer.save(str(target / 'tokenizer.json'))
