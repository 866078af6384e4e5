"""What the judges of eval sets return."""

import pytest

from spmd_tasks.programs.judges import Judges


class NamesByNumber:
  wants_texts = wants_scores = False

  def metrics(self, step, texts, scores):
    return {'accuracy': 0.5, 1: 0.25}


def test_a_metric_without_a_name_is_refused():
  judges = Judges(None, None, {'valid': NamesByNumber()})
  with pytest.raises(ValueError, match="judge of eval set 'valid' returned a metric with the name 1: give a string"):
    judges.metrics('valid', {}, 0, [], lambda: None)
  assert judges.metrics('another', {}, 0, [], lambda: None) == {}
