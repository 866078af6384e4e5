"""generation_config.json: the defaults of requests, and where texts end."""

import json

import pytest

from spmd_tasks.bridges.huggingface.experiments import generation_defaults
from spmd_tasks.runtime import DecodeSettings, SamplingParams

GREEDY = SamplingParams()


@pytest.mark.parametrize(
  'generation, config, sampling, ends',
  [
    (None, {'eos_token_id': 2}, GREEDY, (2,)),
    ({'eos_token_id': [3, 4, 3]}, {'eos_token_id': 2}, GREEDY, (3, 4)),
    ({'do_sample': True}, {}, SamplingParams(temperature=1.0, top_k=50), None),
    (
      {'do_sample': True, 'temperature': 0.6, 'top_k': 20, 'top_p': 0.95, 'min_p': 0, 'repetition_penalty': 1.1},
      {},
      SamplingParams(temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.1),
      None,
    ),
    ({'temperature': 0.6, 'top_p': 0.9, 'typical_p': 0.5}, {}, SamplingParams(top_p=0.9), None),
    ({'eos_token_id': 0, 'max_new_tokens': 7, 'top_k': None}, {}, GREEDY, (0,)),
  ],
)
def test_defaults_of_requests(tmp_path, generation, config, sampling, ends):
  (tmp_path / 'config.json').write_text(json.dumps(config))
  if generation is not None:
    (tmp_path / 'generation_config.json').write_text(json.dumps(generation))
  settings = DecodeSettings(**generation_defaults(str(tmp_path)))
  assert settings.sampling_for(settings) == sampling
  assert settings.end_ids(9) == (ends or (9,))
  assert settings.max_tokens == (generation or {}).get('max_new_tokens')
  assert settings.max_stop_ids >= len(ends or ()) + 4 or ends is None


@pytest.mark.parametrize(
  'text, message',
  [('[', 'cannot be read as JSON'),  ('{"eos_token_id": "x"}', 'eos_token_id'),
   ('{"top_p": "1"}', "top_p = '1' must be a number")],
)  # fmt: skip
def test_a_wrong_file_is_named(tmp_path, text, message):
  (tmp_path / 'generation_config.json').write_text(text)
  with pytest.raises(ValueError, match=rf'generation_config.json.*{message}'):
    generation_defaults(str(tmp_path))
