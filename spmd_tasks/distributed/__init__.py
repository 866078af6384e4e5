"""Processes: starts a job of several processes, lets them agree, and ends them when one fails.

    emergency = EmergencyExit()
    with emergency.on_failure():
      initialize(DistributedSettings(coordinator_address='10.0.0.1:1234', num_processes=2, process_id=0))
      with StepWatchdog(timeout_s=600, emergency=emergency) as watchdog, PreemptionGuard() as guard:
        ...

Read initialization.py (jax.distributed and its launchers), roll_call.py (who is there), environment.py and
agreement.py (what all must have alike, barriers, decisions of process 0), preemption.py (SIGTERM, Ctrl-C), links.py
(authenticated messages) and link_connections.py, then the parts of failure handling: watchdog.py (no progress),
rank_records.py (what processes tell each other through files), emergency_exit.py (how a process ends).
slowest_process.py finds whom steps wait for; fake_devices.py gives tests a mesh of CPU devices.
docs/multi_host.md explains the behaviour, docs/design/0004-failure-handling.md the reasons.
"""

from etils import epy

with epy.lazy_api_imports(globals()):
  from spmd_tasks.distributed.agreement import (
    PrimaryError,
    all_agree,
    barrier,
    gather,
    is_primary,
    primary_decides,
    refuse_differences,
  )
  from spmd_tasks.distributed.emergency_exit import EmergencyExit
  from spmd_tasks.distributed.environment import (
    backend_errors,
    code_digests,
    numeric_settings,
    process_environment,
    refuse_unusable_environment,
  )
  from spmd_tasks.distributed.fake_devices import compile_quickly, use_fake_devices
  from spmd_tasks.distributed.initialization import (
    CLUSTERS,
    DistributedSettings,
    coordinator_host,
    detect_cluster,
    finish,
    initialize,
    report_absence,
    skip_absent_tpu,
  )
  from spmd_tasks.distributed.link_connections import (
    admit,
    connect_pairs,
    connect_processes,
    join,
    listen_for_processes,
  )
  from spmd_tasks.distributed.links import Link, LinkError
  from spmd_tasks.distributed.preemption import PreemptionGuard
  from spmd_tasks.distributed.rank_records import Failure, Position, Progress, RankRecords, open_rank_records
  from spmd_tasks.distributed.slowest_process import SlowestProcess
  from spmd_tasks.distributed.watchdog import StepWatchdog, watch_steps

__all__ = [
  'CLUSTERS',
  'DistributedSettings',
  'EmergencyExit',
  'Failure',
  'Link',
  'LinkError',
  'Position',
  'PreemptionGuard',
  'PrimaryError',
  'Progress',
  'RankRecords',
  'SlowestProcess',
  'StepWatchdog',
  'admit',
  'all_agree',
  'backend_errors',
  'barrier',
  'code_digests',
  'compile_quickly',
  'connect_pairs',
  'connect_processes',
  'coordinator_host',
  'detect_cluster',
  'finish',
  'gather',
  'initialize',
  'is_primary',
  'join',
  'listen_for_processes',
  'numeric_settings',
  'open_rank_records',
  'primary_decides',
  'process_environment',
  'refuse_differences',
  'refuse_unusable_environment',
  'report_absence',
  'skip_absent_tpu',
  'use_fake_devices',
  'watch_steps',
]
