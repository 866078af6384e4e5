"""Runs EleutherAI's evaluation harness (lm-eval) on a job's checkpoint or on a model's folder, on any mesh.

    python -m spmd_tasks.evaluation --model spmd_tasks --model_args path=runs/tiny --tasks hellaswag --batch_size 32

The command is the harness's own, `lm-eval`, with one model more in its registry: the registry reads no entry points, so
`lm-eval` itself cannot find ours. Everything else is the harness's: tasks, few-shot examples, metrics, results, caches.
In Python, the model can be given to the harness itself:

    lm_eval.simple_evaluate(HarnessModel(path='runs/tiny'), tasks=['hellaswag'])

The package lm-eval is optional: the extra `evaluation`. A server is evaluated by the harness's
`local-completions` and `local-chat-completions` instead (docs/evaluation.md).
"""

from spmd_tasks.lazy_exports import lazy_exports

with lazy_exports(globals()):
  from spmd_tasks.evaluation.harness_model import HarnessModel
