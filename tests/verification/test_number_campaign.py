"""scripts/number_campaign builds random experiments on random layouts and counts refusals."""

import json
from pathlib import Path
import random

from tests.verification.number_campaign import REFUSALS, reason_of, summarize
from tests.verification.random_experiments import draw_settings, make_job
from tests.verification.random_layouts import draw_layout, mesh_of, reference_of

DOCS = Path(__file__).parents[2] / 'docs' / 'verify.md'


def test_random_experiments_can_be_built_on_random_layouts():
  for seed in range(8):
    settings = draw_settings(random.Random(seed))
    for number in range(3):
      layout = draw_layout(random.Random(f'{seed}/{number}'), settings)
      assert json.loads(json.dumps(settings)) == settings
      job = make_job(settings, layout)
      assert job.experiment.mesh_axis_names == layout['mesh_axis_names']


def test_a_pipeline_with_random_numbers_is_compared_with_the_same_pipeline_without_other_axes():
  num_pipelines = 0
  for seed in range(60):
    settings = draw_settings(random.Random(seed))
    layout = draw_layout(random.Random(seed), settings)
    reference = reference_of(layout, settings)
    if reference:
      num_pipelines += 1
      assert settings['dropout'] or settings['jitter']
      assert [axis for axis, size in mesh_of(reference) if size > 1] == ['stage']
      assert dict(mesh_of(reference))['stage'] == dict(mesh_of(layout))['stage']
      assert make_job(settings, reference).experiment.ici_mesh_shape == reference['ici_mesh_shape']
  assert num_pipelines


SMALL = (
  "group_size={} makes groups of {} tokens, but each of the pipeline's {} microbatches has {}, and a group lies within "
  'one: choose a smaller group_size, fewer microbatches or a larger batch.'
)


def test_refusals_are_counted_by_message_and_count_as_bad_without_a_reason():
  refusals = [
    SMALL.format(16, 16, 4, 8),
    SMALL.format(32, 32, 2, 16),
    'num_repeats=2.5 is odd.',
    'num_repeats=3 is odd.',
  ]
  results = [{'verdict': 'same'}, *({'verdict': 'refused', 'reason': refusal} for refusal in refusals)]
  summary = summarize(results[:3])
  assert (summary['cases'], summary['same'], summary['refused'], summary['bad']) == (1, 1, 2, 0)
  assert [refusal['count'] for refusal in summary['refusals']] == [2]
  assert summary['refusals'][0]['reason'] == reason_of(refusals[0])
  summary = summarize(results)
  assert (summary['cases'], summary['bad'], summary['refused without a reason']) == (1, 2, 2)
  assert summary['refusals'][1] == {'sentence': 'num_repeats=N is odd.', 'count': 2, 'reason': None}


def test_the_guide_lists_every_refusal_with_its_reason():
  guide = ' '.join(DOCS.read_text(encoding='utf-8').split())
  for sentence, reason in REFUSALS.items():
    assert f'| {sentence} | {reason} |' in guide.replace('`', '')
