"""Drawing: writes rectangles, texts and arrows as SVG, with equal bytes for equal calls."""

from html import escape

INK, FAINT, LINE = '#1f2430', '#6b7280', '#9aa3b2'
# Fills, light enough for dark text: one per device, microbatch or request.
FILLS = ('#c9dcf7', '#fbd9b5', '#cdebc9', '#f6c9d4', '#ddd0f2', '#fdeeb0', '#c6ebea', '#e4d3c2')
PALE, PADDING = '#f3f5f9', '#e2e5eb'
FONT = 'Helvetica, Arial, sans-serif'
MONO = 'Menlo, Consolas, monospace'


class Drawing:
  """A picture of width x height, in pixels, on white."""

  def __init__(self, width: int, height: int, title: str):
    self._width, self._height, self._title = width, height, title
    self._parts: list[str] = []

  def rect(self, x: float, y: float, width: float, height: float, fill: str = PALE, line: str = LINE, radius: int = 4):
    """Draws a filled rectangle with a thin border."""
    self._parts.append(
      f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius}" fill="{fill}" stroke="{line}"/>'
    )

  def text(
    self,
    x: float,
    y: float,
    text: str,
    size: int = 14,
    color: str = INK,
    anchor: str = 'start',
    bold: bool = False,
    mono: bool = False,
  ):
    """Draws one line of text; (x, y) is the start, middle or end of its baseline."""
    weight = ' font-weight="bold"' if bold else ''
    family = f' font-family="{MONO}"' if mono else ''
    self._parts.append(
      f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{color}" text-anchor="{anchor}"{weight}{family} '
      f'xml:space="preserve">{escape(text)}</text>'
    )

  def line(self, points: list[tuple[float, float]], color: str = LINE, width: float = 1.5, arrow: bool = False):
    """Draws a line through points, optionally with an arrow head at its end."""
    path = ' '.join(f'{x:g},{y:g}' for x, y in points)
    head = ' marker-end="url(#head)"' if arrow else ''
    self._parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width:g}"{head}/>')

  def arrow(self, *points: tuple[float, float]):
    """Draws an arrow through points."""
    self.line(list(points), color=FAINT, arrow=True)

  def svg(self) -> str:
    """Returns the SVG."""
    head = (
      '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
      f'<path d="M0,0 L8,4 L0,8 z" fill="{FAINT}"/></marker></defs>'
    )
    return '\n'.join(
      [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self._width} {self._height}" width="{self._width}" '
        f'height="{self._height}" font-family="{FONT}">',
        f'<title>{escape(self._title)}</title>',
        head,
        f'<rect width="{self._width}" height="{self._height}" fill="white"/>',
        *self._parts,
        '</svg>\n',
      ]
    )
