"""Reads gin files with bindings, macros, references and includes, without importing what they name.

    setup = read_setup(['made_up_sums.gin'], ["MODEL_DIR = 'runs/sums'"])
    setup.node('__main__.train').get('total_steps')      # macros resolved; @references are Nodes
    setup.node('__main__.train').unread()                # its bindings that were not read

The gin-config library parses. Names are resolved by the imports in the files (gin's dynamic registration), so T5X need
not be installed. The folder `gin` has the settings of T5X's and Flaxformer's own files that affect numbers: defaults of
runs, sizes and parts of models. It is searched last, after an installed T5X.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import importlib.util
from pathlib import Path
import re
import tokenize
from typing import Any

from spmd_tasks.errors import UserError
from spmd_tasks.extensions import require

MISSING: Any = object()
_REQUIRED = '%gin.REQUIRED'
_OWN_FILES = Path(__file__).parent / 'gin'
_MAX_FILES = 100
_FLAG = '--gin'


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
  """A configurable of a setup in a scope, such as the reference `@scope/package.Name()`."""

  setup: 'Setup' = dataclasses.field(repr=False, compare=False)
  scope: str  # may be ''
  selector: str  # package.module.Name

  @property
  def name(self) -> str:
    """The last part of the selector."""
    return self.selector.rpartition('.')[2]

  def get(self, argument: str, default: Any = MISSING, kind: type | tuple[type, ...] = object) -> Any:
    """Returns the value of an argument, with macros and references resolved.

    Args:
      argument: the name of the argument.
      default: its value if it is not bound.
      kind: the type of its value, or a tuple of types; the default may have another type.

    Raises:
      UserError: the argument is not bound (or bound to gin.REQUIRED) and has no default, or its value has another type.
    """
    for scope in _scopes(self.scope):
      keys = [
        key for key in self.setup.bindings if key[::2] == (scope, argument) and _matches(key[1], self.selector)
      ]  # one for each name of the configurable, such as `train` and `__main__.train`; the last binding wins
      if keys:
        self.setup.read.update(keys)
        resolved = self.setup.resolve(self.setup.bindings[keys[-1]], f'{self.selector}.{argument}', scope=self.scope)
        if not isinstance(resolved, kind) and resolved != default:
          kinds = kind if isinstance(kind, tuple) else (kind,)
          kind_names = ' or '.join(_KINDS.get(cls, cls.__name__) for cls in kinds)
          raise UserError(f'{self}.{argument} = {resolved!r} must be {kind_names}.')
        return resolved
    if default is MISSING:
      raise UserError(f'the gin setup has no value for {self}.{argument}: bind it, or include a file that binds it.')
    return default

  def get_node(self, argument: str, default: Any = MISSING) -> Any:
    """Returns the Node to which an argument refers, or the default."""
    return self.get(argument, default, kind=Node)

  def unread(self) -> list[str]:
    """Returns the bindings that `get` did not read, as texts `name = value`."""
    return [
      f'{selector}.{argument} = {value!r}'
      for (scope, selector, argument), value in self.setup.bindings.items()
      if scope in _scopes(self.scope)
      and _matches(selector, self.selector)
      and (scope, selector, argument) not in self.setup.read
    ]

  def __str__(self) -> str:
    return f'{self.scope}/{self.selector}' if self.scope else self.selector


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
  """The contents of gin files.

  Attributes:
    bindings: (scope, selector, argument) -> value, in the order in which they were bound last.
    macros: name -> value.
    imports: the name by which the files, or those read last, import a module -> the module.
    files: the names of the files that were read.
    read: the keys of `bindings` that `Node.get` has read.
    flags: the macros that --gin binds.
  """

  bindings: dict[tuple[str, str, str], Any] = dataclasses.field(default_factory=dict)
  macros: dict[str, Any] = dataclasses.field(default_factory=dict)
  imports: dict[str, str] = dataclasses.field(default_factory=dict)
  files: list[str] = dataclasses.field(default_factory=list)
  read: set[tuple[str, str, str]] = dataclasses.field(default_factory=set)
  flags: set[str] = dataclasses.field(default_factory=set)

  def node(self, selector: str) -> Node | None:
    """Returns a configurable without a scope; None if it has no bindings."""
    is_bound = any(_matches(bound_selector, selector) for _, bound_selector, _ in self.bindings)
    return Node(setup=self, scope='', selector=selector) if is_bound else None

  def unused(self, root: Node) -> list[str]:
    """Returns the configurables, also in a scope, and the macros of flags that cannot be reached from `root`."""
    reached: set[str] = set()  # selectors, and macros as %NAME
    scopes = {''}
    pending = [root.selector, *(selector for _, selector, _ in self.read)]
    while pending:
      name = pending.pop()
      if name in reached:
        continue
      reached.add(name)
      values = [self.macros.get(name[1:])] if name.startswith('%') else []
      values += [value for (_, selector, _), value in self.bindings.items() if _matches(selector, name)]
      while values:
        value = values.pop()
        if isinstance(value, _Macro | _Reference):
          pending.append(repr(value) if isinstance(value, _Macro) else value.selector)
          scopes.update(_scopes(getattr(value, 'scope', '')))
        elif isinstance(value, dict | list | tuple):
          values += value.values() if isinstance(value, dict) else value
    selectors = dict.fromkeys(selector for _, selector, _ in self.bindings)
    unused = [selector for selector in selectors if not any(_matches(selector, name) for name in reached)]
    scoped = dict.fromkeys((scope, selector) for scope, selector, _ in self.bindings if scope not in scopes)
    unused += [f'{scope}/{selector}' for scope, selector in scoped if selector not in unused]
    return unused + sorted(f'%{name}' for name in self.flags if f'%{name}' not in reached)

  def resolve(self, value: Any, setting: str, macros: tuple[str, ...] = (), scope: str = '') -> Any:
    """Replaces macros and references, also in lists and dicts.

    Args:
      value: a value of a binding or a macro.
      setting: the name of the binding or macro, for errors.
      macros: the names of the macros that are being resolved, to find cycles.
      scope: the scope of the configurable with the binding, in which references without a scope are, too.
    """
    if isinstance(value, _Macro):
      if f'%{value.name}' == _REQUIRED:
        raise UserError(f'{setting} is required: set --gin.{setting.removeprefix("%")}=VALUE.')
      if value.name not in self.macros and '.' in value.name:  # a constant of a module
        return value.name
      if value.name not in self.macros:
        raise UserError(f'{setting} is the undefined macro %{value.name}: bind it, or include a file that binds it.')
      if value.name in macros:
        raise UserError(f'the macro %{value.name} refers to itself through {setting}: bind one of them to a value.')
      return self.resolve(self.macros[value.name], f'%{value.name}', (*macros, value.name))
    if isinstance(value, _Reference):
      return Node(setup=self, scope=value.scope or scope, selector=value.selector)
    if isinstance(value, dict):
      return {key: self.resolve(item, setting, macros, scope) for key, item in value.items()}
    if isinstance(value, list | tuple):
      return type(value)(self.resolve(item, setting, macros, scope) for item in value)
    return value


_KINDS = {Node: 'a reference, @NAME', int: 'an integer', float: 'a number', str: 'a string', list: 'a list'}
_KINDS |= {tuple: 'a tuple', Mapping: 'a dict', type(None): 'None'}


def _scopes(scope: str) -> list[str]:
  """Returns the scopes whose bindings apply in a scope: a/b, a and the empty one."""
  parts = scope.split('/') if scope else []
  return ['/'.join(parts[:end]) for end in range(len(parts), -1, -1)]


def _matches(suffix: str, selector: str) -> bool:
  """Whether a selector, or its last parts, is `suffix`."""
  return selector == suffix or selector.endswith(f'.{suffix}')


def read_setup(files: Sequence[str], bindings: Sequence[str] = (), search: Sequence[str] = ()) -> Setup:
  """Reads gin files and bindings, of which later ones win.

  Args:
    files: paths, or names of T5X's files such as 't5x/configs/runs/pretrain.gin'.
    bindings: lines `name = value`.
    search: directories to search for files and includes, after the current directory.

  Raises:
    UserError: a file is not found or has a syntax error.
  """
  require('t5x', 'gin', wants='a gin setup')
  setup = Setup()
  for name in files:
    _read_file(name, setup, search, '')
  for binding in bindings:
    _read_text(binding, _FLAG, setup, search)
  return setup


def _read_file(name: str, setup: Setup, search: Sequence[str], included_by: str) -> None:
  if len(setup.files) > _MAX_FILES:
    raise UserError(f'more than {_MAX_FILES} gin files are included: {included_by} may include itself.')
  path = next((path for path in _candidate_paths(name, search) if path.is_file()), None)
  if path is None:
    by = f', which {included_by} includes,' if included_by else ''
    raise UserError(
      f'the gin file {name}{by} is not found: correct the name, or set --gin_search_paths DIR to the directory that '
      'contains it. It is not one of the files of T5X that are built in.'
    )
  try:
    text = path.read_text(encoding='utf-8')
  except (OSError, UnicodeDecodeError) as error:
    raise UserError(f'the gin file {path} cannot be read ({error}): correct the file.') from error
  setup.files.append(name)
  _read_text(text, name, setup, search)


def _candidate_paths(name: str, search: Sequence[str]) -> Iterator[Path]:
  yield Path(name).expanduser()
  for directory in search:
    yield Path(directory).expanduser() / name
  top = name.split('/')[0]
  spec = importlib.util.find_spec(top) if '/' in name and top.isidentifier() else None  # such as an installed t5x
  for location in (spec.submodule_search_locations or ()) if spec else ():
    yield Path(location).parent / name
  yield _OWN_FILES / name


def _read_text(text: str, name: str, setup: Setup, search: Sequence[str]) -> None:
  from gin import config_parser

  imports: dict[str, str] = {}  # of this text; they take precedence over those of included files

  class Delegate(config_parser.ParserDelegate):
    def configurable_reference(self, scoped_name: str, evaluate: bool) -> _Reference:
      scope, _, selector = scoped_name.rpartition('/')
      return _Reference(scope, _full_name(selector, {**setup.imports, **imports}))

    def macro(self, name: str) -> _Macro:
      return _Macro(name)

  try:
    for statement in config_parser.ConfigParser(text, Delegate()):
      kind = type(statement).__name__
      if kind == 'ImportStatement':
        alias = statement.alias or (statement.module.rpartition('.')[2] if statement.is_from else statement.module)
        imports[alias] = setup.imports[alias] = statement.module
      elif kind == 'IncludeStatement':
        _read_file(statement.filename, setup, search, name)
      elif kind == 'BindingStatement':
        if not statement.arg_name:
          setup.macros[statement.selector] = statement.value
          setup.flags.update({statement.selector} if name == _FLAG else ())
        elif statement.selector == 'macro' or statement.selector.endswith('/macro'):
          setup.macros[statement.scope] = statement.value
        else:
          selector = _full_name(statement.selector, {**setup.imports, **imports})
          key = (statement.scope, selector, statement.arg_name)
          setup.bindings.pop(key, None)
          setup.bindings[key] = statement.value
  except (SyntaxError, tokenize.TokenError, RecursionError) as error:  # the last: nested too deeply
    message = ' '.join(str(error.args[0]).split()).rstrip('.')
    token = re.search("Failed to parse token '(.*)'$", message)
    message = f'{token[1]} is not a value; text needs quotes' if token else message
    if name == _FLAG:
      argument, _, value = text.partition('=')
      example = f', as in --gin.{argument}="{value.strip()!r}"' * bool(token)
      raise UserError(f'--gin.{text} has a syntax error of gin: {message}{example}.') from error
    line = f' line {number}' if (number := getattr(error, 'lineno', None)) else ''
    raise UserError(f'{name}{line} has a syntax error of gin: {message}.') from error


def _full_name(selector: str, imports: Mapping[str, str]) -> str:
  """Replaces the name by which a file imports a module by the module's full name."""
  parts = selector.split('.')
  for end in range(len(parts), 0, -1):
    if (module := imports.get('.'.join(parts[:end]))) is not None:
      return '.'.join([module, *parts[end:]])
  return selector
