"""Bridges: runs, reads and writes models, experiments and checkpoints of other frameworks.

`bridges.huggingface` reads and writes folders in the format of Hugging Face and of `peft`. `bridges.t5x` runs T5X's
setups, and reads and writes its checkpoints. Both convert weights by a table of invertible rules (_rules.py, with the
operations of _operations.py). `bridges.pax` runs experiments of Paxml and Praxis, and reads their checkpoints.
"""
