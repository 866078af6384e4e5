"""LowRankTuning: the base class of experiments that train low-rank adapters (LoRA)."""

import dataclasses

import fiddle as fdl

from spmd_tasks.adapters import LowRankAdapter, add_adapters
from spmd_tasks.bridges.huggingface import PretrainedLanguageModel, open_adapter
from spmd_tasks.bridges.huggingface.experiments import stacks_of
from spmd_tasks.bridges.huggingface.origin import FolderOrigin
from spmd_tasks.errors import UserError
from spmd_tasks.runtime import Origin, Task
from spmd_tasks.sharding.weights import QUANTIZED_DTYPES
from spmd_tasks.store_files import local_folder


class LowRankTuning(PretrainedLanguageModel):
  """Trains low-rank adapters of a folder's model, whose own weights are frozen.

  Checkpoints have only the adapters, and the folder's name and digest.
  """

  # Patterns of the weights that get an adapter, matched anywhere in names like 'stack/layers/attention/query/kernel'.
  lora_targets: tuple[str, ...] = ('attention/', 'ffn/')
  lora_rank: int = 16
  lora_alpha: float = 32.0
  lora_dropout: float = 0.0
  use_rslora: bool = False  # divides alpha by the square root of the rank
  use_dora: bool = False  # also trains the norms of the kernels' columns
  # Patterns of further weights to train, such as ('norm/',).
  also_trained: tuple[str, ...] = ()
  # The dtype of the frozen kernels: 'float32', 'bfloat16', 'int8', 'nf4' (QLoRA) or 'nf4_double' (scales in 8 bits);
  # None is the folder's dtype.
  base_dtype: str | None = None
  # A folder of `peft` whose adapters training starts from; it determines the settings `lora_...` and `use_...`.
  adapter: str = ''

  learning_rate: float = 2e-4

  def origin(self) -> Origin | None:
    """Returns the folder, with the adapters that training starts from."""
    origin = super().origin()
    if not isinstance(origin, FolderOrigin) or not self.adapter:
      return origin
    return dataclasses.replace(origin, adapter=str(local_folder(self.adapter)))

  def language_model(self) -> fdl.Config:
    """The folder's model with adapters."""
    if self.adapters:
      raise UserError(
        f'adapters = {dict(self.adapters)!r} cannot be combined with the adapter of {type(self).__name__}: serve them '
        f'with --exp hf.Model --set model={self.model}.'
      )
    model = super().language_model()
    for stack in stacks_of(model):
      if self.base_dtype in QUANTIZED_DTYPES and stack.remat_policy in ('none', 'elementwise'):
        # The backward pass dequantizes the kernels again, instead of keeping them dequantized.
        stack.remat_policy = 'dots'
    if self.adapter:
      for name, adapter in open_adapter(local_folder(self.adapter)).adapters(self.folder).items():
        add_adapters(model, [f'^{name}$'], adapter, setting=f'adapter = {self.adapter!r}')
      return model
    adapter = LowRankAdapter(
      rank=self.lora_rank,
      alpha=self.lora_alpha,
      dropout_rate=self.lora_dropout,
      use_rslora=self.use_rslora,
      use_dora=self.use_dora,
    )
    add_adapters(model, self.lora_targets, adapter, setting='lora_targets')
    return model

  def task(self) -> fdl.Config[Task]:
    task = super().task()
    task.trained = ('lora_', *self.also_trained)
    frozen_dtype = self.base_dtype or ('bfloat16' if self.folder.dtype == 'bfloat16' else 'float32')
    task.frozen_dtype = None if frozen_dtype == 'float32' else frozen_dtype
    return task
