"""plan.html: everything of the plan is on it, it loads nothing, every name is escaped, and a browser lays it out."""

import html
from html.parser import HTMLParser
import json
import re
import shutil
import subprocess

import pytest

from spmd_tasks.planning import text
from spmd_tasks.planning.page import duration, percent, plan_page, quantity, size
from tests.planning.sample_plan import GIB, pipelined_plan, sample_plan

CHROMIUM = shutil.which('chromium')


class Reader(HTMLParser):
  """Collects the text, and checks that elements are closed in order."""

  VOID = {'meta', 'br', 'rect', 'line', 'circle', 'path', 'col'}

  def __init__(self):
    super().__init__()
    self.open, self.text, self.attributes, self.is_style = [], [], [], False

  def handle_starttag(self, name, attributes):
    self.attributes += [(name, *pair) for pair in attributes]
    if name not in self.VOID or (not self.get_starttag_text().endswith('/>') and name not in ('meta',)):
      self.open.append(name)

  def handle_startendtag(self, name, attributes):
    self.attributes += [(name, *pair) for pair in attributes]

  def handle_endtag(self, name):
    assert self.open.pop() == name

  def handle_data(self, data):
    if 'style' not in self.open:
      self.text.append(data)


def read(page):
  reader = Reader()
  reader.feed(page)
  assert not reader.open
  return re.sub(r'\s+', ' ', ' '.join(reader.text)), reader.attributes


def test_a_plan_that_does_not_fit_says_by_how_much_and_what_does():
  text, _ = read(plan_page(sample_plan()))
  for words in (
    'lm.Dense1B on v5e:8x4',
    'Does not fit: needs 55.80 GiB of 15.75 GiB',
    '40.05 GiB too much',
    'task.learner.num_microbatches=8 fits: 9.10 GiB',
    'RESOURCE_EXHAUSTED',
    'data 8 x mdl 4',
    '3.91 s',
    '3.20 s to 4.90 s',
    '39%',
    '8,380',
    'activations',
    '46.10 GiB',
    'stack/layers/ffn/gate/kernel',
    'embed 2,048',
    '/ data 8',
    '32 copies over data, mdl',
    "axis_rules map 'norm' to no mesh axis",
    'heads 6 (stored 8)',
    '25% padding',
    'all gather',
    'replica over DCN',
    'asynchronous',
    'Roofline',
    'fusion.231',
    'libtpu 0.0.42.1',
    'at 1.5 GHz',
  ):
    assert words in text, words


def test_a_plan_that_fits_shows_what_is_free_and_the_ticks_of_its_pipeline():
  text, _ = read(plan_page(pipelined_plan()))
  assert 'Fits: 55.80 GiB of 95.00 GiB' in text
  assert '39.20 GiB (41%) are free' in text
  assert 'stage 4 (4 over DCN)' in text
  assert '512 devices in 4 slices' in text
  assert '4 stages, 8 microbatches, schedule circular with 2 groups' in text
  assert '16% of the ticks' in text
  assert text.count('stage 3, tick') == 16


def test_a_key_that_is_missing_leaves_its_part_out():
  whole = pipelined_plan()
  for key in whole:
    read(plan_page({name: value for name, value in whole.items() if name != key}))
    read(plan_page({**whole, key: None}))
  assert 'Memory is not known' in plan_page({})


def test_a_plan_of_devices_without_a_limit_is_neither_good_nor_bad():
  text, _ = read(plan_page({**sample_plan(), 'fits': None, 'hbm_bytes': None, 'suggestions': []}))
  assert 'Needs 55.80 GiB per device' in text
  assert 'No limit is known' in text


def test_without_cycles_of_the_compiler_a_step_is_given_at_best():
  plan = sample_plan()
  assert text._speed(plan)[0].startswith('predicted: ')
  del plan['time_by_kind']['cycles']
  assert text._speed(plan)[0].startswith('at best, by rooflines: ')
  assert ('step at best' in plan_page(plan), 'predicted MFU' in plan_page(plan)) == (True, False)


def test_the_page_loads_nothing_and_runs_nothing():
  page = plan_page(sample_plan())
  _, attributes = read(page)
  assert '<script' not in page
  assert '@import' not in page
  assert not [each for each in attributes if each[1] in ('src', 'href', 'srcset') or each[1].startswith('on')]
  assert not re.search(r'https?://|url\((?!#hatch\))', page)


def hostile(value):
  """The plan with every text made hostile; `kind` and `network` too."""
  if isinstance(value, dict):
    return {key: hostile(item) for key, item in value.items()}
  if isinstance(value, list):
    return [hostile(item) for item in value]
  return f'{value}"\'><script>alert(1)</script>{{{{body}}}}' if isinstance(value, str) else value


def test_every_name_is_escaped():
  plan = hostile(sample_plan())
  plan['mesh'] = {'<script>a': 2, **plan['mesh']}
  plan['memory'] = {'<script>m': GIB, **plan['memory']}
  plan['time_by_kind'] = {'<script>t': 1.0}
  plan['versions'] = {'<script>v': '<script>'}
  page = plan_page(plan)
  assert '<script' not in page
  assert page.count('<body>') == 1
  read(page)


@pytest.mark.parametrize(
  'made, expected',
  [
    (size(0), '0 B'),
    (size(2**34), '16.00 GiB'),
    (size(-3 * 2**20), '-3.0 MiB'),
    (size(None), 'unknown'),
    (duration(1.28), '1.28 s'),
    (duration(0.0352), '35.2 ms'),
    (duration(4.1e-4), '410 µs'),
    (duration(0), '0 µs'),
    (quantity(4.59e14, 'FLOP/s'), '459 TFLOP/s'),
    (quantity(5), '5'),
    (percent(0.0123), '1.2%'),
    (percent(0.387), '39%'),
  ],
)
def test_numbers(made, expected):
  assert made == expected


@pytest.mark.skipif(CHROMIUM is None, reason='no chromium here: scripts/setup_browser installs it')
def test_a_browser_lays_the_page_out_without_scrolling_sideways(tmp_path):
  """In frames, because a window of chromium is never narrower than 500 pixels."""
  page = html.escape(plan_page(sample_plan()))
  frames = ''.join(f'<iframe width="{width}" height="900" srcdoc="{page}"></iframe>' for width in (1280, 360))
  measure = '[...document.querySelectorAll("iframe")].map(f => f.contentDocument.documentElement)'
  measure = f'{measure}.map(root => [root.clientWidth, root.scrollWidth, root.querySelectorAll("table").length])'
  wrapper = tmp_path / 'frames.html'
  wrapper.write_text(f'{frames}<script>onload = () => {{ document.title = JSON.stringify({measure}) }}</script>')
  flags = ['--headless=new', '--no-sandbox', '--disable-gpu', f'--user-data-dir={tmp_path}/profile']
  done = subprocess.run(
    [CHROMIUM, *flags, '--dump-dom', wrapper.as_uri()], capture_output=True, text=True, timeout=60, check=True
  )
  sizes = json.loads(re.search(r'<title>(.*?)</title>', done.stdout).group(1))
  assert len(sizes) == 2
  for width, scrolled, num_tables in sizes:
    assert scrolled <= width
    assert num_tables == 6
