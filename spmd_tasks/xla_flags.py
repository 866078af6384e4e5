"""XLA_FLAGS: the only place that writes this environment variable.

XLA aborts the process on a flag whose name it does not know, and a new minor of jaxlib may drop any name. Therefore a
flag is set only where the installed jaxlib is known to have it. `scripts/admit_jax` raises the bound.
"""

import os

from jaxlib.version import __version_info__ as JAXLIB  # without JAX itself, which is not to be imported yet

UNKNOWN_FROM = (0, 13)  # jaxlib's first minor whose flags were not tried
_GONE_FROM = {'--xla_cpu_use_fusion_emitters': (0, 11)}  # the first minor that lacks a flag
_NEW_IN = {'--xla_cpu_opt_preset': (0, 11)}  # the first minor that has it


def add_xla_flags(*flags: str) -> None:
  """Adds `--name=value` flags to XLA_FLAGS; leaves out what XLA_FLAGS name already, and what jaxlib may not know."""
  given = os.environ.get('XLA_FLAGS', '')
  names = {flag.partition('=')[0] for flag in given.split()}
  new = [flag for flag in known_flags(*flags) if flag.partition('=')[0] not in names]
  if new:
    os.environ['XLA_FLAGS'] = ' '.join([given, *new]).strip()


def known_flags(*flags: str) -> list[str]:
  """Returns the flags that the installed jaxlib is known to have."""
  names = {flag: flag.partition('=')[0] for flag in flags}
  return [
    flag for flag, name in names.items() if _NEW_IN.get(name, (0, 0)) <= JAXLIB[:2] < _GONE_FROM.get(name, UNKNOWN_FROM)
  ]
