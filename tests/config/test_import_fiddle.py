"""Fiddle is imported without LibCST, which it uses once it looks for a lambda."""

from pathlib import Path
import subprocess
import sys

import pytest

from spmd_tasks.config import _import_fiddle

THREE = lambda x: 3


def test_libcst_is_imported_when_a_lambda_is_looked_for():
  """In a process of its own, of a Pax experiment, for Praxis imports more of Fiddle; not forked from one with all."""
  program = (
    'import sys; sys.path += [".", "tests/data", "tests/config"]; from spmd_tasks.config import resolve; '
    'resolve("pax_lab.dense_lm.DenseLm", []); late = {"libcst", "chex"}; assert not late & set(sys.modules); '
    'from fiddle._src.codegen import import_manager; from fiddle._src.experimental import auto_config; '
    'import test_import_fiddle as it; assert auto_config._getsource_for_lambda(it.THREE) == "(lambda x: 3)"; '
    'assert not late & set(sys.modules); assert it._import_fiddle.source_of_lambda(it.THREE) == "lambda x: 3"; '
    'assert import_manager._dummy_module_for_formatting.code.strip() == ""; assert "libcst" in sys.modules'
  )
  root = Path(__file__).resolve().parents[2]
  finished = subprocess.run(
    [sys.executable, '-W', 'ignore', '-c', program], cwd=root, capture_output=True, text=True, timeout=240
  )
  assert finished.returncode == 0, finished.stderr


def test_two_lambdas_on_a_line_are_refused_as_fiddle_does():
  with pytest.raises(ValueError, match='multiple lambdas'):
    _import_fiddle.source_of_lambda([lambda: 1, lambda: 2][0])
