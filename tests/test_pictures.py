"""The pictures of the docs say what scripts/draw_pictures.py draws today; where a line lies is not compared."""

import json
from pathlib import Path
import sys
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / 'scripts'))

import draw_losses  # noqa: E402
import draw_pictures  # noqa: E402

PICTURES = ROOT / 'docs' / 'pictures'


def texts_of(picture):
  return [text.strip() for text in ElementTree.fromstring(picture).itertext() if text.strip()]


@pytest.mark.parametrize('name', draw_pictures.PICTURES_BY_NAME)
def test_a_picture_says_what_the_real_objects_are(name):
  drawn = texts_of(draw_pictures.PICTURES_BY_NAME[name]())
  committed = texts_of((PICTURES / f'{name}.svg').read_text(encoding='utf-8'))
  assert drawn == committed, '.venv/bin/python scripts/draw_pictures.py draws it anew; look at it, and commit it'


def test_every_picture_is_drawn_and_used():
  used = [path.read_text(encoding='utf-8') for path in [ROOT / 'README.md', *(ROOT / 'docs').rglob('*.md')]]
  names = {path.stem for path in PICTURES.glob('*.svg')}
  assert names == {*draw_pictures.PICTURES_BY_NAME, 'same_losses'}
  assert [name for name in names if not any(f'pictures/{name}.svg' in text for text in used)] == []


def test_a_difference_between_losses_is_said(tmp_path):
  for name in draw_losses.RUNS:
    (tmp_path / name).mkdir()
    losses = [3.0] * draw_losses.NUM_STEPS
    losses[6] += 2e-6 * (name == 'pipe')
    lines = [json.dumps({'step': step, 'loss': loss}) for step, loss in enumerate(losses, 1)]
    (tmp_path / name / 'metrics.jsonl').write_text('\n'.join(lines))
  remarks = [text for text in texts_of(draw_losses.same_losses(tmp_path)) if 'at most' in text or 'every bit' in text]
  assert remarks == ['every bit is the same', 'every bit is the same', 'at most 2.0e-06', 'every bit is the same']
