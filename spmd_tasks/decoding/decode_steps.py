"""DecodeSteps: a PartitionedModel's compiled Prefill, Step and Draft.

    steps = DecodeSteps(model, settings)
    state = steps.init()
    variables = steps.storage.store(variables)      # the model's, unless the settings have a weights_dtype
    state, first = steps.prefill(variables, state, steps.prefill.make_batch(chunks))
    state, outputs = steps.step(variables, state, steps.step.make_inputs(keep))

Nothing is compiled after `compile()`, whatever the requests; after `compile(num_texts=..., longest=...)`, for requests
within these limits.
"""

from typing import Any

from spmd_tasks.decoding.beam import BeamSearch
from spmd_tasks.decoding.decode_layout import DecodeLayout
from spmd_tasks.decoding.decode_model import DecodeModel
from spmd_tasks.decoding.decode_programs import DecodePrograms
from spmd_tasks.decoding.decode_state import DecodeState
from spmd_tasks.decoding.draft_model import Draft, DraftModel, ModelDraft, decode_model_of
from spmd_tasks.decoding.prefill import Prefill
from spmd_tasks.decoding.step import Step
from spmd_tasks.runtime import DecodeSettings, PartitionedModel


class DecodeSteps:
  """Generates text with a model, by programs that are compiled for its mesh.

  Attributes:
    model: the model with a KV cache and stored weights.
    layout: the layout of the state over the mesh.
    programs: the compiled programs, including those of group sampling and scoring.
    prefill: reads chunks of prompts.
    step: generates the next token of every slot.
    draft: guesses further tokens, which a step checks.
    search: searches by beams, if the settings have several, instead of the three above.
    settings, storage, max_len, encoder_len, vocab_size, adapter_names: attributes of `model`.
    kept_state: the state, on the devices, that the last `generate` left for the next one; None if there is none.
  """

  def __init__(
    self,
    model: PartitionedModel,
    settings: DecodeSettings | None = None,
    *,
    temperature: float = 1.0,
    draft: DraftModel | None = None,
    records_routing: bool = False,
  ):
    """Plans the state; compiles nothing yet.

    Args:
      model: the partitioned model.
      settings: the sizes; None takes the task's.
      temperature: divides the model's logits, and so changes log-probabilities, unlike the temperature of a request.
      draft: the model that guesses drafts, if the settings have any; None: the model's own heads (nextn_drafts.py), or
        n-grams if it has none (drafts.py).
      records_routing: whether group sampling also returns which experts computed each token.

    Raises:
      UserError: the model cannot generate text.
    """
    if settings is None:
      settings = model.task.as_task('text generation').decode
    self.model = DecodeModel(
      model, settings, temperature=temperature, uses_heads=draft is None, records_routing=records_routing
    )
    draft_model = None if draft is None else decode_model_of(draft, self.model)
    self.layout = DecodeLayout(self.model, draft_model=draft_model)
    self.programs = DecodePrograms(self.model, self.layout)
    self.prefill, self.step, self.search = Prefill(self.programs), Step(self.programs), BeamSearch(self.programs)
    self.draft = Draft(is_model=bool(self.model.heads))
    if draft is not None and draft_model is not None:
      self.draft = ModelDraft(draft, draft_model, self.layout, settings.num_drafts)
    self.settings, self.storage = self.model.settings, self.model.storage
    self.max_len, self.encoder_len = self.model.max_len, self.model.encoder_len
    self.vocab_size, self.adapter_names = self.model.vocab_size, self.model.adapter_names
    self.kept_state: DecodeState | None = None

  def init(self) -> DecodeState:
    """Returns the state in which no slot is active."""
    self.draft.init()
    return self.programs.init_state()

  def compile(
    self,
    *,
    score_prompts: bool = False,
    constrain: bool = False,
    num_texts: int | None = None,
    longest: int | None = None,
  ) -> None:
    """Compiles the prefills and steps, or the searches if the settings have several beams.

    Args:
      score_prompts: whether to compile prefills that score prompts too.
      constrain: whether prefills take token masks, and to compile steps that take them too.
      num_texts: how many texts are generated, each of which may need another program; None: any number.
      longest: the tokens of the longest prompt; None: any length.
    """
    if self.layout.num_blocks < self.settings.num_slots * self.layout.table_len:
      longest = None  # a text may begin again, with what it had generated as a part of its prompt
    needed: Any = {'num_texts': num_texts, 'longest': longest}
    if self.settings.num_beams > 1:
      for chunks in self.prefill.any_chunks(**needed):
        self.search.compile(self.prefill.make_batch(chunks))
      return
    self.init()
    with self.programs.in_threads():
      for inputs in self.step.any_inputs(constrain=constrain, num_texts=num_texts):
        self.step.compile(inputs)
        if inputs.masks is not None or inputs.drafts is not None:
          self.draft.compile_guess(self.layout.abstract_state, inputs)
      for score in (False, True) if score_prompts else (False,):
        for chunks in self.prefill.any_chunks(score, **needed):
          batch = self.prefill.make_batch(chunks, score_prompts=score, masks={} if constrain else None)
          self.prefill.compile(batch)
          self.draft.compile_prefill(batch)
