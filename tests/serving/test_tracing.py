"""A request is a span in its client's trace, with child spans for queue, prefill and decode."""

from http.server import BaseHTTPRequestHandler, HTTPServer
import sys
import threading

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from spmd_tasks.serving import tracing
from tests.serving.fake_engine import FakeEngine
from tests.serving.served import COMPLETIONS, HELLO, serving, wait_for

TRACE, PARENT = 0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7


def test_a_request_is_a_span_in_the_clients_trace_with_spans_of_its_phases():
  exporter, provider = InMemorySpanExporter(), TracerProvider()
  provider.add_span_processor(SimpleSpanProcessor(exporter))
  with serving(tracer=tracing.RequestTracer(provider)) as served, served.client() as client:
    header = {'traceparent': f'00-{TRACE:032x}-{PARENT:016x}-01'}
    assert client.post(COMPLETIONS, json=HELLO, headers=header).status_code == 200
    with client.stream('POST', COMPLETIONS, json=HELLO | {'n': 2, 'stream': True}) as response:
      response.read()
    wait_for(lambda: len(exporter.get_finished_spans()) == 8)
  *phases, whole = exporter.get_finished_spans()[:4]
  assert (whole.name, whole.context.trace_id, whole.parent.span_id) == (COMPLETIONS, TRACE, PARENT)
  assert dict(whole.attributes) == {
    'http.route': COMPLETIONS,
    'gen_ai.request.model': 'fake.Model',
    'gen_ai.usage.input_tokens': 5,
    'gen_ai.usage.output_tokens': 7,
    'gen_ai.response.finish_reasons': ('length',),
  }
  assert [phase.name for phase in phases] == ['queue', 'prefill', 'decode']
  assert all(phase.parent.span_id == whole.context.span_id for phase in phases)
  times = [whole.start_time, *(phase.end_time for phase in phases)]
  assert [phase.start_time for phase in phases] == times[:-1]
  assert times == sorted(times)
  assert times[-1] == whole.end_time
  of_stream = exporter.get_finished_spans()[-1]
  assert of_stream.parent is None
  assert of_stream.attributes['gen_ai.usage.output_tokens'] == 14


def test_a_request_that_leaves_the_queue_has_no_other_phase():
  exporter, provider = InMemorySpanExporter(), TracerProvider()
  provider.add_span_processor(SimpleSpanProcessor(exporter))
  engine = FakeEngine(num_slots=1, gate=(gate := threading.Event()))
  with (
    serving(engine, tracer=tracing.RequestTracer(provider)) as served,
    served.client() as client,
    client.stream('POST', COMPLETIONS, json=HELLO | {'stream': True}) as running,
  ):
    with client.stream('POST', COMPLETIONS, json=HELLO | {'stream': True}):
      pass
    wait_for(lambda: len(exporter.get_finished_spans()) == 2)
    queue, whole = exporter.get_finished_spans()
    gate.set()
    running.read()
  assert queue.name == 'queue'
  assert queue.end_time == whole.end_time
  assert whole.attributes['gen_ai.response.finish_reasons'] == ('cancelled',)


def test_the_environment_names_the_collector(monkeypatch, capsys):
  for name in ('OTEL_EXPORTER_OTLP_ENDPOINT', 'OTEL_EXPORTER_OTLP_TRACES_ENDPOINT'):
    monkeypatch.delenv(name, raising=False)
  assert tracing.open_tracer() is None
  posted = []

  class Collector(BaseHTTPRequestHandler):
    def do_POST(self):
      posted.append((self.path, self.rfile.read(int(self.headers['content-length']))))
      self.send_response(200)
      self.end_headers()

    def log_message(self, *_):
      pass

  with HTTPServer(('127.0.0.1', 0), Collector) as collector:
    threading.Thread(target=collector.serve_forever).start()
    monkeypatch.setenv('OTEL_EXPORTER_OTLP_ENDPOINT', f'http://127.0.0.1:{collector.server_port}')
    monkeypatch.setenv('OTEL_BSP_SCHEDULE_DELAY', '50')  # milliseconds
    tracer = tracing.open_tracer()
    with serving(tracer=tracer) as served, served.client() as client:
      client.post(COMPLETIONS, json=HELLO)
      wait_for(lambda: posted)
    collector.shutdown()
  assert posted[0][0] == '/v1/traces'
  assert all(text in posted[0][1] for text in (b'spmd-tasks', b'prefill', b'gen_ai.usage.output_tokens'))
  monkeypatch.setitem(sys.modules, 'opentelemetry.sdk.trace', None)
  assert tracing.open_tracer() is None
  assert "pip install 'spmd-tasks[traces]'" in capsys.readouterr().err
