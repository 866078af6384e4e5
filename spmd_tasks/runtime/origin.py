"""Origin: where a job without a checkpoint gets its weights; see `Experiment.origin`.

A new training job calls `start` for its first state. Modes that only read weights (eval, decode, serve, export) call
`weights`. A Base also completes checkpoints: those of a job with frozen weights contain only the trained ones.
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
    variables: padded variables on the mesh.
    step: the train step after which they were saved.
    place: the checkpoint or folder that they are from; None for a checkpoint of the job itself.
  """

  variables: Variables
  step: int
  place: str | None = None


class Origin(abc.ABC):
  """The source of a new job's weights."""

  @abc.abstractmethod
  def start(self, model: PartitionedModel, seed: int) -> tuple[TrainState, int, str]:
    """Returns the first state of a job: (padded state, its step, a phrase for the log about its source).

    Args:
      model: the job's model.
      seed: the experiment's seed, for new weights.

    Raises a UserError if the weights cannot be read, or belong to another model.
    """

  def weights(self, model: PartitionedModel, part: Part, storage: Any = None) -> RestoredVariables | None:
    """Returns the variables to evaluate, decode or serve; None if the job starts from new weights.

    The default creates the whole first state. Override it to read only the variables.

    Args:
      model: the job's model.
      part: selects the variables from a state, as `task.evaluation_variables` does.
      storage: a WeightStorage; weights may be converted to it as soon as they are read.

    Raises a UserError as `start` does.
    """
    state, step, phrase = self.start(model, 0)
    return RestoredVariables(part(state), step, phrase)


class Base(Origin):
  """An Origin with all weights of the model in the folder `path`, which must remain unchanged."""

  path: str

  @abc.abstractmethod
  def variables(self, model: PartitionedModel, storage: Any = None) -> Variables:
    """Returns the padded variables. If a WeightStorage is given, it converts each weight as soon as it is read."""

  def weights(self, model: PartitionedModel, part: Part, storage: Any = None) -> RestoredVariables | None:
    """Returns the folder's variables, at step 0."""
    return RestoredVariables(self.variables(model, storage), 0, str(self.path))

  @abc.abstractmethod
  def frozen(self, model: PartitionedModel, storage: Any = None) -> Any:
    """Returns the padded frozen weights: a tree of all weights with None for trained ones."""

  @abc.abstractmethod
  def identity(self) -> Mapping[str, str]:
    """Returns what identifies the folder's content, such as a digest. Checkpoints store it as JSON."""

  @abc.abstractmethod
  def check(self, restored: Restored, checkpoints: epath.Path) -> None:
    """Raises a CheckpointError that names `checkpoints` if `restored` was trained on another folder's weights."""


def base_of(model: PartitionedModel, origin: Origin | None) -> Base | None:
  """Returns the Base with the frozen weights of a job; None if its checkpoints have all weights."""
  return origin if isinstance(origin, Base) and model.has_frozen_weights else None


def saved_part(model: PartitionedModel, origin: Origin | None) -> Part:
  """Returns the part of a job's state that its checkpoints contain."""
  return whole_state if base_of(model, origin) is None else model.trained_part


def origin_named(init_from: str | None, step: int | None) -> Origin | None:
  """Returns the origin for `init_from = FORMAT:PLACE`; None for None and for job directories."""
  name, colon, place = (init_from or '').partition(':')
  for known in formats():
    if colon and known.name == name and known.origin is not None:
      return call(known.origin, place, step)
  return None
