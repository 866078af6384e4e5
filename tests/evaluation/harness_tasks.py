"""Defines tasks for EleutherAI's harness with all kinds of requests, and evaluates them.

directory = write_tasks(tmp_path)
results = evaluate(HarnessModel(path='runs/x'), directory)
answers(results)    # {'choice': [[(-12.3, False), ...], ...], 'write': [['a text'], ...], ...}
"""

import json
import os
from pathlib import Path
import warnings

WORDS = [
  *('the', 'cat', 'sat', 'on', 'the', 'mat', 'and', 'the', 'hat', 'a', 'dog', 'ate', 'that'),
  *('def', 'f(x):', 'return', 'x', 'été', '漢字', '🙂'),
]

_HEAD = """
task: NAME
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
fewshot_split: test
"""
_TASKS = {
  'choice': """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
  'ending': """
output_type: loglikelihood
doc_to_text: "{{context}}"
doc_to_target: "{{ending}}"
metric_list: [{metric: perplexity}, {metric: acc}]
""",
  'whole': """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}]
""",
  'write': """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["zz", "\\n\\n"], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}
TASKS = tuple(_TASKS)


def write_tasks(directory: Path) -> Path:
  """Writes YAML files and data, with texts longer and shorter than a window of 62 tokens."""
  directory.mkdir(parents=True, exist_ok=True)

  def text(start: int, length: int) -> str:
    return ' '.join(WORDS[(start * 7 + i * (start + 1)) % len(WORDS)] for i in range(length))

  questions = [
    {'question': text(i, 3 + 2 * i), 'choices': [text(i + 1, 1), text(i + 2, 4), WORDS[i]], 'answer': i % 3}
    for i in range(5)
  ]
  records = {
    'choice': questions,
    'ending': [{'context': '' if i == 3 else text(i, 2 + 20 * i), 'ending': text(i + 3, 1 + i)} for i in range(5)],
    'whole': [{'text': text(i, 3 + 25 * i)} for i in range(4)],
    'write': questions,
  }
  for name, task in _TASKS.items():
    data = directory / f'{name}.jsonl'
    data.write_text(''.join(json.dumps(record) + '\n' for record in records[name]))
    (directory / f'{name}.yaml').write_text(_HEAD.replace('NAME', name).replace('FILE', str(data)) + task)
  return directory


def import_harness(cache: Path):
  """Imports lm_eval with its caches in `cache` and without network access."""
  os.environ.update(HF_HOME=str(cache), HF_DATASETS_CACHE=str(cache / 'datasets'), HF_HUB_OFFLINE='1')
  with warnings.catch_warnings():
    warnings.simplefilter('ignore')
    import datasets
    import lm_eval
    import lm_eval.tasks

  datasets.disable_progress_bars()
  return lm_eval


def evaluate(model, directory: Path, tasks=TASKS, **settings):
  """Returns the harness's results; `model` is a model, or the name of a model with model_args in `settings`."""
  import lm_eval
  from lm_eval.tasks import TaskManager

  with warnings.catch_warnings():
    warnings.simplefilter('ignore')
    manager = TaskManager(include_path=str(directory), include_defaults=False)
    return lm_eval.simple_evaluate(model, tasks=list(tasks), task_manager=manager, bootstrap_iters=0, **settings)


def answers(results) -> dict[str, list]:
  """Returns the model's answers by task, document and request."""
  return {
    task: [[response[0] for response in sample['resps']] for sample in sorted(samples, key=lambda s: s['doc_id'])]
    for task, samples in results['samples'].items()
  }


def metrics(results) -> dict[str, dict[str, float]]:
  """Returns the metrics of each task."""
  return {
    task: {name: value for name, value in values.items() if isinstance(value, float) and 'stderr' not in name}
    for task, values in results['results'].items()
  }
