"""Exit codes of the binary: the one place that says which number means what.

FAILED and USAGE are what Python itself and argparse use. Our own lie between the small numbers of Python and shells and
what others use for themselves (64-78 sysexits, 124-127 `timeout` and shells, 128 + n a signal), so that a launcher can
tell them from anything else: start again on PREEMPTED, read the log for the rest.
"""

OK = 0
FAILED = 1  # an exception in this process
USAGE = 2  # a bad flag, path or value: nothing was started
PREEMPTED = 42  # SIGTERM: the state was saved, or there was none to save; start the same command again to continue
STUCK = 43  # no progress within the watchdog's limit; the stacks are in the log
PEER_FAILED = 44  # this process was well, another one reported its failure
EXITED = 46  # the experiment's own code called sys.exit, whatever its code: the job is not finished
INTERRUPTED = 130  # Ctrl-C, as shells say it: the state was saved, or there was none to save

NAMES = {code: name.lower().replace('_', ' ') for name, code in dict(globals()).items() if isinstance(code, int)}
