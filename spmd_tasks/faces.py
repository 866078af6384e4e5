"""lazy_face: the public names of a package, each imported when it is first used.

    with lazy_face(globals(), 'WING'):
      from spmd_tasks.layers.linear import Linear

Here `__all__` becomes ['Linear', 'WING'].
"""

from collections.abc import Iterator
import contextlib
from typing import Any

from etils import epy


@contextlib.contextmanager
def lazy_face(face: dict[str, Any], *own: str) -> Iterator[None]:
  """Defers the imports of the body; with them, and the names that the package itself defines, makes `__all__`."""
  before = {*face}
  with epy.lazy_api_imports(face):
    yield
    names = {*face} - before
  face['__all__'] = sorted({*names, *own})
