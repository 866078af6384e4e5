"""Suggests the right flag in place of a wrong flag or argument. Imported only for an error.

    hints = Hints(argv=argv, parsed=namespace, actions=actions, mode_flags=names, modes=names, others=hints_by_flag)
    hints.unknown(['--num_step', '3'])   # ['unknown flag --num_step. Nearest: --num_train_steps.']

A wrong flag is compared with the flags of the mode, with other programs' flags (`foreign_flags`, extensions.py), and
with the fields of the command's experiment, which is resolved for this. So "Nearest" never names a flag that the mode
refuses, or a field that the experiment does not have.
"""

import argparse
from collections.abc import Collection, Iterable, Mapping, Sequence
import dataclasses
import difflib
import functools
import os
import re
import shlex

_DASHES = '-\u2013\u2014'  # also the longer dashes that word processors write for --
_NEAR, _NEARLY_SAME = 0.75, 0.9
_MAX_SHOWN_CHARS = 100
_ARGPARSE_ERROR = re.compile(r'argument (?:-\w, ?)?--(\w+)(?:/\S+)?: (.*)', re.DOTALL)
_EVERY = 'Every argument belongs to a flag: --exp NAME, --mode MODE, --job_log_dir DIR, --set PATH=VALUE.'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hints:
  """The hints for one command.

  Attributes:
    argv: the command's words.
    parsed: the parsed flags.
    actions: argparse's actions by flag, without the dashes.
    mode_flags: the flags of the command's mode, or of all modes if it names none.
    modes: the names of the modes.
    others: what to write instead of another program's flag, or FLAG=CHOICE.
  """

  argv: Sequence[str]
  parsed: argparse.Namespace
  actions: Mapping[str, argparse.Action]
  mode_flags: Collection[str]
  modes: Sequence[str]
  others: Mapping[str, str]

  def unknown(self, words: Sequence[str]) -> list[str]:
    """Returns a sentence for each flag and argument that argparse did not recognize."""
    texts, index = [], 0
    while index < len(words):
      word, rest = words[index], words[index + 1 :]
      if word[:1] in _DASHES and word.strip(_DASHES):
        has_value = '=' not in word and rest and rest[0][:1] not in _DASHES and self._follows(rest[0], word)
        texts.append(
          f'unknown flag {word.partition("=")[0][:_MAX_SHOWN_CHARS]}. '
          f'{self._hint_for_flag(word, rest[0] if has_value else "")}'
        )
        index += 1 + bool(has_value)
      else:
        end = next((i for i, other in enumerate(rest, index + 1) if other.startswith('--')), len(words))
        shown = shlex.quote(word[:_MAX_SHOWN_CHARS])
        texts.append(f'unknown argument {shown}. {self._hint_for_arguments(words[index:end])}')
        index = end
    return texts

  def wrong(self, message: str) -> str:
    """Returns the hint for argparse's error about the value of a flag; '' if there is none."""
    if (match := _ARGPARSE_ERROR.match(message)) is None or match[1] not in self.actions:
      return ''
    name, text = match[1], match[2]
    action = self.actions[name]
    if text.startswith('ignored explicit argument'):
      return f'It takes no value: write --{name}.'
    if value := re.match(r"invalid choice: '?([^' ]*)", text):
      choice = value[1].replace('-', '_').lower()
      nearest, likeness = _nearest(choice, action.choices or ())
      return self.others.get(f'{name}={choice}') or (f'Nearest: {nearest}.' if likeness >= _NEAR else '')
    return f'Write {_form(name, action)}.'

  def _follows(self, word: str, before: str) -> bool:
    return any(pair == (before, word) for pair in zip(self.argv, self.argv[1:]))

  def _hint_for_flag(self, word: str, value: str) -> str:
    """Returns the hint for an unknown flag, `--NAME`, `--NAME=VALUE` or `-NAME`."""
    name, _, own_value = word.lstrip(_DASHES).partition('=')
    name, value = name.replace('-', '_').lower(), own_value or value
    if name in self.actions:  # by another spelling
      return f'Write {_form(name, self.actions[name], value)}.'
    if hint := self.others.get(name) or self.others.get(name.removeprefix('no')):  # absl's --noNAME
      return hint
    if name in self.modes:
      return f'Write --mode {name}.'
    if name.startswith('no') and getattr(self.actions.get(name.removeprefix('no')), 'nargs', None) == 0:
      return f'--{name.removeprefix("no")} is off unless it is given: leave it out.'
    flag, likeness = _nearest(name, {*self.mode_flags, *self.others})
    if likeness < _NEARLY_SAME:
      field, field_likeness = _nearest(name, {path.rpartition('.')[2] for path in self._fields})
      if field_likeness >= _NEAR and field_likeness > likeness:
        paths = [path for path in self._fields if path.rpartition('.')[2] == field]
        override = f'{min(paths, key=lambda path: path.count("."))}={value or "VALUE"}'
        return f'Nearest, a field of the experiment: --set {shlex.quote(override)}.'
    if likeness >= _NEAR:
      return f'Nearest: --{flag}.' if flag in self.actions else self.others[flag]
    if self._fields:
      return 'The experiment has no such field either: --print_config lists its fields.'
    return 'A field of the experiment is set by --set PATH=VALUE: --exp NAME --print_config lists the paths.'

  def _hint_for_arguments(self, words: Sequence[str]) -> str:
    """Returns the hint for arguments without a flag."""
    word, (flag, before) = words[0], self._before(words[0])
    action, text = self.actions.get(flag), ' '.join(words)
    if flag == 'set' and '=' not in before:
      return f'Write --set {shlex.quote(before + "=" + text.lstrip("= "))}.'
    if before.endswith(',') or (action is not None and ',' in str(action.metavar) and re.fullmatch(r'[\d, ]+', text)):
      joined = re.sub(r'[\s,]+', ',', f'{before},{text}')
      return f'A list has no spaces: write --{flag} {joined}.'
    if action is not None and action.nargs == 0 and not before:
      return f'--{flag} takes no value: leave {shlex.quote(word)} out.'
    if re.match(r'[\w.]+=.', word):
      return f'Write --set {shlex.quote(word)}.'
    mode, likeness = _nearest(word.lower(), self.modes)
    if likeness >= _NEAR and self.parsed.mode is None:
      return f'Write --mode {mode}.'
    if self.parsed.exp is None and re.fullmatch(r'[\w./]+\.(py|gin)|\w+(\.\w+)+|[A-Z]\w+', word):
      return f'Write {"--config" if word.endswith(".json") else "--exp"} {word}.'
    if self.parsed.job_log_dir is None and (os.sep in word or os.path.isdir(word)):
      return f'Write {"--config" if word.endswith(".json") else "--job_log_dir"} {shlex.quote(word)}.'
    return _EVERY

  def _before(self, word: str) -> tuple[str, str]:
    """Returns the flag before a stray argument, without the dashes, and the flag's value; ('', '') if there is none."""
    for index, other in enumerate(self.argv):
      flag, _, value = other.lstrip(_DASHES).partition('=') if other.startswith('--') else ('', '', '')
      takes_next = flag in self.actions and self.actions[flag].nargs != 0 and '=' not in other
      if not takes_next and self.argv[index + 1 : index + 2] == [word]:
        if flag:
          return flag, value
        before = self.argv[index - 1] if index else ''
        return (before.lstrip(_DASHES), other) if before.startswith('--') and '=' not in before else ('', '')
    return '', ''

  @functools.cached_property
  def _fields(self) -> Sequence[str]:
    """The paths of the fields of the command's experiment; () if it names none, or has other mistakes."""
    flags = self.parsed
    if not (flags.exp or flags.config or flags.job_log_dir):
      return ()
    try:
      import jax

      jax.config.update('jax_platforms', 'cpu')  # the experiment may ask for devices, but nothing is run
      from spmd_tasks.config import resolve, to_json
      from spmd_tasks.config.saved_config import read_saved_config
      from spmd_tasks.distributed import use_fake_devices

      if flags.num_fake_devices:
        use_fake_devices(flags.num_fake_devices)
      if flags.exp:
        return tuple(to_json(resolve(flags.exp, flags.overrides, None, flags.experiment_path))['config'])
      return tuple(read_saved_config(flags.config or f'{flags.job_log_dir}/config.json')['config'])
    except (Exception, SystemExit):  # another mistake, which the next run reports
      return ()


def _form(name: str, action: argparse.Action, value: str = '') -> str:
  if action.nargs == 0:
    return f'--{name}'
  return f'--{name} {shlex.quote(value) if value else action.metavar or "|".join(action.choices or ("VALUE",))}'


def _nearest(name: str, known: Iterable[str]) -> tuple[str, float]:
  """Returns the most similar name and its likeness, at most 1; the first in the alphabet if several are."""
  return max(((other, _likeness(name, other)) for other in sorted(known)), key=lambda pair: pair[1], default=('', 0.0))


def _likeness(name: str, other: str) -> float:
  """Returns the similarity of two names, by words (num_step, num_train_steps), letters, and initials (lr)."""
  words, others = name[:100].split('_'), other.split('_')
  if 1 < len(name) <= 3 and len(others) > 1 and name == ''.join(word[:1] for word in others):
    return 1.0
  nearest = [max(_ratio(word, other) for other in others) for word in words]
  shared = sum(ratio for ratio in nearest if ratio >= _NEAR)
  is_most = other.startswith(f'{name}_') and 2 * len(name) >= len(other)  # batch, batch_size
  return max(2 * shared / (len(words) + len(others)), _ratio(''.join(words), ''.join(others)), 0.85 * is_most)


def _ratio(text: str, other: str) -> float:
  return difflib.SequenceMatcher(None, text, other).ratio()
