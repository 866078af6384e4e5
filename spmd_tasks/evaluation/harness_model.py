"""HarnessModel: the model interface of EleutherAI's lm-eval for a job's checkpoint or a Hugging Face folder.

Texts are tokenized as by the harness's own `hf` model, so that both have the same numbers for the same weights: the
tokenizer's prefix also precedes contexts, an empty context is the beginning-of-text token, and texts that are too long
are truncated at the start.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
import hashlib
from typing import Any

from absl import logging
from jax.sharding import Mesh
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from spmd_tasks.decoding import Prompt
from spmd_tasks.distributed import use_fake_devices
from spmd_tasks.errors import UserError
from spmd_tasks.inputs import ChatTemplate, FolderTokenizer, Tokenizer
from spmd_tasks.inputs.tokenizers import encode_prompt
from spmd_tasks.loading import load

_AUTO_BATCH_SIZE = 32
_SAMPLING = ('top_k', 'top_p', 'min_p', 'repetition_penalty', 'frequency_penalty', 'presence_penalty')

# A request of the harness: (texts or None, tokens of the context, tokens of the continuation).
_TokenRequest = tuple[tuple[str, str] | None, list[int], list[int]]


@register_model('spmd_tasks')
class HarnessModel(TemplateLM):
  """A model for lm-eval, which computes log-likelihoods and rolling log-likelihoods and generates texts.

  Attributes:
    loaded: the LoadedModel.
    max_length: maximum number of tokens of a text.
    max_gen_toks: number of tokens to generate if a task does not set it.
    batch_size: number of texts to score at once.
  """

  def __init__(
    self,
    path: str = '',
    *,
    step: int | None = None,
    mesh: Mesh | Sequence[int] | str | int | None = None,
    batch_size: int | str = 1,
    max_length: int | None = None,
    max_gen_toks: int = 256,
    add_bos_token: bool | None = None,
    prefix_token_id: int | None = None,
    experiment_path: str | Sequence[str] = (),
    num_fake_devices: int | None = None,
    max_batch_size: int | None = None,
    device: str | None = None,
    **overrides: Any,
  ):
    """Loads the model; the arguments are given in `--model_args`.

    Args:
      path: a job's directory, or a Hugging Face model folder; required.
      step: the step of the checkpoint; None for the newest.
      mesh: the sizes of the experiment's mesh axes, such as 1x2x4; None as in `spmd_tasks.load`.
      batch_size: number of texts to score at once; 'auto' means 32. Generation uses task.decode.num_slots.
      max_length: maximum number of tokens of a text; None for `task.decode.max_len`, or else the training length.
      max_gen_toks: number of tokens to generate if a task does not set it.
      add_bos_token: whether to prepend the beginning-of-text token; None as for prompts.
      prefix_token_id: the token before texts without a context; None for beginning of text, or else end of text.
      experiment_path: directories of the experiment's own module, or a string of them separated by `:`.
      num_fake_devices: number of fake CPU devices to run on.
      max_batch_size, device: ignored; the harness passes them.
      **overrides: overrides of the config as with --set, such as task.decode.num_slots=16.

    Raises:
      UserError: the directory, the mesh or an argument is invalid, or the job has no tokenizer.
      CheckpointError: there is no such checkpoint, or it is damaged.
    """
    super().__init__()
    if not path:
      raise UserError('model_args has no path: write --model_args path=DIRECTORY, of a job or a Hugging Face model.')
    if num_fake_devices is not None:
      use_fake_devices(num_fake_devices)
    self.batch_size = _AUTO_BATCH_SIZE if str(batch_size).startswith('auto') else int(batch_size)
    if self.batch_size < 1:
      raise UserError(f"batch_size={batch_size} must be at least 1, or 'auto'.")
    all_overrides = {'task.decode.max_len': max_length} | overrides
    self.loaded = load(
      path,
      step=step,
      mesh=_mesh_sizes(mesh),
      overrides=[f'{name}={value}' for name, value in all_overrides.items() if value is not None],
      experiment_path=experiment_path.split(':') if isinstance(experiment_path, str) else experiment_path,
    )
    if self.loaded.tokenizer is None:
      raise UserError(f'{path} has no tokenizer in its inputs: use a job or folder with a tokenizer.')
    self._tokenizer: Tokenizer = self.loaded.tokenizer
    if self.loaded.job.task.as_task('the harness').decode.num_beams > 1:
      raise UserError('task.decode.num_beams must be 1, because the harness has no beam search.')
    self.max_length, self.max_gen_toks = self.loaded.max_len, max_gen_toks
    self._add_bos = add_bos_token
    self._prefix_id = prefix_token_id
    self._template: ChatTemplate = self.loaded.job.experiment.chat_template()

  # --- properties of the model ---

  @property
  def eot_token_id(self) -> int:
    return self._tokenizer.eos_id

  @property
  def prefix_token_id(self) -> int:
    """The token before a text without a context."""
    if self._prefix_id is not None:
      return self._prefix_id
    if self._tokenizer.bos_id is not None:
      return self._tokenizer.bos_id
    if isinstance(self._tokenizer, FolderTokenizer):  # some have a bos_token that they do not add to texts
      ids = self._tokenizer.encode(self._tokenizer.special_tokens.get('bos_token', ''))
      if len(ids) == 1:
        return ids[0]
    return self.eot_token_id

  @property
  def tokenizer_name(self) -> str:
    """The name of tokenizer and template in the harness's caches."""
    identity = f'{self._tokenizer.fingerprint()} {self._template.template}'
    return hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()

  def get_model_info(self) -> dict[str, Any]:
    """Returns the entries about the model in the harness's results."""
    mesh = {name: int(size) for name, size in self.loaded.mesh.shape.items()}
    model = {'num_parameters': self.loaded.num_parameters, 'step': self.loaded.step, 'mesh': mesh}
    return {f'model_{name}': value for name, value in model.items()} | {'max_length': self.max_length}

  # --- text to tokens ---

  def tok_encode(
    self, string: str, add_special_tokens: bool | None = None, left_truncate_len: int | None = None, **kwargs: Any
  ) -> list[int]:
    """Returns the tokens of a text, by default with the tokenizer's prefix, like a prompt."""
    del kwargs
    with_bos = self._add_bos if add_special_tokens is None else add_special_tokens
    ids = list(self._tokenizer.encode(string) if with_bos is False else encode_prompt(self._tokenizer, string))
    return ids[-left_truncate_len:] if left_truncate_len else ids

  def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
    """Renders a conversation; without the generation prompt, it ends in the last message, which can be continued."""
    text = self._template.render(chat_history, add_generation_prompt=add_generation_prompt)
    if add_generation_prompt:
      return text
    last = chat_history[-1]['content']
    start = text.rfind(last.strip())
    if start < 0:
      raise UserError('the chat template changes the last message, which must be continued: use another template.')
    keeps_spaces = text.startswith(last.lstrip(), start)
    return text[: start + len(last.lstrip() if keeps_spaces else last.strip())]

  def chat_template(self, chat_template: bool | str = False) -> str | None:
    """Returns the template for the harness's results; None if the run does not use it."""
    return self._template.template if chat_template else None

  # --- requests ---

  def _loglikelihood_tokens(
    self, requests: Sequence[_TokenRequest], disable_tqdm: bool = False, **kwargs: Any
  ) -> list[tuple[float, bool]]:
    """Returns (log-likelihood, whether greedy decoding generates it) of each continuation, in order."""
    del kwargs
    texts, num_truncated = [], 0
    for _, context, continuation in requests:
      if len(continuation) > self.max_length:
        raise UserError(
          f'a task has a continuation of {len(continuation)} tokens, but max_length={self.max_length}: raise it.'
        )
      whole = [*context, *continuation]
      num_truncated += len(whole) > self.max_length + 1
      start = max(0, len(whole) - self.max_length - 1)
      texts.append((whole[start : len(whole) - len(continuation)], continuation))
    if num_truncated:
      logging.warning(
        '%d of %d texts are longer than max_length=%d tokens and are truncated at the start: raise max_length if the '
        'model supports longer texts.',
        *(num_truncated, len(texts), self.max_length),
      )
    answers: list[tuple[float, bool]] = [(0.0, True)] * len(texts)
    with tqdm(total=len(texts), desc='log-likelihoods', disable=disable_tqdm) as progress:
      for number, score in self.loaded.score(texts, num_rows=self.batch_size):
        answers[number] = (score.logprob, score.is_greedy)
        if requests[number][0] is not None:
          self.cache_hook.add_partial('loglikelihood', requests[number][0], answers[number])
        progress.update()
    return answers

  def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
    """Returns the log-likelihood of each text, computed in windows of max_length tokens that overlap by one."""
    windows: list[_TokenRequest] = []
    owners: list[int] = []
    for number, request in enumerate(requests):
      ids = self.tok_encode(request.args[0])
      for pair in get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1):
        windows.append((None, *make_disjoint_window(pair)))
        owners.append(number)
    totals = [0.0] * len(requests)
    for owner, (logprob, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
      totals[owner] += logprob
    for request, total in zip(requests, totals, strict=True):
      self.cache_hook.add_partial('loglikelihood_rolling', request.args, total)
    return totals

  def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
    """Generates a continuation of each context up to its stop strings, greedily unless the task samples."""
    seen: Counter[str] = Counter()
    prompts = []
    for request in requests:
      context, settings = request.args
      prompts.append(self._prompt(context, settings, sample=seen[context]))
      seen[context] += 1  # repeated contexts get different samples
    texts = [''] * len(prompts)
    with tqdm(total=len(prompts), desc='texts', disable=disable_tqdm) as progress:
      for number, text in self.loaded.complete(prompts):
        texts[number] = text
        self.cache_hook.add_partial('generate_until', requests[number].args, text)
        progress.update()
    return texts

  def _prompt(self, context: str, settings: Mapping[str, Any], *, sample: int) -> Prompt:
    """Returns the prompt of a request with `generation_kwargs` of the harness."""
    kwargs: dict[str, Any] = dict(normalize_gen_kwargs(dict(settings), self.max_gen_toks))
    max_tokens, stop = kwargs.pop('max_gen_toks'), kwargs.pop('until')
    temperature = kwargs.pop('temperature', None)
    if not kwargs.pop('do_sample', False):
      temperature = 0.0
    sampling = {name: kwargs.pop(name) for name in _SAMPLING if name in kwargs}
    if kwargs:
      raise UserError(
        f'the generation_kwargs of a task have {", ".join(sorted(kwargs))}, but supported are until, do_sample, '
        f'max_gen_toks, temperature, {", ".join(_SAMPLING)}: remove the others.'
      )
    max_context = self.max_length - max_tokens
    if max_context < 1:
      raise UserError(
        f'a task generates {max_tokens} tokens, which must be less than max_length={self.max_length}: raise '
        'max_length, or set --gen_kwargs max_gen_toks=N.'
      )
    return Prompt(
      prompt_ids=tuple(self.tok_encode(context, left_truncate_len=max_context)),
      max_tokens=max_tokens,
      temperature=temperature,
      seed=self.loaded.job.experiment.seed + sample,
      stop=tuple(text for text in stop if text),
      **sampling,
    )


def _mesh_sizes(mesh: Mesh | Sequence[int] | str | int | None) -> Mesh | Sequence[int] | None:
  """Returns the sizes in a string such as 1x2x4."""
  if isinstance(mesh, int):
    return (mesh,)
  if not isinstance(mesh, str):
    return mesh
  try:
    return tuple(int(size) for size in mesh.split('x'))
  except ValueError:
    raise UserError(f'mesh={mesh} must be the sizes of the mesh axes separated by x, such as 1x2x4.') from None
