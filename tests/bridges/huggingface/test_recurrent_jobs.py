"""Jobs and a server of a folder with recurrent layers, as users start them, against transformers and peft."""

from concurrent.futures import ThreadPoolExecutor
import copy

import httpx
import jax
import numpy as np
import pytest

from spmd_tasks import load
from tests import binary
from tests.bridges.huggingface.reference_models import EOS, Reference, assert_close, logits_of, random_ids
from tests.serving.served import client_of_binary

pytestmark = [
  pytest.mark.slow,
  pytest.mark.exhaustive,
  pytest.mark.filterwarnings('ignore::FutureWarning', 'ignore::UserWarning'),  # of peft
]

NUM_GENERATED = 32


@pytest.fixture(scope='module')
def base(tmp_path_factory):
  return Reference('qwen3_5_text', tmp_path_factory.mktemp('folders'))


def test_adapters_resume_bit_for_bit_and_peft_computes_the_same(base, tmp_path):
  import peft

  flags = ('--exp', 'tests.tuning.low_rank_jobs.Small', '--set', f'model={base.path}', '--mode', 'train')
  assert binary.run_in_process(*flags, '--job_log_dir', tmp_path / 'whole') == 0
  binary.copy_at(tmp_path / 'whole', 2, tmp_path / 'parts')
  assert binary.run_in_process(*flags, '--job_log_dir', tmp_path / 'parts') == 0
  for name in ('whole', 'parts'):
    export = ('--mode', 'export', '--format', 'peft', '--out', tmp_path / f'{name}_adapter')
    assert binary.run_in_process('--job_log_dir', tmp_path / name, *export) == 0
  whole, parts = ((tmp_path / f'{name}_adapter/adapter_model.safetensors').read_bytes() for name in ('whole', 'parts'))
  assert whole == parts

  with jax.default_matmul_precision('highest'):
    ours = np.asarray(load(tmp_path / 'parts').logits(random_ids()))
  # In float64, because the float32 error of torch (1.2e-5) is larger than ours (0.8e-5).
  loaded = peft.PeftModel.from_pretrained(copy.deepcopy(base.model), tmp_path / 'parts_adapter').eval().double()
  theirs = logits_of(loaded)
  assert_close(ours, theirs, 2e-5)
  assert np.abs(theirs - base.logits).max() > 0.1 * np.abs(base.logits).max()  # after training


def greedy(model, prompt):
  """Returns transformers' continuation of one prompt, without EOS."""
  import torch

  ids = torch.tensor([prompt])
  settings = {'do_sample': False, 'max_new_tokens': NUM_GENERATED, 'pad_token_id': EOS}
  generated = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, len(prompt) :].tolist()
  return generated[: generated.index(EOS)] if EOS in generated else generated


def test_served_greedy_tokens_are_those_of_transformers(base):
  """Prompts of parts of a chunk and of several, two of which begin alike, alone and together, with drafts."""
  rows = random_ids().tolist()
  prompts = [rows[0][:1], rows[1], rows[0] + rows[1], rows[0] + rows[2] + rows[3]]
  expected = [greedy(base.model, prompt) for prompt in prompts]
  assert sum(map(len, expected)) > 3 * NUM_GENERATED
  sizes = ('max_len=128', 'num_slots=2', 'min_bucket=16', 'prefill_chunk=16', 'prefill_rows=2')
  sizes += ('num_snapshots=4', 'num_drafts=2')
  overrides = [word for size in sizes for word in ('--set', f'task.decode.{size}')]
  with client_of_binary('--exp', 'hf.Model', '--set', f'model={base.path}', *overrides) as client:
    assert ' blocks of 16 tokens and 4 snapshots of states: 2 texts of 128 tokens at once.' in client.lines

    reused = []

    def tokens(prompt):
      settings = {'max_tokens': NUM_GENERATED, 'temperature': 0, 'extra_body': {'return_token_ids': True}}
      answer = client.completions.create(model='hf.Model', prompt=prompt, **settings)
      reused.append(answer.usage.prompt_tokens_details.cached_tokens)
      return [token for token in answer.choices[0].token_ids if token != EOS]

    assert [tokens(prompt) for prompt in prompts] == expected
    assert reused == [0, 0, 0, 0]  # the last two begin alike, but there is no snapshot where they part
    assert [tokens(prompt) for prompt in prompts] == expected
    assert reused[4:] == [(len(prompt) - 1) // 16 * 16 for prompt in prompts]
    with ThreadPoolExecutor(4) as pool:
      assert list(pool.map(tokens, prompts)) == expected
    text = httpx.get(f'{client.url}/metrics', timeout=20).text
    assert '\nspmd_tasks_drafted_tokens_total 0.0\n' not in text
    num_reused = float(sum(reused))
    assert f'\nspmd_tasks_prompt_tokens_total {3 * sum(map(len, prompts)) - num_reused}\n' in text
    assert f'\nspmd_tasks_reused_prompt_tokens_total {num_reused}\n' in text
