"""Defaults of requests and end-of-text tokens from generation_config.json and chat templates."""

import json

import pytest

from spmd_tasks import exit_codes
from spmd_tasks.bridges.huggingface.experiments import generation_defaults
from spmd_tasks.config import resolve
from spmd_tasks.runtime import DecodeSettings, SamplingParams
from tests.binary import run_in_process
from tests.bridges.huggingface.reference_models import quiet_transformers
from tests.model_folders import write_llama

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
def test_invalid_files_raise_user_errors(tmp_path, text, message):
  (tmp_path / 'generation_config.json').write_text(text)
  with pytest.raises(ValueError, match=rf'generation_config.json.*{message}'):
    generation_defaults(str(tmp_path))


CHATML = (
  "{% for m in messages %}<|im_start|>{{ m.role + '\n' + m.content }}<|im_end|>\n{% endfor %}"
  '{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}'
)
END, TURN_END = 2, 4  # </s> and <|im_end|>


def tuned_settings(folder, *overrides):
  data = ('data=none.jsonl', f'model={folder}')
  return resolve('finetune.FullSft', [*data, *overrides]).build().task.decode


def test_texts_end_with_the_turn_of_the_tuned_template(tmp_path):
  """In generation and serving, which use `task.decode`, and in an export."""
  folder, template = write_llama(tmp_path / 'base', eos_token_id=END), tmp_path / 'chatml.jinja'
  template.write_text(CHATML)
  assert tuned_settings(folder).end_ids(END) == (END,)
  tuned = f'chat_template_file={template}'
  assert tuned_settings(folder, tuned).end_ids(END) == (END, TURN_END)
  (tmp_path / 'talks.jsonl').write_text('{"messages": [{"role": "assistant", "content": "x"}]}')
  job = ('--exp', 'finetune.FullSft', '--set', f'model={folder}', '--set', tuned)
  job += ('--set', f'data={tmp_path}/talks.jsonl', '--job_log_dir', tmp_path / 'job')
  exported = tmp_path / 'exported'
  assert run_in_process('--mode', 'export', '--format', 'hf', '--out', exported, *job) == exit_codes.OK
  transformers = quiet_transformers()
  assert transformers.AutoTokenizer.from_pretrained(exported).chat_template == CHATML
  assert transformers.GenerationConfig.from_pretrained(exported).eos_token_id == [END, TURN_END]
  assert transformers.AutoConfig.from_pretrained(exported).eos_token_id == [END, TURN_END]
  assert resolve('hf.Model', [f'model={exported}']).build().task.decode.end_ids(END) == (END, TURN_END)


def test_templates_without_an_end_token_are_warned_about(tmp_path, caplog):
  folder, template = write_llama(tmp_path / 'base'), tmp_path / 'other.jinja'
  template.write_text(CHATML.replace('<|im_end|>', '<eot>'))
  assert tuned_settings(folder, f'chat_template_file={template}').end_ids(END) == (END,)
  assert "the chat template ends a turn with '<eot>\\n'" in caplog.text
  assert 'set task.decode.eos_ids' in caplog.text
