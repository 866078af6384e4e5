"""The messages between a server's processes: JSON, with the engine's chunks, requests and sampling settings in it.

    link.send(to_message({'name': 'step', 'arguments': [keep]}))
    for fields in map(from_message, link):
      ...

A message is data, never a pickle: nothing in it can name code.
"""

import base64
from collections.abc import Mapping
import json
from typing import Any

import numpy as np

from spmd_tasks.decoding import Request, SamplingParams
from spmd_tasks.decoding.engine_contract import TokenMasks
from spmd_tasks.decoding.requests import Chunk

# What a message may contain beside JSON's own types.
_TYPES = {'Chunk': Chunk, 'Request': Request, 'SamplingParams': SamplingParams}


def to_message(fields: Mapping[str, Any]) -> bytes:
  """Encodes an object of JSON's types, chunks, requests and sampling settings."""
  return json.dumps(fields, default=_to_json).encode()


def from_message(message: bytes) -> dict[str, Any]:
  """Decodes what `to_message` has encoded; arrays inside the three classes become tuples."""
  return json.loads(message, object_hook=_from_json)


def pack_masks(masks: TokenMasks | None) -> list[list[Any]]:
  """Token masks for a message: pairs of a row and its words in base64. Process 0 alone computes them."""
  return [[row, base64.b64encode(mask.astype('<u4').tobytes()).decode()] for row, mask in (masks or {}).items()]


def unpack_masks(pairs: list[list[Any]]) -> TokenMasks | None:
  """The masks that `pack_masks` packed."""
  return {row: np.frombuffer(base64.b64decode(words), '<u4') for row, words in pairs} or None


def _to_json(value: Any) -> dict[str, Any]:
  return {'type': type(value).__name__, **vars(value)}


def _from_json(fields: dict[str, Any]) -> Any:
  made = _TYPES.get(fields.get('type', ''))
  if made is None:
    return fields
  return made(**{name: _to_tuples(value) for name, value in fields.items() if name != 'type'})


def _to_tuples(value: Any) -> Any:
  return tuple(map(_to_tuples, value)) if isinstance(value, list) else value
