"""The entry of a mixture's batch that says of which source each row is: inputs write it, losses and samples read it.

    batch[source_ids_name(['code', 'web'])] = np.array([0, 1, 1], np.int32)   # a row of code, two of web
    names, ids = row_sources(batch)                                            # ['code', 'web'], the array

The entry's name holds the names of the sources: a batch is a dict of arrays, in which text has no other place.
"""

from collections.abc import Iterable, Mapping
from typing import Any

_PREFIX = 'source_ids:'


def source_ids_name(names: Iterable[str]) -> str:
  """Returns the name of the entry, int32 [B]: source i of `names` has the number i, and a row of padding -1."""
  return _PREFIX + ','.join(names)


def row_sources(batch: Mapping[str, Any]) -> tuple[list[str], Any]:
  """Returns (the names of the sources, the number of each row's, [B]); ([], None) for a batch that is no mixture's."""
  entry = next((name for name in batch if name.startswith(_PREFIX)), None)
  return ([], None) if entry is None else (entry.removeprefix(_PREFIX).split(','), batch[entry])
