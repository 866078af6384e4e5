"""python -m spmd_tasks.evaluation: the command `lm-eval` with the model `spmd_tasks`."""

import importlib
import sys

from spmd_tasks.errors import user_error_code
from spmd_tasks.extensions import require


def main() -> None:
  """Runs the harness's command with the arguments of this process; prints UserErrors without a traceback."""
  try:
    require('evaluation', 'lm_eval', wants='the harness')
    from lm_eval.__main__ import cli_evaluate

    importlib.import_module('spmd_tasks.evaluation.harness_model')  # registers the model
    cli_evaluate()
  except Exception as error:
    code = user_error_code(error)
    if code is None:
      raise
    print(f'spmd_tasks.evaluation: {error}', file=sys.stderr)
    sys.exit(code)


if __name__ == '__main__':
  main()
