"""DecodeSettings are the defaults of requests, compute buckets, and refuse impossible values."""

import types

import pytest

from spmd_tasks.errors import UserError
from spmd_tasks.runtime import DecodeSettings, SamplingParams


def test_settings_are_the_defaults_of_a_request():
  request = types.SimpleNamespace(temperature=0.0, top_k=None, top_p=None, min_p=0.5, repetition_penalty=None)
  request.frequency_penalty, request.presence_penalty = 0.0, None
  settings = DecodeSettings(temperature=1.0, top_k=5, top_p=0.9, frequency_penalty=1.0)
  assert settings.sampling_for(request) == SamplingParams(temperature=0.0, top_k=5, top_p=0.9, min_p=0.5)
  request.top_p = 2.0
  with pytest.raises(UserError, match=r'top_p=2\.0'):
    settings.sampling_for(request)


def test_buckets():
  assert DecodeSettings(min_bucket=4).buckets(16) == (4, 8, 16)
  assert DecodeSettings(min_bucket=5).buckets(20) == (5, 8, 16, 20)
  assert DecodeSettings(min_bucket=64).buckets(16) == (16,)


@pytest.mark.parametrize(
  'fields, message',
  [
    ({'num_slots': 0}, 'num_slots=0 must be at least 1'),
    ({'num_drafts': -1}, 'num_drafts=-1 must be at least 0'),
    ({'memory_fraction': 0.0}, 'memory_fraction=0.0'),
    ({'cache_dtype': 'int4'}, "cache_dtype='int4' must be one of"),
    ({'prefill_rows': 33}, 'prefill_rows=33 must be at most num_slots=32'),
    ({'prefill_chunk': 8}, 'prefill_chunk=8 must be at least min_bucket=16'),
    ({'eos_ids': (1, 2), 'max_stop_ids': 1}, r'eos_ids=\(1, 2\) .*max_stop_ids=1'),
    ({'draft_model': 'small'}, "draft_model='small' .*: set num_drafts"),
    ({'top_p': 1.5}, 'top_p=1.5'),
    ({'frequency_penalty': 2.5}, 'frequency_penalty=2.5'),
  ],
)
def test_impossible_settings_are_refused(fields, message):
  with pytest.raises(UserError, match=message):
    DecodeSettings(**fields)
