"""DecodeSettings and SamplingParams: defaults of requests, buckets, and what is impossible."""

import types

import pytest

from spmd_tasks.runtime import DecodeSettings, SamplingParams


def test_a_request_takes_what_it_leaves_out_from_the_settings():
  given = types.SimpleNamespace(temperature=0.0, top_k=None, top_p=None, min_p=0.5, repetition_penalty=None)
  given.frequency_penalty, given.presence_penalty = 0.0, None
  settings = DecodeSettings(temperature=1.0, top_k=5, top_p=0.9, frequency_penalty=1.0)
  assert settings.sampling_for(given) == SamplingParams(temperature=0.0, top_k=5, top_p=0.9, min_p=0.5)
  given.top_p = 2.0
  with pytest.raises(ValueError, match=r'top_p=2\.0'):
    settings.sampling_for(given)


def test_buckets():
  assert DecodeSettings(min_bucket=4).buckets(16) == (4, 8, 16)
  assert DecodeSettings(min_bucket=5).buckets(20) == (5, 8, 16, 20)
  assert DecodeSettings(min_bucket=64).buckets(16) == (16,)


@pytest.mark.parametrize(
  'fields, message',
  [
    ({'prefill_rows': 33}, 'prefill_rows=33 must be at most num_slots=32'),
    ({'prefill_chunk': 8}, 'prefill_chunk=8 must be at least min_bucket=16'),
    ({'top_p': 1.5}, 'top_p=1.5'),
    ({'frequency_penalty': 2.5}, 'frequency_penalty=2.5'),
  ],
)
def test_impossible_settings_are_errors(fields, message):
  with pytest.raises(ValueError, match=message):
    DecodeSettings(**fields)
