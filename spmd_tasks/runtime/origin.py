"""Origin: where the weights of a new job are from, if no checkpoint of ours holds them; see `Experiment.origin`.

A new job asks `start` for its first state. A Base can do more: its weights are evaluated, decoded and served as long as
the job has no checkpoint, and checkpoints of a job that trains only some of them leave out the others.
"""

import abc
from collections.abc import Mapping
from typing import Any

from etils import epath

from spmd_tasks.checkpoints.checkpointer import Restored
from spmd_tasks.runtime.partition import Part, PartitionedModel, whole_state
from spmd_tasks.runtime.task import TrainState, Variables
from spmd_tasks.wings import call, formats


class Origin(abc.ABC):
  """Where the weights of a new job are from."""

  @abc.abstractmethod
  def start(self, model: PartitionedModel, seed: int) -> tuple[TrainState, int, str]:
    """Returns the first state of a job: (padded state, its step, a phrase that says where it is from).

    Args:
      model: of the job.
      seed: of the experiment, for what is drawn.

    Raises a UserError: the weights cannot be read, or are those of another model.
    """


class Base(Origin):
  """An Origin that stays where it is, with all weights of the model: the folder `path`."""

  path: str

  @abc.abstractmethod
  def variables(self, model: PartitionedModel, storage: Any = None) -> Variables:
    """Returns the padded variables, for eval, decode and serve of a job that has no checkpoint.

    A WeightStorage converts each weight as soon as it is read.
    """

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
