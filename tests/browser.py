"""Debian's chromium, if it is installed (scripts/setup_browser), for tests of pages.

Usage:

    pytestmark = browser.needed

    with browser.opened(directory) as driver:
      driver.get(url)
"""

from collections.abc import Iterator
import contextlib
from pathlib import Path
import shutil

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

CHROMIUM, DRIVER = shutil.which('chromium'), shutil.which('chromedriver')
# Nothing but the page: no updates, no lookups, no profile of an earlier run.
FLAGS = """
  --headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
  --disable-component-update --disable-sync --window-size=1000,800
""".split()  # noqa: SIM905

needed = pytest.mark.skipif(
  not (CHROMIUM and DRIVER), reason='no chromium and chromedriver here: scripts/setup_browser installs them'
)


@contextlib.contextmanager
def opened(directory: Path) -> Iterator[webdriver.Chrome]:
  """Starts a browser with its profile in `directory`."""
  options = webdriver.ChromeOptions()
  options.binary_location = CHROMIUM
  for flag in (*FLAGS, f'--user-data-dir={directory}'):
    options.add_argument(flag)
  options.set_capability('goog:loggingPrefs', {'browser': 'ALL'})
  with webdriver.Chrome(options, Service(DRIVER)) as driver:
    yield driver
