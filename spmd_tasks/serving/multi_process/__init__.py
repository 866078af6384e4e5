"""Serving with several processes: process 0 leads, all other processes follow.

    joined, admitted = connect_pairs('serve', pairs, limit_s=600)   # distributed; every process calls it
    if jax.process_index() == 0:
      with lead(engine, admitted.values(), restore=restore, leave=leave) as leader:
        code = run_server(leader, ..., stop=leader.stop, leave=leader.leave)
        leader.end(code)
    else:
      code = follow(engine, joined[0], restore=restore, leave=leave)

Each process holds its part of the weights and runs its own engine. Process 0 answers HTTP and schedules; it sends every
engine call to the other processes as a numbered operation before it runs the call itself, so that all devices run the
same programs in the same order.

Read `messages.py`, then `leader.py`, then `follower.py`. The links are those of package distributed.
"""
