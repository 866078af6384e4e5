"""RequestTracer: an OpenTelemetry span for each request, with spans of its time in the queue, in prefill and in decode.

    tracer = open_tracer()          # None, unless the environment names a collector, as for any OpenTelemetry SDK
    tracer.record(answer, 'qwen3')  # when the request has ended

    OTEL_EXPORTER_OTLP_ENDPOINT=http://localhost:4318 spmd-tasks --mode serve ...

The span belongs to the trace that the client's `traceparent` header names. OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER,
OTEL_EXPORTER_OTLP_HEADERS and the like act as the SDK says. Attributes have the names of OpenTelemetry's conventions.
"""

import itertools
import os
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from opentelemetry.sdk.trace import TracerProvider

_ENDPOINTS = ('OTEL_EXPORTER_OTLP_TRACES_ENDPOINT', 'OTEL_EXPORTER_OTLP_ENDPOINT')


class RequestTracer:
  """Records requests that have ended with a provider of OpenTelemetry's SDK."""

  def __init__(self, provider: 'TracerProvider'):
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    self._trace = trace
    self.close = provider.shutdown  # sends what is left
    self._tracer = provider.get_tracer('spmd_tasks')
    self._extract = TraceContextTextMapPropagator().extract

  def record(self, answer: Any, model: str) -> None:
    """Records an Answer of service.py, which ends now; `model` is the name of the model or adapter."""
    ended = time.monotonic()
    offset_ns = time.time_ns() - round(1e9 * ended)
    sequences, route = answer.sequences, answer.request.url.path
    reasons = [each.finish_reason or 'cancelled' for each in sequences]
    attributes = {
      'http.route': route,
      'gen_ai.request.model': model,
      'gen_ai.usage.input_tokens': answer.num_prompt_tokens,
      'gen_ai.usage.output_tokens': sum(each.num_tokens for each in sequences),
      'gen_ai.response.finish_reasons': reasons,
    }
    at = lambda seconds: offset_ns + round(1e9 * seconds)
    context, kind = self._extract(answer.request.headers), self._trace.SpanKind.SERVER
    span = self._tracer.start_span(route, context, kind, attributes, start_time=at(answer.begun))
    times = (answer.begun, answer.admitted, answer.first_text, ended)
    for name, (start, stop) in zip(('queue', 'prefill', 'decode'), itertools.pairwise(times), strict=True):
      if start is not None:
        part = self._tracer.start_span(name, self._trace.set_span_in_context(span), start_time=at(start))
        part.end(at(ended if stop is None else stop))
    if 'error' in reasons:
      span.set_status(self._trace.StatusCode.ERROR)
    span.end(at(ended))


def open_tracer() -> RequestTracer | None:
  """Returns the tracer of the collector that the environment names; None where it names none.

  Without the extra it is None too, and a line on stderr says so: a platform names a collector for all that it runs.
  """
  if not (named := [name for name in _ENDPOINTS if os.environ.get(name)]):
    return None
  try:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
  except ImportError as error:
    message = f"serve: no traces are sent, though {named[0]} is set ({error}): pip install 'spmd-tasks[traces]'."
    print(message, file=sys.stderr, flush=True)
    return None
  resource = Resource.create({} if os.environ.get('OTEL_SERVICE_NAME') else {'service.name': 'spmd-tasks'})
  provider = TracerProvider(resource=resource)
  provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
  return RequestTracer(provider)
