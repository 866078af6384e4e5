"""The ticks of a plan's pipeline: every microbatch passes every stage once each way, and the rest is the bubble."""

import collections

import pytest

from spmd_tasks.config import resolve
from spmd_tasks.experiment import partition_job
from spmd_tasks.planning.plan import pipeline_report


def report_of(name: str, *overrides: str):
  job = resolve(name, overrides).build()
  return pipeline_report(job, partition_job(job, job.experiment.mesh_spec().build_abstract()))


@pytest.mark.parametrize(
  'name, stages, num_forward',
  [('pipeline.StdlibTiny', 4, 1), ('pipeline.CircularTiny', 2, 2), ('pipeline.OneForwardOneBackwardTiny', 4, 2)],
)
def test_every_microbatch_passes_every_stage(name, stages, num_forward):
  """1F1B runs forward twice: for the loss, and again shortly before each backward pass. A circular one repeats."""
  report = report_of(name)
  assert (report['stages'], len(report['ticks'])) == (stages, stages)
  for ticks in report['ticks']:
    assert len(ticks) == report['num_ticks']
    work = collections.Counter(half.partition('.')[0] for tick in ticks for half in (tick or '').split())
    num_backward = report['repeats']
    assert work == {
      **{f'F{m}': num_forward for m in range(report['microbatches'])},
      **{f'B{m}': num_backward for m in range(report['microbatches'])},
    }


@pytest.mark.parametrize('name', ['pipeline.StdlibTiny', 'pipeline.CircularTiny'])
def test_the_bubble_is_the_fraction_of_empty_ticks(name):
  report = report_of(name)
  ticks = [tick for stage in report['ticks'] for tick in stage]
  assert report['bubble'] == pytest.approx(ticks.count(None) / len(ticks))


def test_a_model_without_stages_has_no_pipeline():
  assert report_of('synthetic.Uneven') is None
  assert report_of('pipeline.StdlibTiny', 'ici_mesh_shape=1,1,4,2') is None
