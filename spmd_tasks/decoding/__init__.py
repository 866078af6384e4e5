"""Decoding: generates text with a PartitionedModel, for batch jobs and for the server.

    steps = DecodeSteps(model)                                        # compiled for the model's mesh
    requests = [Request(ids=(1, 17, 34), max_tokens=20, sampling=SamplingParams(temperature=0.8))]
    for number, completion in generate(steps, variables, requests, decode=tokenizer.decode):
      print(completion.text)

Read in this order:
  requests.py            Request and Chunk on the host, and the arrays of a prefill
  sampling.py            from logits to a token, with separate parameters for every row
  decode_state.py        the sequences in the slots of a model, and how they grow by a token
  kv_cache.py            the KV cache that attention writes and attends to (cached_attention.py, paged_attention.py)
  prefill.py, step.py    what reads prompts into slots, and what generates the next token of every slot
  decode_steps.py        DecodeSteps: both, with drafts (draft_model.py) and beam search (beam.py), compiled for a mesh.
                         decode_model.py has the model that they call, with weights as weight_storage.py stores them;
                         decode_layout.py the layout of the state, and decode_programs.py compiles
  engine_contract.py     Engine: the interface between scheduler and model; engine.py implements it
  scheduler.py           which sequence is in which slot, and which blocks hold what (block_pool.py)
                         drafts.py guesses tokens that a step then checks
  generated_sequence.py  a request's tokens and text as they grow; constraints.py says which tokens may come next
  generation.py          `generate` and `search`, for batch jobs; scoring.py scores texts that are given
  text_scorer.py         scores or vectors of texts, by a model that predicts no tokens
  group_sampling.py      many samples of prompts that are known at once, by one program
  prompts.py             what a request is made from: a line of JSON
"""

from spmd_tasks.lazy_exports import lazy_exports

with lazy_exports(globals()):
  from spmd_tasks.decoding.decode_steps import DecodeSteps
  from spmd_tasks.decoding.generation import generate
  from spmd_tasks.decoding.prompts import Prompt, PromptFile, Prompts
  from spmd_tasks.decoding.requests import Request
  from spmd_tasks.runtime import DecodeSettings, SamplingParams
