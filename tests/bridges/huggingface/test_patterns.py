"""Patterns of an adapter's config match as in `peft`, and hostile patterns take little time."""

import contextlib
import importlib.util
from pathlib import Path
import re
import sys
import time

import pytest

from spmd_tasks.bridges.huggingface._patterns import NumberByPattern
from spmd_tasks.errors import UserError

FILE = Path('adapter_config.json')
KERNELS = ('self_attn.q_proj', 'self_attn.k_proj', 'mlp.down_proj')
MODULES = [f'model.layers.{i}.{kernel}' for i in (0, 1, 12) for kernel in KERNELS] + ['lm_head', 'xq_proj', 'q_proj']


def expected(numbers: dict[str, int], module: str) -> int | None:
  """Matches as `get_pattern_key` of `peft`."""
  return next((number for pattern, number in numbers.items() if re.match(rf'(.*\.)?({pattern})$', module)), None)


@pytest.mark.parametrize(
  'numbers',
  [
    {'q_proj': 1, 'mlp.down_proj': 2},
    {'self_attn.q_proj': 1, 'q_proj': 2},
    {'q_proj': 2, 'self_attn.q_proj': 1},
    {re.escape(module): i for i, module in enumerate(MODULES)},
    {r'layers\.1\..*': 1, 'down_proj': 2, r'layers\.\d+\.mlp\.down_proj': 3},
    {'down_proj': 2, r'layers\.1\..*': 1},
    {r'(q|k)_proj': 1, '.*': 2},
    {r'model.layers.1.*': 1, 'proj': 3},
    {},
  ],
  ids=str,
)
def test_the_first_match_wins(numbers):
  pytest.importorskip('re2')
  patterns = NumberByPattern(FILE, 'rank_pattern', numbers)
  assert {module: patterns.find(module) for module in MODULES} == {m: expected(numbers, m) for m in MODULES}


HOSTILE = {
  'many optional characters': '.?' * 30 + '!',
  'repeats of repeats': '(a+)+!' * 100,
  'nested deeply': '(' * 480 + ')' * 480,
  'counted repeats': '((a{1,1000}){1,1000}){1,1000}',
  'lookaround': '(?!q_proj).*',
  'a backreference': r'(.)\1',
  'no expression': '(',
  'half of a character': '\ud800.*',
  'a million characters': 'a' * 1_000_000,
  'a million brackets': '(' * 500_000 + ')' * 500_000,
}
READ = ('many optional characters', 'repeats of repeats', 'nested deeply')


@pytest.mark.parametrize('name', HOSTILE)
def test_hostile_patterns_take_little_time(name):
  pytest.importorskip('re2')
  refusal = pytest.raises(UserError, match=r"^adapter_config.json has rank_pattern '.{,300}name the modules.$")
  start = time.monotonic()
  with contextlib.nullcontext() if name in READ else refusal:
    NumberByPattern(FILE, 'rank_pattern', {HOSTILE[name]: 1}).find('model.' + 'a' * 1000)
  assert time.monotonic() - start < 2


def test_many_patterns_are_refused_but_many_names_are_read():
  pytest.importorskip('re2')
  with pytest.raises(UserError, match='at most 100'):
    NumberByPattern(FILE, 'alpha_pattern', {f'a{i}.*': 1 for i in range(101)})
  names = NumberByPattern(FILE, 'alpha_pattern', {rf'layers\.{i}\.q_proj': i for i in range(100_000)})
  assert names.find('model.layers.99999.q_proj') == 99999
  assert names.find('model.layers.100000.q_proj') is None


def test_only_patterns_need_re2(monkeypatch):
  find_spec = importlib.util.find_spec
  monkeypatch.delitem(sys.modules, 're2', raising=False)
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None if name == 're2' else find_spec(name))
  names = NumberByPattern(FILE, 'rank_pattern', {'q_proj': 1, r'model\.layers\.0\.mlp\.down_proj': 2})
  assert [names.find(module) for module in ('model.layers.0.self_attn.q_proj', 'model.layers.0.mlp.down_proj')] == [
    1,
    2,
  ]
  with pytest.raises(UserError, match=r"needs re2, which is not installed: pip install 'spmd-tasks\[huggingface\]'"):
    NumberByPattern(FILE, 'rank_pattern', {'.*q_proj': 1})
