"""Origin: where the weights of a new job come from, if the job has no checkpoint; see `Experiment.origin`.

A new job asks `start` for its first state. Modes that only read weights (eval, decode, serve, export) ask `weights` as
long as the job has no checkpoint. A Base does more: checkpoints of a job that trains some of its weights leave out the
others.
"""

import abc
from collections.abc import Mapping
from typing import Any, NamedTuple

from etils import epath

from spmd_tasks.checkpoints.checkpointer import Restored
from spmd_tasks.extensions import call, formats
from spmd_tasks.runtime.partition import Part, PartitionedModel, whole_state
from spmd_tasks.runtime.task import TrainState, Variables


class RestoredVariables(NamedTuple):
  """A model's variables to evaluate, decode or serve.

  Attributes:
    variables: padded, on the mesh.
    step: the train step after which they were saved.
    place: the checkpoint or folder that was read; None for a checkpoint of the job itself.
  """

  variables: Variables
  step: int
  place: str | None = None


class Origin(abc.ABC):
  """Where the weights of a new job come from."""

  @abc.abstractmethod
  def start(self, model: PartitionedModel, seed: int) -> tuple[TrainState, int, str]:
    """Returns the first state of a job: (padded state, its step, a phrase that says where it is from).

    Args:
      model: of the job.
      seed: of the experiment, for what is drawn.

    Raises a UserError: the weights cannot be read, or are those of another model.
    """

  def weights(self, model: PartitionedModel, part: Part, storage: Any = None) -> RestoredVariables | None:
    """Returns the variables to evaluate, decode or serve; None if the job starts from new weights.

    The default makes the whole state of a new job. Override it to read the variables alone.

    Args:
      model: of the job.
      part: selects the variables from a state, as `task.evaluation_variables` does.
      storage: a WeightStorage, by which weights may be converted as soon as they are read.

    Raises a UserError: as `start`.
    """
    state, step, phrase = self.start(model, 0)
    return RestoredVariables(part(state), step, phrase)


class Base(Origin):
  """An Origin that stays where it is, with all weights of the model: the folder `path`."""

  path: str

  @abc.abstractmethod
  def variables(self, model: PartitionedModel, storage: Any = None) -> Variables:
    """Returns the padded variables. A WeightStorage converts each weight as soon as it is read."""

  def weights(self, model: PartitionedModel, part: Part, storage: Any = None) -> RestoredVariables | None:
    """Returns the folder's variables, at step 0."""
    return RestoredVariables(self.variables(model, storage), 0, str(self.path))

  @abc.abstractmethod
  def frozen(self, model: PartitionedModel, storage: Any = None) -> Any:
    """Returns the padded frozen weights, a tree like all weights with None for those that are trained."""

  @abc.abstractmethod
  def identity(self) -> Mapping[str, str]:
    """Returns what tells this folder from any other, such as a digest: JSON that checkpoints keep."""

  @abc.abstractmethod
  def check(self, restored: Restored, checkpoints: epath.Path) -> None:
    """Raises a CheckpointError, which names `checkpoints`, if the frozen weights of `restored` are not the folder's."""


def base_of(model: PartitionedModel, origin: Origin | None) -> Base | None:
  """Returns what completes the checkpoints of a job; None if they have all weights."""
  return origin if isinstance(origin, Base) and model.has_frozen_weights else None


def saved_part(model: PartitionedModel, origin: Origin | None) -> Part:
  """Returns which part of a job's state its checkpoints have."""
  return whole_state if base_of(model, origin) is None else model.trained_part


def origin_named(init_from: str | None, step: int | None) -> Origin | None:
  """Returns the origin that `init_from = FORMAT:PLACE` names; None for None and for the directory of a job of ours."""
  name, colon, place = (init_from or '').partition(':')
  for each in formats():
    if colon and each.name == name and each.origin is not None:
      return call(each.origin, place, step)
  return None
