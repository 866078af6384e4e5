"""Runs, imports and exports models, experiments and checkpoints of other frameworks.

`bridges.huggingface` reads and writes model folders of Hugging Face and adapter folders of `peft`. `bridges.t5x` runs
T5X's gin configs, and reads and writes its checkpoints. Both convert weights by a table of invertible rules (_rules.py,
_operations.py). `bridges.pax` runs experiments of Paxml and Praxis, and reads their checkpoints.
"""
