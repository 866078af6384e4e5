"""SeqIO tasks with metric_fns of each kind, and small models whose eval sets compute them."""

import numpy as np
import seqio
import tensorflow as tf

from spmd_tasks.bridges.t5x import T5xExperiment

LENGTHS = {'inputs': 8, 'targets': 4}


def sums(split, shuffle_files, seed=None):
  del shuffle_files, seed
  rows = [(f'{a}+{a % 7}', str(a + a % 7)) for a in range(90, 150 if split == 'train' else 101)]
  return tf.data.Dataset.from_tensor_slices(dict(zip(('inputs', 'targets'), map(list, zip(*rows)))))


def exact_match(targets, predictions):
  return {'exact_match': float(np.mean([a == b for a, b in zip(targets, predictions)]))}


def accuracy(targets, predictions):  # the name of one of ours
  pairs = [(a, b) for target, text in zip(targets, predictions) for a, b in zip(target, text)]
  return {'accuracy': 100 * np.mean([a == b for a, b in pairs]) if pairs else 0.0, 'told': seqio.metrics.Text('x')}


def lengths_and_scores(targets, predictions, aux_values):
  del targets
  return {
    'mean_length': seqio.metrics.Scalar(np.mean([len(text) for text in predictions])),
    'predicted_score': float(np.mean(aux_values['scores'])),
  }


def log_likelihood(targets, scores):
  return {'log_likelihood': float(np.mean(scores)), 'worst': targets[int(np.argmin(scores))]}


METRICS = [exact_match, accuracy, lengths_and_scores, log_likelihood]
TASK = {
  'source': seqio.FunctionDataSource(dataset_fn=sums, splits=('train', 'validation')),
  'preprocessors': [seqio.preprocessors.tokenize, seqio.preprocessors.append_eos],
  'output_features': {key: seqio.Feature(seqio.ByteVocabulary()) for key in ('inputs', 'targets')},
}
seqio.TaskRegistry.add(
  'judged_sums',
  **TASK,
  postprocess_fn=lambda text, **unused: int(text) if text.isdecimal() else -1,
  metric_fns=[lambda targets, predictions: {'sums_right': np.mean(np.equal(targets, predictions))}],
)
seqio.TaskRegistry.add('judged_texts', **TASK, metric_fns=METRICS)
seqio.MixtureRegistry.add('judged', ['judged_texts', 'judged_sums'], default_rate=1)

_DATA = {'task': 'judged', 'lengths': LENGTHS, 'batch_size': 8, 'split': 'validation'}
_DATA |= {'num_epochs': 1, 'packing': False, 'shuffle': False}


class Sums(T5xExperiment):
  """An encoder-decoder of two layers."""

  task_modules = ('tests.bridges.t5x.judged_sums',)
  train_data = {**_DATA, 'task': 'judged_texts', 'split': 'train', 'num_epochs': None, 'packing': True}
  infer_data = _DATA
  decode_data = {**_DATA, 'task': 'judged_texts'}
  rate = {'factors': 'constant', 'base': 0.01}
  num_train_steps = 4
  eval_every_steps = 2
  batch_size = 8
  vocab_size = 384
  model_dims = 16
  num_heads = 2
  head_dim = 8
  hidden_dims = 32
  num_layers = 1
  num_encoder_layers = 1
  seq_len = 4
  encoder_len = 8
  dtype = 'float32'
  ici_mesh_shape = (1, 1, 1)


class PrefixSums(Sums):
  """A prefix language model."""

  num_encoder_layers = 0
  seq_len = 12
  train_data = {**Sums.train_data, 'architecture': 'prefix_lm'}
  infer_data = {**_DATA, 'task': 'judged_texts', 'architecture': 'prefix_lm'}
  decode_data = infer_data
