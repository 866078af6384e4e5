"""Episodes: completions of a prompt and an environment's answers, several turns in one sequence of tokens.

    class Calculator:                                        # --set environment=my_lab.games:Calculator
      stop = ('=',)

      def reset(self, record):
        self.answer = record['answer']
        return record['prompt']                              # a text, or a list of messages

      def step(self, completion):
        if completion.endswith('='):
          return str(compute(completion)), 0.0, False        # the answer, a reward, and whether the episode ends
        return None, float(completion == self.answer), True

An answer must depend only on the record and the completions so far. For each turn a new instance is made. It either
restores the state of the turn before, if the class has the methods `state()` and `restore(state)`, or repeats all steps
from `reset`. Any process can therefore answer, and a process that hangs costs one episode. If a job ends during a
rollout, a resumed job samples the rollout again, bit for bit.
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
  """A prompt and its continuation: one completion, or alternating turns of the model and an environment.

  Fields:
    prompt_ids, ids: the tokens of the prompt, and of its continuation.
    logprobs, is_sampled: for each of `ids`, its log-probability, and whether the model sampled it; 0 and False if not.
    text: the text of `ids`.
    is_cut: whether the limit of tokens or turns ended the episode.
    reward: the sum of the environment's rewards; NaN without an environment, or if it failed.
    turns, state: the model's texts, and the environment's state after them.
    expert_ids: the experts that computed the tokens of the prompt and a single completion, [T, n]; None if unknown.
    messages, tools: the conversation so far, with placeholders for the model's texts; None if the prompt is a text.
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


def stop_strings(environment: Any) -> tuple[str, ...]:
  """Returns the stop strings of an environment's class, whose `stop` is a text or several; () if it has none.

  Raises a UserError if they are anything else.
  """
  stop = getattr(environment, 'stop', ())
  strings = (stop,) if isinstance(stop, str) else stop
  if not isinstance(strings, tuple | list) or not all(isinstance(text, str) and text for text in strings):
    raise UserError(
      f"`stop` of {environment.__name__} must be texts of at least one character, such as ('=',), not {stop!r:.100}."
    )
  return tuple(strings)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turns:
  """Continues episodes after their first completions.

  Fields:
    tokenizer, template: for the environment's answers.
    stop: the environment's stop strings, which end a turn and are part of its text.
    max_tokens: the limit of an episode's tokens after the prompt.
    max_turns: the limit of the model's turns.
    report: shows a message about an episode that failed.
    answer: for each (record, the model's texts, state), returns (messages, reward, done, state), or None if it fails.
    complete: (turn, [(index of the episode, ids, limit of further tokens), ...]) -> Completions, in the same order.
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
      records, episodes: of the same length; the episodes have only their prompts.
      newest: the first Completion of each episode.
    """
    for episode in episodes:
      episode.reward = 0.0
    running, turn = dict(zip(range(len(episodes)), newest, strict=True)), 1
    while running:
      endings = {}
      for index, completion in running.items():
        episodes[index].add(completion)
        endings[index] = self._ending(episodes[index], completion)
      answers = self.answer([(records[i], episodes[i].turns, episodes[i].state) for i in running])
      continued = []
      for index, answer in zip(running, answers, strict=True):
        episode = episodes[index]
        try:
          ids = self._add_answer(episode, answer, endings[index], is_last=turn == self.max_turns)
        except UserError as error:
          self.report(f'the environment returned {answer[0]!r:.200}: {error}')
          episode.reward, ids = float('nan'), []
        if ids:
          continued.append((index, (*episode.prompt_ids, *episode.ids), self.max_tokens - len(episode.ids)))
      completions = self.complete(turn, continued) if continued else ()
      running = dict(zip((index for index, *_ in continued), completions, strict=True))
      turn += 1

  def _ending(self, episode: Episode, completion: Any) -> str:
    """Returns the text of the completion's tokens after its text, such as a stop string of the template.

    A stop string of the environment is added to the text of the turn instead.
    """
    if completion.ids and completion.ids[-1] in completion.request.stop_ids:
      return decode_all(self.tokenizer, completion.ids[-1:])
    rest = decode_generated(self.tokenizer, completion.ids)[len(completion.text) :]
    stop = next((stop for stop in self.stop if rest.startswith(stop)), '')
    episode.turns[-1] += stop
    episode.text += stop
    return rest[len(stop) :]

  def _add_answer(self, episode: Episode, answer: Any, ending: str, *, is_last: bool) -> list[int]:
    """Adds the environment's answer to an episode; returns its tokens, [] if the episode has ended."""
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
      raise UserError('its first answer was a text: return texts, too.')
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
    """Returns what the template writes from the end of the assistant's text to the next generation prompt.

    It is rendered with a placeholder as the assistant's text, which the template may change.
    """
    before = episode.messages or ()
    prompt = self.template.render(before, tools=episode.tools) + _PLACEHOLDER['content']
    whole = self.template.render([*before, _PLACEHOLDER, *after], tools=episode.tools)
    if not whole.startswith(prompt):
      raise UserError(
        'the chat template renders messages differently once other messages follow, so that no conversation can be '
        'continued: use another template (chat_template_file=FILE).'
      )
    return whole[len(prompt) :]
