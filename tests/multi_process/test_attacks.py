"""Two processes that serve, of which one is killed or stopped: a timely end."""

import contextlib
import json
from pathlib import Path
import re
import signal
import sys

import httpx
from launch import Job, coordinator_flags
import pytest

from spmd_tasks import exit_codes

WORKER = str(Path(__file__).with_name('worker_serves.py'))
START_S = 60.0
DEADLINE_S = 30.0  # from a fault until the last process is gone
KEY = {'authorization': 'Bearer secret'}

pytestmark = pytest.mark.slow


@contextlib.contextmanager
def serving(tmp_path, *flags):
  """Yields the running job and a client."""
  argvs = [[sys.executable, WORKER, *own, *flags] for own in coordinator_flags(num_processes=2)]
  with Job(argvs, log_dir=tmp_path, num_devices=1) as job:
    job.wait_for_text(0, 'Serving ', limit_s=START_S)
    url = re.search(r'at (http://\S+)', job.log(0))[1]
    with httpx.Client(base_url=url, headers=KEY, timeout=60) as client:
      yield job, client


def lines_of_a_stream(client, fault):
  """The lines of a long answer, during which `fault` is called; how it broke off, if it did."""
  body = {'prompt': 'abc', 'max_tokens': 900, 'stream': True}
  lines = []
  try:
    with client.stream('POST', '/v1/completions', json=body) as response:
      assert response.status_code == 200
      for line in response.iter_lines():
        if not lines:
          fault()
        lines += [line] if line else []
  except httpx.TransportError as error:
    return lines, error
  return lines, None


@pytest.mark.parametrize('culprit, signum', [(0, signal.SIGKILL), (1, signal.SIGSTOP)])
def test_a_process_that_is_killed_or_stopped_ends_the_job_and_the_clients_are_told(tmp_path, culprit, signum):
  silence = ['--silence_limit_s=5'] if signum == signal.SIGSTOP else []
  with serving(tmp_path, *silence) as (job, client):
    client.timeout = 10.0  # from a stopped process 0, nothing comes any more
    lines, error = lines_of_a_stream(client, lambda: job.send(culprit, signum))
    assert (error is None) == (culprit == 1)
    if culprit == 1:
      assert 'error' in json.loads(lines[-2].removeprefix('data: ')), lines[-2:]
      assert lines[-1] == 'data: [DONE]'
    job.wait_for_text(1 - culprit, 'leaving with exit code 44', limit_s=DEADLINE_S)
    if signum == signal.SIGSTOP:
      job.send(culprit, signal.SIGCONT)  # it does not go on as if nothing had happened
    ranks = job.wait(deadline_s=DEADLINE_S)
  assert not any(rank.was_killed or rank.left_orphans for rank in ranks), [rank.log for rank in ranks]
  reason = 'is gone' if signum == signal.SIGKILL else 'has sent nothing for 5 s: it is stopped or stuck'
  assert f'process {culprit}' in ranks[1 - culprit].log
  assert reason in ranks[1 - culprit].log
  assert ranks[1 - culprit].returncode == exit_codes.PEER_FAILED
  assert ranks[culprit].returncode != exit_codes.OK
