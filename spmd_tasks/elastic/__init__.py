"""Keeps a training job going when a host dies: one supervisor per host starts the training process anew.

    spmd-tasks --exp lm.Dense1B --mode train --job_log_dir /shared/runs/dense --supervise 2:4      # on each host

JAX cannot be initialised again in a process, so each host's supervisor starts a training process per round. A round is
the set of hosts that train together. When one of them dies, the others agree on the next round and go on from the
newest checkpoint, on a smaller mesh and with the same global batch. A spare or returning host makes a round larger.

Read `supervisor.py` first: the life of a host. `neighbours.py` has what supervisors tell each other, `rounds.py` how
they agree, `fitting.py` how the training process makes its job fit the hosts of the round.
"""

from spmd_tasks.wings import Flag, Wing

WING = Wing(
  name='elastic',
  flags=(
    Flag(
      name='supervise',
      metavar='MIN:MAX',
      help='train on MIN to MAX hosts, and go on with the others when one dies; the mesh is that of MAX hosts',
    ),
    Flag(
      name='supervisor_address',
      metavar='HOST',
      help='the address of this host for the other supervisors; default: that of its network',
    ),
  ),
  expand='spmd_tasks.elastic.supervisor:supervise',
  prepare_job='spmd_tasks.elastic.fitting:fit_job',
)
