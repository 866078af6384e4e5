"""How tests have XLA compile: little optimisation, emitted the cheaper way (a third of the time), into one cache.

    os.environ.update({**xla_settings.ENVIRONMENT, **os.environ})      # before JAX is imported

Fake devices wait long for one another, because a busy machine may not run one of them for XLA's 40 seconds, after
which XLA aborts.
"""

from pathlib import Path

from spmd_tasks import xla_flags

ENVIRONMENT = {
  'XLA_FLAGS': ' '.join(
    xla_flags.known_flags(
      '--xla_backend_optimization_level=0',
      '--xla_llvm_disable_expensive_passes=true',
      '--xla_cpu_use_fusion_emitters=false',
      '--xla_cpu_opt_preset=FAST_COMPILE',
      '--xla_cpu_parallel_codegen_split_count=1',
      '--xla_disable_hlo_passes=fusion-wrapper',  # single instructions are emitted without MLIR: a twelfth of the time
      '--xla_cpu_collective_call_terminate_timeout_seconds=300',
    )
  ),
  'SPMD_TASKS_QUIET': '1',  # no lines about what is being compiled, however slow the machine
  'JAX_COMPILATION_CACHE_DIR': str(Path(__file__).parents[1] / '.pytest_cache/xla'),
  'JAX_TRACEBACK_IN_LOCATIONS_LIMIT': '0',  # a tenth of what XLA takes
  'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',  # to read a program takes half of what the smallest ones take
}
