"""Starts a job of several processes, synchronizes them, and ends them all when one fails.

    emergency = EmergencyExit()
    with emergency.on_failure():
      initialize(DistributedSettings(coordinator_address='10.0.0.1:1234', num_processes=2, process_id=0))
      with StepWatchdog(timeout_s=600, emergency=emergency) as watchdog, PreemptionGuard() as guard:
        ...

Read initialization.py (launchers, fake devices) and rendezvous.py (how processes connect), environment.py and
comparison.py (settings that must be equal on all processes), agreement.py (barriers, decisions of process 0) and
preemption.py (SIGTERM, Ctrl-C). Then failure handling: watchdog.py (no progress), rank_records.py and shutdown.py
(what processes tell each other), emergency_exit.py (how a process ends). docs/multi_host.md explains the behaviour,
docs/design/0004-failure-handling.md the reasons.
"""

from spmd_tasks.lazy_exports import lazy_exports

with lazy_exports(globals()):
  from spmd_tasks.distributed.agreement import barrier, is_primary
  from spmd_tasks.distributed.emergency_exit import EmergencyExit
  from spmd_tasks.distributed.initialization import DistributedSettings, initialize, use_fake_devices
