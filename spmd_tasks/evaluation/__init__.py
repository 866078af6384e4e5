"""Runs EleutherAI's evaluation harness (lm-eval) on a job's checkpoint or a model folder, on any mesh.

    python -m spmd_tasks.evaluation --model spmd_tasks --model_args path=runs/tiny --tasks hellaswag --batch_size 32

This is the command `lm-eval` with the model `spmd_tasks` added to its registry, which does not read entry points. The
harness provides tasks, few-shot examples, metrics, results and caches. In Python, pass the model to the harness:

    lm_eval.simple_evaluate(HarnessModel(path='runs/tiny'), tasks=['hellaswag'])

lm-eval is an optional dependency, the extra `evaluation`. To evaluate a server, use the harness's `local-completions`
and `local-chat-completions` (docs/evaluation.md).
"""

from spmd_tasks.lazy_exports import lazy_exports

with lazy_exports(globals()):
  from spmd_tasks.evaluation.harness_model import HarnessModel
