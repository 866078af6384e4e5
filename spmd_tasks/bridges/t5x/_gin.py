"""Reads gin files as T5X's users write them: bindings, macros, references and includes, without importing anything.

    setup = read_setup(['made_up_sums.gin'], ["MODEL_DIR = 'runs/sums'"])
    setup.node('__main__.train').get('total_steps')      # macros resolved; @references are Nodes
    setup.node('__main__.train').rest()                  # its bindings that nobody has asked for

The library gin-config parses; names are resolved by the imports of the files (gin's dynamic registration), so T5X need
not be installed. The folder `gin` has the settings of T5X's and Flaxformer's own files that decide numbers: defaults of
runs, sizes and parts of models. It is searched last, after an installed T5X.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import importlib.util
from pathlib import Path
import tokenize
from typing import Any

from spmd_tasks.errors import UserError
from spmd_tasks.extensions import require

MISSING: Any = object()
_REQUIRED = '%gin.REQUIRED'
_OWN_FILES = Path(__file__).parent / 'gin'
_MAX_FILES = 100


@dataclasses.dataclass(frozen=True)
class _Macro:
  name: str

  def __repr__(self) -> str:
    return f'%{self.name}'


@dataclasses.dataclass(frozen=True)
class _Reference:
  scope: str
  selector: str

  def __repr__(self) -> str:
    return f'@{self.scope}/{self.selector}' if self.scope else f'@{self.selector}'


@dataclasses.dataclass(frozen=True)
class Node:
  """A configurable of a setup, in a scope: what a reference `@scope/package.Name()` stands for."""

  setup: 'Setup' = dataclasses.field(repr=False, compare=False)
  scope: str  # may be ''
  selector: str  # package.module.Name

  @property
  def name(self) -> str:
    """The last part of the selector."""
    return self.selector.rpartition('.')[2]

  def get(self, argument: str, default: Any = MISSING, kind: type | tuple[type, ...] = object) -> Any:
    """Returns the value of an argument, with macros and references resolved.

    Raises a UserError if the argument is bound to nothing (or to gin.REQUIRED), and has no default, or to a value that
    is neither the default nor of the kind.
    """
    for scope in dict.fromkeys((self.scope, '')):
      for (bound_scope, selector, bound), value in self.setup.bindings.items():
        if bound == argument and bound_scope == scope and _is_name_of(selector, self.selector):
          self.setup.read.add((bound_scope, selector, bound))
          found = self.setup.resolve(value, f'{self.selector}.{argument}')
          if not isinstance(found, kind) and found != default:
            kinds = kind if isinstance(kind, tuple) else (kind,)
            wanted = ' or '.join(_KINDS.get(each, each.__name__) for each in kinds)
            raise UserError(f'{self}.{argument} = {found!r} must be {wanted}.')
          return found
    if default is MISSING:
      raise UserError(f'the gin setup has no value for {self}.{argument}: bind it, or include the file that does.')
    return default

  def part(self, argument: str, default: Any = MISSING) -> Any:
    """Returns the configurable that an argument refers to, a Node, or the default."""
    return self.get(argument, default, kind=Node)

  def rest(self) -> list[str]:
    """Returns the arguments that are bound and that `get` was never asked for, as `name = value` texts."""
    return [
      f'{selector}.{argument} = {value!r}'
      for (scope, selector, argument), value in self.setup.bindings.items()
      if scope in ('', self.scope)
      and _is_name_of(selector, self.selector)
      and (scope, selector, argument) not in self.setup.read
    ]

  def __str__(self) -> str:
    return f'{self.scope}/{self.selector}' if self.scope else self.selector


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
  """All bindings of a setup, by (scope, selector, argument); `read` are those that were asked for.

  `imports` has modules by the names under which the files import them, `flags` the macros that --gin binds.
  """

  bindings: dict[tuple[str, str, str], Any] = dataclasses.field(default_factory=dict)
  macros: dict[str, Any] = dataclasses.field(default_factory=dict)
  imports: dict[str, str] = dataclasses.field(default_factory=dict)
  files: list[str] = dataclasses.field(default_factory=list)
  read: set[tuple[str, str, str]] = dataclasses.field(default_factory=set)
  flags: set[str] = dataclasses.field(default_factory=set)

  def node(self, selector: str) -> Node | None:
    """Returns a configurable without a scope; None if nothing is bound to it."""
    bound = any(_is_name_of(each, selector) for _, each, _ in self.bindings)
    return Node(setup=self, scope='', selector=selector) if bound else None

  def unused(self, root: Node) -> list[str]:
    """Returns the configurables, and the macros of flags, to which neither `root` nor what it refers to refers."""
    found: set[str] = set()  # macros as %NAME
    news = [root.selector, *(selector for _, selector, _ in self.read)]
    while news:
      name = news.pop()
      if name in found:
        continue
      found.add(name)
      values = [self.macros.get(name[1:])] if name.startswith('%') else []
      values += [v for (_, selector, _), v in self.bindings.items() if _is_name_of(selector, name)]
      while values:
        value = values.pop()
        if isinstance(value, _Macro | _Reference):
          news.append(repr(value) if isinstance(value, _Macro) else value.selector)
        elif isinstance(value, dict | list | tuple):
          values += value.values() if isinstance(value, dict) else value
    bound = dict.fromkeys(selector for _, selector, _ in self.bindings)
    names = [each for each in bound if not any(_is_name_of(each, name) for name in found)]
    return names + sorted(f'%{name}' for name in self.flags if f'%{name}' not in found)

  def resolve(self, value: Any, where: str, within: tuple[str, ...] = ()) -> Any:
    """Replaces macros and references, within lists and dicts too; `within` are the macros whose value this is."""
    if isinstance(value, _Macro):
      if f'%{value.name}' == _REQUIRED:
        raise UserError(f'{where} is required: give --gin.{where.removeprefix("%")}=VALUE.')
      if value.name not in self.macros and '.' in value.name:  # a constant of a module
        return value.name
      if value.name not in self.macros:
        raise UserError(f'{where} is the macro %{value.name}, which nothing defines: bind it or include its file.')
      if value.name in within:
        raise UserError(f'the macro %{value.name} refers to itself, by way of {where}: bind one of them to a value.')
      return self.resolve(self.macros[value.name], f'%{value.name}', (*within, value.name))
    if isinstance(value, _Reference):
      return Node(setup=self, scope=value.scope, selector=value.selector)
    if isinstance(value, dict):
      return {key: self.resolve(each, where, within) for key, each in value.items()}
    if isinstance(value, list | tuple):
      return type(value)(self.resolve(each, where, within) for each in value)
    return value


_KINDS = {Node: 'a reference, @NAME', int: 'a whole number', float: 'a number', str: 'a text', list: 'a list'}
_KINDS |= {tuple: 'a tuple', Mapping: 'a dict', type(None): 'None'}


def _is_name_of(bound: str, selector: str) -> bool:
  return selector == bound or selector.endswith(f'.{bound}')


def read_setup(files: Sequence[str], bindings: Sequence[str] = (), search: Sequence[str] = ()) -> Setup:
  """Reads gin files and further bindings, each `name = value`; what comes later wins.

  Files are paths, or names of T5X's such as 't5x/configs/runs/pretrain.gin'; they and their includes are looked for in
  the current directory, then in those of `search`. Raises a UserError if one is not found, or is not gin's syntax.
  """
  require('t5x', 'gin', wants='a gin setup')
  setup = Setup()
  for name in files:
    _read_file(name, setup, search, '')
  if bindings:
    _read_text('\n'.join(bindings), '--gin', setup, search)
  return setup


def _read_file(name: str, setup: Setup, search: Sequence[str], included_by: str) -> None:
  if len(setup.files) > _MAX_FILES:
    raise UserError(f'more than {_MAX_FILES} gin files are included: {included_by} includes itself.')
  path = next((path for path in _places(name, search) if path.is_file()), None)
  if path is None:
    by = f', which {included_by} includes,' if included_by else ''
    raise UserError(
      f'the gin file {name}{by} is not found: correct the name, or give --gin_search_paths DIR, the directory '
      'that contains it (it is not among the files of T5X that are known here).'
    )
  try:
    text = path.read_text(encoding='utf-8')
  except (OSError, UnicodeDecodeError) as error:
    raise UserError(f'the gin file {path} cannot be read: {error}.') from error
  setup.files.append(name)
  _read_text(text, name, setup, search)


def _places(name: str, search: Sequence[str]) -> Iterator[Path]:
  yield Path(name).expanduser()
  for directory in search:
    yield Path(directory).expanduser() / name
  top = name.split('/')[0]
  spec = importlib.util.find_spec(top) if '/' in name and top.isidentifier() else None  # an installed t5x, as it is
  for location in (spec.submodule_search_locations or ()) if spec else ():
    yield Path(location).parent / name
  yield _OWN_FILES / name


def _read_text(text: str, name: str, setup: Setup, search: Sequence[str]) -> None:
  from gin import config_parser

  class Delegate(config_parser.ParserDelegate):
    def configurable_reference(self, scoped_name: str, evaluate: bool) -> _Reference:
      scope, _, selector = scoped_name.rpartition('/')
      return _Reference(scope, _full_name(selector, setup))

    def macro(self, name: str) -> _Macro:
      return _Macro(name)

  try:
    for statement in config_parser.ConfigParser(text, Delegate()):
      kind = type(statement).__name__
      if kind == 'ImportStatement':
        bound = statement.alias or (statement.module.rpartition('.')[2] if statement.is_from else statement.module)
        setup.imports[bound] = statement.module
      elif kind == 'IncludeStatement':
        _read_file(statement.filename, setup, search, name)
      elif kind == 'BindingStatement':
        if not statement.arg_name:
          setup.macros[statement.selector] = statement.value
          setup.flags.update({statement.selector} if name == '--gin' else ())
        elif statement.selector == 'macro' or statement.selector.endswith('/macro'):
          setup.macros[statement.scope] = statement.value
        else:
          key = (statement.scope, _full_name(statement.selector, setup), statement.arg_name)
          setup.bindings[key] = statement.value
  except (SyntaxError, tokenize.TokenError, RecursionError) as error:  # the last: nested too deeply
    line = f' line {number}' if (number := getattr(error, 'lineno', None)) else ''
    message = ' '.join(str(error.args[0]).split()).rstrip('.')
    raise UserError(f'{name}{line} is not in the syntax of gin: {message}.') from error


def _full_name(selector: str, setup: Setup) -> str:
  """Returns a selector with the module in place of the name under which a file imports it."""
  parts = selector.split('.')
  for end in range(len(parts), 0, -1):
    if (module := setup.imports.get('.'.join(parts[:end]))) is not None:
      return '.'.join([module, *parts[end:]])
  return selector
