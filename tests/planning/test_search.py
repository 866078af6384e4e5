"""`--mode plan --search`: which settings are planned, in which order, and what is said of them."""

import json
import math
import re

import pytest

from spmd_tasks import exit_codes
from spmd_tasks.config import resolve
from spmd_tasks.config.from_saved import from_json
from spmd_tasks.config.saved_config import read_saved_config
from spmd_tasks.errors import UserError
from spmd_tasks.main import run
from spmd_tasks.planning import format_plan, make_plan, parse_target
from spmd_tasks.planning import search as search_module
from spmd_tasks.planning.search import search

TARGET = parse_target('v5e:2x4')
GIB = 2.0**30


def resolver(name, *overrides):
  return lambda more: resolve(name, (*overrides, *more))


def made_up_plan(job, target, *, compiles):
  """A step is slower by tensor parallelism, remat and microbatches; the last two need less memory.

  Without tensor parallelism it fits with 4 microbatches, or with 2 and remat, which is faster.
  """
  del target
  assert not compiles
  mesh, policy = job.experiment.ici_mesh_shape, job.experiment.remat_policy
  number = job.task.learner.num_microbatches
  if policy == 'dots':
    raise UserError('no dots\nand more')
  network, products = 0.5 * math.log2(mesh[2]) + 0.01 * (mesh[0] - 1), 2.0 if policy == 'none' else 2.3
  accumulation = 0.2 * (number - 1)
  memory = (64 if policy == 'none' else 28) / number + mesh[2]
  seconds = {'products': products, 'network mdl': network, 'memory': accumulation}
  terms = [{'name': name, 'seconds': value} for name, value in sorted(seconds.items(), key=lambda item: -item[1])]
  return {
    'predicted_step_s': sum(seconds.values()),
    'predicted_mfu': 0.5,
    'peak_bytes': memory * GIB,
    'hbm_bytes': 16 * GIB,
    'fits': memory <= 16,
    'mesh': dict(zip(('replica', 'data', 'mdl'), mesh)),
    'terms': terms,
  }


def test_search_passes_through_plans_that_do_not_fit(monkeypatch, capfd):
  monkeypatch.setattr(search_module, 'make_plan', made_up_plan)
  found = search(resolver('lm.StdlibTiny', 'batch_size=64', 'remat_policy=none'), TARGET)
  first, *others = found['best']
  flags = '--ici_mesh_shape 1,8,1 --set remat_policy=elementwise --set task.learner.num_microbatches=2'
  assert first['flags'] == flags
  assert first['changes_s'] == {'network mdl': -0.5, 'products': pytest.approx(0.3), 'memory': pytest.approx(0.2)}
  assert first['gain_s'] == pytest.approx(0)
  assert first['fits']
  assert all(row['fits'] for row in others)
  memory = [row['peak_bytes'] for row in found['best']]
  assert memory == sorted(memory, reverse=True)  # slower ones need less
  assert {row['flags']: row['fits'] for row in found['single']}['--ici_mesh_shape 1,8,1'] is False
  assert {'flags': '--set remat_policy=dots', 'why': 'no dots'} in found['refused']
  assert 'plans, the fastest that fits: 2.5 s' in capfd.readouterr().err


def test_a_row_is_what_a_plan_with_its_flags_says(monkeypatch):
  monkeypatch.setattr(search_module, 'MAX_PLANS', 3)
  again = resolver('lm.StdlibTiny', 'ici_mesh_shape=1,8,1')
  found = search(again, TARGET)
  row = next(row for row in found['single'] if row['flags'] == '--ici_mesh_shape 1,4,2')
  planned = make_plan(again(['ici_mesh_shape=1,4,2']).build(), TARGET, compiles=False)
  assert {name: planned[name] for name in ('predicted_step_s', 'peak_bytes', 'fits', 'mesh')}.items() <= row.items()
  assert found['num_plans'] + len(found['refused']) == 3
  json.dumps(found)
  printed = format_plan(planned | {'search': found | {'seconds': 71.2}})
  assert re.search(r'\nestimated in [\d.]+ (ms|s), and 3 plans of --search in 71.2 s, by jax ', printed)


def test_axes_that_split_nothing_get_no_devices(monkeypatch):
  monkeypatch.setattr(search_module, 'make_plan', made_up_plan)
  rules = "(('batch', ('replica', 'data')), ('embed', 'data'))"
  found = search(resolver('lm.StdlibTiny', 'batch_size=64', f'axis_rules={rules}'), TARGET)
  assert found['num_plans'] > 3
  assert not [row['flags'] for row in found['single'] if ',4 ' in f'{row["flags"]} ']


def test_without_times_there_is_nothing_to_search():
  with pytest.raises(UserError, match='cpu:8 has none: give --target'):
    search(resolver('lm.StdlibTiny'), parse_target('cpu:8'))


def test_the_fastest_settings_that_fit_start_a_job(monkeypatch, tmp_path, capfd):
  monkeypatch.setattr(search_module, 'make_plan', made_up_plan)
  flags = f'--set batch_size=64 --set remat_policy=none --target {TARGET.name} --no_compile --search'.split()
  flags += ['--plan_out', str(tmp_path / 'plan')]
  assert run(['--exp', 'lm.StdlibTiny', '--mode', 'plan', *flags]) == exit_codes.OK
  assert f'spmd-tasks --config {tmp_path}/plan/fastest.json --mode train' in capfd.readouterr().out
  saved = read_saved_config(tmp_path / 'plan' / 'fastest.json')
  assert not saved.why_unsigned
  experiment, task = (resolved := from_json(saved)).experiment, resolved.build().task
  assert (experiment.ici_mesh_shape, experiment.remat_policy) == ((1, 8, 1), 'elementwise')
  assert task.learner.num_microbatches == 2
