"""Jobs beside one another: the table and the page have the same figures, in whatever state the jobs are."""

import json
import math
import re
import statistics

import pytest
from selenium import webdriver

from spmd_tasks import exit_codes
from spmd_tasks.programs.recorded_runs import find_runs
from spmd_tasks.sweeps.compare import comparison_page, comparison_table, group_runs
from tests import binary, browser
from tests.programs.test_recorded_runs import RATES, line, write_run


def losses(start):
  return [line(step, start / step, goodput=0.5, wall_seconds=10.0 * step, **RATES) for step in (1, 10, 20)]


@pytest.fixture
def sweep(tmp_path):
  """Two learning rates with two seeds each; one of the four runs is not complete."""
  directory = tmp_path / 'lr'
  for rate in (0.1, 0.2):
    for seed in (0, 1):
      evals = [line(20, rate + seed, top1=0.25, num_batches=3)]
      write_run(
        directory / f'{rate},{seed}',
        losses(2 + seed),
        evals=evals,
        newest={'step': 20} if (rate, seed) != (0.2, 1) else {'step': 10},
        overrides={'rate': rate, 'seed': seed},
        same=3,
      )
  return directory


def groups_in(*places):
  return group_runs(find_runs(places))


def data_of(page):
  return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])


def test_seeds_are_one_row_with_their_mean_and_deviation(sweep):
  table = comparison_table(groups_in(sweep)).splitlines()
  assert table[0].split() == ['rate', 'seeds', 'step', 'eval/valid/loss', 'loss', 'eval/valid/top1', 'goodput']
  deviation = statistics.stdev([0.1, 1.1])
  assert re.split(r'  +', table[1]) == [
    '0.1',
    '2',
    '20',
    f'0.6 ± {deviation:.2g}',
    '0.125 ± 0.035',
    '0.25 ± 0',
    '50.0%',
  ]
  assert re.split(r'  +', table[2])[:3] == ['0.2', '2', '20 of 20']  # the lowest loss is first
  assert len(table) == 3


def test_the_page_has_the_curves_by_step_tokens_flops_and_seconds(sweep):
  data = data_of(comparison_page(groups_in(sweep)))
  assert data['labels'] == ['rate=0.1', 'rate=0.2']
  assert data['axes'] == ['step', 'tokens', 'flops', 'seconds']
  assert data['knots'][0][1] == {
    'step': [0, 1, 10, 20],
    'tokens': [0, 128, 1280, 2560],
    'flops': [0, 3e3, 3e4, 6e4],
    'seconds': [0, 10, 100, 200],
  }
  charts = {chart['name']: chart['curves'] for chart in data['charts']}
  assert charts['loss'][0][1] == {'steps': [1, 10, 20], 'values': [3.0, 0.3, 0.15]}
  assert charts['eval/valid/loss'][1][0] == {'steps': [20], 'values': [0.2]}
  assert [chart['name'] for chart in data['charts']][: data['numResults']] == [
    'eval/valid/loss',
    'loss',
    'eval/valid/top1',
  ]


def test_repeated_runs_are_not_seeds_and_keep_their_names(tmp_path):
  for name in ('before', 'after'):
    write_run(tmp_path / name, losses(2))
  groups = groups_in(tmp_path)
  assert sorted(group.label for group in groups) == ['after', 'before']
  assert comparison_table(groups).split()[0] == 'run'


def test_runs_in_any_state_are_compared(tmp_path):
  """Diverged, empty, of another experiment, without evals, and with settings that are no numbers."""
  write_run(tmp_path / 'diverged', [line(1, 2.0), line(2, math.nan), line(3, math.inf)], shape=[1, 2], rate=None)
  write_run(tmp_path / 'empty', shape=[2, 2], rate=0.1)
  write_run(tmp_path / 'other', losses(2), evals=[line(20, 0.5)], experiment='mine.Large', rate='<b>fast</b>')
  groups = groups_in(tmp_path)
  table = comparison_table(groups)
  assert [group.label for group in groups] == ['other', 'diverged', 'empty']
  assert re.search(r'mine\.Small +\[1, 2\] +None +3 of 20 +inf$|mine\.Small .* 3 of 20 +inf', table)
  page = comparison_page(groups)
  assert '<b>fast' not in page
  data = data_of(page)
  curves = {chart['name']: chart['curves'] for chart in data['charts']}
  assert curves['loss'][1] == [{'steps': [1, 2, 3], 'values': [2.0, None, None]}]
  assert data['knots'][2] == [{'step': [0]}]


def test_a_seed_that_diverges_is_counted(tmp_path):
  for seed, loss in enumerate((1.0, 3.0, math.inf, -math.inf)):
    write_run(tmp_path / str(seed), [line(20, loss)], overrides={'seed': seed})
  write_run(tmp_path / 'worse', [line(20, 9.0)], rate=0.3)
  first, second = comparison_table(groups_in(tmp_path)).splitlines()[1:]
  assert '9' in first.split()  # finite losses come first
  assert '2 ± 1.4 (2 not finite)' in second


def test_a_long_run_has_few_points_and_its_last_one(tmp_path):
  write_run(tmp_path / 'long', [line(step, 1 / step) for step in range(1, 5001)])
  page = comparison_page(groups_in(tmp_path))
  (curve,) = next(chart['curves'][0] for chart in data_of(page)['charts'] if chart['name'] == 'loss')
  assert (len(curve['steps']), curve['steps'][0], curve['steps'][-1]) == (400, 1, 5000)
  assert len(page) < 60_000


def test_the_mode_writes_the_page_and_prints_the_table(sweep, tmp_path, capfd):
  out = tmp_path / 'new' / 'page.html'
  assert binary.run_in_process('--mode', 'compare', sweep, '--out', out) == exit_codes.OK
  printed = capfd.readouterr().out
  assert printed.splitlines()[0].split()[:2] == ['rate', 'seeds']
  assert printed.splitlines()[-1] == f'page: {out}'
  page = out.read_text()
  assert page == comparison_page(groups_in(sweep))
  assert not re.search(r'(src|href)\s*=|url\(|https?://(?!www\.w3\.org/2000/svg)|@import', page)  # it loads nothing


@pytest.mark.parametrize(
  'words, place',
  [
    (['lr'], 'lr/compare.html'),
    (['./lr/../lr/'], 'lr/compare.html'),
    (['lr/*'], 'compare.html'),
    (['lr/0.1,0', 'lr/0.2,0'], 'compare.html'),
    (['lr', '--out', 'page.html'], 'page.html'),
  ],
)
def test_the_page_is_in_the_directory_that_is_compared(words, place, sweep, tmp_path, monkeypatch, capfd):
  monkeypatch.chdir(tmp_path)
  assert binary.run_in_process('--mode', 'compare', *words) == exit_codes.OK
  assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob('*.html')] == [place]
  assert capfd.readouterr().out.splitlines()[-1].endswith(f'{tmp_path.name}/{place}')


@pytest.mark.parametrize(
  'words, message',
  [
    ((), '--mode compare needs directories of jobs'),
    (('no_such_directory',), 'no_such_directory is no directory: name directories of jobs'),
    (('runs', '--set', 'a=b', '--step', 3), '--step is for --mode replay'),
  ],
)
def test_a_wrong_comparison_is_one_sentence(words, message, tmp_path, monkeypatch, capfd):
  monkeypatch.chdir(tmp_path)
  assert binary.run_in_process('--mode', 'compare', *words) == exit_codes.USAGE
  assert message in capfd.readouterr().err
  assert list(tmp_path.iterdir()) == []


def test_words_are_for_this_mode_alone(capfd):
  with pytest.raises(SystemExit):
    binary.run_in_process('--mode', 'train', 'runs/lr')
  with pytest.raises(SystemExit):
    binary.run_in_process('--mode', 'compare', '--no_such_flag', 'runs/lr')
  said = capfd.readouterr().err
  assert 'unknown argument runs/lr' in said
  assert 'unknown flag --no_such_flag' in said


@pytest.mark.slow
@browser.needed
def test_the_page_in_a_browser(sweep, tmp_path):
  """Curves with bands; by another axis; without a run; under the pointer; wide and narrow, light and dark."""
  write_run(sweep / 'diverged', [line(1, 2.0), line(2, math.nan), line(3, 1.0)], overrides={'rate': 0.3, 'seed': 0})
  page = tmp_path / 'page.html'
  page.write_text(comparison_page(groups_in(sweep)))
  with browser.opened(tmp_path / 'profile') as driver:
    driver.get(f'file://{page}')

    def paths(chart=1):
      found = driver.find_elements('css selector', f'#results .chart:nth-of-type({chart + 1}) svg path')
      return [path.get_attribute('d') for path in found]

    def click(text):
      driver.find_element('xpath', f'//label[contains(., "{text}")]/input').click()

    by_step = paths()
    assert len(by_step) == 2 * 2 + 1  # two bands with their means, and one run
    assert by_step[-1].count('M') == 2  # a gap at the NaN
    click('tokens')
    texts = [text.text for text in driver.find_elements('css selector', '#results .chart svg text')]
    assert {'2k', 'tokens'} <= {*texts}
    assert len(paths()) == 4  # the diverged run has not counted its tokens
    click('rate=0.1')
    assert len(paths()) == 2
    click('step')
    svg = driver.find_element('css selector', '#results .chart svg')
    webdriver.ActionChains(driver).move_to_element(svg).perform()
    assert 'rate=0.2' in driver.find_element('css selector', '.readout').text
    overflow = 'return document.documentElement.scrollWidth - document.documentElement.clientWidth'
    colors = set()
    for scheme in ('light', 'dark'):
      feature = {'name': 'prefers-color-scheme', 'value': scheme}
      driver.execute_cdp_cmd('Emulation.setEmulatedMedia', {'features': [feature]})
      for width in (1400, 380):
        size = {'width': width, 'height': 900, 'deviceScaleFactor': 1, 'mobile': False}
        driver.execute_cdp_cmd('Emulation.setDeviceMetricsOverride', size)
        assert driver.execute_script(overflow) == 0
      colors.add(driver.execute_script('return getComputedStyle(document.body).backgroundColor'))
    assert len(colors) == 2
    assert driver.get_log('browser') == []
