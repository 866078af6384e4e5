"""Registered experiments, nothing else: each file opens with its command and expected result."""
