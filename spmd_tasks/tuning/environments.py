"""Episodes: completions of prompts, and an environment's answers to them, several turns in one sequence of tokens.

    class Calculator:                                        # --set environment=my_lab.games:Calculator
      stop = ('=',)

      def reset(self, record):
        self.answer = record['answer']
        return record['prompt']                              # a text, or a list of messages

      def step(self, completion):
        if completion.endswith('='):
          return str(compute(completion)), 0.0, False        # what comes next, a reward, and whether this is the end
        return None, float(completion == self.answer), True

Each call is a function of the record and of the completions so far: an object is made, and either gets back what
its `state()` returned after the turn before, by `restore(state)`, or without these methods begins and makes all
steps again. So any process may answer, a process that hangs costs one episode, and nothing of an environment is kept
when the job ends in the middle of a rollout: the rollout is drawn anew, to the same bits.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any

from spmd_tasks.errors import UserError
from spmd_tasks.inputs import ChatTemplate, Tokenizer
from spmd_tasks.inputs.tokenizers import decode_all, decode_generated

_PLACEHOLDER = {'role': 'assistant', 'content': 'x'}


@dataclasses.dataclass(kw_only=True)
class Episode:
  """A prompt and what follows it: one completion, or the turns of the model and of an environment.

  Fields:
    prompt_ids, ids: tokens of the prompt, and of what follows.
    logprobs, is_sampled: of each of `ids`: its log-probability, 0 where the model did not write it, and whether it did.
    text: of `ids`.
    is_cut: the limit of tokens or turns has ended it.
    reward: the sum of the environment's; NaN without an environment, or if that failed.
    turns, state: the model's texts, and the environment's state after them.
    expert_ids: of a single completion, which experts computed its prompt and itself, [T, n]; None: not known.
    messages, tools: what the template wrote so far, the model's texts replaced; None: the texts are no messages.
  """

  prompt_ids: tuple[int, ...] = ()
  ids: list[int] = dataclasses.field(default_factory=list)
  logprobs: list[float] = dataclasses.field(default_factory=list)
  is_sampled: list[bool] = dataclasses.field(default_factory=list)
  text: str = ''
  is_cut: bool = False
  reward: float = float('nan')
  turns: list[str] = dataclasses.field(default_factory=list)
  state: Any = None
  expert_ids: Any = None
  messages: Sequence[Mapping[str, Any]] | None = None
  tools: Sequence[Mapping[str, Any]] | None = None

  def add(self, completion: Any) -> None:
    """Appends a Completion of decoding."""
    self.prompt_ids = self.prompt_ids or completion.request.ids
    self.ids += completion.ids
    self.logprobs += completion.logprobs
    self.is_sampled += [True] * len(completion.ids)
    self.text += completion.text
    self.turns.append(completion.text)
    self.is_cut, self.expert_ids = completion.finish_reason == 'length', completion.expert_ids


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turns:
  """Goes on with episodes after their first completions.

  Fields:
    tokenizer, template: of the texts.
    stop: strings of the environment at which a turn ends; they belong to the text that it gets.
    max_tokens: of all that follows the prompt of an episode.
    max_turns: of the model.
    report: shows a sentence about an episode that failed.
    answer: to each (record, texts of the model, state) gives (messages, reward, done, state), or None where it fails.
    complete: completes (number of the episode, ids, tokens that may follow), in the same order.
  """

  tokenizer: Tokenizer
  template: ChatTemplate
  stop: tuple[str, ...]
  max_tokens: int
  max_turns: int
  report: Callable[[str], None]
  answer: Callable[[list[tuple[Mapping[str, Any], Sequence[str], Any]]], Sequence[Any]]
  complete: Callable[[int, list[tuple[int, tuple[int, ...], int]]], Sequence[Any]]

  def play(self, records: Sequence[Mapping[str, Any]], episodes: Sequence[Episode], newest: Sequence[Any]) -> None:
    """Plays episodes to their ends.

    Args:
      records, episodes: of the same length; each episode has its prompt alone.
      newest: its first Completion.
    """
    for episode in episodes:
      episode.reward = 0.0
    running, turn = dict(zip(range(len(episodes)), newest, strict=True)), 1
    while running:
      endings = {}
      for number, completion in running.items():
        episodes[number].add(completion)
        endings[number] = self._ending(episodes[number], completion)
      answers = self.answer([(records[n], episodes[n].turns, episodes[n].state) for n in running])
      wanted = []
      for number, answer in zip(running, answers, strict=True):
        episode = episodes[number]
        try:
          ids = self._after(episode, answer, endings[number], is_last=turn == self.max_turns)
        except UserError as error:
          self.report(f'the environment gave {answer[0]!r:.200}: {error}')
          episode.reward, ids = float('nan'), []
        if ids:
          wanted.append((number, (*episode.prompt_ids, *episode.ids), self.max_tokens - len(episode.ids)))
      running = dict(zip((number for number, *_ in wanted), self.complete(turn, wanted) if wanted else (), strict=True))
      turn += 1

  def _ending(self, episode: Episode, completion: Any) -> str:
    """The text of the completion's tokens behind its text, such as its stop string."""
    if completion.ids and completion.ids[-1] in completion.request.stop_ids:
      return decode_all(self.tokenizer, completion.ids[-1:])
    rest = decode_generated(self.tokenizer, completion.ids)[len(completion.text) :]
    own = next((stop for stop in self.stop if rest.startswith(stop)), '')
    episode.turns[-1] += own
    episode.text += own
    return rest[len(own) :]

  def _after(self, episode: Episode, answer: Any, ending: str, *, is_last: bool) -> list[int]:
    """Adds what the environment answers; returns the tokens that it adds, none where the episode has ended."""
    if answer is None:
      episode.reward = float('nan')
      return []
    messages, reward, done, episode.state = answer
    episode.reward += reward
    if done or episode.is_cut:
      return []
    if episode.messages is None:
      text = messages if isinstance(messages, str) else None
    else:
      messages = [{'role': 'user', 'content': messages}] if isinstance(messages, str) else messages
      text = self._between(episode, messages)
      episode.messages = [*episode.messages, _PLACEHOLDER, *messages]
    if text is None:
      raise UserError('its first answer was a text, so that it must give texts.')
    ids = list(self.tokenizer.encode(text.removeprefix(ending)))
    if is_last or len(episode.ids) + len(ids) >= self.max_tokens:
      episode.is_cut = True
      return []
    episode.ids += ids
    episode.logprobs += [0.0] * len(ids)
    episode.is_sampled += [False] * len(ids)
    episode.text += text
    return ids

  def _between(self, episode: Episode, after: Sequence[Mapping[str, Any]]) -> str:
    """What the template writes behind a text of the assistant: the end of its turn, messages, and the next beginning.

    The assistant's own text does not matter: a placeholder stands for it, so that templates may change what it says.
    """
    before = episode.messages or ()
    prompt = self.template.render(before, tools=episode.tools) + _PLACEHOLDER['content']
    whole = self.template.render([*before, _PLACEHOLDER, *after], tools=episode.tools)
    if not whole.startswith(prompt):
      raise UserError(
        'the chat template writes earlier messages otherwise once messages follow them, so that the text of a '
        'conversation cannot go on: take another template (chat_template_file=FILE).'
      )
    return whole[len(prompt) :]
