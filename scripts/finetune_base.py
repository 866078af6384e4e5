"""Provides the base model of scripts/quickstart_finetune, trained on Python source, and conversations about it.

    python scripts/finetune_base.py inputs DIRECTORY          # writes tokenizer.json and chats.jsonl
    python scripts/finetune_base.py template DIRECTORY/base   # makes an exported base a model to talk to
    spmd-tasks --exp scripts.finetune_base.Base --set tokenizer_file=DIRECTORY/tokenizer.json ...

A conversation asks what a function of the standard library does, and the answer is the first sentence of its docstring.
"""

import ast
from collections.abc import Iterator
import json
from pathlib import Path
import re
import sys
import sysconfig

import fiddle as fdl

from spmd_tasks.inputs import BpeTokenizer, train_bpe
from spmd_tasks.recipes import DenseLanguageModel

VOCAB_SIZE = 2048
MARKS = ('<|user|>', '<|assistant|>')
# The text of an answer, with the end of text behind it, is what the tuning learns.
TEMPLATE = (
  '{{ bos_token }}{% for message in messages %}'
  "{% if message['role'] == 'assistant' %}"
  "<|assistant|>{% generation %}{{ message['content'] }}{{ eos_token }}{% endgeneration %}"
  "{% else %}<|user|>{{ message['content'] }}{% endif %}"
  '{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}'
)


class Base(DenseLanguageModel):
  """1.4M parameters on the standard library's source."""

  tokenizer_file: str = ''
  vocab_size = VOCAB_SIZE + len(MARKS)
  num_train_steps = 200
  checkpoint_every = 100
  log_every_steps = 50

  def task(self):
    task = super().task()
    task.model.embedding.tied = False  # as Llama, so that there is a folder of it
    task.model.embedding.scale_sqrt_depth = False
    return task

  def tokenizer(self):
    return fdl.Config(BpeTokenizer, path=self.tokenizer_file)


def conversations() -> Iterator[dict]:
  """Yields a conversation for each function of the standard library whose docstring begins with a short sentence."""
  for path in sorted(Path(sysconfig.get_path('stdlib')).glob('*.py')):
    for node in ast.walk(ast.parse(path.read_text(errors='replace'))):
      if not isinstance(node, ast.FunctionDef) or node.name.startswith('_'):
        continue
      sentence = re.split(r'(?<=\.)\s', (ast.get_docstring(node) or '').replace('\n', ' '))[0]
      if 15 < len(sentence) < 120 and sentence.endswith('.'):
        question = f'What does {path.stem}.{node.name} do?'
        yield {'messages': [{'role': 'user', 'content': question}, {'role': 'assistant', 'content': sentence}]}


def texts() -> Iterator[str]:
  """Some of the text that the base is trained on, for the vocabulary."""
  root = Path(sysconfig.get_path('stdlib'))
  for path in sorted(root.glob('*.py'))[::2]:
    yield path.read_text(errors='replace')


def write_inputs(directory: Path) -> None:
  """Writes the vocabulary, and the conversations."""
  import tokenizers

  directory.mkdir(parents=True, exist_ok=True)
  path = str(directory / 'tokenizer.json')
  train_bpe(texts(), path, VOCAB_SIZE)
  tokenizer = tokenizers.Tokenizer.from_file(path)
  tokenizer.add_special_tokens(list(MARKS))
  tokenizer.save(path)
  lines = [json.dumps(conversation) + '\n' for conversation in conversations()]
  (directory / 'chats.jsonl').write_text(''.join(lines))
  print(f'{len(lines)} conversations in {directory}/chats.jsonl')


def write_chat_template(folder: Path) -> None:
  """Makes an exported base a model to talk to: names of special tokens, and the template."""
  named = {'bos_token': '<bos>', 'eos_token': '<eos>', 'pad_token': '<pad>'}
  (folder / 'tokenizer_config.json').write_text(json.dumps({'tokenizer_class': 'PreTrainedTokenizerFast'} | named))
  (folder / 'chat_template.jinja').write_text(TEMPLATE)


if __name__ == '__main__':
  {'inputs': write_inputs, 'template': write_chat_template}[sys.argv[1]](Path(sys.argv[2]))
