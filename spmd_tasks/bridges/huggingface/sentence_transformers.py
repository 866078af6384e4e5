"""The files of sentence-transformers beside a model: how the vectors of tokens become that of a text.

    reading = read_text_reading(folder)               # of modules.json, 1_Pooling/config.json, the head of config.json
    write_pooling(Path('out'), reading, folder, 512)  # into a folder that `SentenceTransformer` loads

`FolderScorer` reads them, and --mode export writes them beside a model that gives texts vectors.
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
  """The names of labels in a config.json, or LABEL_0 and so on."""
  named = config.get('id2label') or {}
  named = named if len(named) == num_labels else {}
  return tuple(str(named.get(str(i), f'LABEL_{i}')) for i in range(num_labels))


def read_text_reading(folder: Folder) -> TextReading:
  """How a folder's texts are read.

  One label without another `problem_type` than `regression` is a score from 0 to 1, as in sentence-transformers'
  CrossEncoder. A folder without modules.json has the vector of the last token, of length 1.

  Raises:
    UserError: the files have another part than a model, a pooling of the last or of all tokens, and a normalization.
  """
  if num_labels := folder.decoder.num_labels or 0:
    kinds: dict[Any, Any] = {'regression': 'none', 'multi_label_classification': 'sigmoid'}
    activation = kinds.get(folder.config.get('problem_type'), 'softmax' if num_labels > 1 else 'sigmoid')
    named = str((folder.config.get('sentence_transformers') or {}).get('activation_fn') or '')
    activation = _ACTIVATIONS.get(named.rpartition('.')[2]) if named else activation
    if activation is None:
      raise UserError(f'{folder.path} has the activation {named}: known are {", ".join(_ACTIVATIONS)}.')
    return TextReading(labels=label_names(folder.config, num_labels), ends=False, activation=activation)
  if not (folder.path / MODULES).exists():
    return TextReading(normalize=True, ends=False)
  try:
    listed = json.loads((folder.path / MODULES).read_text())
    modules = [(each['type'].rpartition('.')[2], each['path']) for each in listed]
  except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
    raise UserError(f'{folder.path / MODULES} cannot be read: {error}.') from error
  kinds_found = [kind for kind, _ in modules]
  if kinds_found not in ([*_KINDS[:2]], [*_KINDS]) or modules[0][1]:
    raise UserError(
      f'{folder.path / MODULES} has the parts {modules}: known are {", ".join(_KINDS)} in this order, and the model in '
      'the folder itself.'
    )
  pooling = read_config(folder.path / modules[1][1] / 'config.json', 'download the folder again')
  modes = {key.removeprefix('pooling_mode_') for key, value in pooling.items() if value is True and 'mode' in key}
  modes |= {pooling['pooling_mode']} if 'pooling_mode' in pooling else set()
  if len(modes) != 1 or not modes <= _MODES.keys():
    raise UserError(f'{folder.path} pools by {sorted(modes)}: known are {sorted(_MODES)}, one of them.')
  settings = read_json_object(str(folder.path / _SETTINGS))
  prompt = (settings.get('prompts') or {}).get(settings.get('default_prompt_name')) or ''
  if prompt and pooling.get('include_prompt') is False:
    raise UserError(f'{folder.path} leaves the prompt {prompt!r} out of the pooling, which is not known here.')
  (mode,) = modes
  return TextReading(pooling=_MODES[mode], normalize=len(modules) == 3, ends=False, prompt=prompt)  # type: ignore[arg-type]


def write_pooling(target: Path, reading: TextReading, num_features: int, max_len: int) -> None:
  """Writes the files beside a model whose vectors have `num_features` and whose texts at most `max_len` tokens.

  Where texts are written as in training, tokenizer.json gets a post-processor that writes them so.
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
  written = {MODULES: modules, f'{_POOLING}/config.json': pooling, _SETTINGS: settings}
  written['sentence_bert_config.json'] = {'max_seq_length': max_len, 'do_lower_case': False}
  for name, value in written.items():
    write_durably(target / name, json.dumps(value, indent=2) + '\n')
  if not reading.ends or not (target / 'tokenizer.json').exists():
    return
  from tokenizers import Tokenizer, processors

  tokenizer = FolderTokenizer(path=str(target))
  made = Tokenizer.from_file(str(target / 'tokenizer.json'))
  ends = {str(made.id_to_token(i)): i for i in (*encode_prompt(tokenizer, ''), tokenizer.eos_id)}
  *before, end = ends
  single, pair = (' '.join([*before, *texts, end]) for texts in (('$A',), ('$A', '$B')))
  made.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=list(ends.items()))
  made.save(str(target / 'tokenizer.json'))
