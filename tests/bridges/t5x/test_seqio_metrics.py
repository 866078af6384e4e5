"""The metric_fns of SeqIO tasks in evals: the numbers of SeqIO's Evaluator on outputs computed here, in float64.

The reference decodes greedily by whole forward passes, without caches, and scores by a log-softmax in numpy.
"""

import jax
import numpy as np
import pytest

from spmd_tasks.bridges.t5x import SeqIoPrompts
from spmd_tasks.bridges.t5x._seqio import contract_batch
from spmd_tasks.config import resolve
from spmd_tasks.experiment import partition_job
from spmd_tasks.programs.evaluator import Evaluator
from tests.drawn_weights import draw_variables


def reference_outputs(job, model, variables, dataset):
  """Returns the tokens, their log-probabilities, and the scores of the targets of all examples."""
  rows = [features for _, features in dataset.as_numpy_iterator()]
  features = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
  forward = jax.jit(lambda batch: job.task.predict(model.true_variables(variables), batch)['logits'])

  def log_probs(batch):
    logits = np.asarray(forward(batch), np.float64)
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))

  batch = contract_batch(features)
  at_labels = np.take_along_axis(log_probs(batch), batch['labels'][..., None], axis=-1)[..., 0]
  scores = (at_labels * batch['weights']).sum(-1)
  num_rows, width = batch['ids'].shape
  lengths = batch['prefix_mask'].sum(-1) if 'prefix_mask' in batch else np.ones(num_rows, int)
  ids = np.where(np.arange(width) < lengths[:, None], batch['ids'], 0).astype(np.int32)
  positions = np.tile(np.arange(width, dtype=np.int32), (num_rows, 1))
  everywhere = {'segment_ids': np.ones_like(ids), 'segment_pos': positions}
  tokens, totals, has_ended = [[] for _ in ids], np.zeros(num_rows), np.zeros(num_rows, bool)
  for position in range(width):
    following = log_probs(batch | everywhere | {'ids': ids})[:, position]
    for row in np.flatnonzero((position >= lengths - 1) & ~has_ended):
      token = int(following[row].argmax())
      tokens[row].append(token)
      totals[row] += following[row, token]
      has_ended[row] = token == 1
      if position + 1 < width:
        ids[row, position + 1] = token
  padded = [row + [0] * (width - len(row)) for row in tokens]
  return padded, totals.tolist(), scores.tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
  'name, converter',
  [
    ('Sums', 'EncDecFeatureConverter'),
    pytest.param('PrefixSums', 'PrefixLMFeatureConverter', marks=pytest.mark.exhaustive),
  ],
)
def test_metrics_equal_seqios_evaluator(name, converter, tmp_path):
  import seqio  # imports TensorFlow, which takes 12 s

  from tests.bridges.t5x.judged_sums import LENGTHS

  job = resolve(f'tests.bridges.t5x.judged_sums.{name}').build()
  model = partition_job(job, job.experiment.mesh_spec().build(jax.devices()[:1]))
  variables = draw_variables(model, 3)
  found = dict(Evaluator(job, model, tmp_path).evaluate(variables, 0))
  converter = getattr(seqio, converter)(pack=False)
  evaluator = seqio.Evaluator('judged_texts', converter, 'validation', sequence_length=LENGTHS)
  outputs = reference_outputs(job, model, variables, evaluator.cached_model_datasets['judged_texts'])
  tokens, totals, scores = (list(enumerate(each)) for each in outputs)
  wanted, _ = evaluator.evaluate(
    compute_metrics=True,
    predict_fn=lambda _: tokens,
    predict_with_aux_fn=lambda _: (tokens, {'scores': [total for _, total in totals]}),
    score_fn=lambda _: scores,
  )
  wanted, ours = wanted.result()['judged_texts'], found['infer_judged_texts']
  assert len(scores) == 11
  assert ours['log_likelihood'] == pytest.approx(wanted['log_likelihood'], rel=1e-5)
  assert ours['predicted_score'] == pytest.approx(wanted['predicted_score'], rel=1e-5)
  assert ours['mean_length'] == wanted['mean_length'].value
  assert (ours['exact_match'], ours['task_accuracy']) == (wanted['exact_match'], wanted['accuracy'])
  assert not {'told', 'worst'} & ours.keys()
  if name == 'Sums':
    assert found['infer_judged_sums']['sums_right'] == 0.0


def test_only_sets_with_one_row_per_example_have_metrics():
  job = resolve('tests.bridges.t5x.judged_sums.Sums').build()
  assert job.train_input.judge is None
  assert sorted(job.eval_inputs) == ['infer_judged_sums', 'infer_judged_texts']
  assert job.eval_inputs['infer_judged_texts'].judge.wants_scores
  assert not job.eval_inputs['infer_judged_sums'].judge.wants_scores
  with pytest.raises(ValueError, match='packing = False and num_epochs = 1'):
    SeqIoPrompts(examples=job.train_input)


@pytest.mark.parametrize(
  'name, ids, max_tokens', [('Sums', (60, 51, 46, 57, 1), 4), ('PrefixSums', (0, 60, 51, 46, 57, 1), 12 - 6 + 1)]
)
def test_examples_are_prompts_of_each_architecture(name, ids, max_tokens):
  prompts = resolve(f'tests.bridges.t5x.judged_sums.{name}').build().decode_inputs['judged_texts'].read()
  assert [(prompt.id, prompt.prompt) for prompt in prompts[:2]] == [(0, '90+6'), (1, '91+0')]
  assert (prompts[0].prompt_ids, prompts[0].max_tokens) == (ids, max_tokens)


def test_texts_are_prompts_of_each_architecture(tmp_path):
  import tensorflow as tf

  (tmp_path / 'a.txt').write_text('90+6\n\n91+0\n')
  text = tf.train.Feature(bytes_list=tf.train.BytesList(value=[b'90+6']))
  tokens = tf.train.Feature(int64_list=tf.train.Int64List(value=[60, 1]))
  with tf.io.TFRecordWriter(str(tmp_path / 'b.tfrecord-00000-of-00001')) as writer:
    for feature in (text, tokens):
      writer.write(tf.train.Example(features=tf.train.Features(feature={'inputs': feature})).SerializeToString())
  for name, ids in (('Sums', None), ('PrefixSums', (0, 60, 51, 46, 57, 1))):
    resolved = resolve(f'tests.bridges.t5x.judged_sums.{name}')
    tokenizer = resolved.build().tokenizer
    of_text, of_examples = (
      resolved.experiment.prompts_of_file(str(tmp_path / file), tokenizer).read()
      for file in ('a.txt', 'b.tfrecord-00000-of-00001')
    )
    assert [prompt.prompt for prompt in of_text] == ['90+6', '91+0']
    assert [prompt.prompt for prompt in of_examples] == ['90+6', None]
    assert (of_text[0].prompt_ids, of_examples[0].prompt_ids, of_examples[1].prompt_ids) == (ids, ids, (60, 1))
  (tmp_path / 'c.tfrecord').write_bytes(b'no record')
  with pytest.raises(ValueError, match=r'c\.tfrecord holds no prompts'):
    resolved.experiment.prompts_of_file(str(tmp_path / 'c.tfrecord'), None).read()
