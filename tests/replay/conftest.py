"""The extension's mode, also where the environment was installed before there was one."""

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
