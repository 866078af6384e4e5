"""A ladder's dial: what depth chooses, what a user's own setting changes, and the reasons that are printed."""

import pytest

from spmd_tasks.config import resolve, to_json
from spmd_tasks.config.from_saved import from_json
from spmd_tasks.errors import UserError
from spmd_tasks.experiment import partition_job
from spmd_tasks.planning import make_plan, parse_target


def test_depth_chooses_sizes_batch_steps_and_learning_rate():
  ladder = resolve('lm.Ladder', ['depth=12']).experiment
  assert (ladder.num_layers, ladder.model_dims, ladder.num_heads, ladder.hidden_dims) == (12, 768, 12, 2304)
  assert ladder.num_active_parameters() == 12 * (4 * 768**2 + 3 * 768 * 2304) + 259 * 768
  num_tokens = 20 * ladder.num_active_parameters()
  law = 0.58 * num_tokens**0.571  # tokens
  assert law / 2**0.5 <= ladder.batch_size * ladder.seq_len <= law * 2**0.5
  assert ladder.num_train_steps * ladder.batch_size * ladder.seq_len == pytest.approx(num_tokens, rel=0.01)
  assert ladder.num_train_steps % ladder.eval_every_steps == 0  # the last step is evaluated
  assert (ladder.learning_rate, ladder.mup_base_width, ladder.mup_base_depth) == (3e-3, 256, 4)
  [reason] = [line for line in ladder.chosen_by_depth if line.startswith('num_train_steps')]
  assert reason.endswith('tokens, 20 for each of 92,211,456 parameters')


@pytest.mark.parametrize('name', ['lm.TinyLadder', 'moe.Ladder'])
def test_it_counts_the_parameters_that_a_token_is_multiplied_with(name):
  """The model has these, the vectors of its norms, and the experts that a token does not visit."""
  job = resolve(name, ['depth=2', 'ici_mesh_shape=1,1,1']).build()
  ladder = job.experiment
  model = partition_job(job, ladder.mesh_spec().build_abstract())
  expected = ladder.num_active_parameters() + (2 * ladder.num_layers + 1) * ladder.model_dims
  if name == 'moe.Ladder':
    unvisited = ladder.num_experts - ladder.num_selected_experts
    expected += ladder.num_layers * unvisited * 3 * ladder.model_dims * ladder.hidden_dims
  assert model.total_num_params == expected


def test_experts_compute_a_token_as_a_dense_model_does():
  dense, experts = (resolve(name, ['depth=6']).experiment for name in ('lm.Ladder', 'moe.Ladder'))
  routers = 6 * 384 * experts.num_experts
  assert experts.num_active_parameters() == dense.num_active_parameters() + routers


def test_a_field_of_ones_own_is_kept_and_others_follow():
  ladder = resolve('lm.Ladder', ['batch_size=8', 'model_dims=512']).experiment
  assert (ladder.batch_size, ladder.model_dims, ladder.hidden_dims, ladder.num_heads) == (8, 512, 1536, 8)
  assert ladder.num_train_steps * 8 * ladder.seq_len == pytest.approx(20 * ladder.num_active_parameters(), rel=0.01)
  assert 'batch_size = 8: set, not chosen' in ladder.chosen_by_depth


def test_a_saved_config_chooses_again_for_another_depth():
  resolved = resolve('lm.TinyLadder', ['batch_size=8'])
  saved = to_json(resolved)
  assert from_json(saved).experiment == resolved.experiment
  deeper = from_json(saved, ['depth=3']).experiment
  assert deeper == resolve('lm.TinyLadder', ['batch_size=8', 'depth=3']).experiment
  assert deeper.model_dims == 24


def test_a_depth_without_whole_heads_is_refused():
  with pytest.raises(UserError, match='depth = 3 gives a width of 32 \\* depth, which must be a positive multiple'):
    resolve('lm.Ladder', ['depth=3', 'width_per_layer=32'])


def test_a_ladder_is_planned_for_any_number_of_devices():
  for target, num_devices in (('v5p:2x2x1', 4), ('v5p:2x2x2', 8)):
    plan = make_plan(resolve('lm.Ladder', ['depth=2']).build(), parse_target(target), compiles=False)
    assert plan['num_devices'] == num_devices
