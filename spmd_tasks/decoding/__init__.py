"""Decoding: generates text with a PartitionedModel, for batch jobs and for the server.

    steps = DecodeSteps(model)                                        # compiled for the model's mesh
    requests = [Request(ids=(1, 17, 34), max_tokens=20, sampling=SamplingParams(temperature=0.8))]
    for number, completion in generate(steps, variables, requests, decode=tokenizer.decode):
      print(completion.text)

Read in this order:
  requests.py            Request and Chunk on the host, and the arrays of a prefill
  sampling.py            from logits to a token, with separate parameters for every row
  step_functions.py      prefill and step as pure functions over slots and their KV cache
  beam.py                beam search as a pure function
  weight_storage.py      weights in fewer bits than in training
  decode_steps.py        these functions, compiled for a mesh
  engine_contract.py     Engine: the interface between scheduler and model; engine.py implements it
  scheduler.py           which sequence is in which slot; prefix_cache.py finds slots that hold a prompt's beginning
  generated_sequence.py  a request's tokens and text as they grow; constraints.py says which tokens may come next
  output_form.py         what a request says about the form of its output
  generation.py          `generate` and `search`, for batch jobs; scoring.py scores texts that are given
  prompts.py             what a request is made from: a line of JSON; for conversations inputs/chat_template.py
"""

from spmd_tasks.decoding.constraints import Grammars, Matcher
from spmd_tasks.decoding.decode_steps import DecodeSteps
from spmd_tasks.decoding.engine import ModelEngine
from spmd_tasks.decoding.engine_contract import Engine, Launched, TokenMasks
from spmd_tasks.decoding.generated_sequence import (
  Delta,
  FinishReason,
  GeneratedSequence,
  IncrementalText,
  TokenLogprob,
  begun_length,
)
from spmd_tasks.decoding.generation import Completion, generate, search
from spmd_tasks.decoding.output_form import FormError, OutputForm, wanted_form
from spmd_tasks.decoding.prompts import Prompt, PromptFile, Prompts, PromptSource, PromptTokenizer
from spmd_tasks.decoding.requests import Chunk, Request, chunk_prompt
from spmd_tasks.decoding.sampling import MAX_BIASES
from spmd_tasks.decoding.scheduler import Scheduler
from spmd_tasks.decoding.scoring import TextScore, score_texts
from spmd_tasks.decoding.step_functions import DecodeState, Outputs
from spmd_tasks.decoding.weight_storage import WeightStorage
from spmd_tasks.inputs import ChatTemplate
from spmd_tasks.runtime import DecodeSettings, SamplingParams

__all__ = [
  'MAX_BIASES',
  'ChatTemplate',
  'Chunk',
  'Completion',
  'DecodeSettings',
  'DecodeState',
  'DecodeSteps',
  'Delta',
  'Engine',
  'FinishReason',
  'FormError',
  'GeneratedSequence',
  'Grammars',
  'IncrementalText',
  'Launched',
  'Matcher',
  'ModelEngine',
  'OutputForm',
  'Outputs',
  'Prompt',
  'PromptFile',
  'PromptSource',
  'PromptTokenizer',
  'Prompts',
  'Request',
  'SamplingParams',
  'Scheduler',
  'TextScore',
  'TokenLogprob',
  'TokenMasks',
  'WeightStorage',
  'begun_length',
  'chunk_prompt',
  'generate',
  'score_texts',
  'search',
  'wanted_form',
]
