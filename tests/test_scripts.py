"""Every script runs in its smallest form: here, in another test, in CI, or beside a framework that is not installed.

Scripts run in processes that have imported the package already (tests/fork_server.py). `--all` runs the benchmarks that
take longer than 10 s of CPU; otherwise they are imported.
"""

import ast
import datetime
import json
import math
import os
from pathlib import Path
import subprocess

import pytest

from tests import binary, forked, mutants

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / 'scripts'


def start(*argv, server=None):
  """Starts `python <argv>` beside the scripts, as a user does, who has no fake devices."""
  environment = {name: value for name, value in os.environ.items() if name != 'JAX_NUM_CPU_DEVICES'}
  environment['PYTHONPATH'] = os.pathsep.join(map(str, (ROOT, SCRIPTS, ROOT / 'tests' / 'data')))
  streams = {'stdin': subprocess.DEVNULL, 'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE}
  if server is not None:
    return forked.ForkedPopen([*map(str, argv)], server=server, cwd=ROOT, env=environment, text=True, **streams)
  return binary.start_process(argv, cwd=ROOT, env=environment, text=True, **streams)


def run(*argv, code=0, **how):
  """Returns what a process prints to stdout."""
  finished = binary.finish(start(*argv, **how), limit_s=840)
  assert finished.returncode == code, finished.stderr[-4000:]
  return finished.stdout


def last_line(*argv):
  """Returns the JSON object in the last line of a script's output."""
  return json.loads(run(SCRIPTS / argv[0], *argv[1:]).splitlines()[-1])


# --- benchmarks ---


def check_adapters(result):
  assert result['ratios']['0'] == 1
  of_one, of_four = (result['adapter_mib'][number] for number in ('1', '4'))
  assert of_four == pytest.approx(of_one * 5 / 2)  # adapter 0, of zeros, is in both


def check_low_rank(result):
  full, low_rank = (result['kinds'][name] for name in ('all weights', 'rank 16'))
  for figures in (full, low_rank):  # but for norms, which are held in float32, and counts
    assert sum(figures['parts'].get(part, 0) for part in ('weights', 'optimizer')) == pytest.approx(
      figures['state_bytes_by_arithmetic'], rel=0.02
    )
  assert result['ratio'] < 0.8


def check_huggingface(result):
  assert result.keys() > {'load, ours', 'load, transformers', 'export, ours', 'export, transformers'}
  assert result['export, ours']['peak_gb'] < result['load, ours']['peak_gb'] + 0.2  # a tensor at a time


def check_pax(result):
  figures = result['pax_lab.dense_lm.DenseLm']
  assert figures['loss_difference'] < 1e-6
  assert figures['ours'].keys() == figures['paxml'].keys() >= {'first_step_s', 'step_ms_cpu'}


def check_pipeline(result):
  # Executed FLOPs are the ideal ones, in the steady state and in the bubbles.
  assert result['ratio'] == pytest.approx(1, abs=0.05)


def check_decode(result):
  assert result['same_tokens'] == 1
  assert result['prefix_prefill_share'] < 0.2


def check_serve(result):
  assert result['same_tokens']
  assert result['ratio'] < 1  # continuous batching takes fewer decode steps than static batching
  assert result['decode_steps']['continuous'] < result['decode_steps']['static']


def check_mup(result):
  assert result['best'].keys() == {'muP', 'standard'}
  for kind, by_width in result['losses'].items():
    for width, losses in by_width.items():
      best = min(losses, key=losses.__getitem__)
      assert float(best) == pytest.approx(result['best'][kind][width])
      first, *_, last = losses
      assert best not in (first, last)  # both neighbors are worse


CHECKS = {
  'bench_adapters.py': check_adapters,
  'bench_decode.py': check_decode,
  'bench_huggingface.py': check_huggingface,
  'bench_low_rank.py': check_low_rank,
  'bench_mup.py': check_mup,
  'bench_pax.py': check_pax,
  'bench_pipeline.py': check_pipeline,
  'bench_serve.py': check_serve,
}
BENCHMARKS = sorted(path.name for path in SCRIPTS.glob('bench_*.py'))
QUICK = ('bench_compile.py', 'bench_input.py', 'bench_moe.py', 'bench_mup.py', 'bench_stores.py')
LONG = [name for name in BENCHMARKS if name not in QUICK]
MINUTES = 'bench_rl.py'  # is only imported


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
  'script', [*QUICK, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in LONG if name != MINUTES)]
)
def test_last_line_is_one_json_object_that_holds_the_claims_without_a_clock(script):
  if script in ('bench_decode.py', 'bench_huggingface.py'):
    import transformers  # noqa: F401  which these compare with
  result = last_line(script, '--quick')
  assert math.isfinite(result.get('ratio', 1))
  CHECKS.get(script, lambda result: None)(result)


def test_benchmarks_that_take_longer_can_be_imported():
  code = 'import sys; [__import__(name.removesuffix(".py")) for name in sys.argv[1:]]'
  run('-c', code, *LONG)


def test_the_models_of_the_comparison_with_paxml_can_be_built():
  code = 'import bench_pax as b; from spmd_tasks.config import resolve; [resolve(n).build() for n in b.PAX | b.NATIVE]'
  run('-c', code, server=os.environ.get(forked.PAX_SOCKET_VARIABLE))


# --- the rest ---


def test_a_published_row_is_predicted(tmp_path):
  row = {'name': 'a', 'chip': 'v6e', 'num_chips': 16, 'num_slices': 1, 'model': 'llama3.1-8b', 'global_batch': 48}
  row |= {'seq_len': 8192, 'precision': 'bf16', 'step_s': 3.393}
  (tmp_path / 'rows.json').write_text(json.dumps({'rows': [row]}))
  [predicted] = last_line('plan_published.py', tmp_path / 'rows.json', '--only', 'a')['rows']
  assert predicted['ratio'] == pytest.approx(1, abs=0.2)
  run(SCRIPTS / 'plan_published.py', tmp_path / 'rows.json', '--only', 'b', code=2)


def test_gpu_check_compares_kernels_on_a_cpu(tmp_path):
  """The other sections run with --all (test_gpu_check.py)."""
  run(SCRIPTS / 'gpu_check.py', '--tiny', '--section', 'kernels', '--to', tmp_path / 'rows.json')
  rows = json.loads((tmp_path / 'rows.json').read_text())
  assert [row for row in rows if 'failure' in row] == []
  assert all(row['error'] <= row['limit'] for row in rows if 'limit' in row)


def test_a_ladder_writes_its_prediction_before_the_next_size_runs(tmp_path):
  exp = 'tests.recipes.small_ladder.Small'
  result = last_line('ladder.py', '--exp', exp, '--next', '3', '--job_log_dir', tmp_path)
  prediction = json.loads((tmp_path / 'prediction.json').read_text())
  assert [size['depth'] for size in result['sizes']] == [1, 2, 3]
  assert result['error'] == pytest.approx(prediction['loss'] / result['sizes'][-1]['loss'] - 1, abs=1e-4)
  written = datetime.datetime.fromisoformat(prediction['written']).timestamp()
  first_metrics = (tmp_path / 'depth=3' / 'metrics.jsonl').read_text().splitlines()[0]
  assert written <= json.loads(first_metrics)['time'] + 1  # `written` has whole seconds
  assert (tmp_path / 'ladder.svg').read_text().startswith('<svg')


def test_a_ladders_fit_finds_a_power_law(monkeypatch):
  monkeypatch.syspath_prepend(SCRIPTS)
  import ladder

  law = ladder.Fit(irreducible=1.2, scale=40.0, exponent=0.15)
  sizes = [ladder.Size(depth, 1, 10.0 ** (8 + depth), law(10.0 ** (8 + depth))) for depth in range(5)]
  prediction = ladder.predict(sizes, 1e14)
  assert prediction['loss'] == pytest.approx(law(1e14), rel=1e-3)
  low, high = prediction['band']
  assert low <= prediction['loss'] <= high <= low * 1.01


@pytest.mark.exhaustive  # 40 s of CPU
def test_campaigns_with_one_case():
  assert json.loads(run('-m', 'tests.verification.number_campaign', '--cases', '1').splitlines()[-1])['same'] == 1
  summary = run('-m', 'tests.decoding.campaign', '--requests', '1', '--cancellations', '1', '--only', '0')
  assert json.loads(summary)['failed'] == []


def test_campaigns_start():
  """Their cases run in tests/test_fault_campaign.py, tests/decoding/test_campaign.py and tests/verification."""
  assert json.loads(run('-m', 'tests.verification.number_campaign', '--cases', '0'))['bad'] == 0
  assert '--cancellations' in run('-m', 'tests.decoding.campaign', '--help')
  assert 'kill/' in run('-m', 'tests.fault_campaign.campaign', '--list')


def test_every_mutant_has_its_place():
  assert mutants.main(['--check']) == 0


def test_the_inputs_of_the_quickstarts_are_written(tmp_path):
  run(SCRIPTS / 'sums.py', 'inputs', tmp_path)
  assert len((tmp_path / 'valid.jsonl').read_text().splitlines()) == 20
  run(SCRIPTS / 'finetune_base.py', 'inputs', tmp_path)
  assert len((tmp_path / 'chats.jsonl').read_text().splitlines()) > 1000
  run(SCRIPTS / 'finetune_base.py', 'template', tmp_path)


# Who runs the other scripts.
ELSEWHERE = {
  'by CI': 'check_wheel docs find_python find_uv lint setup setup_browser test',
  'by other tests': (
    'docs_fields.py docs_site.py draw_losses.py draw_pictures.py draw_request.py published.py '
    'render_benchmarks.py svg.py t5x_compare t5x_compare.py'
  ),
  'imported by scripts above': (
    'alternation.py bare_decode.py bare_step.py native_models.py pax_models.py stream_client.py'
  ),
  'starts what is above or a longer form of it': (
    'coverage decode_campaign fault_campaign gpu_check mutants number_campaign plan_published quickstart '
    'quickstart_finetune quickstart_grpo update_golden'
  ),
  'sets up another JAX': 'admit_jax',
  'beside a framework that is not installed': (
    'paxml_run.py run_flaxformer.py run_megablocks.py run_t5x.py run_trl.py run_trl_offline.py'
  ),
}
HERE = {*BENCHMARKS, 'finetune_base.py', 'gpu_check.py', 'ladder.py', 'plan_published.py', 'sums.py'}


def is_code(path):
  return path.suffix in ('', '.py')


def test_every_script_is_run_somewhere():
  listed = [*HERE, *' '.join(ELSEWHERE.values()).split()]
  assert sorted(listed) == sorted(path.name for path in SCRIPTS.iterdir() if path.is_file() and is_code(path))


@pytest.mark.parametrize(
  'path', sorted(path for path in SCRIPTS.iterdir() if path.is_file() and not path.suffix), ids=lambda path: path.name
)
def test_a_shell_script_can_be_parsed(path):
  assert os.access(path, os.X_OK)
  subprocess.run(['bash', '-n', path], check=True)


def names_in(path):
  """Returns the names that a module binds: definitions, assignments and imports, including lazy ones."""
  nodes = [*ast.walk(ast.parse(path.read_text()))]
  bound = {getattr(node, 'name', None) or getattr(node, 'id', None) for node in nodes}
  return bound | {alias.asname for alias in nodes if isinstance(alias, ast.alias)}


@pytest.mark.parametrize('path', sorted(SCRIPTS.glob('*.py')), ids=lambda path: path.name)
def test_the_imports_of_a_script_exist(path):
  """Also imports in functions, and of scripts that cannot run here."""
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.ImportFrom) and (node.module or '').startswith('spmd_tasks'):
      place = ROOT / node.module.replace('.', '/')
      file = place / '__init__.py' if place.is_dir() else place.with_suffix('.py')
      missing = {alias.name for alias in node.names} - names_in(file) - {path.stem for path in place.glob('*')}
      assert not missing, f'{node.module} has no {missing}'
