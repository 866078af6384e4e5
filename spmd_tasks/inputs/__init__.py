"""Inputs: batches for training and evaluation whose position can be saved and restored exactly.

    TextInput(source=StdlibText(), tokenizer=ByteTokenizer(), batch_size=32, seq_len=512)

An Input is a frozen dataclass; `make_iterator(shard_index, shard_count)` returns one host's InputIterator. The global
batch depends only on the fields and the position, so the number of hosts may change between save and restore.

Start with base.py (the protocols and the arrays of a batch), then batches.py (a user's own data) or text_input.py
(packed text). TextInput reads a source (text.py, records.py, foreign_files.py) through a tokenizer (tokenizers.py,
tokenizer_files.py), assigns text to rows (row_order.py, epoch_rows.py) and packs it (packing.py). The others:
synthetic.py (random tokens), mixture.py (rows from several inputs), batch_ramp.py (batches of several sizes),
span_corruption.py (T5's objective), chat_template.py (conversations as text), prefetch.py (reads batches ahead). Each
module loads on first use.
"""

from spmd_tasks.lazy_exports import lazy_exports

with lazy_exports(globals()):
  from spmd_tasks.inputs.base import Batch, Input, InputIterator, State
  from spmd_tasks.inputs.batch_ramp import BatchRamp
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
