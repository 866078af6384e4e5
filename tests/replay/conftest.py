"""Registers the extension's mode, even if the environment was installed before it existed."""

import pytest

from spmd_tasks import extensions, flags, replay


@pytest.fixture(scope='package', autouse=True)
def registered():
  installed = extensions.extensions()
  with pytest.MonkeyPatch.context() as patch:
    if replay.EXTENSION not in installed:
      for module in (extensions, flags):
        patch.setattr(module, 'extensions', lambda: (*installed, replay.EXTENSION))
    flags.all_modes.cache_clear()
    yield
  flags.all_modes.cache_clear()
