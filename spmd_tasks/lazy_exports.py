"""Imports the public names of a package on first use.

    with lazy_exports(globals()):
      from spmd_tasks.layers.linear import Linear

Here `__all__` becomes ['Linear']. Packages declare extensions and export names without importing JAX: `spmd-tasks
--help` takes 0.3 s instead of 10 s.
"""

from collections.abc import Iterator
import contextlib
from typing import Any

from etils import epy


@contextlib.contextmanager
def lazy_exports(namespace: dict[str, Any]) -> Iterator[None]:
  """Defers the imports of the body; sets `__all__` to their names."""
  before = {*namespace}
  with epy.lazy_api_imports(namespace):
    yield
    names = {*namespace} - before
  namespace['__all__'] = sorted(names)
