"""T5's tokenizers: models of SentencePiece, and bytes in T5's order; both with sentinels for spans that are cut out."""

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any

from etils import epath
import numpy as np

from spmd_tasks.errors import UserError
from spmd_tasks.files import read_bytes
from spmd_tasks.inputs.tokenizer_files import digest_of
from spmd_tasks.inputs.tokenizers import ByteTokenizer
from spmd_tasks.wings import require


@dataclasses.dataclass(frozen=True, kw_only=True)
class T5ByteTokenizer(ByteTokenizer):
  """T5's and ByT5's bytes: ids 0, 1, 2 are pad, eos, unknown; byte b is id b + 3; `extra_ids` sentinels follow."""

  bos_id: None = dataclasses.field(default=None, init=False)  # type: ignore[assignment]
  eos_id: int = dataclasses.field(default=1, init=False)
  extra_ids: int = 0

  @property
  def vocab_size(self) -> int:
    return super().vocab_size + self.extra_ids

  def decode(self, ids: Sequence[int]) -> str:
    return super().decode([token for token in ids if token < super(T5ByteTokenizer, self).vocab_size])

  def fingerprint(self) -> str:
    return f'T5 bytes+3+{self.extra_ids}'


@dataclasses.dataclass(frozen=True, kw_only=True)
class SentencePieceTokenizer:
  """A SentencePiece model file, as T5 has it: pad is id 0, and `extra_ids` sentinels follow the file's pieces.

  The sentinels are `<extra_id_0>` and so on, from the last id downwards.
  """

  path: str
  extra_ids: int = 0
  pad_id: int = dataclasses.field(default=0, init=False)

  @functools.cached_property
  def _processor(self) -> Any:
    require('t5x', 'sentencepiece', wants=self.path)
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2 as proto

    if not epath.Path(self.path).exists():
      raise UserError(f'there is no SentencePiece model {self.path}: correct the path.')
    try:
      model = proto.ModelProto.FromString(read_bytes(self.path))  # type: ignore[attr-defined]
      for number in reversed(range(self.extra_ids)):
        model.pieces.add(piece=f'▁<extra_id_{number}>', score=0.0, type=model.SentencePiece.USER_DEFINED)
      return sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())
    except Exception as e:  # of protobuf or of the library, which raises a RuntimeError
      raise UserError(f'{self.path} is not a model of SentencePiece: {e}') from e

  def __getstate__(self) -> dict[str, Any]:
    return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

  @property
  def vocab_size(self) -> int:
    return self._processor.get_piece_size()

  @property
  def bos_id(self) -> int | None:
    return None if self._processor.bos_id() < 0 else self._processor.bos_id()

  @property
  def eos_id(self) -> int:
    return self._processor.eos_id()

  def encode(self, text: str) -> list[int]:
    return self._processor.encode(text)

  def encode_array(self, text: str) -> np.ndarray:
    return np.array(self.encode(text), np.int32)

  def decode(self, ids: Sequence[int]) -> str:
    return self._processor.decode([int(token) for token in ids if token != self.pad_id])

  def fingerprint(self) -> str:
    return f'sentencepiece {self.extra_ids} {digest_of(self.path)}'
