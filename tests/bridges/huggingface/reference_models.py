"""Small random models of `transformers` and their results, which are computed once:

    reference = Reference('llama3', tmp_path)
    reference.logits           # float32 [B, T, V]
    reference.step             # the loss, and the tensors of the folder after one step of SGD
    reference.greedy_tokens    # of two prompts

Shapes: B batch, T sequence, V vocab.
"""

from collections.abc import Callable
import copy
import functools
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from tests.bridges.huggingface.tiny_configs import CONFIGS

B, T, NUM_PROMPT, NUM_GENERATED = 4, 24, 11, 64
LEARNING_RATE = 64.0  # large, so that the step is not lost to rounding of the weights
EOS = 258


def random_ids() -> np.ndarray:
  """Returns random tokens [B, T] without EOS."""
  return np.random.default_rng(1).integers(0, EOS, (B, T))


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
  """Returns all tensors of a folder."""
  return {name: value for file in folder.glob('*.safetensors') for name, value in load_file(file).items()}


def quiet_transformers():
  """Imports transformers without progress bars and warnings."""
  import transformers

  transformers.utils.logging.set_verbosity_error()
  transformers.utils.logging.disable_progress_bar()
  return transformers


def random_model(kind: str, settings: dict[str, Any], scale: Callable[[str, Any], float]):
  """Returns a model of transformers with random weights, centered at 1 for norms, scales and scalars.

  Args:
    kind: the name of the Auto class.
    settings: the content of config.json.
    scale: (name, weight) -> standard deviation.
  """
  import torch
  from transformers.models.auto.configuration_auto import CONFIG_MAPPING

  torch.manual_seed(0)
  settings = copy.deepcopy(settings)  # the config changes them
  config = CONFIG_MAPPING[settings.pop('model_type')](**settings)
  config._experts_implementation = 'eager'
  model = getattr(quiet_transformers(), kind).from_config(config, dtype=torch.float32).eval()
  with torch.no_grad():
    buffers = [item for item in model.named_buffers() if item[0].endswith(('e_score_correction_bias', 'layer_scalar'))]
    for key, value in [*model.named_parameters(), *buffers]:
      value.copy_(torch.randn_like(value) * scale(key, value) + float('norm' in key or 'scal' in key))
      if key.endswith('A_log'):  # slow and fast decays of recurrent layers
        value += torch.linspace(-8.0, 2.0, value.numel()).reshape(value.shape)
  return model


class Reference:
  """The reference model of one of CONFIGS.

  Attributes:
    name: the name in CONFIGS.
    path: the folder of the model in float32.
    model: the model of transformers.
  """

  def __init__(self, name: str, directory: Path):
    self.name = name
    self.path = directory / name
    settings = CONFIGS[name] | {'bos_token_id': None, 'eos_token_id': EOS}
    self.model = random_model('AutoModelForCausalLM', settings, lambda key, value: 0.1 if value.ndim == 1 else 0.08)
    self.model.save_pretrained(self.path, max_shard_size='40KB')

  @functools.cached_property
  def logits(self) -> np.ndarray:
    return logits_of(self.model)

  @functools.cached_property
  def step(self) -> tuple[float, dict[str, np.ndarray]]:
    import torch

    trained = copy.deepcopy(self.model)
    ids = torch.tensor(random_ids())
    loss = trained(ids, labels=ids).loss
    loss.backward()
    with torch.no_grad():
      for value in trained.parameters():
        value -= 0.0 if value.grad is None else LEARNING_RATE * value.grad  # ERNIE's balance bias has none
    trained.save_pretrained(self.path.with_name(f'{self.name}_trained'))
    return loss.item(), tensors_of(self.path.with_name(f'{self.name}_trained'))

  @functools.cached_property
  def greedy_tokens(self) -> list[list[int]]:
    """The greedy continuations, without EOS, of the first NUM_PROMPT tokens of the first two rows of `random_ids`."""
    import torch

    prompts = torch.tensor(random_ids()[:2, :NUM_PROMPT])
    generated = self.model.generate(
      prompts, attention_mask=torch.ones_like(prompts), do_sample=False, max_new_tokens=NUM_GENERATED, pad_token_id=EOS
    )
    rows = generated[:, NUM_PROMPT:].tolist()
    return [row[: row.index(EOS)] if EOS in row else row for row in rows]

  @functools.cached_property
  def in_16_bits(self) -> Path:
    """The folder of the model in bfloat16."""
    import torch

    path = self.path.with_name(f'{self.name}_in_16_bits')
    copy.deepcopy(self.model).to(torch.bfloat16).save_pretrained(path)
    return path


def logits_of(model) -> np.ndarray:
  """Returns the logits of `random_ids`, float32 [B, T, V]."""
  import torch

  with torch.no_grad():
    return model(torch.tensor(random_ids())).logits.float().numpy()


def load_reference(folder: Path, dtype: str):
  """Loads a folder with transformers; returns the model, and the missing and unexpected tensors."""
  import torch

  model, report = quiet_transformers().AutoModelForCausalLM.from_pretrained(
    folder, dtype=getattr(torch, dtype), output_loading_info=True
  )
  model.set_experts_implementation('eager')
  problems = {kind: sorted(map(str, names)) for kind, names in report.items() if names}
  return model.eval(), problems


def assert_close(ours, theirs, tolerance, what=''):
  """Asserts that the maximum difference is at most `tolerance` times the maximum value."""
  assert ours.shape == theirs.shape
  assert np.abs(ours - theirs).max() <= tolerance * np.abs(theirs).max(), what
