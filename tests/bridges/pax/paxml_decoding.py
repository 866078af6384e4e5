"""Decodes with Paxml itself, in a process with one device, for test_modes.py.

python paxml_decoding.py JOB_LOG_DIR OUTPUT    runs Paxml's decode program with a job's newest checkpoint
"""

import sys
import types

from etils import epath
import jax
import jax.numpy as jnp
import numpy as np

from spmd_tasks.bridges.pax import install_shims
from spmd_tasks.config.from_saved import from_json
from spmd_tasks.config.saved_config import read_saved_config
from spmd_tasks.experiment import partition_job
from spmd_tasks.programs.job_directory import CheckpointRecord

ONE_DEVICE = 'ici_mesh_shape=1,1,1'


def run_decode_program(job_log_dir: epath.Path, output: epath.Path, experiment_path: str) -> None:
  """Runs Paxml's SingleTaskDecodeProgram on every dataset, with the averaged weights of the newest checkpoint."""
  from absl import flags
  from paxml import decode_programs, tasks_lib, train_states

  flags.FLAGS(['paxml'])
  np.unicode_ = np.str_  # NumPy 2 removed this name, which Paxml uses
  decode_programs.seqio_input = types.SimpleNamespace(  # SeqIO may not be installed, and these inputs do not use it
    maybe_update_decode_output_keys=lambda processed, output: processed, should_process_outputs=lambda dataset: False
  )
  job = from_json(read_saved_config(job_log_dir / 'config.json'), [ONE_DEVICE], [experiment_path]).build()
  restored = CheckpointRecord(job_log_dir).open_checkpoints(read_only=True).restore(partition_job(job).canonical_state)
  state = restored.state
  trained = train_states.TrainState(
    step=jnp.uint32(restored.step), mdl_vars=state.variables, opt_states=state.learner.opt_state
  )
  task, hparams = job.task.task, job.task.weight_hparams

  class PlainJit:
    """Replaces Paxml's partitioner: a step is a jitted function on one device, compiled once for all datasets."""

    def __init__(self):
      self._jitted = None

    def preprocess_input_config(self, config):
      return config

    def preprocess_inputs(self, dataset, batch, specs):
      return jax.tree.map(jnp.asarray, batch)

    def partition(self, step, inputs_shape_dtype, is_eval):
      if self._jitted is None:
        self._jitted = jax.jit(lambda *arguments: step(task, *arguments, task.model.fprop_dtype, hparams))
      return lambda state, key, batch, static_args: self._jitted(state, key, batch), None

  with jax.default_prng_impl('rbg'):
    root, _ = jax.random.split(jax.random.PRNGKey(task.decode.random_seed))
    decode_key, _ = jax.random.split(root)
    partitioner = PlainJit()
    for dataset in job.decode_inputs.values():
      program = decode_programs.SingleTaskDecodeProgram(dataset.config.clone())
      program.setup(task, partitioner, output, decode_key)
      program.run(tasks_lib.extract_ema(trained).to_eval_state(), restored.step)
      program.shutdown()


if __name__ == '__main__':
  install_shims()
  job_log_dir, output, _, path = sys.argv[1:]  # ends by --experiment_path PATH
  run_decode_program(epath.Path(job_log_dir), epath.Path(output), path)
