"""The reports of a plan: its figures are on both, the page loads nothing, every name is escaped."""

from html.parser import HTMLParser
import re

import pytest

from spmd_tasks.config import resolve
from spmd_tasks.planning import format_plan, make_plan, parse_target, plan_page

GIB = 2**30
TIMES = {
  'predicted_step_s': 3.91,
  'predicted_mfu': 0.387,
  'tokens_per_s_per_chip': 8380.0,
  'terms': [
    {
      'name': name,
      'seconds': seconds,
      'work': work,
      'unit': unit,
      'rate': work / seconds,
      'basis': basis,
      'source': 'a profile',
    }
    for name, seconds, work, unit, basis in (
      ('products', 3.2, 2.98e14, 'FLOP', 'fitted'),
      ('memory', 0.42, 1.6e12, 'B', 'measured'),
      ('network data', 0.29, 4.1e10, 'B', 'assumed'),
    )
  ],
  'shares': {'assumed': 0.07, 'fitted': 0.82, 'measured': 0.11},
}


@pytest.fixture(scope='module')
def plan():
  """A plan for CPUs, with memory and times as if it were for a TPU, which it does not fit."""
  made = make_plan(resolve('pipeline.StdlibTiny', ()).build(), parse_target('cpu:8'), compiles=False)
  memory = {'weights': int(0.4 * GIB), 'activations': int(46.1 * GIB), 'temporaries': int(9.3 * GIB)}
  step = made['steps']['train'] | TIMES
  step |= {'fits': False, 'hbm_bytes': int(15.75 * GIB), 'peak_bytes': int(55.8 * GIB), 'memory': memory}
  step['out_of_memory'] = {'needed_bytes': 1, 'available_bytes': 1, 'message': 'RESOURCE_EXHAUSTED: used 55.80G'}
  return made | step | {'steps': {'train': step}, 'notes': ['JAX takes 75%']}


class Reader(HTMLParser):
  """Collects the text, and checks that elements are closed in order."""

  def __init__(self):
    super().__init__()
    self.open, self.text, self.attributes = [], [], []

  def handle_starttag(self, name, attributes):
    self.attributes += [(name, *pair) for pair in attributes]
    if name != 'meta':
      self.open.append(name)

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


def test_both_reports_have_the_figures(plan):
  page, text = read(plan_page(plan))[0], format_plan(plan)
  for words in (
    *('pipeline.StdlibTiny on cpu:8', 'mesh stage 4 x data 2', '55.80 GiB of 15.75 GiB per device'),
    *('40.05 GiB too much', '3.91 s', '3.20 s', 'products', '39%', '8,380', 'activations', '46.10 GiB'),
    *('stack/layers/ffn/gate/kernel', 'all gather'),
    'JAX takes 75%',
    *('298 TFLOP', '1.6 TB', 'network data', 'fitted: a profile', 'bubble', 'replicated over data', 'jax '),
    'No published figures of cpu are used',
  ):
    assert words in page, words
    assert words in text, words
  assert 'DOES NOT FIT: 55.80 GiB' in text
  assert 'Does not fit: 55.80 GiB' in page
  assert 'RESOURCE_EXHAUSTED' in page
  assert page.count('F7') == page.count('B7') == 4  # the pipeline's ticks, of each stage


def test_the_page_loads_nothing_and_runs_nothing(plan):
  page = plan_page(plan)
  _, attributes = read(page)
  assert '<script' not in page
  assert not [each for each in attributes if each[1] in ('src', 'href', 'srcset') or each[1].startswith('on')]
  assert not re.search(r'https?://|url\(|@import', page)


def hostile(value):
  """Every text of a plan made hostile, but for keys and the names of kinds."""
  if isinstance(value, dict):
    return {key: item if key in ('compiler', 'unit') else hostile(item) for key, item in value.items()}
  if isinstance(value, list | tuple):
    return [hostile(item) for item in value]
  return f'{value}"\'><script>alert(1)</script>{{{{body}}}}' if isinstance(value, str) else value


def test_every_name_is_escaped(plan):
  made = hostile(plan)
  made['mesh'] = {'<script>a': 2, **made['mesh']}
  made['versions'] = {'<script>v': '<script>'}
  page = plan_page(made)
  assert '<script' not in page
  assert page.count('<body>') == 1
  read(page)
