"""Generates pages of the docs site from the code. mkdocs calls the `on_*` functions (mkdocs.yml, `hooks`).

    api/<package>.md   every public name of a package: each entry of its `__all__`
    modules.md         every module with the first sentence of its docstring
    experiments.md     every registered experiment, with the command that trains it
    index.md           README.md; likewise contributing.md and changelog.md

The sources are read as syntax. Nothing is listed by hand, so that a new name, module or experiment has its entry.
"""

import ast
from collections.abc import Iterator, Sequence
import dataclasses
import importlib
from pathlib import Path
import re
from typing import Any

from mkdocs.structure.files import File, Files

from spmd_tasks.config.listing import list_experiments

ROOT = Path(__file__).parents[1]
# Modules beside the packages whose public names are written without an `__all__`.
MODULES = ('errors', 'experiment')
# Files of the repository's top level that are pages of the site.
TOP_LEVEL = {'README.md': 'index.md', 'CONTRIBUTING.md': 'contributing.md', 'CHANGELOG.md': 'changelog.md'}


@dataclasses.dataclass(frozen=True)
class PublicPackage:
  """A package with public names: its dotted name, its docstring, the entries of its `__all__`; or one of MODULES."""

  name: str
  docstring: str
  names: tuple[str, ...]

  @property
  def page(self) -> str:
    """The path of the page below docs/."""
    return f'api/{self.name}.md'


def public_packages(root: Path = ROOT) -> list[PublicPackage]:
  """Returns every package of spmd_tasks with a nonempty `__all__`, outer packages first."""
  packages = []
  for path in (root / 'spmd_tasks').rglob('__init__.py'):
    tree = ast.parse(path.read_text(encoding='utf-8'))
    names = public_names(tree)
    if names:
      package = '.'.join(path.parent.relative_to(root).parts)
      packages.append(PublicPackage(package, ast.get_docstring(tree) or '', names))
  for name in MODULES:
    tree = ast.parse((root / 'spmd_tasks' / f'{name}.py').read_text(encoding='utf-8'))
    packages.append(PublicPackage(f'spmd_tasks.{name}', ast.get_docstring(tree) or '', own_names(tree)))
  return sorted(packages, key=lambda package: package.name)


def public_names(tree: ast.Module) -> tuple[str, ...]:
  """Returns the names in the `lazy_exports` of a package, sorted, or else the entries of its `__all__`."""
  for node in tree.body:
    if isinstance(node, ast.With) and ast.unparse(node.items[0].context_expr).startswith('lazy_exports('):
      return tuple(sorted(bound_names(node.body)))
    if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == '__all__':
      return tuple(ast.literal_eval(node.value))
  return ()


def own_names(tree: ast.Module) -> tuple[str, ...]:
  """Returns the public names that a module defines or assigns at its top level."""
  own = [node for node in tree.body if not isinstance(node, ast.Import | ast.ImportFrom | ast.If)]
  return tuple(name for name in bound_names(own) if not name.startswith('_'))


def identifier(package: str, name: str) -> str:
  """Returns the dotted path of a public name for griffe, which only reads syntax."""
  folder = ROOT.joinpath(*package.split('.'))
  if folder.with_suffix('.py').is_file():
    return f'{package}.{name}'
  if (folder / f'{name}.py').is_file():
    return f'{package}.{name}'
  tree = ast.parse((folder / '__init__.py').read_text(encoding='utf-8'))
  if name in set(bound_names(tree.body)):
    return f'{package}.{name}'
  public = getattr(importlib.import_module(package), name)
  return f'{public.__module__}.{public.__qualname__}'


def bound_names(body: Sequence[ast.stmt]) -> Iterator[str]:
  """Yields the names that statements bind, also in `if TYPE_CHECKING` and lazy imports, but not in functions."""
  for node in body:
    if isinstance(node, ast.ImportFrom | ast.Import):
      yield from (alias.asname or alias.name for alias in node.names)
    elif isinstance(node, ast.FunctionDef | ast.ClassDef):
      yield node.name
    elif isinstance(node, ast.Assign | ast.AnnAssign):
      targets = node.targets if isinstance(node, ast.Assign) else [node.target]
      yield from (target.id for target in targets if isinstance(target, ast.Name))
    elif isinstance(node, ast.If | ast.With):
      yield from bound_names(node.body)


def api_page(package: PublicPackage) -> str:
  """Returns the page of a package: its docstring, then an entry for each public name."""
  parts = [
    f'# {package.name}',
    f'::: {package.name}\n    options:\n      members: []\n      show_root_heading: false\n'
    '      show_root_toc_entry: false',
  ]
  for name in package.names:
    parts.append(f'::: {identifier(package.name, name)}')
  return '\n\n'.join(parts) + '\n'


def api_index(packages: list[PublicPackage]) -> str:
  """Returns a table of all public names by package."""
  lines = ['# API reference', '', 'Every public name, by the package that exports it.', '']
  lines += ['| package | names |', '|---|---|']
  for package in packages:
    page = f'{package.name}.md'
    lines.append(f'| [`{package.name}`]({page}) | {", ".join(f"`{name}`" for name in package.names)} |')
  return '\n'.join(lines) + '\n'


def first_sentence(path: Path) -> str:
  """Returns the first paragraph of a module's docstring in one line, or an empty string."""
  paragraph = (ast.get_docstring(ast.parse(path.read_text(encoding='utf-8'))) or '').partition('\n\n')[0]
  return ' '.join(paragraph.split())


def modules(root: Path = ROOT) -> Iterator[tuple[str, list[tuple[Path, str]]]]:
  """Yields (folder, [(file, first sentence)]) for the package and the experiments, `__init__` files first."""
  by_folder: dict[Path, list[tuple[Path, str]]] = {}
  for path in [*root.glob('spmd_tasks/**/*.py'), *root.glob('experiments/*.py')]:
    sentence = first_sentence(path)
    if sentence:
      by_folder.setdefault(path.parent, []).append((path, sentence))
  for folder, files in sorted(by_folder.items()):
    yield str(folder.relative_to(root)), sorted(files, key=lambda item: (item[0].name != '__init__.py', item[0].name))


def modules_page() -> str:
  """Returns a table per folder."""
  lines = ['# Every module', '', 'Each file with the first sentence of its docstring.']
  for folder, files in modules():
    lines += ['', f'## {folder}', '', '| file | |', '|---|---|']
    lines += [f'| `{path.name}` | {table_cell(sentence)} |' for path, sentence in files]
  return '\n'.join(lines) + '\n'


def table_cell(text: str) -> str:
  """Escapes text for a cell of a Markdown table."""
  return text.replace('|', '\\|').replace('<', '&lt;')


def experiments_page() -> str:
  """Returns the registered experiments with their commands."""
  lines = [
    '# Registered experiments',
    '',
    'Those for 1 or 8 devices run on fake CPU devices. The others are checked by their shapes only; no one has trained',
    'them. `spmd-tasks --list` prints the same list, and `spmd-tasks --exp NAME --print_config` every field of one.',
  ]
  by_module: dict[str, list[tuple[str, str]]] = {}
  for name, description in list_experiments():
    by_module.setdefault(name.partition('.')[0], []).append((name, description))
  for module, entries in by_module.items():
    docstring = ast.get_docstring(ast.parse((ROOT / 'experiments' / f'{module}.py').read_text(encoding='utf-8'))) or ''
    lines += ['', f'## {module}', '', docstring, '', '| name | |', '|---|---|']
    lines += [f'| `{name}` | {table_cell(description)} |' for name, description in entries]
  return '\n'.join(lines) + '\n'


def layering_rows(root: Path = ROOT) -> list[tuple[str, ...]]:
  """Returns the rows of the package in tests/test_layering.py, top row first."""
  tree = ast.parse((root / 'tests' / 'test_layering.py').read_text(encoding='utf-8'))
  for node in tree.body:
    if isinstance(node, ast.Assign) and getattr(node.targets[0], 'id', None) == 'ROWS':
      return ast.literal_eval(node.value)
  raise ValueError('tests/test_layering.py assigns no ROWS')


def existing_rows(root: Path = ROOT) -> str:
  """Formats the rows, one per line, without missing packages."""
  package = root / 'spmd_tasks'
  rows = []
  for row in layering_rows(root):
    parts = [part for part in row if (package / part).is_dir() or (package / f'{part}.py').is_file()]
    if parts:
      rows.append('  '.join(parts))
  return '\n'.join(rows) + '\n'


def page_of_top_level(text: str) -> str:
  """Returns a top-level file as a page, with its links to docs/ and to other top-level files rewritten."""
  text = re.sub(r'\]\(docs/', '](', text)
  for name, page in TOP_LEVEL.items():
    text = text.replace(f']({name}', f']({page}')
  return text


def plain_fences(markdown: str) -> str:
  """Rewrites code fences for the renderer: without `no-run`, and `file=` as a title (see tests/test_docs.py)."""
  markdown = re.sub(r'^```(\w+) no-run$', r'```\1', markdown, flags=re.MULTILINE)
  return re.sub(r'^```(\w+) file=(\S+)$', r'```\1 title="\2"', markdown, flags=re.MULTILINE)


def on_config(config: Any) -> Any:
  """Appends the API reference to the navigation."""
  pages = [{package.name: package.page} for package in public_packages()]
  config.nav.append({'API reference': [{'All names': 'api/index.md'}, *pages]})
  return config


def on_files(files: Files, config: Any) -> Files:
  """Adds the generated pages."""
  packages = public_packages()
  pages = {package.page: api_page(package) for package in packages}
  pages |= {'api/index.md': api_index(packages), 'modules.md': modules_page(), 'experiments.md': experiments_page()}
  for name, page in TOP_LEVEL.items():
    pages[page] = page_of_top_level((ROOT / name).read_text(encoding='utf-8'))
  for path, content in pages.items():
    files.append(File.generated(config, path, content=content))
  return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
  """Rewrites code fences, and links from docs/ to top-level files."""
  markdown = plain_fences(markdown)
  for name, target in TOP_LEVEL.items():
    markdown = markdown.replace(f'](../{name}', f']({target}').replace(f'](../../{name}', f'](../{target}')
  return markdown
