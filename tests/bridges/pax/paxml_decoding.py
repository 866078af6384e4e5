"""What test_modes.py does between commands, in their process: decodes with Paxml itself, and writes its checkpoints."""

from pathlib import Path
import types

from etils import epath
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from spmd_tasks.config.from_saved import from_json
from spmd_tasks.config.saved_config import read_saved_config
from spmd_tasks.experiment import partition_job
from spmd_tasks.programs.job_directory import CheckpointRecord

ONE_DEVICE = 'ici_mesh_shape=1,1,1'


def run_decode_program(job_log_dir: str, output: str, experiment_path: str) -> None:
  """Runs Paxml's SingleTaskDecodeProgram on every dataset, with the averaged weights of a job's newest checkpoint.

  It uses one of the devices.
  """
  from absl import flags
  from paxml import decode_programs, tasks_lib, train_states

  flags.FLAGS(['paxml'])
  np.unicode_ = np.str_  # NumPy 2 removed this name, which Paxml uses
  decode_programs.seqio_input = types.SimpleNamespace(  # SeqIO may not be installed, and these inputs do not use it
    maybe_update_decode_output_keys=lambda processed, output: processed, should_process_outputs=lambda dataset: False
  )
  directory = epath.Path(job_log_dir)
  job = from_json(read_saved_config(directory / 'config.json'), [ONE_DEVICE], [experiment_path]).build()
  model = partition_job(job, job.experiment.mesh_spec().build(jax.devices()[:1]))
  restored = CheckpointRecord(directory).open_checkpoints(read_only=True).restore(model.canonical_state)
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
      program.setup(task, partitioner, epath.Path(output), decode_key)
      program.run(tasks_lib.extract_ema(trained).to_eval_state(), restored.step)
      program.shutdown()


def write_as_paxml(job_log_dir: str, *directories: str) -> None:
  """Writes a job's checkpoint of step 20 to each directory in Paxml's format with `tensorstore_use_ocdbt`."""
  name = Path('checkpoints', 'checkpoint_00000020')
  handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True)
  state = handler.restore(job_log_dir / name / 'state')
  variables = {'params': state['weights'], **(state.get('non_trainable') or {})}
  paxml = {'step': np.uint32(20), 'mdl_vars': variables, 'opt_states': state['learner']['opt_state']}
  for directory in directories:
    path = directory / name
    (path / 'metadata').mkdir(parents=True)
    (path / 'metadata/metadata').write_text('{"version": 1.2, "train_state_metadata": {}}')
    handler.save(epath.Path(path / 'state'), args=ocp.args.PyTreeSave(paxml))
    handler.finalize(epath.Path(path / 'state'))
  handler.close()
