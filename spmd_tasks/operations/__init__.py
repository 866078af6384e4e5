"""What operators of long jobs expect: a job that outlives its hosts, and its metrics in the services that they use.

    spmd-tasks --exp lm.Dense1B --mode train --job_log_dir /shared/runs/dense --supervise 2:4      # on each host

`supervisor.py` is the life of a host whose job goes on when another host dies; `neighbours.py` has what supervisors
tell each other and how they agree, `standby.py` how a training process waits for its round and fits its job to it.
`trackers.py` has the hook for Weights & Biases and MLflow.
"""

import json
import os
from typing import Any

from spmd_tasks.errors import UserError
from spmd_tasks.wings import Flag, Wing, call

SUPERVISED = 'SPMD_TASKS_SUPERVISED'  # an environment variable: what a supervisor tells its training process


def _expand(flags: Any) -> int | None:
  """Runs the supervisor where it is asked for."""
  is_concerned = flags.supervise is not None or (flags.mode == 'train' and SUPERVISED in os.environ)
  if flags.supervisor_address and not is_concerned:
    raise UserError('--supervisor_address is for --supervise MIN:MAX: give both, or leave it out.')
  return call('spmd_tasks.operations.supervisor:supervise', flags) if is_concerned else None


def _prepare_job(job: Any, mode: str, directory: Any) -> Any:
  """Makes a job fit the hosts of its round."""
  del directory
  is_concerned = mode == 'train' and SUPERVISED in os.environ
  return call('spmd_tasks.operations.standby:fit_job', job) if is_concerned else job


def _train_hooks(job: Any) -> tuple[Any, ...]:
  hooks = [call('spmd_tasks.operations.trackers:Track')] if getattr(job.experiment, 'trackers', ()) else []
  if SUPERVISED in os.environ:
    modules_file = json.loads(os.environ[SUPERVISED])['modules_file']
    hooks.append(call('spmd_tasks.operations.standby:TellModules', modules_file))
  return tuple(hooks)


WING = Wing(
  name='operations',
  flags=(
    Flag(name='supervise', metavar='MIN:MAX', help='train on MIN to MAX hosts; go on with the others when one dies'),
    Flag(name='supervisor_address', metavar='HOST', help="this host's address for the others; default: it is found"),
  ),
  expand=_expand,
  prepare_job=_prepare_job,
  train_hooks=_train_hooks,
)
