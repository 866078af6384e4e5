"""Prompts: what a line of JSON may hold, and the requests that prompts become."""

import dataclasses
import json
from types import SimpleNamespace

import pytest

from spmd_tasks.decoding import SamplingParams
from spmd_tasks.decoding.prompts import Prompt, PromptFile, PromptTokenizer, parse_prompt
from spmd_tasks.inputs import ByteTokenizer
from spmd_tasks.runtime import DecodeSettings

SETTINGS = DecodeSettings(max_tokens=8, temperature=0.5, top_k=7)
BEAMS = DecodeSettings(num_beams=3)


def make_tokenizer(tokenizer=ByteTokenizer(), settings=SETTINGS, adapter_names=()) -> PromptTokenizer:
  sizes = {'max_len': 24, 'vocab_size': 300, 'encoder_len': None}
  steps = SimpleNamespace(settings=settings, adapter_names=adapter_names, **sizes)
  return PromptTokenizer(steps=steps, tokenizer=tokenizer, seed=11)


TOKENIZER = make_tokenizer()


def parse(fields) -> Prompt:
  return parse_prompt(fields if isinstance(fields, bytes) else json.dumps(fields).encode(), 'p line 3')


def test_every_field_is_read():
  fields = {
    'prompt': 'ñ',
    'n': 2,
    'seed': 2**32 - 1,
    'max_tokens': 0,
    'repetition_penalty': 1.5,
    'frequency_penalty': -2,
    'presence_penalty': 0.5,
    'temperature': 2,
    'top_k': 3,
    'top_p': 0.5,
    'min_p': 0.25,
    'stop_ids': [4, 5],
    'score_prompt': True,
    'id': {'mine': [1, None]},
  }
  expected = Prompt(**fields | {'stop_ids': (4, 5), 'stop': ('a', 'b')})
  assert parse(fields | {'stop': ['a', 'b']}) == expected
  assert parse({'prompt': 'x', 'stop': 'ab'}).stop == ('ab',)
  assert parse({'prompt': 'x', 'logit_bias': {'7': -100}}).logit_bias == {7: -100}
  assert parse({'prompt': None, 'prompt_ids': [1, 2], 'n': None}) == Prompt(prompt_ids=(1, 2))
  assert {field.name for field in dataclasses.fields(SamplingParams)} <= set(fields)


def test_a_line_of_text_is_a_prompt_whatever_characters_it_has(tmp_path):
  path = tmp_path / 'prompts.txt'
  path.write_bytes('\ufeffone\u2028still one\r\n\r\ntwo\x85\x0c'.encode())
  assert [prompt.prompt for prompt in PromptFile(path=str(path)).read()] == ['one\u2028still one', 'two\x85\x0c']


@pytest.mark.parametrize(
  'fields, message',
  [
    (b'{', 'is not JSON'),
    (b'[' * 100_000, 'is not JSON'),  # nested too deeply
    ({'promt': 'x'}, "there is no field 'promt'; nearest: 'prompt'"),
    ({'prompt': 'x', 'prompt_ids': [1]}, "give one of 'prompt'"),
    ({'prompt': '\ud800'}, 'is not JSON in UTF-8'),
    ({'prompt_ids': []}, r'prompt_ids = \[\] must have at least 1 item'),
    ({'prompt': 'x', 'n': 0}, 'n = 0 must be greater than or equal to 1'),
    ({'prompt': 'x', 'seed': 2**32}, 'seed = 4294967296 must be less than 4294967296'),
    ({'prompt': 'x', 'temperature': 'hot'}, "temperature = 'hot' must be a valid number"),
    ({'prompt': 'x', 'min_p': float('nan')}, 'min_p = nan must be a finite number'),
    ({'prompt': 'x', 'logit_bias': {'a': 1}}, r"logit_bias\.a = 'a' must be a valid integer"),
    ({'prompt': 'x', 'stop': ['a', '']}, r"stop\[1\] = '' must have at least 1 character"),
  ],
)
def test_a_wrong_line_is_named_in_a_sentence(fields, message):
  with pytest.raises(ValueError, match=rf'^p line 3:? .*{message}'):
    parse(fields)


def test_what_a_prompt_leaves_out_comes_from_the_settings():
  request, num_outputs = TOKENIZER.request(Prompt(prompt='abc', top_k=0), 'here')
  assert (request.ids, request.max_tokens, request.seed, num_outputs) == ((1, 100, 101, 102), 8, 11, 1)
  assert request.stop_ids == (2,)
  assert request.sampling == SamplingParams(temperature=0.5)
  assert type(request.sampling) is SamplingParams
  assert TOKENIZER.request(Prompt(prompt_ids=(7,) * 20), 'here')[0].max_tokens == 4  # what max_len leaves
  assert TOKENIZER.request(Prompt(prompt='x', max_tokens=0), 'here')[0].score_prompt


def test_ids_beyond_the_vocabulary_of_the_tokenizer_have_no_text():
  assert TOKENIZER.decode([100, 299, 101]) == 'ab'
  assert make_tokenizer(tokenizer=None).decode([100]) == ''


@pytest.mark.parametrize(
  'prompt, changes, message',
  [
    ({'prompt': 'x'}, {'tokenizer': None}, 'the prompt is text'),
    ({'prompt_ids': (300,)}, {}, 'token 300 is outside the vocabulary of 300'),
    ({'prompt_ids': (3,) * 24}, {}, 'the prompt has 24 tokens and max_len is 24'),
    ({'prompt': 'x', 'max_tokens': 23}, {}, '2 tokens of prompt and max_tokens=23 exceed max_len 24'),
    ({'prompt': 'x', 'logit_bias': {7: 101}}, {}, 'logit_bias must have at most 300 tokens, and numbers from -100'),
    ({'prompt': 'x', 'logit_bias': {7: 1}}, {'settings': BEAMS}, 'beam search has no penalties'),
    ({'prompt': 'x', 'n': 4}, {'settings': BEAMS}, 'n=4 is more than task.decode.num_beams=3'),
    ({'prompt': 'x', 'adapter': 'a'}, {'settings': BEAMS, 'adapter_names': ('a',)}, 'beam search has no adapters'),
  ],
)
def test_a_prompt_that_does_not_fit_is_named_in_a_sentence(prompt, changes, message):
  with pytest.raises(ValueError, match=f'^here: {message}'):
    make_tokenizer(**changes).request(Prompt(**prompt), 'here')


def test_scoring_which_searches_no_beams_finds_an_adapter_whatever_num_beams_is():
  tokenizer = make_tokenizer(settings=BEAMS, adapter_names=('law', 'art'))
  assert tokenizer.adapter_number('art', 'score') == 2
