"""Bridges: runs, reads and writes models, experiments and checkpoints of other frameworks.

`bridges.huggingface` reads and writes folders in the format of Hugging Face and of `peft`. `bridges.pax` runs
experiments of Paxml and Praxis, and reads and writes their checkpoints. Both convert weights by a table of invertible
rules (_rules.py, with the operations of _operations.py).
"""
