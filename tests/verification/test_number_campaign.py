"""Random experiments have the numbers of one device on random layouts; scripts/number_campaign runs hundreds."""

import json
import random

from tests.verification.random_experiments import draw_settings, make_job
from tests.verification.random_layouts import draw_layout


def test_every_drawn_experiment_can_be_built_on_every_layout():
  for seed in range(8):
    settings = draw_settings(random.Random(seed))
    for number in range(3):
      layout = draw_layout(random.Random(f'{seed}/{number}'), settings)
      assert json.loads(json.dumps(settings)) == settings
      job = make_job(settings, layout)
      assert job.experiment.mesh_axis_names == layout['mesh_axis_names']
