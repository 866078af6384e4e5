"""Subclasses of Experiment: their fields, their mesh, and what is refused."""

import dataclasses
import pickle
import re
from typing import ClassVar

from flax.core import FrozenDict
import pytest

from spmd_tasks.config import resolve
from spmd_tasks.errors import UserError
from spmd_tasks.experiment import MESH_FIELDS, Experiment, Job, duration_s
from spmd_tasks.layers import TransformerStack
from spmd_tasks.layers.pipeline import PipelinedStack
from spmd_tasks.sharding import DataExpertModelMesh, MeshAxes


class Base(Experiment):
  num_train_steps = 20
  num_layers: int = 2
  dims: tuple[int, ...] = (8,)
  LIMIT: ClassVar[int] = 3

  def task(self):
    return [f'{self.num_layers} layers']

  def train_input(self):
    return 'input'


class Middle(Base):
  num_layers = 4


class Last(Middle):
  num_train_steps = 30
  dropout: float = 0.5
  dims = [1, 2]


def test_unannotated_attributes_are_new_defaults():
  assert (Base().num_train_steps, Base().num_layers) == (20, 2)
  assert (Middle().num_train_steps, Middle().num_layers) == (20, 4)
  assert (Last().num_train_steps, Last().num_layers) == (30, 4)
  assert Experiment.num_train_steps == 1000


def test_with_two_bases_the_first_that_sets_a_field_wins():
  class Wide(Base):
    width: int = 64
    num_train_steps = 7

  class Both(Last, Wide):
    width = 128

  assert (Both().width, Both().num_train_steps) == (128, Last().num_train_steps)
  assert Both(width=1, num_train_steps=2).num_train_steps == 2


def test_fields_are_keyword_only_and_frozen():
  with pytest.raises(TypeError):
    Last(3)
  with pytest.raises(dataclasses.FrozenInstanceError):
    Last().num_layers = 3
  assert Last() == Last()
  assert hash(Last()) == hash(Last())
  assert Last() != Last(num_layers=5)


def test_lists_and_dicts_become_immutable():
  experiment = Last(inputs_split_mapping={'map_1d': ['data']})
  assert experiment.dims == (1, 2)
  assert experiment.inputs_split_mapping == FrozenDict({'map_1d': ('data',)})

  class WithDict(Base):
    inputs_split_mapping = {'map_1d': ['data']}

  assert WithDict().inputs_split_mapping == FrozenDict({'map_1d': ('data',)})


def test_a_field_without_a_value_must_be_given():
  class Required(Base):
    width: int

  with pytest.raises(TypeError, match='width'):
    Required()
  assert Required(width=3).width == 3


def use_new_attribute():
  class Wrong(Base):
    num_layer = 3

  class Variation(Wrong):  # refused as well, but other classes of the module can be used
    num_layers = 4

  assert Base().num_layers != 4
  Variation()


def use_new_none():
  class Wrong(Base):
    width = None

  Wrong()


def define_field_as_property():
  class Wrong(Base):
    @property
    def num_layers(self):
      return 3


def define_method_as_field():
  class Wrong(Base):
    task: int = 3


def define_property_as_field():
  class WithProperty(Base):
    @property
    def width(self):
      return 3

  class Wrong(WithProperty):
    width: int


@pytest.mark.parametrize(
  'define, message',
  [
    (use_new_attribute, 'num_layer = 3 is a new attribute .*, `num_layer: int = 3`, or did you mean num_layers\\?$'),
    (use_new_none, r'annotate it, `width: int \| None = None`\.$'),
    (define_field_as_property, 'num_layers overrides a field with a property: give it a value'),
    (define_method_as_field, r'Base\.task is a method: define `def task\(self\)`'),
    (define_property_as_field, 'width overrides a property: give it a default'),
  ],
)
def test_mistakes_in_a_class_body_are_refused(define, message):
  with pytest.raises(ValueError, match=message):
    define()


BAD_FIELDS = [
  ({'ici_mesh_shape': (1, 2)}, r'\(1, 2\) has 2 entries, but the mesh has 3 axes, replica, data, mdl: give one'),
  ({'ici_mesh_shape': (1, 0, 2)}, 'positive'),
  ({'mesh_axis_names': ('data', 'data', 'mdl')}, 'axis twice'),
  ({'axis_rules': (('mlp', 'model'),)}, "'model', which is not one of the mesh axes"),
  ({'num_train_steps': 0}, 'num_train_steps = 0 must be a positive integer'),
  ({'eval_every_steps': 0}, 'eval_every_steps = 0 must be a positive number of steps, or None for never'),
  ({'eval_limit_batches': 0}, 'eval_limit_batches = 0 must be a positive integer'),
  ({'checkpoint_keep_every_steps': True}, 'checkpoint_keep_every_steps'),
  ({'checkpoint_every': 0}, "checkpoint_every = 0 must be a positive number of steps, a time such as '10m', or None"),
  ({'checkpoint_every': '10 min'}, "checkpoint_every = '10 min' must be a number with its unit: '90s', '10m'"),
  ({'checkpoint_every': '0m'}, 'checkpoint_every'),
  ({'profile_steps': (5, 5)}, 'profile_steps'),
]


@pytest.mark.parametrize('fields, message', BAD_FIELDS)
def test_invalid_fields_are_refused_by_name(fields, message):
  with pytest.raises(ValueError, match=message):
    Base(**fields)


@pytest.mark.parametrize('text, seconds', [('90s', 90), ('10m', 600), ('2h', 7200), ('1d', 86_400)])
def test_a_time_between_checkpoints_has_a_unit(text, seconds):
  assert Base(checkpoint_every=text).checkpoint_every == text
  assert duration_s(text, 'checkpoint_every') == seconds


def test_a_field_may_be_set_by_its_earlier_name():
  class Old(Base):
    checkpoint_every_steps: int = 7

  class Older(Old):
    checkpoint_every_steps = None

  assert (Old().checkpoint_every, Older().checkpoint_every) == (7, None)


def test_a_removed_field_says_what_to_set_instead():
  with pytest.raises(UserError, match='trackers'):

    class Quiet(Base):
      tensorboard = False

  class Podded(Base):
    target: str = 'v5p:4x4x2'

  class OnH200(Podded):
    target = 'h200:8'

  assert OnH200().target == 'h200:8'


def test_a_mesh_axis_replaces_the_default_rule_of_its_name():
  fields = {'mesh_axis_names': ('replica', 'data', 'expert', 'mdl'), 'ici_mesh_shape': (1, 1, 1, 1)}
  rules = dict(Base(**fields).axis_rules)
  assert 'expert' not in rules
  assert rules['mlp'] == 'mdl'
  with pytest.raises(ValueError, match=r'has the name of a mesh axis .* rename the rule'):
    Base(**fields, axis_rules=(('expert', 'data'),))


LAYOUT = DataExpertModelMesh(num_devices=8, num_expert_partitions=4)
AXES = LAYOUT.axes()
ON_ONE = MeshAxes(mesh_axis_names=('data',), ici_mesh_shape=(8,), axis_rules=(('batch', 'data'),))


class WithLayout(Base):
  mesh = LAYOUT


class WithShape(WithLayout):
  ici_mesh_shape = (1, 1, 4, 2)


@pytest.mark.parametrize(
  'experiment, axes',
  [
    (WithLayout(), AXES),
    (WithShape(), dataclasses.replace(AXES, ici_mesh_shape=(1, 1, 4, 2))),
    (WithLayout(mesh=ON_ONE), ON_ONE),
    (WithLayout(ici_mesh_shape=(1, 8, 1, 1)), dataclasses.replace(AXES, ici_mesh_shape=(1, 8, 1, 1))),
    (WithLayout(mesh=ON_ONE, ici_mesh_shape=(4,)), dataclasses.replace(ON_ONE, ici_mesh_shape=(4,))),
    (Base(mesh=LAYOUT, dcn_mesh_shape=(1, 2, 1, 1)), dataclasses.replace(AXES, dcn_mesh_shape=(1, 2, 1, 1))),
  ],
)
def test_a_mesh_layout_fills_the_fields_that_were_not_set_later(experiment, axes):
  assert {name: getattr(experiment, name) for name in MESH_FIELDS} == {
    name: getattr(axes, name) for name in MESH_FIELDS
  }
  assert dataclasses.replace(experiment, seed=3).mesh_spec() == experiment.mesh_spec()
  assert pickle.loads(pickle.dumps(experiment)) == experiment


def test_a_layout_that_does_not_fit_is_refused():
  with pytest.raises(ValueError, match=r'num_devices=8 .* num_partitions=3'):
    Base(mesh=DataExpertModelMesh(num_devices=8, num_expert_partitions=2, num_partitions=3))
  with pytest.raises(ValueError, match='one size per axis'):
    WithLayout(ici_mesh_shape=(8, 1, 1))


def test_replicas_of_a_mesh_with_experts():
  """Weights are sharded over `data`, batches over both."""
  axes = DataExpertModelMesh(num_devices=8, num_expert_partitions=2, num_replicas=2).axes()
  assert dict(zip(axes.mesh_axis_names, axes.ici_mesh_shape)) == {'replica': 2, 'data': 2, 'expert': 2, 'mdl': 1}
  rules = dict(axes.axis_rules)
  assert (set(rules['batch']), rules['expert_embed']) == ({'replica', 'expert', 'data'}, 'data')
  staged = DataExpertModelMesh(num_devices=8, num_expert_partitions=1, num_stages=2, num_replicas=2).axes()
  assert staged.ici_mesh_shape == (2, 2, 2, 1, 1)
  with pytest.raises(ValueError, match=r'num_replicas=3 must .*8 devices'):
    DataExpertModelMesh(num_devices=8, num_expert_partitions=2, num_replicas=3).axes()


@pytest.mark.parametrize('name', ['a.b', '../up', 'a b', '', 300 * 'x'])
def test_the_name_of_an_eval_set_must_be_a_valid_directory(name):
  with pytest.raises(ValueError, match=re.escape(f'eval_inputs has the name {name!r}')):
    Job(name='x', experiment=Base(), task=1, train_input=2, eval_inputs={name: 3})


def test_a_pipeline_has_the_layers_of_its_other_base():
  model = resolve('pipeline.MoeTiny', ['num_dense_layers=1']).build().task.model
  dense, mixtures = model.stack.stacks
  assert isinstance(dense, TransformerStack)
  assert isinstance(mixtures, PipelinedStack)
  assert (dense.num_layers, mixtures.num_layers) == (1, 3)
