"""lazy_exports: the public names of a package, each imported when it is first used.

    with lazy_exports(globals(), 'EXTENSION'):
      from spmd_tasks.layers.linear import Linear

Here `__all__` becomes ['EXTENSION', 'Linear']. Packages declare extensions and export names without importing JAX:
`spmd-tasks --help` takes 0.3 s instead of 10 s.
"""

from collections.abc import Iterator
import contextlib
from typing import Any

from etils import epy


@contextlib.contextmanager
def lazy_exports(namespace: dict[str, Any], *own: str) -> Iterator[None]:
  """Defers the imports of the body; with them, and the names that the package itself defines, makes `__all__`."""
  before = {*namespace}
  with epy.lazy_api_imports(namespace):
    yield
    names = {*namespace} - before
  namespace['__all__'] = sorted({*names, *own})
