"""Imports and exports models of Hugging Face's families: a folder (config.json, safetensors) <-> a LanguageModel.

    folder = open_folder('models/llama')
    folder.build_model(dtype='bfloat16')           # LanguageModel(...), unbound
    folder.read_weights(partitioned_model)         # sharded and padded; each process reads the bytes of its shards
    export_folder(Path('out'), model, weights)     # a folder that `transformers` loads

No code of a folder is run, and no pickle is read. An unknown key of config.json or an unknown tensor is an error.

Read `_families.py` first: it has one table per family. Then:

    _config_keys.py, _special_keys.py   kinds of config keys
    _decoder.py, _describe.py           the Decoder, a family-independent description, to a LanguageModel and back
    _tensors.py                         rules between tensors and weights
    _folder.py, _safetensors.py         reading and writing folders
    _peft.py                            low-rank adapters in folders of `peft`
    adapter_stacks.py                   several adapters of one model, selected per request
    base_digest.py                      identifies the base model of a checkpoint of adapters
    sentence_transformers.py            pooling of token vectors to embeddings
    experiments.py, origin.py           experiments that start from a folder, and its weights
    exporting.py                        --mode export
"""

from spmd_tasks.extensions import Extension, Format
from spmd_tasks.lazy_exports import lazy_exports

with lazy_exports(globals()):
  from spmd_tasks.bridges.huggingface._folder import Folder, open_folder
  from spmd_tasks.bridges.huggingface._peft import AdapterFolder, open_adapter
  from spmd_tasks.bridges.huggingface.experiments import PipelinedPretrainedModel, PretrainedLanguageModel
  from spmd_tasks.bridges.huggingface.exporting import export_folder

EXTENSION = Extension(
  name='huggingface',
  formats=(
    Format(
      name='hf',
      help='a Hugging Face model folder',
      origin='spmd_tasks.bridges.huggingface.origin:open_origin',
      export='spmd_tasks.bridges.huggingface.exporting:export_model',
      recognize='spmd_tasks.bridges.huggingface.origin:recognize',
    ),
    Format(
      name='peft',
      help='a peft folder with only the adapters',
      export='spmd_tasks.bridges.huggingface.exporting:export_adapters',
    ),
  ),
)
