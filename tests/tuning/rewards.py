"""A reward and environments, in a module without JAX, which reward workers import quickly."""

import time


def share_of_a(prompt, completion, record):
  """Returns the fraction of the letter a in the completion."""
  return completion.count('a') / max(len(completion), 1)


class Echo:
  """Answers texts, which end at a vowel, with their length, three times; the reward is 1 for each that has an a."""

  stop = tuple('aeiou')

  def reset(self, record):
    self.num_turns = 0
    return record['prompt']

  def step(self, completion):
    self.num_turns += 1
    if completion == 'hang':
      time.sleep(60)
    return f'[{len(completion)}]', float('a' in completion), self.num_turns == 3


class Silent(Echo):
  """Returns None from `step`."""

  def step(self, completion):
    super().step(completion)


class Remembering(Echo):
  """Saves and restores its state."""

  def state(self):
    return {'num_turns': self.num_turns}

  def restore(self, state):
    self.num_turns = state['num_turns']


class Calculator:
  """A conversation with a tool: `calc: 2+3` is answered with the sum, and any other text ends the episode."""

  tools = ({'type': 'function', 'function': {'name': 'calc', 'parameters': {}}},)

  def reset(self, record):
    self.record = record
    return [{'role': 'user', 'content': record['prompt']}]

  def step(self, completion):
    kind, _, terms = completion.partition(': ')
    if kind == 'calc':
      return [{'role': 'tool', 'content': str(sum(map(int, terms.split('+'))))}], 0.0, False
    return None, float(completion == self.record['answer']), True
