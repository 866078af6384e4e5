"""The notebook of the docs runs from its first cell to its last, and its committed outputs are of the same cells."""

from pathlib import Path

import nbclient
import nbformat
import pytest

NOTEBOOK = Path(__file__).parents[1] / 'docs' / 'notebook.ipynb'


@pytest.mark.slow
@pytest.mark.exhaustive  # it compiles all anew; the code of the README and of most guides runs always
def test_the_notebook_runs(tmp_path, monkeypatch):
  monkeypatch.delenv('JAX_NUM_CPU_DEVICES', raising=False)  # the notebook asks for its devices itself
  monkeypatch.setenv('JAX_PLATFORMS', 'cpu')
  monkeypatch.setenv('PYTHONPATH', str(NOTEBOOK.parents[1]))
  notebook = nbformat.read(NOTEBOOK, as_version=4)
  resources = {'metadata': {'path': tmp_path}}
  client = nbclient.NotebookClient(notebook, timeout=240, kernel_name='python3', resources=resources)
  client.execute()  # a cell that raises is a CellExecutionError
  assert (tmp_path / 'runs' / 'notebook' / 'config.json').exists()


def test_every_cell_was_executed_in_order_and_has_its_output():
  cells = [cell for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == 'code']
  assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
  assert all(cell.outputs for cell in cells[:1] + cells[2:])
