"""Runs an experiment with the real `paxml.main` until it is killed; bench_pax.py starts this in its own process.

    python paxml_run.py pax_models.Dense 5 marks.jsonl      # step and loss after the first step and after every fifth

Only Paxml and JAX are needed here, not spmd_tasks. Nothing of Paxml is changed, but for what does not run on Python
3.11 and today's JAX: names that JAX no longer has are given back, modules without a wheel (seqio and others, named by
imports alone) are stood in for, and checkpoints, whose Orbax is another one, are not written. Its loop is as it is;
around `run`, the step that is written down is waited for.
"""

import importlib
import importlib.abc
import importlib.machinery
import json
import os
import sys
import tempfile
import types


class StandIn(types.ModuleType):
  """A module whose names are empty classes, or such modules if they begin with a lowercase letter."""

  __path__: list[str] = []

  def __getattr__(self, name):
    if name.startswith('__'):
      raise AttributeError(name)
    made = importlib.import_module(f'{self.__name__}.{name}') if name[0].islower() else type(name, (), {})
    setattr(self, name, made)
    return made


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
  """Provides the modules that Paxml imports, but that cannot be installed or loaded."""

  def find_spec(self, fullname, path=None, target=None):
    names = 'seqio', 't5', 'tensorflow_datasets', 'lingvo.core.ops'
    if any(fullname == name or fullname.startswith(f'{name}.') for name in names):
      return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
    return None

  def create_module(self, spec):
    return StandIn(spec.name)

  def exec_module(self, module):
    module.__path__ = []


def give_back_names() -> None:
  """Adds names of earlier JAX versions that Paxml 1.4.0 uses."""
  import jax
  from jax._src.lib import xla_client
  from jax.experimental import pjit

  vars(jax)['tree_map'] = jax.tree.map
  sys.modules['jax.lib.xla_client'] = vars(jax.lib)['xla_client'] = xla_client
  if 'AUTO' not in vars(pjit):
    vars(pjit)['AUTO'] = type('AUTO', (), {})  # named by isinstance alone


class NoCheckpointer:
  """A checkpointer for Paxml's loop with new weights and without files."""

  step_to_restore = None

  def __init__(self, checkpoint_type):
    self.checkpoint_type = checkpoint_type

  def get_model_states(self, partitioner, metadata, key, train_input=None):
    from praxis import py_utils

    key, state, provenance = partitioner.initialize_prng_key_and_train_state(key, None, self.checkpoint_type)
    return state, provenance, py_utils.total_num_vars(state.mdl_vars), key

  def save_if_needed(self, *args, **kwargs):
    pass

  save_final = save_if_needed
  wait_until_finished = save_if_needed

  def reached_preemption(self, step):
    return False


def main() -> None:
  name, every, path = sys.argv[1], int(sys.argv[2]), sys.argv[3]
  os.environ.setdefault('XLA_FLAGS', '--xla_force_host_platform_device_count=8')
  os.environ.setdefault('JAX_PLATFORMS', 'cpu')
  sys.meta_path.insert(0, StandIns())
  import jax

  give_back_names()
  from absl import app, logging
  from fiddle import absl_flags
  from paxml import experiment_registry, programs, train
  from paxml import main as paxml_main

  module, _, cls = name.rpartition('.')
  experiment = getattr(importlib.import_module(module), cls)
  marks = open(path, 'w', buffering=1)  # noqa: SIM115  until the process ends

  class TimedProgram(programs.SingleTaskTrainProgram):
    """Paxml's own program."""

    def run(self, state, step):
      output = super().run(state, step)
      if step == 0 or (step + 1) % every == 0:
        jax.block_until_ready((output.loss, output.state))
        marks.write(json.dumps({'step': step + 1, 'loss': float(output.loss)}) + '\n')
      return output

  class Timed(experiment):  # type: ignore[valid-type, misc]
    """Returns the experiment without an end and without evals."""

    def train_programs(self):
      return [TimedProgram()]

    def task(self):
      task = super().task()
      task.train.num_train_steps, task.train.eval_interval_steps = 1_000_000, None
      task.train.summary_interval_steps = 1000
      return task

  experiment_registry.register(Timed)
  train._create_checkpointer = lambda task, job_log_dir, checkpoint_type, *args, **kwargs: NoCheckpointer(
    checkpoint_type
  )
  logging.set_verbosity(logging.ERROR)
  with tempfile.TemporaryDirectory() as job_log_dir:
    flags = [f'--exp={Timed.__module__}.Timed', f'--job_log_dir={job_log_dir}', '--mode=train']
    jax.config.config_with_absl()
    try:
      argv = ['paxml', *flags, '--enable_checkpoint_saving=false']
      app.run(paxml_main.main, argv=argv, flags_parser=absl_flags.flags_parser)
    except SystemExit as error:
      if error.code:
        raise


if __name__ == '__main__':
  main()
