"""Serving with several processes: process 0 leads, all other processes follow.

    links = connect_processes(limit_s=600)            # every process calls it
    if jax.process_index() == 0:
      with lead(engine, links, restore=restore, leave=leave) as leader:
        code = run_server(leader, ..., stop=leader.stop, leave=leader.leave)
        leader.end(code)
    else:
      code = follow(engine, links[0], restore=restore, leave=leave)

Each process holds its part of the weights and runs its own engine. Process 0 answers HTTP and schedules; it sends every
engine call to the other processes as a numbered operation before it runs the call itself, so that all devices run the
same programs in the same order.

Read `link.py` (messages over TCP), then `leader.py`, then `follower.py`.
"""

from spmd_tasks.serving.multi_process.follower import follow
from spmd_tasks.serving.multi_process.leader import Followers, LeadingEngine, PeerFailedError, lead
from spmd_tasks.serving.multi_process.link import Link, connect_processes

__all__ = ['Followers', 'LeadingEngine', 'Link', 'PeerFailedError', 'connect_processes', 'follow', 'lead']
