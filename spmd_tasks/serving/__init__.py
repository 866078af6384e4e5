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

with epy.lazy_api_imports(globals()):
  from spmd_tasks.serving.engine_thread import EngineEndedError, EngineThread, QueueFullError
  from spmd_tasks.serving.errors import RequestError
  from spmd_tasks.serving.publisher import Publisher
  from spmd_tasks.serving.requests import GenerationRequest, ServedModel, check_adapter_names
  from spmd_tasks.serving.server import listen, run_server, url_of
  from spmd_tasks.serving.service import Service
  from spmd_tasks.serving.settings import ServerSettings

__all__ = [
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
