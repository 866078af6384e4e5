"""Provides the base model and the reward of scripts/quickstart_grpo: it knows numbers but no sums.

    python scripts/sums.py inputs DIRECTORY [SEED]   # tokenizer.json, texts.jsonl, train.jsonl, valid.jsonl
    spmd-tasks --exp scripts.sums.Base --set directory=DIRECTORY ...
    python scripts/sums.py result DIRECTORY/job      # accuracy before and after, as one JSON object

A prompt is 'a+b=' with two digits, and a number is one token. The base model is trained on texts of two kinds: rows of
numbers that go up or down in equal steps, and sums whose answers are random numbers below 40. So it knows how numbers
follow one another and what an answer looks like, but learns sums only from the reward.

20 of the 100 sums are held out. If a sum is held out, the one with its digits swapped is not, so the model can learn
that their order does not matter. Another SEED holds out other sums.

Measured on 2026-11-26: correct answers to the 20 held-out sums, from 0 before. With a base of 1,500 steps, 600 steps of
rewards in groups of 16 and kl_weight 0.01: 18, 14 and 16 (SEED 77, 78, 79); with a base of 300 steps, 11 (77). Groups
of 32 and kl_weight 0.003, the current settings, were chosen with SEED=78: 18 after 900 steps. Without SEED, from 1 to
18; with a base of 1,200 steps, the current setting, from 0 to 18. Everything takes 2 min 42 s on 2 idle cores.
"""

from collections.abc import Callable, Iterator, Mapping
import json
from pathlib import Path
import random
import sys
from typing import Any

import fiddle as fdl
import tokenizers

from spmd_tasks.inputs import BpeTokenizer, JsonLines, train_bpe
from spmd_tasks.recipes import DenseLanguageModel

_NUM_TEXTS = 20_000
_NUM_NUMBERS = 40
_VOCAB_SIZE = 259 + _NUM_NUMBERS - 10  # every number is one token


class Base(DenseLanguageModel):
  """90,000 parameters."""

  directory: str = ''
  vocab_size = _VOCAB_SIZE
  model_dims = 64
  num_layers = 1
  hidden_dims = 192
  seq_len = 12
  batch_size = 64
  num_train_steps = 1200
  log_every_steps = 100

  def task(self):
    task = super().task()
    task.model.embedding.tied = False  # as Llama, so that there is a folder of it
    task.model.embedding.scale_sqrt_depth = False
    return task

  def tokenizer(self):
    return fdl.Config(BpeTokenizer, path=f'{self.directory}/tokenizer.json')

  def train_input(self):
    train_input = super().train_input()
    train_input.source = fdl.Config(JsonLines, pattern=f'{self.directory}/texts.jsonl')
    train_input.packing = False
    return train_input

  def eval_inputs(self):
    return {}


def is_sum(prompt: str, completion: str, record: Mapping[str, Any]) -> float:
  """Returns 1 for the right number, else 0."""
  return float(completion.strip() == str(record['answer']))


def texts(rng: random.Random) -> Iterator[str]:
  """Yields rows of numbers, and sums with random answers."""
  for _ in range(_NUM_TEXTS):
    if rng.random() < 0.3:
      yield f'{rng.randrange(10)}+{rng.randrange(10)}={rng.randrange(_NUM_NUMBERS)}'
    else:
      first, step = rng.randrange(_NUM_NUMBERS), rng.randrange(-9, 10)
      row = [first + i * step for i in range(6)]
      yield ','.join(str(number) for number in row if 0 <= number < _NUM_NUMBERS)


def write_inputs(directory: Path, seed: str | None = None) -> None:
  directory.mkdir(parents=True, exist_ok=True)
  rng = random.Random(1)
  lines = list(texts(rng))
  path = str(directory / 'tokenizer.json')
  train_bpe(lines, path, _VOCAB_SIZE)
  tokenizer = tokenizers.Tokenizer.from_file(path)
  tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single='<bos> $A', special_tokens=[('<bos>', 1)])
  tokenizer.save(path)  # what reads the folder puts <bos> before a text, as the training of the base does
  sums = [(a, b) for a in range(10) for b in range(10)]
  draw = rng if seed is None else random.Random(int(seed))
  held_out = set(draw.sample([(a, b) for a, b in sums if a < b], 20))
  for name, records in (
    ('texts', [{'text': text} for text in lines]),
    ('train', [{'prompt': f'{a}+{b}=', 'answer': a + b} for a, b in sums if (a, b) not in held_out]),
    ('valid', [{'prompt': f'{a}+{b}=', 'answer': a + b} for a, b in sorted(held_out)]),
  ):
    (directory / f'{name}.jsonl').write_text(''.join(json.dumps(record) + '\n' for record in records))


def print_result(job: Path) -> None:
  lines = [json.loads(line) for line in (job / 'eval_rewards' / 'metrics.jsonl').read_text().splitlines()]
  print(json.dumps({'accuracy_before': lines[0]['reward'], 'accuracy_after': lines[-1]['reward']}))


if __name__ == '__main__':
  commands: dict[str, Callable[..., None]] = {'inputs': write_inputs, 'result': print_result}
  commands[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
