"""The exit codes of the binary.

FAILED and USAGE are Python's and argparse's own. The others avoid the codes of other programs (64-78 sysexits, 124-127
`timeout` and shells, 128 + n signals), so that a launcher can restart on PREEMPTED.
"""

OK = 0
FAILED = 1  # an exception in this process
USAGE = 2  # a bad flag, path or value: nothing was started
PREEMPTED = 42  # SIGTERM; the state is saved if there was one; the same command continues
STUCK = 43  # no progress within the watchdog's limit; the stacks are in the log
PEER_FAILED = 44  # another process failed
EXITED = 46  # the experiment's own code called sys.exit, with any code; the job is not finished
INTERRUPTED = 130  # Ctrl-C, the code that shells use; the state is saved if there was one

NAMES = {code: name.lower().replace('_', ' ') for name, code in dict(globals()).items() if isinstance(code, int)}
