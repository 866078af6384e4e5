"""Adds flags to the environment variable XLA_FLAGS; nothing else in this package writes it.

XLA aborts on an unknown flag, and a new minor version of jaxlib may remove any flag. So a flag is added only if the
installed jaxlib is known to have it. `scripts/admit_jax` raises the bound.
"""

import os

from jaxlib.version import __version_info__ as JAXLIB  # JAX itself must not be imported yet

UNKNOWN_FROM = (0, 13)  # the first minor version of jaxlib whose flags were not tested
_REMOVED_IN = {'--xla_cpu_use_fusion_emitters': (0, 11)}  # minor version of jaxlib, by flag
_ADDED_IN = {'--xla_cpu_opt_preset': (0, 11)}


def add_xla_flags(*flags: str) -> None:
  """Adds `--name=value` flags to XLA_FLAGS, except flags that it has already, or that jaxlib may not have."""
  current = os.environ.get('XLA_FLAGS', '')
  names = {flag.partition('=')[0] for flag in current.split()}
  new = [flag for flag in known_flags(*flags) if flag.partition('=')[0] not in names]
  if new:
    os.environ['XLA_FLAGS'] = ' '.join([current, *new]).strip()


def known_flags(*flags: str) -> list[str]:
  """Returns the flags that the installed jaxlib is known to have."""
  names = {flag: flag.partition('=')[0] for flag in flags}
  return [
    flag
    for flag, name in names.items()
    if _ADDED_IN.get(name, (0, 0)) <= JAXLIB[:2] < _REMOVED_IN.get(name, UNKNOWN_FROM)
  ]
