"""Protocols of what some tasks do and others do not; `isinstance` tells whether a task does.

    if isinstance(task, DecodesBatches): ...

Task and the task of a Pax experiment (bridges/pax/_task.py) have some of these each; a class of a user's own needs
none.
"""

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class DecodesBatches(Protocol):
  """A task that decodes batches of its inputs in its own way, where others continue prompts."""

  def make_decoder(self, *arguments: Any, **named: Any) -> Any:
    """Returns the decoder of a job; programs/decode.py says what it is given and what it does."""
    ...
