"""A server of folders whose layers read other layers' keys, or have a state, gives the greedy texts of transformers."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.bridges.huggingface.reference_models import EOS, Reference, random_ids
from tests.bridges.huggingface.test_recurrent_jobs import NUM_GENERATED, greedy
from tests.serving.served import client_of_binary

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

DRAFTS = {'gemma4_shared': ('num_drafts=2',), 'gemma3n_text': (), 'kimi_linear': ('num_drafts=2', 'num_snapshots=4')}


@pytest.mark.parametrize('name', DRAFTS)
def test_greedy_tokens_are_those_of_transformers(name, tmp_path):
  """Prompts of parts of a chunk and of several, alone, again from what is cached, and together."""
  base, rows = Reference(name, tmp_path), random_ids().tolist()
  prompts = [rows[0][:1], rows[1], rows[0] + rows[1], rows[0] + rows[2] + rows[3]]
  expected = [greedy(base.model, prompt) for prompt in prompts]
  assert sum(map(len, expected)) > 3 * NUM_GENERATED
  sizes = ('max_len=128', 'num_slots=2', 'min_bucket=16', 'prefill_chunk=16', 'prefill_rows=2', *DRAFTS[name])
  overrides = [word for size in sizes for word in ('--set', f'task.decode.{size}')]
  with client_of_binary('--exp', 'hf.Model', '--set', f'model={base.path}', *overrides) as client:

    def tokens(prompt):
      settings = {'max_tokens': NUM_GENERATED, 'temperature': 0, 'extra_body': {'return_token_ids': True}}
      answer = client.completions.create(model='hf.Model', prompt=prompt, **settings)
      return [token for token in answer.choices[0].token_ids if token != EOS]

    assert [tokens(prompt) for prompt in prompts] == expected
    assert [tokens(prompt) for prompt in prompts] == expected
    with ThreadPoolExecutor(4) as pool:
      assert list(pool.map(tokens, prompts)) == expected
