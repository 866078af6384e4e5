"""Serves a model over OpenAI's HTTP API, with continuous batching, streaming and metrics.

    sock = server.listen(settings)                                # a ServerSettings: address, key and limits
    exit_code = server.run_server(engine, model, settings, sock)  # a ServedModel; returns after SIGTERM

The path of a request, file by file: `routes.py` checks the API key and reads the body. `request_bodies.py` (pydantic)
and `requests.py` validate it and build a GenerationRequest. `service.py` queues its sequences. `engine_thread.py` runs
the scheduler and the engine (package decoding). `response_bodies.py` formats the answer. `answer_format.py` derives
from the chat template how the model writes reasoning and tool calls: `tool_call_formats.py` is the table of formats,
`answer_parsers.py` parses the generated text.

Read `server.py` first: it assembles these parts and shuts them down in order. `publisher.py` replaces the weights of a
running server, `metrics.py` counts for Prometheus, `tracing.py` records requests for OpenTelemetry, and
`multi_process.py` serves a model that spans several processes.

Everything runs on the event loop's thread, except the engine, which has a thread of its own.
"""

from spmd_tasks.extensions import ACCEPT_CONFIG_CHANGES, CHECKPOINT_STEP, Extension, Flag, Mode

EXTENSION = Extension(
  name='serving',
  modes=(
    Mode(
      name='serve',
      help='serves a model over HTTP',
      run='spmd_tasks.serving.mode:run',
      extra='serve',
      packages=('starlette', 'uvicorn', 'uvloop', 'prometheus_client', 'llguidance'),
      flags=(
        Flag(name='host', metavar='HOST', may_differ=True, help='default: 127.0.0.1, which only this machine reaches'),
        Flag(name='port', type=int, metavar='N', may_differ=True, help='default: 8000; 0 takes any free port'),
        Flag(name='api_key_file', metavar='FILE', may_differ=True, help='a file with the key of every request'),
        Flag(name='max_queued', type=int, metavar='N', may_differ=True, help='waiting sequences; default: 64'),
        Flag(name='max_connections', type=int, metavar='N', may_differ=True, help='open at once; default: 1000'),
        Flag(name='drain_s', type=float, metavar='S', may_differ=True, help='for requests after SIGTERM; default: 30'),
        CHECKPOINT_STEP,
        ACCEPT_CONFIG_CHANGES,
      ),
    ),
  ),
)
