"""A checkpoint of one mesh generates text on another, restored as for serving.

One model is everything at once: 3 layers of experts over 2 stages, in dims that no axis divides. It is trained for a
step, so that its weights are what a step stored. The reference is a full forward pass of them, on no mesh.
"""

import jax
import numpy as np
import pytest

from spmd_tasks.checkpoints import Checkpointer
from spmd_tasks.decoding import DecodeSteps, Request, generate
from spmd_tasks.programs.restored_weights import restore_evaluation_variables
from spmd_tasks.runtime import DecodeSettings
from tests.runtime.loss_curves import make_model
from tests.runtime.pipeline_experiments import PipelinedExperts

MAX_LEN = 16
SETTINGS = DecodeSettings(max_len=MAX_LEN, num_slots=3, min_bucket=MAX_LEN)
SIZES = ('num_layers=3', 'num_microbatches=2', 'batch_size=4')
# (replica, stage, data, expert, mdl)
TRAINED_ON = (1, 2, 1, 2, 2)
SERVED_ON = (1, 1, 2, 1, 4)


# By default: pipelines, experts and padding each in tests/decoding/test_decode_steps.py, moved checkpoints in
# tests/runtime.
@pytest.mark.exhaustive
def test_pipelined_padded_experts_give_the_tokens_of_the_full_forward_pass(tmp_path):
  trained, train_input = make_model(PipelinedExperts, TRAINED_ON, overrides=SIZES)
  batch = trained.train_step.place(next(train_input.make_iterator()))
  state, _ = trained.train_step(trained.init(0), batch)
  canonical = trained.to_canonical(state)
  checkpointer = Checkpointer(tmp_path)
  checkpointer.save(1, canonical)
  checkpointer.wait()

  model, _ = make_model(PipelinedExperts, SERVED_ON, overrides=SIZES)
  assert trained.padding_waste > 0
  assert model.padding_waste > 0
  variables, _ = restore_evaluation_variables(model, checkpointer, step=1)
  checkpointer.close()
  rng = np.random.default_rng(3)
  requests = [Request(ids=tuple(rng.integers(1, 257, length).tolist()), max_tokens=5) for length in (9, 3, 7, 1)]
  done = dict(generate(DecodeSteps(model, SETTINGS), variables, requests, decode=lambda tokens: ''))

  true_weights = jax.tree.map(
    lambda w, true: np.reshape(w, true.shape), jax.device_get(canonical.weights), trained.abstract_state.weights
  )
  rows = np.zeros((len(requests), MAX_LEN), np.int32)
  texts = [[*request.ids, *done[index].ids] for index, request in enumerate(requests)]
  for row, text in zip(rows, texts, strict=True):
    row[: len(text)] = text
  logits = jax.jit(trained.task.model.apply)({'params': true_weights}, {'ids': rows})['logits']
  logprobs = np.asarray(jax.nn.log_softmax(logits))
  for index, request in enumerate(requests):
    predicted = logprobs[index, len(request.ids) - 1 :][:5]
    assert done[index].ids == np.argmax(predicted, axis=-1).tolist()
    np.testing.assert_allclose(done[index].logprobs, np.max(predicted, axis=-1), atol=1e-4)
