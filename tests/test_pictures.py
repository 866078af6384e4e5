"""The pictures of the docs say what scripts/draw_pictures.py draws today; where a line lies is not compared."""

from pathlib import Path
import sys
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / 'scripts'))

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
  assert names == {*draw_pictures.PICTURES_BY_NAME, 'loss_curve'}
  assert [name for name in names if not any(f'pictures/{name}.svg' in text for text in used)] == []


def test_a_loss_curve_is_drawn_from_metrics_files(tmp_path):
  (tmp_path / 'eval' / 'valid').mkdir(parents=True)
  (tmp_path / 'metrics.jsonl').write_text('{"step": 1, "cross_entropy": 5.5}\n{"step": 50, "cross_entropy": 3.0}\n')
  (tmp_path / 'eval' / 'valid' / 'metrics.jsonl').write_text('{"step": 50, "cross_entropy": 3.25}\n')
  assert any('3.25' in text for text in texts_of(draw_pictures.loss_curve(tmp_path)))
