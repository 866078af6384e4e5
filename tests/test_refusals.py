"""Origins, paths and numbers that nothing can be computed with: one sentence, and no file is left."""

import pytest

from spmd_tasks import exit_codes
from tests import binary

TINY = ('--exp', 'synthetic.Tiny', '--ici_mesh_shape', '1,8,1')
TRAIN = ('--mode', 'train', '--job_log_dir', 'HERE/new/job')

# Flags (HERE is an empty directory), and what the sentence says.
REFUSED = {
  'origin that is no model': (
    (*TINY, *TRAIN, '--set', 'init_from=hf:HERE'),
    ["HERE/config.json does not exist: give the folder of a model in Hugging Face's format"],
  ),
  'origin without a checkpoint': (
    (*TINY, *TRAIN, '--set', 'init_from=HERE/file'),
    ['HERE/file/checkpoints has no checkpoint that can be read'],
  ),
  'origin at a URL': ((*TINY, *TRAIN, '--set', 'init_from=hf:gs://b/m'), ["'gs://b/m' is a URL", 'mount the object']),
  'seed of more than 32 bits': (
    (*TINY, *TRAIN, '--set', f'seed={10**22}'),
    [f'seed = {10**22}', 'in [0, 4,294,967,296)'],
  ),
  'more steps than int32': ((*TINY, *TRAIN, '--num_train_steps', f'{10**12}'), ['num_train_steps', 'less than 2,147']),
  'vocabulary beyond memory': (
    (*TINY, *TRAIN, '--set', f'vocab_size={2**31 - 8}'),
    ['the training state has', 'GB of memory', 'lower'],
  ),
  'batch beyond memory': ((*TINY, *TRAIN, '--set', f'batch_size={2**31 - 8}'), ['a batch has', 'lower batch_size']),
  'no heads': ((*TINY, *TRAIN, '--set', 'num_heads=0'), ['num_heads=0 does not divide the model dim 32']),
  'no hidden dims': ((*TINY, *TRAIN, '--set', 'hidden_dims=0'), ['a weight of shape (32, 0)', 'raise the size']),
  'not a number': ((*TINY, *TRAIN, '--set', 'task.learner.optimizer.beta1=nan'), ['beta1 = nan is no number']),
}


@pytest.mark.parametrize('name', REFUSED)
def test_it_is_refused_in_one_sentence_and_nothing_is_written(name, tmp_path, capfd):
  flags, parts = REFUSED[name]
  code = binary.run_in_process(*(flag.replace('HERE', str(tmp_path)) for flag in flags))
  shown = capfd.readouterr().err
  assert (code, shown.count('\n')) == (exit_codes.USAGE, 1), shown
  for part in parts:
    assert part.replace('HERE', str(tmp_path)) in shown
  assert [*tmp_path.iterdir()] == []
