"""Inputs: batches for training and evaluation whose position can be saved and restored exactly.

    TextInput(source=StdlibText(), tokenizer=ByteTokenizer(), batch_size=32, seq_len=512)

An Input is a frozen dataclass; `make_iterator(shard_index, shard_count)` gives one host's InputIterator. The global
batch is a function of the fields and the position alone, so the number of hosts may change between save and restore.

Read base.py (the contract and the fields of a batch), batches.py (a user's own data), then text_input.py (packed text
from any TextSource) with packing.py, row_order.py and epoch_rows.py (which text is in which row), text.py, sources
(records.py, foreign_files.py) and tokenizers (tokenizers.py, tokenizer_files.py), synthetic.py (made-up tokens),
mixture.py (rows of several inputs by weights), span_corruption.py (T5's objective), prefetch.py (reads ahead). Each
module loads on first use.
"""

from spmd_tasks.lazy_exports import lazy_exports

with lazy_exports(globals()):
  from spmd_tasks.inputs.base import Batch, Input, InputIterator, State
  from spmd_tasks.inputs.batches import Batches, as_input
  from spmd_tasks.inputs.chat_template import ChatTemplate
  from spmd_tasks.inputs.foreign_files import MegatronTokens, TarShards
  from spmd_tasks.inputs.mixture import Mixture
  from spmd_tasks.inputs.prefetch import Prefetcher
  from spmd_tasks.inputs.records import ArrayRecord, JsonLines, Parquet, TextFiles
  from spmd_tasks.inputs.span_corruption import SpanCorruption, span_corruption_lengths
  from spmd_tasks.inputs.synthetic import SyntheticPairs, SyntheticText
  from spmd_tasks.inputs.text import Block, StdlibText, TextSource
  from spmd_tasks.inputs.text_input import TextInput
  from spmd_tasks.inputs.tokenizer_files import (
    BpeTokenizer,
    FolderTokenizer,
    IdTokenizer,
    SentencePieceTokenizer,
    T5ByteTokenizer,
    train_bpe,
  )
  from spmd_tasks.inputs.tokenizers import ByteTokenizer, Tokenizer
