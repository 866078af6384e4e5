"""Traces the initialization of a model in half the time, where only the shapes of its weights are looked at.

While a model is initialized, `nn.scan` traces its layer twice, because the numbers that a seed gives depend on it.
"""

from collections.abc import Iterator
import contextlib
from unittest import mock

import flax.linen as nn


@contextlib.contextmanager
def shapes_alone() -> Iterator[None]:
  """Has `nn.scan` trace its layer once: a model that is traced in this context must not be initialized."""
  scan = nn.scan

  def scan_once(*given, **settings):
    return scan(*given, **settings | {'check_constancy_invariants': False})

  with mock.patch.object(nn, 'scan', scan_once):
    yield
