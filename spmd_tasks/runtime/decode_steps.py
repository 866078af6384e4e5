"""DecodeSteps: prefill and step of a PartitionedModel, compiled for its mesh.

    steps = DecodeSteps(model, settings)
    state = steps.init()
    state, first = steps.prefill(weights, state, requests)
    state, outputs = steps.step(weights, state, keep)

As in training, what is stored is padded and what is computed is not: weights and caches are sliced inside. The state
is donated: it is updated in place. Requests and outputs are the same on every process, host arrays in and replicated
arrays out. Nothing is compiled after `compile()`, whatever the requests.
"""

from collections.abc import Callable, Mapping
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np

from spmd_tasks.decoding import beam, loop
from spmd_tasks.decoding.samplers import Sampling
from spmd_tasks.decoding.settings import DecodeSettings, prompt_buckets
from spmd_tasks.runtime.partition import PartitionedModel
from spmd_tasks.sharding import padding
from spmd_tasks.sharding.specs import sharding_scope, split_dims_to_partition_spec
from spmd_tasks.sharding.stage_axis import stage_axis, without_axis
from spmd_tasks.sharding.weights import unbox_weights, weight_specs

Weights = Any


class DecodeSteps:
  """The compiled steps of one task and settings.

  Attributes:
    settings: as given, with max_len filled in.
    max_len: S; buckets: the lengths of prompts that are compiled.
    vocab_size: V.
    abstract_state, padded_state: true shapes of the DecodeState, and the shapes and shardings in which it is stored.
  """

  def __init__(self, model: PartitionedModel, settings: DecodeSettings | None = None):
    """Partitions; compiles nothing yet.

    Raises:
      ValueError: the model cannot generate text, or its training input has no length to take as max_len.
    """
    self.settings = model.task.decode if settings is None else settings
    self._model = model
    # Layers run one after another from the weights that pipeline stages hold.
    axis = stage_axis(model.mesh.axis_names, model.axis_rules)
    self._axis_rules = model.axis_rules if axis is None else without_axis(axis, model.axis_rules)
    self._replicated = NamedSharding(model.mesh, PartitionSpec())
    self.max_len = self.settings.max_len or _training_length(model)
    self.buckets = prompt_buckets(self.settings.min_bucket, self.max_len)
    self._compiled: dict[Any, Any] = {}

    abstract_cache, specs, self.vocab_size = self._abstract_cache(self.settings.num_slots)
    empty = functools.partial(
      loop.empty_state,
      num_slots=self.settings.num_slots,
      vocab_size=self.vocab_size,
      num_stop_ids=self.settings.max_stop_ids,
    )
    self.abstract_state = jax.eval_shape(lambda: empty(abstract_cache))
    shardings = jax.tree.map(lambda _: self._replicated, self.abstract_state)
    shardings = shardings.replace(cache=jax.tree.map(lambda spec: NamedSharding(model.mesh, spec), specs))

    def padded(leaf, sharding):
      shape = padding.padded_shape(leaf.shape, sharding.spec, model.mesh.shape)
      return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)

    self.padded_state = jax.tree.map(padded, self.abstract_state, shardings)
    self._state_shardings = jax.tree.map(lambda leaf: leaf.sharding, self.padded_state)

  def init(self) -> loop.DecodeState:
    """The state in which no slot is active."""
    return self._compile('init', lambda: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), self.padded_state), ())()

  def prefill(
    self, weights: Weights, state: loop.DecodeState, requests: loop.Requests, *, score_prompts: bool = False
  ) -> tuple[loop.DecodeState, loop.Outputs]:
    """See loop.prefill; `requests.ids` has the length of a bucket, and `prefill_rows` rows."""
    return self._prefill(requests.ids.shape[1], score_prompts)(weights, state, requests)

  def step(self, weights: Weights, state: loop.DecodeState, keep: np.ndarray) -> tuple[loop.DecodeState, loop.Outputs]:
    """See loop.step."""
    return self._step()(weights, state, keep)

  def search(self, weights: Weights, requests: loop.Requests) -> beam.Beams:
    """Beam search for the requests' rows; their slots, seeds and sampling mean nothing."""
    return self._search(requests.ids.shape[1])(
      weights, requests.ids, requests.lengths, requests.max_tokens, requests.stop_ids
    )

  def compile(self, *, score_prompts: bool = False) -> None:
    """Compiles all that requests need: the step and every bucket's prefill, where asked for its scoring form too."""
    if self.settings.num_beams > 1:
      for bucket in self.buckets:
        self._search(bucket)
      return
    self.init()
    self._step()
    for bucket in self.buckets:
      self._prefill(bucket, False)
      if score_prompts:
        self._prefill(bucket, True)

  def bucket(self, length: int) -> int:
    """The shortest bucket for a prompt of `length` tokens, at most max_len."""
    return next(bucket for bucket in self.buckets if bucket >= length)

  def abstract_requests(self, bucket: int) -> loop.Requests:
    """Shapes and dtypes of a prefill's requests."""
    num_rows = self.settings.prefill_rows

    def array(dtype, *shape):
      return jax.ShapeDtypeStruct((num_rows, *shape), dtype)

    return loop.Requests(
      ids=array(jnp.int32, bucket),
      lengths=array(jnp.int32),
      slots=array(jnp.int32),
      max_tokens=array(jnp.int32),
      seeds=array(jnp.uint32),
      samples=array(jnp.uint32),
      stop_ids=array(jnp.int32, self.settings.max_stop_ids),
      sampling=Sampling(
        repetition_penalty=array(jnp.float32),
        temperature=array(jnp.float32),
        top_k=array(jnp.int32),
        top_p=array(jnp.float32),
        min_p=array(jnp.float32),
      ),
    )

  def _prefill(self, bucket: int, score_prompts: bool) -> Any:
    def prefill(padded_weights, padded_state, requests):
      state, outputs = loop.prefill(
        self._forward,
        self._true_weights(padded_weights),
        padding.unpad(padded_state, self.abstract_state),
        requests,
        num_top_logprobs=self.settings.num_top_logprobs,
        score_prompts=score_prompts,
      )
      return padding.pad(state, self.padded_state), outputs

    return self._compile(('prefill', bucket, score_prompts), prefill, (self.abstract_requests(bucket),), stateful=True)

  def _step(self) -> Any:
    def step(padded_weights, padded_state, keep):
      state, outputs = loop.step(
        self._forward,
        self._true_weights(padded_weights),
        padding.unpad(padded_state, self.abstract_state),
        keep,
        num_top_logprobs=self.settings.num_top_logprobs,
      )
      return padding.pad(state, self.padded_state), outputs

    keep = jax.ShapeDtypeStruct((self.settings.num_slots,), jnp.bool_)
    return self._compile('step', step, (keep,), stateful=True)

  def _search(self, bucket: int) -> Any:
    num_beams, requests = self.settings.num_beams, self.abstract_requests(bucket)
    abstract_cache, specs, _ = self._abstract_cache(self.settings.prefill_rows * num_beams)

    def search(padded_weights, *arrays):
      def empty(leaf, spec):
        sharding = NamedSharding(self._model.mesh, spec)
        return jax.lax.with_sharding_constraint(jnp.zeros(leaf.shape, leaf.dtype), sharding)

      return beam.beam_search(
        self._forward,
        self._true_weights(padded_weights),
        jax.tree.map(empty, abstract_cache, specs),
        *arrays,
        num_beams=num_beams,
        max_new_tokens=self.max_len - 1,
        length_penalty=self.settings.length_penalty,
      )

    arguments = (requests.ids, requests.lengths, requests.max_tokens, requests.stop_ids)
    return self._compile(('search', bucket), search, arguments, weighted=True)

  def _compile(
    self,
    name: Any,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    *,
    stateful: bool = False,
    weighted: bool = False,
  ) -> Any:
    """`function`, compiled once: of weights, of the state, which it then returns first, and of the host's arguments."""
    if name in self._compiled:
      return self._compiled[name]

    def scoped(*given):
      with sharding_scope(self._model.mesh, self._axis_rules):
        return function(*given)

    weights = self._model.padded_state.weights
    held = (weights, self.padded_state) if stateful else (weights,) if weighted else ()
    out: Any = self._replicated
    if stateful:
      out = (self._state_shardings, self._replicated)
    elif name == 'init':
      out = self._state_shardings
    jitted = jax.jit(
      scoped,
      in_shardings=(
        *jax.tree.map(lambda leaf: leaf.sharding, held),
        *jax.tree.map(lambda _: self._replicated, arguments),
      ),
      out_shardings=out,
      donate_argnums=(1,) if stateful else (),
    )
    self._compiled[name] = jitted.lower(*held, *arguments).compile()
    return self._compiled[name]

  def _true_weights(self, padded_weights: Weights) -> Weights:
    model = self._model
    weights = padding.unpad(padded_weights, model.abstract_state.weights)
    return jax.tree.map(
      lambda x, spec: jax.lax.with_sharding_constraint(x, NamedSharding(model.mesh, spec)),
      weights,
      model.state_specs.weights,
    )

  def _forward(self, weights: Weights, cache: Any, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, Any]:
    variables = {'params': weights} | ({} if cache is None else {'cache': cache})
    outputs, updated = self._model.task.model.apply(variables, batch, train=False, mutable='new_cache')
    return outputs['logits'], unbox_weights(updated['new_cache'])

  def _abstract_cache(self, num_rows: int) -> tuple[Any, Any, int]:
    """(shapes of the cache, its PartitionSpecs, V) for rows of max_len, from a prefill that is traced only."""
    model = self._model
    batch = {
      name: jax.ShapeDtypeStruct((num_rows, self.max_len), jnp.int32) for name in ('ids', 'segment_ids', 'segment_pos')
    }

    def prefill(weights, batch):
      return model.task.model.apply({'params': weights}, batch, train=False, mutable='new_cache')

    with sharding_scope(model.mesh, self._axis_rules):
      outputs, variables = jax.eval_shape(prefill, model.abstract_state.weights, batch)
    if not isinstance(outputs, Mapping) or 'logits' not in outputs or not variables.get('new_cache'):
      raise ValueError(
        f'{type(model.task.model).__name__} cannot generate text: it must return logits [B, T, V] under the key '
        "'logits' and leave the keys and values of its attention in the collection 'new_cache', as LanguageModel does."
      )
    boxes = weight_specs(variables['new_cache'])
    specs = jax.tree.map(
      lambda box: split_dims_to_partition_spec(box.split_dims, model.mesh.axis_names, self._axis_rules), boxes
    )
    return unbox_weights(variables['new_cache']), specs, outputs['logits'].shape[-1]


def _training_length(model: PartitionedModel) -> int:
  ids = model.input_layout.spec.get('ids')
  if ids is None:
    raise ValueError("the training input has no 'ids', whose length would be max_len: set task.decode.max_len.")
  return ids.shape[1]
