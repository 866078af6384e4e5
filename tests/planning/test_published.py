"""Predictions of published recipes: architectures against published sizes, FLOPs against the authors' own count."""

import json
from pathlib import Path
import statistics
import sys

import pytest

from spmd_tasks.errors import UserError
from spmd_tasks.planning.chips import CHIPS

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / 'scripts'))

from published import Recipe, compare_rows, find_model, model_flops, predict_recipe  # noqa: E402

ROW = {
  'name': 'a', 'chip': 'tpu7x', 'num_chips': 64, 'num_slices': 1, 'model': 'llama3.1-70b', 'global_batch': 256,
  'seq_len': 8192, 'precision': 'bf16', 'step_s': 12.2,
}  # fmt: skip


@pytest.mark.parametrize(
  'name, billions',  # of the models' cards; norms and biases are not counted here
  [
    ('llama2-7b', 6.74), ('llama3.1-8b', 8.03), ('llama3.1-70b', 70.6), ('llama3.1-405b', 405.9), ('qwen3-8b', 8.19),
    ('gemma3-12b', 11.77), ('gpt3-175b', 175.0), ('mixtral-8x7b', 46.7), ('mixtral-8x22b', 140.6),
    ('qwen3-30b-a3b', 30.5), ('qwen3-235b-a22b', 235.1), ('gpt-oss-20b', 20.9), ('gpt-oss-120b', 116.8),
    ('deepseek-v3', 671.0),
  ],
)  # fmt: skip
def test_models_have_their_published_sizes(name, billions):
  assert find_model(name).num_params() / 1e9 == pytest.approx(billions, rel=0.006)


@pytest.mark.parametrize(
  'name, num_chips, batch, seq_len, step_s, tflops',  # of Ironwood, where MaxText counts causal scores by half
  [
    ('llama3.1-70b', 64, 256, 8192, 12.2, 1207.05), ('llama3.1-405b', 256, 1536, 8192, 98.34, 1261.4),
    ('llama3.1-70b', 256, 64, 131072, 34.02, 897.94), ('qwen3-235b-a22b', 256, 8192, 4096, 30.87, 629.79),
    ('deepseek-v3', 256, 4096, 4096, 26.79, 612.66),
  ],
)  # fmt: skip
def test_model_flops_are_the_authors_count(name, num_chips, batch, seq_len, step_s, tflops):
  ours = model_flops(find_model(name), batch * seq_len, seq_len)
  assert ours / num_chips / 1e12 == pytest.approx(step_s * tflops, rel=0.015)


def test_the_time_is_the_sum_of_its_operations_and_says_what_it_rests_on():
  [row] = compare_rows([ROW])['rows']
  assert row['fits']
  assert not row['recipe']['is_guess']
  assert sum(row['seconds'].values()) == pytest.approx(row['predicted_s'])
  assert sum(row['share'].values()) == pytest.approx(1)
  assert row['mfu'] / row['measured_mfu'] == pytest.approx(1 / row['ratio'])
  assert row['predicted_s'] > row['model_flops'] / (64 * 2307e12)


def _seconds(recipe, **settings):
  given = {'num_chips': 64, 'num_slices': 1, 'num_tokens': 256 * 8192, 'seq_len': 8192} | settings
  return predict_recipe(find_model('llama3.1-70b'), recipe, CHIPS['tpu7x'], **given)


def test_what_is_kept_costs_memory_and_what_is_not_costs_time():
  all_kept, none = _seconds(Recipe(save='q k v context out wi wo')), _seconds(Recipe())
  assert all_kept['predicted_s'] < none['predicted_s']
  assert all_kept['memory_bytes'] > none['memory_bytes']
  products = [each['seconds']['products'] for each in (none, all_kept)]
  weights = find_model('llama3.1-70b').weights
  again = sum(weights.values()) - weights['wo']
  assert products[0] / products[1] == pytest.approx(1 + again / (3 * sum(weights.values())))
  assert none['seconds']['attention'] / all_kept['seconds']['attention'] == pytest.approx(4.5 / 3.5)


def test_a_copy_to_the_host_that_is_too_long_is_waited_for():
  # Keys and values of 4 GB a layer: 3.4 s at 100 GB/s, more than a quarter of the step.
  recipe = Recipe(offload='input q k v context out wi')
  made = _seconds(recipe)
  assert made['seconds']['host'] > 0
  assert made['memory_bytes'] < _seconds(Recipe())['memory_bytes']


def test_slices_and_precisions():
  one, two = _seconds(Recipe()), _seconds(Recipe(), num_chips=128, num_slices=2, num_tokens=512 * 8192)
  assert two['seconds'].keys() - one['seconds'].keys() == {'slices'}
  fp8 = _seconds(Recipe(), precision='fp8_full')
  assert 0.5 < fp8['seconds']['products'] / one['seconds']['products'] < 0.6
  assert fp8['seconds']['attention'] == one['seconds']['attention']


def test_without_a_published_recipe_one_that_fits_is_chosen():
  [row] = compare_rows([ROW | {'model': 'qwen3-32b', 'chip': 'v6e', 'num_chips': 256, 'step_s': None}])['rows']
  assert row['recipe']['is_guess']
  assert row['fits']
  assert row['ratio'] is None


def test_published_recipes_that_run_are_not_called_unfit():
  runs = (
    ('llama3.1-70b', 'v6e', 32, 1, 64, 8192), ('llama3.1-405b', 'v6e', 512, 2, 512, 8192),
    ('mixtral-8x22b', 'v6e', 256, 1, 2048, 4096), ('mixtral-8x7b', 'v5p', 64, 1, 2304, 4096),
    ('deepseek-v3', 'tpu7x', 128, 1, 2048, 4096), ('gpt-oss-120b', 'tpu7x', 256, 1, 5120, 8192),
  )  # fmt: skip
  keys = ('model', 'chip', 'num_chips', 'num_slices', 'global_batch', 'seq_len')
  report = compare_rows([ROW | dict(zip(keys, run, strict=True)) for run in runs])
  assert [row['fits'] for row in report['rows']] == [True] * len(runs)


def test_the_published_rows_are_within_the_bars():
  result = json.loads((ROOT / 'docs/benchmarks/results/published.json').read_text(encoding='utf-8'))
  errors = [abs(float(row[3]) - 1) for row in result['rows']]
  assert errors == sorted(errors, reverse=True)
  experts = ('deepseek', 'gpt-oss', 'mixtral', 'qwen3-235b')
  for are_experts, median, worst in ((False, 0.10, 0.25), (True, 0.15, 0.35)):
    found = [each for row, each in zip(result['rows'], errors) if row[0].startswith(experts) == are_experts]
    assert len(found) == (4 if are_experts else 11)
    assert statistics.median(found) <= median
    assert max(found) <= worst


@pytest.mark.parametrize(
  'row, message',
  [
    ('row', "a row is 'row': write an object"),
    ({'name': 'b'}, "row 'b' has no 'chip': give name, chip, num_chips"),
    (ROW | {'num_chips': 0}, "row 'a' has num_chips=0: give a whole number above 0"),
    (ROW | {'seq_len': '8k'}, "row 'a' has seq_len='8k': give a whole number"),
    (ROW | {'step_s': float('nan')}, "row 'a' has step_s=nan: give a number"),
    (ROW | {'num_slices': 3}, 'num_slices=3, which must divide'),
  ],
)
def test_a_row_that_is_wrong_is_named(row, message):
  with pytest.raises(UserError, match=message):
    compare_rows([row])


def test_what_is_not_known_has_no_prediction():
  for key in ('model', 'chip', 'precision'):
    [row] = compare_rows([ROW | {key: 'other'}])['rows']
    assert (row['predicted_s'], row['ratio'], row['measured_s']) == (None, None, 12.2)
