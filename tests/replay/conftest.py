"""The wing's mode, also where the environment was installed before there was one."""

import pytest

from spmd_tasks import flags, replay, wings


@pytest.fixture(scope='package', autouse=True)
def registered():
  installed = wings.wings()
  with pytest.MonkeyPatch.context() as patch:
    if replay.WING not in installed:
      for module in (wings, flags):
        patch.setattr(module, 'wings', lambda: (*installed, replay.WING))
    flags.all_modes.cache_clear()
    yield
  flags.all_modes.cache_clear()
