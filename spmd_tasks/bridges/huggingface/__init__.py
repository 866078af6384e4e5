"""Models of Hugging Face's families: from a folder (config.json, safetensors) to a LanguageModel, and back.

    folder = open_folder('models/llama')
    folder.build_model(dtype='bfloat16')           # LanguageModel(...), unbound
    folder.read_weights(partitioned_model)         # sharded and padded; each process reads the bytes of its shards
    export_folder(Path('out'), model, weights)     # a folder that `transformers` loads

No code of a folder is run, and no pickle is read. A key of config.json or a tensor that is not understood is an error.

Read `_families.py` (one table per family), then `_config_keys.py` and `_special_keys.py` (kinds of keys), `_decoder.py`
(what a config says, as a model of ours and back), `_tensors.py` (rules between tensors and weights), `_folder.py`,
`_safetensors.py` (reading and writing), `_peft.py` (low-rank adapters in folders of `peft`), `adapter_stacks.py`
(several adapters beside one model), `base_digest.py` (the base that a checkpoint of adapters belongs to),
`sentence_transformers.py` (how token vectors are pooled). `experiments.py` has the bases of experiments that start from
a folder, with its defaults of requests, `origin.py` reads its weights, `exporting.py` writes folders and runs
--mode export.
"""

from spmd_tasks.extensions import Extension, Format
from spmd_tasks.lazy_exports import lazy_exports

with lazy_exports(globals(), 'EXTENSION'):
  from spmd_tasks.bridges.huggingface._folder import Folder, open_folder
  from spmd_tasks.bridges.huggingface._peft import AdapterFolder, open_adapter
  from spmd_tasks.bridges.huggingface.experiments import PipelinedPretrainedModel, PretrainedLanguageModel
  from spmd_tasks.bridges.huggingface.exporting import export_folder

EXTENSION = Extension(
  name='huggingface',
  formats=(
    Format(
      name='hf',
      help="a folder of Hugging Face's format",
      origin='spmd_tasks.bridges.huggingface.origin:open_origin',
      export='spmd_tasks.bridges.huggingface.exporting:export_model',
      recognize='spmd_tasks.bridges.huggingface.origin:recognize',
    ),
    Format(
      name='peft',
      help='a folder of peft, with the adapters alone',
      export='spmd_tasks.bridges.huggingface.exporting:export_adapters',
    ),
  ),
)
