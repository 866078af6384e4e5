"""Images, histograms and tables of a hook: as files that metrics.jsonl names, in event files, and at trackers."""

import json

from etils import epath
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from spmd_tasks.errors import UserError
from spmd_tasks.programs.hooks import TrainRun
from spmd_tasks.runtime.media import Image, Table
from spmd_tasks.runtime.metrics import read_jsonl
from tests import binary
from tests.programs.media_experiment import PIXELS

JOB = ('--exp', 'tests.programs.media_experiment.Short', '--mode', 'train')
ROWS = [{'prompt': 'a|b', 'score': 0.5, 'right': True}, {'prompt': 'c'}]


@pytest.fixture(scope='module')
def job(tmp_path_factory):
  directory = tmp_path_factory.mktemp('media') / 'job'
  assert binary.run_in_process(*JOB, '--job_log_dir', directory, '--set', "trackers=('tensorboard',)") == 0
  return directory


def decoded(png: bytes) -> np.ndarray:
  """The pixels, as Pillow reads them."""
  image = pytest.importorskip('PIL.Image')
  import io

  return np.asarray(image.open(io.BytesIO(png)))


def test_files_are_named_by_metric_and_step(job):
  media = job / 'media'
  names = sorted(str(path.relative_to(media)) for path in media.rglob('*.*'))
  assert names == [
    f'{name}/step_{step:08d}.{suffix}'
    for name, suffix in (('answers', 'json'), ('lengths', 'json'), ('pictures/noise', 'png'))
    for step in (3, 6)
  ]
  np.testing.assert_array_equal(decoded((media / 'pictures/noise/step_00000003.png').read_bytes()), PIXELS)
  assert json.loads((media / 'answers/step_00000003.json').read_text()) == ROWS
  histogram = json.loads((media / 'lengths/step_00000003.json').read_text())
  assert (histogram['counts'][0], histogram['counts'][-1], sum(histogram['counts'])) == (2, 1, 3)


def test_the_next_line_of_metrics_names_them_and_numbers_are_read_as_before(job):
  named = {line['step']: line['media_files'] for line in binary.metric_lines(job) if 'media_files' in line}
  files = ('pictures/noise/step_{:08d}.png', 'lengths/step_{:08d}.json', 'answers/step_{:08d}.json')
  assert named == {line: [f'media/{file.format(step)}' for file in files] for line, step in ((4, 3), (6, 6))}
  metrics = read_jsonl(epath.Path(job))
  assert list(metrics) == [1, 2, 4, 6]
  assert metrics[4].keys() == metrics[2].keys()
  assert metrics[6]['loss'] == binary.metric_lines(job)[-1]['loss']


def test_tensorboard_shows_them_at_their_steps(job):
  events = EventAccumulator(str(job), size_guidance={'images': 0}).Reload()
  first, last = events.Images('pictures/noise')
  assert (first.step, last.step, first.width, first.height) == (3, 6, 7, 5)
  np.testing.assert_array_equal(decoded(first.encoded_image_string), PIXELS)
  assert [event.step for event in events.Tensors('lengths')] == [3, 6]
  text = events.Tensors('answers')[0].tensor_proto.string_val[0].decode()
  assert text.splitlines() == [
    '| prompt | score | right |',
    '| --- | --- | --- |',
    '| a\\|b | 0.5 | True |',
    '| c |  |  |',
  ]


@pytest.mark.parametrize('shape', [(4, 6), (4, 6, 1), (4, 6, 2), (4, 6, 3), (4, 6, 4)])
def test_floats_are_pixels_from_0_to_1(shape, rng):
  pixels = rng.uniform(-0.2, 1.2, shape)
  expected = np.round(255 * np.clip(pixels, 0, 1)).astype(np.uint8)
  np.testing.assert_array_equal(decoded(Image(pixels).encode()).reshape(shape), expected)


@pytest.mark.parametrize('shape', [(3,), (2, 3, 5), (1, 2, 3, 4), (0, 3)])
def test_another_shape_is_refused(shape):
  with pytest.raises(UserError, match=r'Image has pixels of shape .*: give \[H, W\]'):
    Image(np.zeros(shape))


def test_a_name_that_is_no_path_is_refused():
  for name in ('../up', 'a b', '', '/a', 'a//b'):
    with pytest.raises(UserError, match='which is also a directory: use letters, digits'):
      TrainRun.log(None, name, Table([]))
