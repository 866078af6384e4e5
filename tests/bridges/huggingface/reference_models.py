"""Reference: a small random model of `transformers`, and what it computes; each result is computed once.

reference = Reference('llama3', tmp_path)
reference.logits           # float32 [B, T, V]
reference.step             # the loss, and the tensors of the folder after one step of SGD
reference.greedy_tokens    # of two prompts
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
LEARNING_RATE = 64.0  # so that the step is not lost in the rounding of the weights
EOS = 258


def random_ids() -> np.ndarray:
  """Tokens [B, T], without the end of text."""
  return np.random.default_rng(1).integers(0, EOS, (B, T))


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
  return {name: value for file in folder.glob('*.safetensors') for name, value in load_file(file).items()}


def quiet_transformers():
  """Imports transformers, without its progress bars and advice."""
  import transformers

  transformers.utils.logging.set_verbosity_error()
  transformers.utils.logging.disable_progress_bar()
  return transformers


def random_model(kind: str, settings: dict[str, Any], scale: Callable[[str, Any], float]):
  """A model of transformers with random weights of such scales, those of norms around 1; `kind` is the Auto class."""
  import torch
  from transformers.models.auto.configuration_auto import CONFIG_MAPPING

  torch.manual_seed(0)
  settings = copy.deepcopy(settings)  # which the config changes
  config = CONFIG_MAPPING[settings.pop('model_type')](**settings)
  config._experts_implementation = 'eager'
  model = getattr(quiet_transformers(), kind).from_config(config, dtype=torch.float32).eval()
  with torch.no_grad():
    biases = [item for item in model.named_buffers() if 'e_score_correction_bias' in item[0]]
    for key, value in [*model.named_parameters(), *biases]:
      value.copy_(torch.randn_like(value) * scale(key, value) + float('norm' in key))
  return model


class Reference:
  """A model by its name in CONFIGS.

  Attributes:
    name: of the model.
    path: its folder, in float32.
    model: of transformers.
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
        value -= LEARNING_RATE * value.grad
    trained.save_pretrained(self.path.with_name(f'{self.name}_trained'))
    return loss.item(), tensors_of(self.path.with_name(f'{self.name}_trained'))

  @functools.cached_property
  def greedy_tokens(self) -> list[list[int]]:
    """What follows the first NUM_PROMPT of `random_ids`, of the first two rows; without the end of text."""
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
  """The logits of `random_ids`, float32 [B, T, V]."""
  import torch

  with torch.no_grad():
    return model(torch.tensor(random_ids())).logits.float().numpy()


def load_reference(folder: Path, dtype: str):
  """Returns (model, what is amiss) of a folder, as transformers loads it: missing and unexpected tensors by name."""
  import torch

  model, report = quiet_transformers().AutoModelForCausalLM.from_pretrained(
    folder, dtype=getattr(torch, dtype), output_loading_info=True
  )
  model.set_experts_implementation('eager')
  amiss = {kind: sorted(map(str, names)) for kind, names in report.items() if names}
  return model.eval(), amiss


def assert_close(ours, theirs, tolerance, what=''):
  """Asserts that the greatest difference is small beside the greatest value."""
  assert ours.shape == theirs.shape
  assert np.abs(ours - theirs).max() <= tolerance * np.abs(theirs).max(), what
