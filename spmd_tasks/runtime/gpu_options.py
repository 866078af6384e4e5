"""The options of XLA's compiler for NVIDIA GPUs that training steps on several of them are compiled with.

MaxText's published commands for GPUs set many more. The plans of programs that were compiled ahead of time for 8 H200
(lm.Dense1BOnH200, 8 layers) decided what is here; no GPU has run them yet:

| option | jaxlib 0.10: ms with work beside, GB | jaxlib 0.11 |
|---|---|---|
| none; the latency-hiding scheduler, which is on in any case | 4.8, 12.7 | 4.8, 12.7 |
| collectives of a loop over layers begin a layer early (pipelined) | 6.1, 12.2 | 4.9, 12.6 but a step 0.5% longer |
| thresholds for combining of 128 MB: 47 collectives in place of 103 | | 4.0, 12.7 |
| these, and a loop over two layers at a time (double buffering) | | 2.4, 12.7 |
"""

import os

from spmd_tasks.xla_flags import JAXLIB

_BEFORE_0_11 = {f'xla_gpu_enable_pipelined_{each}': True for each in ('all_gather', 'reduce_scatter', 'all_reduce')}


def gpu_options() -> dict[str, bool]:
  """Returns the options for the installed jaxlib, less those that XLA_FLAGS names."""
  given = {flag.partition('=')[0].removeprefix('--') for flag in os.environ.get('XLA_FLAGS', '').split()}
  options = _BEFORE_0_11 if JAXLIB[:2] < (0, 11) else {}
  return {name: value for name, value in options.items() if name not in given}
