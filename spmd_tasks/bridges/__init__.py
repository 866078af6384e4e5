"""Bridges: run, read and write what other frameworks use.

`bridges.pax` is for Paxml and Praxis. Weights are converted between models by a table of invertible rules (_rules.py,
with the operations of _operations.py), which all bridges share.
"""
