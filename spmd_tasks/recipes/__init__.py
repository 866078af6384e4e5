"""Bases to subclass: whole experiments that lack only sizes, intervals and, if you like, your own data.

    class Narrow(DenseLanguageModel):
      model_dims = 48

Each base builds its model from small methods, such as `ffn()`, `block(ffn)`, `stack()` and `embedding()`, and the rest
from `loss()`, `optimizer()`, `tokenizer()` and `source(split)`: override one and call `super()`. Read
`text_training.py` (all but the model) and `dense.py` first; `mixture_of_experts.py`, `hybrid.py`, `pipelined.py` and
`encoder_decoder.py` override what differs. Bases for Hugging Face models are in `bridges/huggingface/experiments.py`
and in the package `tuning`.
"""

from spmd_tasks.lazy_exports import lazy_exports

with lazy_exports(globals()):
  from spmd_tasks.recipes.dense import DenseLanguageModel
  from spmd_tasks.recipes.encoder_decoder import EncoderDecoderLanguageModel, MoeEncoderDecoderLanguageModel
  from spmd_tasks.recipes.hybrid import HybridLanguageModel
  from spmd_tasks.recipes.mixture_of_experts import MoeLanguageModel
  from spmd_tasks.recipes.pipelined import PipelinedLanguageModel
  from spmd_tasks.recipes.synthetic import SyntheticLanguageModel
  from spmd_tasks.recipes.text_training import TextTraining
