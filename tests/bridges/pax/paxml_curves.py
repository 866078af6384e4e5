"""Trains experiments with the real Paxml: its own binary's main, its partitioner, executor and programs.

    python -m tests.bridges.pax.paxml_curves tests/data/pax_cases/paxml_losses.json [transformers.Dropout ...]

Each case runs in a process forked after the imports, on the devices of its mesh. The file gets, by case, the losses of
the training steps, `total_loss` (or the learner's loss) of every eval by dataset and step, and what an
`early_stopping_fn` of the module `ending` was asked; a case that Paxml cannot run gets its error. Ours beside Paxml: a
clock-free recorder around its programs, and a checkpointer that does nothing, because Paxml's needs an older Orbax.
"""

import importlib
import json
import math
import os
from pathlib import Path
import sys
import tempfile
import traceback
from typing import Any

from scripts.paxml_run import NoCheckpointer
from spmd_tasks.bridges.pax import install_shims

install_shims()  # makes Paxml importable

DATA = Path(__file__).parents[2] / 'data'
MODULES = (
  'transformers',
  'optimizers',
  'pipelines',
  'experts',
  'families',
  'nvidia',
  'samples',
  'classifiers',
  'sequences',
  'inputs',
  'ending',
)


def case_names() -> list[str]:
  """Returns the names of the experiments in tests/data/pax_cases: MODULE.CLASS."""
  from paxml import base_experiment

  names = []
  for module_name in MODULES:
    module = importlib.import_module(f'pax_cases.{module_name}')
    names += [
      f'{module_name}.{name}'
      for name, value in vars(module).items()
      if isinstance(value, type)
      and issubclass(value, base_experiment.BaseExperiment)
      and value.__module__ == module.__name__
    ]
  return names


def run_paxml(name: str) -> dict[str, Any]:
  """Runs one case by `paxml.main` in this process."""
  from absl import app
  from fiddle import absl_flags
  import jax
  from jax.experimental import pjit
  import numpy as np
  from paxml import experiment_registry, programs, train
  from paxml import main as paxml_main

  module_name, class_name = name.split('.')
  module = importlib.import_module(f'pax_cases.{module_name}')
  losses: list[float] = []
  evals: dict[str, dict[int, float]] = {}

  class TrainProgram(programs.SingleTaskTrainProgram):
    def run(self, state, step):
      output = super().run(state, step)
      losses.append(float(np.asarray(output.loss)))
      return output

  class EvalProgram(programs.SingleTaskEvalProgram):
    def _run_eval_loop(self, state):
      *others, self._clu_metrics = super()._run_eval_loop(state)
      return *others, self._clu_metrics

    def run(self, state, step):
      output = super().run(state, step)
      loss_name = self._task.learners[0].loss_name
      metrics = output.eval_metrics or {name: metric.compute() for name, metric in self._clu_metrics.items()}
      evals.setdefault(self.eval_input.name, {})[int(step)] = float(metrics[loss_name])
      return output

  def train_programs(self):
    return [TrainProgram()]

  def eval_programs(self):
    return [EvalProgram(dataset) for dataset in self.eval_datasets()]

  if not hasattr(pjit, 'AUTO'):  # Paxml's partitioner asks whether a sharding is one
    pjit.AUTO = type('AUTO', (), {})  # type: ignore[attr-defined]
  np.unicode_ = np.str_  # Paxml's name for it, which NumPy 2 lacks
  train._create_checkpointer = lambda task, directory, kind, *args, **kwargs: NoCheckpointer(kind)
  recorded = type(
    'Recorded',
    (getattr(module, class_name),),
    {
      'train_programs': train_programs,
      'eval_programs': eval_programs,
      '__module__': 'cases.cases',
    },
  )
  experiment_registry.register(recorded)
  jax.config.config_with_absl()
  with tempfile.TemporaryDirectory(prefix='paxml_') as directory:
    argv = ['paxml', '--exp=cases.Recorded', f'--job_log_dir={directory}', '--mode=train']
    argv += ['--enable_checkpoint_saving=false', '--eval_on_test=true']
    try:
      app.run(paxml_main.main, argv, flags_parser=absl_flags.flags_parser)
    except SystemExit as exit:
      if exit.code:
        raise
    asked = Path(directory, 'asked.jsonl')  # by early_stopping_fn
    calls = {'asked': [json.loads(line) for line in asked.read_text().splitlines()]} if asked.exists() else {}
  return {'losses': losses, 'evals': evals} | calls


def num_devices(name: str) -> int:
  """Returns how many devices the mesh of a case has."""
  module_name, class_name = name.split('.')
  cls = getattr(importlib.import_module(f'pax_cases.{module_name}'), class_name)
  slices = getattr(cls, 'DCN_MESH_SHAPE', None) or ()
  return math.prod((*(getattr(cls, 'ICI_MESH_SHAPE', None) or cls.MESH_SHAPE), *slices))


def run_forked(name: str) -> dict[str, Any]:
  """Runs one case in a child; returns its result, or its error."""
  read, write = os.pipe()
  pid = os.fork()
  if pid == 0:
    os.environ['XLA_FLAGS'] = f'--xla_force_host_platform_device_count={num_devices(name)}'
    try:
      result = run_paxml(name)
    except BaseException as error:
      if os.environ.get('VERBOSE'):
        traceback.print_exc()
      result = {'error': f'{type(error).__name__}: {error}'[:300]}
    with os.fdopen(write, 'w') as file:
      json.dump(result, file)
    os._exit(0)
  os.close(write)
  with os.fdopen(read) as file:
    text = file.read()
  os.waitpid(pid, 0)
  return json.loads(text) if text else {'error': 'the process died'}


def main(path: str, *names: str) -> None:
  """Runs the cases, all of them by default, and adds them to the file."""
  sys.path.insert(0, str(DATA))
  import paxml.main  # noqa: F401  before the forks
  import praxis.layers  # noqa: F401

  file = Path(path)
  results = json.loads(file.read_text()) if file.exists() else {}
  for name in names or case_names():
    results[name] = run_forked(name)
    print(name, results[name], flush=True)
    file.write_text(json.dumps(dict(sorted(results.items())), indent=1) + '\n')


if __name__ == '__main__':
  main(*sys.argv[1:])
