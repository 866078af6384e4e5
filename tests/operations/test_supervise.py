"""A job of supervised hosts goes on when one dies, on a smaller mesh with the same rows."""

import contextlib
import errno
import fcntl
import json
import re
import signal
import subprocess
import threading
import time

from etils import epath
import pytest

from spmd_tasks import exit_codes, operations
from spmd_tasks.config import resolve
from spmd_tasks.distributed import DistributedSettings, roll_call
from spmd_tasks.errors import JobError, UserError
from spmd_tasks.files import absolute_path
from spmd_tasks.operations import neighbours as neighbours_module
from spmd_tasks.operations import standby, supervisor
from spmd_tasks.operations.neighbours import Neighbours, Status, choose_hosts, newest_round, propose_round, read_round
from spmd_tasks.programs import store_claim
from spmd_tasks.sharding import DEFAULT_AXIS_RULES, MeshSpec
from tests.operations.hosts import Hosts, metric_lines, stop_and_compare
from tests.operations.supervised_experiments import Job

AXES = ('replica', 'data', 'mdl')


def job_directory(place: str, tmp_path, request) -> epath.Path:
  """A directory on the disk or in an emulated store."""
  if place == 'disk':
    return epath.Path(tmp_path / 'job')
  request.getfixturevalue('gcs_emulator' if place == 'gs' else 's3_emulator')
  return absolute_path(f'{place}://bucket/{tmp_path.name}_{time.time_ns()}')


@pytest.fixture(autouse=True)
def held_ports(monkeypatch):
  """Those that supervisors hold which do not leave are closed."""
  held, ready_for = [], Neighbours.ready_for

  def ready_and_noted(self, number):
    ready_for(self, number)
    held.append(self._port)

  monkeypatch.setattr(Neighbours, 'ready_for', ready_and_noted)
  yield held
  for port in held:
    port.close()


@pytest.mark.parametrize(
  'ici, dcn, hosts, shrunk',
  [
    ((1, 4, 2), None, 3, ((1, 3, 2), None)),
    ((1, 8, 1), None, 3, ((1, 6, 1), None)),
    ((2, 8, 1), None, 2, ((1, 8, 1), None)),  # whole replicas go first
    ((1, 8, 4), (4, 1, 1), 1, ((1, 8, 4), (1, 1, 1))),  # and slices before them
    ((1, -1, 2), None, 3, ((1, -1, 2), None)),
    ((1, -1, 2), (4, 1, 1), 3, ((1, -1, 2), (3, 1, 1))),
    ((1, 2, 4), None, 3, None),
    ((1, 1, 4), None, 2, None),
  ],
)
def test_one_batch_axis_of_the_mesh_becomes_shorter_in_proportion(ici, dcn, hosts, shrunk):
  spec = MeshSpec(axis_names=AXES, ici_mesh_shape=ici, dcn_mesh_shape=dcn)
  found = standby.shrink_mesh(spec, DEFAULT_AXIS_RULES, hosts, 4)
  assert shrunk == (None if found is None else (found.ici_mesh_shape, found.dcn_mesh_shape))


@pytest.mark.parametrize('batch, parts, hosts, expected', [(24, 1, 3, 2), (24, 1, 2, 2), (24, 2, 1, 8), (7, 1, 2, 7)])
def test_a_device_holds_no_more_rows_than_before(batch, parts, hosts, expected):
  assert standby.more_microbatches(batch, parts, hosts, 4) == expected


@pytest.mark.parametrize(
  'ready, previous, sizes, limits, expected',
  [
    ('abcd', '', (), (2, 4), 'abcd'),
    ('abd', 'abcd', (), (2, 4), 'abd'),
    ('abd', 'abcd', (1, 2, 4), (2, 4), 'ab'),  # the third is a spare
    ('abce', 'cab', (), (2, 4), 'cabe'),  # those that stay keep their order
    ('abcde', '', (), (2, 4), 'abcd'),
    ('a', 'abcd', (), (2, 4), ''),
    ('abc', 'abcd', (4,), (2, 4), ''),
  ],
)
def test_hosts_of_the_next_round(ready, previous, sizes, limits, expected):
  order = {host: (0, host) for host in ready}
  assert choose_hosts(order, list(previous), sizes, limits) == list(expected)


@pytest.mark.parametrize('place', ['disk', 'gs', 's3'])
def test_of_several_proposals_one_succeeds(place, tmp_path, request):
  directory = job_directory(place, tmp_path, request)
  directory.mkdir(parents=True, exist_ok=True)
  for hosts in ('ab', 'cd'):
    propose_round(directory, 3, list(hosts), 'a:1')
  assert read_round(directory, 3)['hosts'] == ['a', 'b']
  assert newest_round(directory) == 3
  assert read_round(directory, 4) is None
  assert place != 'disk' or [path.name for path in directory.iterdir()] == ['round_000003.json']


def test_a_later_round_takes_the_store_from_a_host_that_is_gone(store, monkeypatch):
  monkeypatch.setattr(store_claim, '_machine', iter('abc').__next__)  # other machines
  monkeypatch.setattr(store_claim, 'DEAD_AFTER_S', 1000.0)
  directory = epath.Path(store) / 'claimed'
  monkeypatch.setenv('SPMD_TASKS_ROUND', '1')
  with contextlib.closing(store_claim.claim_store(directory, 'job.lock')) as first:
    monkeypatch.setenv('SPMD_TASKS_ROUND', '2')
    with contextlib.closing(store_claim.claim_store(directory, 'job.lock')) as second:
      with pytest.raises(JobError, match='was taken by another job'):
        first.check()
      second.check()


@pytest.mark.parametrize('text', ['2', '4:2', '0:2', 'a:b', ':4'])
def test_numbers_of_hosts_that_are_refused(text):
  with pytest.raises(UserError, match='must be MIN:MAX'):
    supervisor._limits(text)


def test_the_port_of_a_round_is_held_until_its_process_listens(tmp_path, monkeypatch):
  neighbours = Neighbours(tmp_path, '127.0.0.1')
  neighbours.ready_for(1)
  own = {'process_id': 0, 'num_processes': 1, 'initialization_timeout_s': 1}
  settings = DistributedSettings(coordinator_address=neighbours.own.coordinator, **own)
  monkeypatch.setattr(roll_call, '_PORT_LIMIT_S', 0.0)
  with pytest.raises(UserError, match='in use'):  # another job's process 0
    roll_call.call_roll(settings)
  monkeypatch.setenv('SPMD_TASKS_ROUND', '1')
  roll_call.call_roll(settings)


class Neighbour(Neighbours):
  """Knows one other host, which runs in round 1 and is silent in the given seconds."""

  def __init__(self, directory, silent=()):
    super().__init__(directory, '127.0.0.1')
    self._silent, self._began = silent, time.monotonic()

  def alive(self):
    now, other = time.monotonic() - self._began, Status(id='b', host='b', order=(1, 'b'), round=1, phase='running')
    is_silent = any(first <= now < last for first, last in self._silent)
    return {self.own.id: self.own} | ({} if is_silent else {'b': other})


def code_of_a_round(directory, neighbours, monkeypatch, seconds, process=None, signals_s=()):
  """The exit code of a process of round 1 that takes so many seconds."""
  monkeypatch.setattr(supervisor, '_DEAD_LIMIT_S', 0.5)
  monkeypatch.setattr(supervisor, '_GATHER_LIMIT_S', 0.0)
  neighbours.ready_for(1)
  own = supervisor._Supervisor(directory, neighbours, (1, 3), 1.0, str(directory))
  for signal_s in signals_s:
    threading.Timer(signal_s, own._on_signal, [signal.SIGTERM, None]).start()
  own._start = lambda *_: process or subprocess.Popen(['sleep', str(seconds)])
  hosts = [neighbours.own.id, 'b']
  return own._run_round(1, {'hosts': hosts, 'coordinator': ''})[hosts[0]]


def test_a_host_that_came_since_the_last_look_is_not_taken_for_dead(tmp_path, monkeypatch):
  monkeypatch.setattr(neighbours_module, '_LOOK_S', 1000.0)
  with Neighbours(tmp_path, '127.0.0.1') as first, Neighbours(tmp_path, '127.0.0.1') as second:
    hosts = [first.own.id, second.own.id]
    propose_round(tmp_path, 1, hosts, 'a:1')
    assert supervisor._Supervisor(tmp_path, first, (1, 2), 1.0, str(tmp_path))._agree(1) == 1
    assert sorted(first.alive()) == sorted(hosts)


@pytest.mark.parametrize('silent, code', [([(0, 0.4), (1, 1.4)], 0), ([(0, 9)], -signal.SIGKILL)])
def test_a_process_goes_on_if_the_others_are_silent_for_a_moment(tmp_path, monkeypatch, silent, code):
  assert code_of_a_round(tmp_path, Neighbour(tmp_path, silent), monkeypatch, 1.6) == code


@pytest.mark.parametrize('code, own', [(-signal.SIGKILL, -signal.SIGKILL), (exit_codes.FAILED, 0)])
def test_one_that_was_killed_is_not_waited_for_and_one_that_failed_is(tmp_path, monkeypatch, code, own):
  neighbours = Neighbour(tmp_path)
  ended = Status(id='b', host='b', order=(1, 'b'), round=1, phase='ended', code=code)
  monkeypatch.setattr(neighbours, 'alive', lambda: {neighbours.own.id: neighbours.own, 'b': ended})
  assert code_of_a_round(tmp_path, neighbours, monkeypatch, 2) == own


@pytest.mark.parametrize('has_made_a_step, code', [(False, 0), (True, -signal.SIGTERM)])
def test_a_round_that_has_made_a_step_ends_for_a_larger_one(tmp_path, monkeypatch, has_made_a_step, code):
  spare, neighbours = Status(id='c', host='c', order=(2, 'c'), round=2), Neighbour(tmp_path)
  others = neighbours.alive
  monkeypatch.setattr(neighbours, 'alive', lambda: {**others(), 'c': spare})
  monkeypatch.setattr(supervisor, '_STAYS_S', 0.3)
  monkeypatch.setattr(supervisor._Supervisor, '_new_process', lambda self: 'the next one')
  if has_made_a_step:
    (tmp_path / 'modules.json').touch()
  assert code_of_a_round(tmp_path, neighbours, monkeypatch, 2) == code


def test_a_process_ends_when_others_have_agreed_on_a_round_without_it(tmp_path, monkeypatch):
  propose_round(tmp_path, 2, ['b'], 'a:1')
  assert code_of_a_round(tmp_path, Neighbour(tmp_path), monkeypatch, 30) == -signal.SIGKILL


def test_a_host_that_died_before_the_first_round_is_not_waited_for(tmp_path):
  neighbours = Neighbours(tmp_path, '127.0.0.1')
  neighbours._heard['b'] = Status(id='b', host='b', order=(1, 'b'), round=1), 2  # it has answered, and does no more
  own = supervisor._Supervisor(tmp_path, neighbours, (1, 2), 60.0, str(tmp_path))
  assert own._agree(1) == 1
  assert read_round(tmp_path, 1)['hosts'] == [neighbours.own.id]


def test_spares_go_on_when_all_that_trained_are_dead(tmp_path, monkeypatch):
  monkeypatch.setattr(supervisor, '_ALONE_S', 0.5)
  directory = tmp_path / 'supervisors'
  directory.mkdir()
  neighbours = Neighbours(directory, '127.0.0.1')
  propose_round(directory, 1, ['a', 'b'], 'a:1')
  neighbours._heard['b'] = Status(id='b', host='b', order=(1, 'b'), round=1, phase='running'), 2
  own = supervisor._Supervisor(directory, neighbours, (1, 2), 60.0, str(tmp_path))
  with (tmp_path / 'job.lock').open('w') as lock:  # one that is out of reach trains
    fcntl.flock(lock, fcntl.LOCK_EX)
    began = time.monotonic()
    threading.Timer(1.5, fcntl.flock, [lock, fcntl.LOCK_UN]).start()
    assert own._agree(1) == 2
    assert 1.4 < time.monotonic() - began < 30
  assert read_round(directory, 2)['hosts'] == [neighbours.own.id]


def test_hosts_that_do_not_reach_those_that_train_wait_for_their_lock(tmp_path, capsys):
  directory, neighbours = tmp_path / 'supervisors', Neighbours(tmp_path / 'supervisors', '127.0.0.1')
  directory.mkdir()
  propose_round(directory, 1, ['a', 'b'], 'a:1')
  own = supervisor._Supervisor(directory, neighbours, (1, 2), 0.3, str(tmp_path))
  with (tmp_path / 'job.lock').open('w') as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    began = time.monotonic()
    threading.Timer(1.5, fcntl.flock, [lock, fcntl.LOCK_UN]).start()
    assert own._agree(2) == 2
    assert time.monotonic() - began > 1.4
  assert read_round(directory, 2)['hosts'] == [neighbours.own.id]
  assert 'does not reach has the job.lock' in capsys.readouterr().err


@pytest.mark.parametrize('num_errors', [2, 10_000])
def test_an_error_of_the_file_system_counts_if_it_stays(tmp_path, monkeypatch, num_errors):
  propose_round(tmp_path, 1, ['a'], 'a:1')
  own = supervisor._Supervisor(tmp_path, Neighbours(tmp_path, '127.0.0.1'), (1, 2), 0.5, str(tmp_path))
  own._period_s = 0.01
  errors = iter([OSError(errno.ESTALE, 'stale handle')] * num_errors)

  def read_round(*arguments):
    for error in errors:
      raise error
    return neighbours_module.read_round(*arguments)

  monkeypatch.setattr(supervisor, 'read_round', read_round)
  with pytest.raises(OSError, match='stale') if num_errors > 2 else contextlib.nullcontext():
    assert own._read_round(1)['hosts'] == ['a']


@pytest.mark.parametrize(
  'smallest, told, result',
  [
    (1, None, 2),  # enough hosts look for themselves: the experiment may have more steps now
    (2, None, -1),
    (2, exit_codes.OK, -1),
    (2, exit_codes.FAILED, None),
  ],
)
def test_a_job_that_is_done(tmp_path, smallest, told, result):
  directory, neighbours = tmp_path / 'supervisors', Neighbours(tmp_path / 'supervisors', '127.0.0.1')
  directory.mkdir()
  propose_round(directory, 1, ['a'], 'a:1')
  own = supervisor._Supervisor(directory, neighbours, (smallest, 2), 60.0 if told == exit_codes.OK else 0.3, '')
  if told is None:
    (directory / supervisor._DONE_FILE).write_text(own._done())
  else:
    neighbours._heard['a'] = Status(id='a', host='a', order=(0, 'a'), round=1, phase='left', code=told), 0
  with contextlib.nullcontext() if result else pytest.raises(JobError, match='no other has come'):
    assert own._agree(2) == result


def test_each_signal_is_passed_on(tmp_path, monkeypatch):
  command = """trap 'trap "exit 5" TERM' TERM; for i in $(seq 600); do sleep 0.05; done"""
  process = subprocess.Popen(['bash', '-c', command])
  assert code_of_a_round(tmp_path, Neighbour(tmp_path), monkeypatch, 0, process, signals_s=(1.0, 2.0)) == 5


def test_a_host_whose_process_cannot_be_killed_leaves(tmp_path, monkeypatch):
  class Stuck:
    pid = 7
    poll = kill = staticmethod(lambda: None)

  monkeypatch.setattr(supervisor, '_KILL_LIMIT_S', 0.5)
  with pytest.raises(JobError, match=r'process 7 was killed .* does not end'):
    code_of_a_round(tmp_path, Neighbour(tmp_path, [(0, 99)]), monkeypatch, 0, Stuck())


def test_a_mesh_that_cannot_shrink_is_refused(tmp_path, monkeypatch):
  told = {'min_hosts': 1, 'max_hosts': 2, 'sizes_file': str(tmp_path / 'sizes.json')}
  monkeypatch.setenv(operations.SUPERVISED, json.dumps(told))
  message = r'the mesh of 2 hosts \(replica 1, data 1, mdl 2\) does not shrink to 1.* give --supervise 2:2'
  with pytest.raises(UserError, match=message):
    standby.fit_job(resolve(Job, ['ici_mesh_shape=1,1,2']).build())
  own = supervisor._Supervisor(tmp_path, Neighbours(tmp_path, '127.0.0.1'), (1, 2), 1.0, str(tmp_path))
  usage = exit_codes.USAGE
  assert own._verdict({own._neighbours.own.id: usage, 'b': usage}) == usage


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
  'place', ['gs', pytest.param('s3', marks=pytest.mark.exhaustive), pytest.param('disk', marks=pytest.mark.exhaustive)]
)
def test_a_job_goes_on_without_the_host_of_process_0_and_with_a_new_one(place, tmp_path, request):
  """From the checkpoint of its directory; the lost host has the directory's claim and writes the metrics."""
  job = job_directory(place, tmp_path, request)
  flags = ('--num_train_steps', '10000', '--set', 'train_input.seconds_per_batch=0.5')  # fewer steps to make again
  with Hosts(tmp_path, *flags, hosts='1:3', job=job) as hosts:
    for _ in range(3):
      hosts.start()
    hosts.wait_for_lines(7, 200)
    hosts.wait_until(lambda: len(hosts.processes(1)) == 2, 60)
    (standby,) = {*hosts.processes(1)} - {hosts.training_process(1)}
    hosts.kill(0)
    goes_on = re.compile(r'mesh replica 1 x data 2 x mdl 1 \(2 cpu devices\), resuming after step')
    hosts.wait_until(lambda: any(goes_on.search(hosts.log(host)) for host in (1, 2)), 60)  # of process 0
    hosts.wait_for_lines(hosts.num_lines() + 2, 60)
    assert hosts.training_process(1) == standby
    hosts.start()
    hosts.wait_until(lambda: re.search(r'round \d+: process \d of 3', hosts.log(3)), 100)
    hosts.wait_for_lines(hosts.num_lines() + 2, 100)
    assert stop_and_compare(hosts, '--num_fake_devices', '3') < 2e-4  # float32, over some dozens of steps
    assert [each.returncode for each in hosts.supervisors[1:]] == [42] * 3


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_job_ends_well_without_the_host_of_a_device_that_computes_wrongly(tmp_path):
  flags = ['--num_train_steps', '16', '--num_fake_devices', '2']
  with Hosts(tmp_path, *flags, hosts='1:2', experiment='Watched') as hosts:
    for _ in range(2):
      hosts.start()
    hosts.wait_until(lambda: 'round 2: process 0 of 1' in hosts.log(0), 150)
    assert [line['step'] for line in metric_lines(hosts.job)] == list(range(1, 8))  # the eighth was not taken
    found = 'device 2048 of process 1 (cpu)'
    assert hosts.supervisors[1].wait(10) == exit_codes.CORRUPTED
    (fault,) = (hosts.job / 'device_faults').glob('*')
    assert fault.name == 'round_000001_step_00000008.json'
    assert json.loads(fault.read_text())['processes'] == [1]
    assert found in next((hosts.job / 'supervisors').glob('left_out_*')).read_text()
    assert found in hosts.log(0)
    hosts.start(rank=1)
    assert hosts.supervisors[2].wait(60) == exit_codes.CORRUPTED
    assert 'this host is left out, because' in hosts.log(2)
    assert hosts.supervisors[0].wait(100) == 0
    assert stop_and_compare(hosts, '--num_fake_devices', '4') < 2e-4
