"""Serving: an engine behind OpenAI's HTTP API, with continuous batching, streams and metrics.

    sock = listen(settings)                                # ServerSettings: address, key and limits
    exit_code = run_server(engine, model, settings, sock)  # a ServedModel; returns after SIGTERM

A request's way, file by file: `middleware.py` checks the API key; `routes.py` reads the body; `bodies.py` (pydantic)
and `requests.py` check it and make a GenerationRequest; `service.py` queues its sequences; `engine_thread.py` runs the
scheduler and the engine (package decoding); `responses.py` formats and `streaming.py` sends the answer.

Read `server.py` first: it puts these parts together and ends them in order. `publisher.py` replaces the weights of a
running server, `metrics.py` counts for Prometheus, and `multi_process/` serves a model that needs several processes.
Two kinds of threads matter: the event loop's thread runs everything but the engine, which one thread of its own calls.
"""

from etils import epy

from spmd_tasks.wings import ACCEPT_CONFIG_CHANGES, CHECKPOINT_STEP, Flag, Mode, Wing

with epy.lazy_api_imports(globals()):
  from spmd_tasks.serving.engine_thread import EngineEndedError, EngineThread, QueueFullError
  from spmd_tasks.serving.errors import RequestError
  from spmd_tasks.serving.publisher import Publisher
  from spmd_tasks.serving.requests import GenerationRequest, ServedModel, check_adapter_names
  from spmd_tasks.serving.server import listen, run_server, url_of
  from spmd_tasks.serving.service import Service
  from spmd_tasks.serving.settings import ServerSettings

__all__ = [
  'WING',
  'EngineEndedError',
  'EngineThread',
  'GenerationRequest',
  'Publisher',
  'QueueFullError',
  'RequestError',
  'ServedModel',
  'ServerSettings',
  'Service',
  'check_adapter_names',
  'listen',
  'run_server',
  'url_of',
]

WING = Wing(
  name='serving',
  modes=(
    Mode(
      name='serve',
      help='serves a model over HTTP',
      run='spmd_tasks.serving.mode:run',
      extra='serve',
      packages=('starlette', 'uvicorn', 'uvloop', 'prometheus_client', 'llguidance'),
      flags=(
        Flag(
          name='host',
          metavar='HOST',
          may_differ=True,
          help='default: 127.0.0.1, which only this machine reaches',
        ),
        Flag(name='port', type=int, metavar='N', may_differ=True, help='default: 8000; 0 takes any free port'),
        Flag(
          name='api_key_file', metavar='FILE', may_differ=True, help='a file with the key that every request must carry'
        ),
        Flag(
          name='max_queued',
          type=int,
          metavar='N',
          may_differ=True,
          help='sequences that may wait for a slot; default: 64',
        ),
        Flag(
          name='max_connections',
          type=int,
          metavar='N',
          may_differ=True,
          help='open connections, half of them from one host; default: 1000',
        ),
        Flag(
          name='drain_s',
          type=float,
          metavar='S',
          may_differ=True,
          help='seconds for running requests after SIGTERM; default: 30',
        ),
        CHECKPOINT_STEP,
        ACCEPT_CONFIG_CHANGES,
      ),
    ),
  ),
)
