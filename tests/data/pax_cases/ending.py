"""Experiments with an early_stopping_fn, and experiments without a training dataset."""

import json

from praxis import base_hyperparams, pax_fiddle

from pax_cases import transformers


class StopsAt(base_hyperparams.FiddleBaseParameterizable):
  """Stops at a step or at a target of an eval; records its arguments beside the checkpoints."""

  last_step: int = 1000
  target_log_pplx: float = 0.0

  def __call__(self, metrics, running_mode, global_step, is_last_ckpt, checkpoint_path):
    asked = {
      'metrics': {name: float(value) for name, value in metrics.items()},
      'mode': [running_mode.has_train, running_mode.has_eval, running_mode.has_decode],
      'step': global_step,
      'is_last': is_last_ckpt,
      'directory': checkpoint_path.name,
    }
    with (checkpoint_path.parent / 'asked.jsonl').open('a') as file:
      file.write(json.dumps(asked) + '\n')
    log_pplx = metrics.get('eval_test_valid/metrics/log_pplx', 1000.0)
    return global_step == self.last_step or log_pplx <= self.target_log_pplx


class UntilTarget(transformers.SmallLm):
  """Ends at step 4, whose eval is the first to reach the target."""

  NUM_TRAIN_STEPS = 7
  EVAL_INTERVAL_STEPS = 2
  STOP = {'target_log_pplx': 3.6}

  def change(self, task, lm):
    task.train.compute_steps_per_sec_interval_steps = 3
    task.train.eval_skip_train = True
    task.early_stopping_fn = pax_fiddle.Config(StopsAt, **self.STOP)


class UntilStep(UntilTarget):
  """Ends between two evals."""

  STOP = {'last_step': 3}


class ToTheEnd(UntilTarget):
  """Trains to the end; the last step is between two evals."""

  STOP = {}


class EvalOnly(UntilTarget):
  """Has no training dataset."""

  def datasets(self):
    return [dataset for dataset in super().datasets() if not dataset.is_training]
