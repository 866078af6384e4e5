"""What people see of the metrics: single numbers, never the vectors with one value per expert."""

import io

from spmd_tasks.programs.progress import Progress, format_metrics

METRICS = {'loss': 1.25, 'accuracy': 0.5, 'expert_load': [0.1, 0.9], 'max_expert_load': 1.8, 'num_batches': 3}


def test_a_logged_step_is_one_line_without_vectors():
  stream = io.StringIO()
  progress = Progress(10, 0, primary=True, stream=stream)
  progress.log(4, METRICS)
  progress.close()
  assert stream.getvalue().split(' ', 1)[1] == 'step 4/10  loss 1.2500  accuracy 0.500\n'


def test_eval_metrics_are_listed_without_vectors():
  assert format_metrics(METRICS) == 'loss 1.2500  accuracy 0.5000  max_expert_load 1.8000'


def test_metrics_of_an_own_loss_are_shown_the_first_four_that_are_one_number():
  stream = io.StringIO()
  own = {'a': 0.123456, 'b': 2.0, 'c': [1.0], 'd': 3.0, 'e': 4.0, 'f': 5.0}
  Progress(10, 0, primary=True, stream=stream).log(4, {'loss': 1.25} | own, list(own))
  assert stream.getvalue().split(' ', 1)[1] == 'step 4/10  loss 1.2500  a 0.1235  b 2  d 3  e 4\n'
