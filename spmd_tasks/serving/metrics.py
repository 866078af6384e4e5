"""The server's Prometheus metrics, in a registry of their own.

    metrics = ServerMetrics({'slots': ('Sequences that can be generated at once.', lambda: 8), ...})
    metrics.http_requests.labels('/v1/models', '200').inc()
    metrics.exposition()     # the text of GET /metrics

Events are counted as they happen; values of other objects are read when Prometheus scrapes.
"""

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

PREFIX = 'spmd_tasks_'

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class ServerMetrics:
  """The metrics of one server.

  Label `model` is the name of the model or adapter, `client` the name of a client's key.
  """

  def __init__(self, read: Mapping[str, tuple[str, Callable[[], float]]]):
    """Initializes all counters to zero.

    Args:
      read: a help text and a function for each metric that is read on a scrape. Names ending in `_total` are counters,
        all others gauges.
    """
    disable_created_metrics()  # a second sample per counter and histogram, with its creation time
    self._registry = CollectorRegistry()
    self._registry.register(_ReadMetrics(read))
    # Clients must not choose label values: each new value takes memory.
    self.http_requests = self._counter('http_requests', 'HTTP responses.', 'route', 'status')
    self.sequences = self._counter('sequences', 'Sequences that have ended.', 'finish_reason', 'model')
    self.tokens_of = self._counter('model_generated_tokens', 'Tokens of sequences that have ended.', 'model')
    self.tokens_of_client = self._counter('client_tokens', 'Tokens of prompts and answers.', 'client')
    self.first_token_s = self._histogram('time_to_first_token_seconds', 'From the request to its first text.')
    self.between_tokens_s = self._histogram('inter_token_seconds', 'Between two steps that generated text.')
    self.request_s = self._histogram('request_seconds', 'From the request to its end.')

  def exposition(self) -> str:
    """Formats all metrics in Prometheus' text format."""
    return generate_latest(self._registry).decode()

  def _counter(self, name: str, text: str, *labels: str) -> Counter:
    return Counter(PREFIX + name, text, labels, registry=self._registry)

  def _histogram(self, name: str, text: str) -> Histogram:
    return Histogram(PREFIX + name, text, buckets=_SECONDS, registry=self._registry)


class _ReadMetrics(Collector):
  """Metrics with values that are read on a scrape."""

  def __init__(self, read: Mapping[str, tuple[str, Callable[[], float]]]):
    self._read = read

  def describe(self) -> Iterable[Metric]:
    return ()  # without this, `register` would read the values

  def collect(self) -> Iterable[Metric]:
    for name, (text, value) in self._read.items():
      family = CounterMetricFamily if name.endswith('_total') else GaugeMetricFamily
      yield family(PREFIX + name, text, value=value())
