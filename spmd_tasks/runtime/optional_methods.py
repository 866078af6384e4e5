"""Protocols of what some tasks do and others do not; `isinstance` tells whether a task does.

    if isinstance(task, ReadsBase) and task.reads_base: ...

Task and the task of a Pax experiment (bridges/pax/_task.py) have some of these each; a class of a user's own needs
none.
"""

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class ReadsBase(Protocol):
  """A task whose loss can compare with the base, the model without its adapters."""

  @property
  def reads_base(self) -> bool:
    """Whether it does, so that every step computes the base too."""
    ...

  def predict_base(self, variables: dict[str, Any], batch: dict[str, Any]) -> Any:
    """Returns the base's predictions; no gradient goes through them."""
    ...


@runtime_checkable
class DecodesBatches(Protocol):
  """A task that decodes batches of its inputs in its own way, where others continue prompts."""

  def make_decoder(self, *arguments: Any, **named: Any) -> Any:
    """Returns the decoder of a job; programs/decode.py says what it is given and what it does."""
    ...
