"""python -m spmd_tasks.evaluation: the command `lm-eval`, which then knows the model `spmd_tasks`."""

import importlib.util
import sys

from spmd_tasks.errors import UserError, user_error_code


def main() -> None:
  """Runs the harness's command on this process's arguments; a mistake of the user is answered in one sentence."""
  try:
    if importlib.util.find_spec('lm_eval') is None:
      raise UserError("the package lm-eval is not installed: pip install 'lm-eval>=0.4.13'.")
    from lm_eval.__main__ import cli_evaluate

    from spmd_tasks.evaluation import harness_model  # registers the model

    del harness_model
    cli_evaluate()
  except Exception as error:
    code = user_error_code(error)
    if code is None:
      raise
    print(f'spmd_tasks.evaluation: {error}', file=sys.stderr)
    sys.exit(code)


if __name__ == '__main__':
  main()
