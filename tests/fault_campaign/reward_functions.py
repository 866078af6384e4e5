"""Reward functions that fail for a fixed set of completions in different ways."""

import os
import time
import zlib


def raises(prompt, completion, record):
  if is_bad(prompt, completion):
    raise KeyError('answer')
  return share_of_a(completion)


def gives_nan(prompt, completion, record):
  return float('nan') if is_bad(prompt, completion) else share_of_a(completion)


def hangs(prompt, completion, record):
  if is_bad(prompt, completion):
    time.sleep(600)
  return share_of_a(completion)


def dies(prompt, completion, record):
  if is_bad(prompt, completion):
    os._exit(3)
  return share_of_a(completion)


def is_bad(prompt, completion):
  """Returns whether to fail: for one completion in 64."""
  return zlib.crc32(f'{prompt} {completion}'.encode()) % 64 == 0


def share_of_a(completion):
  return completion.count('a') / max(len(completion), 1)
