"""Pax experiments decode as Paxml does."""

import json
from pathlib import Path
import pickle

from etils import epath
import numpy as np
import orbax.checkpoint as ocp
import pytest

from spmd_tasks import exit_codes

DECODE = 'pax_lab.decode_lm.DecodeLm'
SCRIPT = Path(__file__).with_name('paxml_decoding.py')
FAKE = ('--num_fake_devices', 8)

pytestmark = pytest.mark.slow


@pytest.fixture(scope='module')
def job(run_pax_together, tmp_path_factory):
  """DecodeLm after 3 steps and two decode jobs, the second of which decodes nothing again, on a mesh 1 x 4 x 2."""
  directory = tmp_path_factory.mktemp('decode')
  flags = ('--exp', DECODE, '--job_log_dir', directory, '--num_train_steps', 3, *FAKE)
  modes = ('train', 'decode', 'decode_once')
  for mode, (code, said) in zip(modes, run_pax_together(*(('--mode', mode, *flags) for mode in modes)), strict=True):
    assert code == 0, said
    assert ('decode prompts: done already' in said) == (mode == 'decode_once')
  return directory


def outputs(directory: Path) -> dict[str, list]:
  """The values of every dataset, as the .jsonl holds them."""
  return {
    str(file.relative_to(directory)): [json.loads(line) for line in file.read_text().splitlines()]
    for file in sorted(directory.glob('decoder_out/*/*.jsonl'))
  }


def scalars(directory: Path) -> dict[str, float]:
  """The last value of every tag of TensorBoard's, which Paxml writes as tensors."""
  from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
  from tensorboard.util import tensor_util

  events = EventAccumulator(str(directory)).Reload()
  found = {tag: events.Scalars(tag)[-1].value for tag in events.Tags()['scalars']}
  tensors = {tag: events.Tensors(tag)[-1].tensor_proto for tag in events.Tags()['tensors']}
  return found | {tag: float(tensor_util.make_ndarray(each)) for tag, each in tensors.items()}


def test_a_decode_job_writes_what_paxmls_decode_program_writes(job, run_pax, tmp_path):
  """Weights averaged, texts passed on; all of a dataset that is reset for eval, else one batch. Ours on 8 devices."""
  finished = run_pax(job, tmp_path, command=[SCRIPT])
  assert finished.returncode == 0, finished.stderr
  ours, theirs = outputs(job), outputs(tmp_path)
  assert [(name, len(values)) for name, values in ours.items()] == [
    ('decoder_out/first/decoder_out_3_shard_0.jsonl', 7),
    ('decoder_out/prompts/decoder_out_3_shard_0.jsonl', 14),
  ]
  for name, values in theirs.items():
    for our, their in zip(ours[name], values, strict=True):
      np.testing.assert_allclose(our.pop('logprobs'), their.pop('logprobs'), atol=1e-5)
      assert our == their
    pickled = [pickle.loads((root / name).with_suffix('.pickle').read_bytes()) for root in (job, tmp_path)]
    assert [key for key, _ in pickled[0]] == [key for key, _ in pickled[1]]
  for dataset in ('prompts', 'first'):
    assert scalars(job / 'summaries' / f'decode_test_{dataset}') == pytest.approx(
      scalars(tmp_path / 'summaries' / f'decode_test_{dataset}')
    )


@pytest.mark.filterwarnings('ignore:Sharding info not provided when restoring')
def test_a_checkpoint_of_paxml_decodes_to_the_same_text(job, run_pax_together, tmp_path):
  """The job's checkpoint in Paxml's format, decoded by jobs of their own, on 2 devices; another place is refused."""
  places = [tmp_path / name for name in ('paxml', 'copy')]
  for place in places:
    write_as_paxml(job / 'checkpoints' / 'checkpoint_00000003', place / 'checkpoints' / 'checkpoint_00000003')
  own = ('--exp', DECODE, '--num_fake_devices', 2, '--set', 'ici_mesh_shape=1,1,2', '--job_log_dir', tmp_path / 'own')
  decode = (
    ('--mode', mode, *own, '--set', f'init_from={place}') for mode in ('decode', 'decode_once') for place in places
  )
  runs = run_pax_together(*decode)
  assert [code for code, _ in runs] == [0, exit_codes.USAGE, 0, exit_codes.USAGE], runs
  assert f'has the outputs of weights of {places[0]}/checkpoints/checkpoint_00000003, not of {places[1]}' in runs[1][1]
  assert 'done already' in runs[2][1]
  for name, values in outputs(tmp_path / 'own').items():
    for our, expected in zip(values, outputs(job)[name], strict=True):
      np.testing.assert_allclose(our.pop('logprobs'), expected.pop('logprobs'), atol=1e-5)
      assert our == expected
  assert outputs(tmp_path / 'own').keys() == outputs(job).keys()


def write_as_paxml(checkpoint: Path, path: Path) -> None:
  """Writes a checkpoint of ours as Paxml does with `tensorstore_use_ocdbt`."""
  handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True)
  state = handler.restore(checkpoint / 'state')
  variables = {'params': state['weights'], **(state.get('non_trainable') or {})}
  (path / 'metadata').mkdir(parents=True)
  (path / 'metadata/metadata').write_text('{"version": 1.2, "train_state_metadata": {}}')
  paxml = {'step': np.uint32(3), 'mdl_vars': variables, 'opt_states': state['learner']['opt_state']}
  handler.save(epath.Path(path / 'state'), args=ocp.args.PyTreeSave(paxml))
  handler.finalize(epath.Path(path / 'state'))
  handler.close()


def test_what_is_not_possible_is_refused_in_one_sentence(run_pax_together, tmp_path):
  refused = [
    (DECODE, ('--mode', 'decode_once', '--decode_input', 'prompts.jsonl'), 'decodes batches of its own datasets'),
    ('pax_lab.dense_lm.DenseLm', ('--mode', 'decode_once'), 'return some from its decode_datasets()'),
    (DECODE, ('--mode', 'serve', '--port', 0), 'only models of ours are served: decode by --mode decode'),
  ]
  flags = (('--exp', name, *flags, '--job_log_dir', tmp_path / 'job', *FAKE) for name, flags, _ in refused)
  for (code, said), (*_, words) in zip(run_pax_together(*flags), refused, strict=True):
    assert code == exit_codes.USAGE
    assert words in said
    assert 'Traceback' not in said
