"""What Paxml and Praxis decode, in a process of one device, for test_decode.py to compare with.

    python paxml_decoding.py program JOB_LOG_DIR OUTPUT    Paxml's own decode program, with a job's newest checkpoint
    python paxml_decoding.py greedy EXPERIMENT             model.decode and our engine, with random weights

The second prints one JSON object: the tokens of both, by prompt.
"""

import json
import sys
import types

from etils import epath
import jax
import jax.numpy as jnp
import numpy as np
from praxis import base_layer, py_utils

from spmd_tasks.bridges.pax import install_shims
from spmd_tasks.config import resolve
from spmd_tasks.config.from_saved import from_json
from spmd_tasks.config.registry import add_to_search_path
from spmd_tasks.config.saved_config import read_saved_config
from spmd_tasks.decoding import DecodeSteps, Request, generate
from spmd_tasks.experiment import partition_job
from spmd_tasks.programs.saved_steps import SavedSteps
from spmd_tasks.runtime import DecodeSettings

ONE_DEVICE = 'ici_mesh_shape=1,1,1'
EOS = 63


def run_decode_program(job_log_dir: epath.Path, output: epath.Path, experiment_path: str) -> None:
  """Runs Paxml's SingleTaskDecodeProgram on every dataset, with the averaged weights of the newest checkpoint."""
  from absl import flags
  from paxml import decode_programs, tasks_lib, train_states

  flags.FLAGS(['paxml'])
  np.unicode_ = np.str_  # Paxml's name for it, which NumPy 2 lacks
  decode_programs.seqio_input = types.SimpleNamespace(  # seqio is not installed, and these inputs are none of it
    maybe_update_decode_output_keys=lambda processed, output: processed, should_process_outputs=lambda dataset: False
  )
  job = from_json(read_saved_config(job_log_dir / 'config.json'), [ONE_DEVICE], [experiment_path]).build()
  restored = SavedSteps(job_log_dir).open_checkpoints(read_only=True).restore(partition_job(job).canonical_state)
  state = restored.state
  trained = train_states.TrainState(
    step=jnp.uint32(restored.step), mdl_vars=state.variables, opt_states=state.learner.opt_state
  )
  task, hparams = job.task.task, job.task.weight_hparams

  class PlainJit:
    """In place of Paxml's partitioner: a step is a jitted function of one device, compiled once for all datasets."""

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


def compare_greedy(experiment: str, experiment_path: str) -> dict[str, list]:
  """Generates with random weights: prompts of one chunk and of several, in fewer slots than prompts."""
  add_to_search_path([experiment_path])
  job = resolve(experiment, [ONE_DEVICE]).build()
  model = partition_job(job)
  rng = np.random.default_rng(0)

  def draw(path, leaf):
    scale = 0.05 if 'softmax' in jax.tree_util.keystr(path) else 1.0
    return (scale * rng.standard_normal(leaf.shape)).astype(leaf.dtype)

  variables = jax.tree_util.tree_map_with_path(draw, model.padded_state.variables)
  prompts = [rng.integers(1, EOS, length).tolist() for length in (1, 3, 6, 5)]

  settings = DecodeSettings(max_len=14, num_slots=3, prefill_chunk=4, min_bucket=4)
  requests = [Request(ids=tuple(prompt), max_tokens=8, stop_ids=(EOS,)) for prompt in prompts]
  generated = generate(DecodeSteps(model, settings), variables, requests, decode=lambda ids: '')
  ours = {number: list(completion.ids) for number, completion in generated}

  rows = np.zeros((len(prompts), 6), np.int32)
  for row, prompt in zip(rows, prompts, strict=True):
    row[: len(prompt)] = prompt
  lengths = np.array([len(prompt) for prompt in prompts], np.int32)
  paddings = (np.arange(6)[None] >= lengths[:, None]).astype(np.float32)
  praxis_model = job.task.model

  def decode(variables, batch):
    with base_layer.JaxContext.new_context(hparams=base_layer.JaxContext.HParams(do_eval=True)):
      output, _ = praxis_model.apply(
        variables, batch, method=praxis_model.decode, mutable=['decoder_cache'], rngs={'random': jax.random.PRNGKey(0)}
      )
    return output[1]

  output = jax.jit(decode)(variables, py_utils.NestedMap(ids=rows, paddings=paddings, prefix_lengths=lengths))
  output_ids = np.asarray(output.output_ids).reshape(len(prompts), -1)
  theirs = [row[length : length + 8].tolist() for row, length in zip(output_ids, lengths, strict=True)]
  theirs = [ids[: ids.index(EOS) + 1] if EOS in ids else ids for ids in theirs]
  return {'ours': [ours[number] for number in range(len(prompts))], 'theirs': theirs}


if __name__ == '__main__':
  install_shims()
  what, *arguments, _, path = sys.argv[1:]  # ends by --experiment_path PATH
  if what == 'program':
    run_decode_program(*map(epath.Path, arguments), path)
  else:
    print(json.dumps(compare_greedy(*arguments, path)))
