"""Sends an OpenTelemetry span for each request, with child spans for queue, prefill and decode.

    tracer = open_tracer()          # None, unless the environment names a collector
    tracer.record(answer, 'qwen3')  # when the request has ended

    OTEL_EXPORTER_OTLP_ENDPOINT=http://localhost:4318 spmd-tasks --mode serve ...

The span joins the trace of the client's `traceparent` header. OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER,
OTEL_EXPORTER_OTLP_HEADERS and the SDK's other variables apply. Attributes follow OpenTelemetry's semantic conventions.
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
  """Records finished requests with a TracerProvider of OpenTelemetry's SDK."""

  def __init__(self, provider: 'TracerProvider'):
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    self._trace = trace
    self.close = provider.shutdown  # sends the remaining spans
    self._tracer = provider.get_tracer('spmd_tasks')
    self._extract = TraceContextTextMapPropagator().extract

  def record(self, answer: Any, model: str) -> None:
    """Records an Answer (service.py) that ends now; `model` is the name of the model or adapter."""
    ended = time.monotonic()
    offset_ns = time.time_ns() - round(1e9 * ended)
    sequences, route = answer.sequences, answer.request.url.path
    reasons = [sequence.finish_reason or 'cancelled' for sequence in sequences]
    attributes = {
      'http.route': route,
      'gen_ai.request.model': model,
      'gen_ai.usage.input_tokens': answer.num_prompt_tokens,
      'gen_ai.usage.output_tokens': sum(sequence.num_tokens for sequence in sequences),
      'gen_ai.response.finish_reasons': reasons,
    }
    at = lambda seconds: offset_ns + round(1e9 * seconds)
    context, kind = self._extract(answer.request.headers), self._trace.SpanKind.SERVER
    span = self._tracer.start_span(route, context, kind, attributes, start_time=at(answer.begun))
    times = (answer.begun, answer.admitted, answer.first_text, ended)
    for name, (start, stop) in zip(('queue', 'prefill', 'decode'), itertools.pairwise(times), strict=True):
      if start is not None:
        child = self._tracer.start_span(name, self._trace.set_span_in_context(span), start_time=at(start))
        child.end(at(ended if stop is None else stop))
    if 'error' in reasons:
      span.set_status(self._trace.StatusCode.ERROR)
    span.end(at(ended))


def open_tracer() -> RequestTracer | None:
  """Returns a tracer for the collector that the environment names, or None if it names none.

  If the extra `traces` is not installed, prints a warning and returns None instead of failing: platforms often set the
  collector for every program that they run.
  """
  variable = next((name for name in _ENDPOINTS if os.environ.get(name)), None)
  if variable is None:
    return None
  try:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
  except ImportError as error:
    message = f"serve: no traces are sent, though {variable} is set ({error}): pip install 'spmd-tasks[traces]'."
    print(message, file=sys.stderr, flush=True)
    return None
  resource = Resource.create({} if os.environ.get('OTEL_SERVICE_NAME') else {'service.name': 'spmd-tasks'})
  provider = TracerProvider(resource=resource)
  provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
  return RequestTracer(provider)
