"""What `scripts/test --changed` runs."""

import subprocess

import pytest

from tests.import_graph import ROOT, changed_files, reached_from

TESTS = ROOT / 'tests'


@pytest.mark.parametrize(
  'changed, reached, not_reached',
  [
    ('tests/multi_process/worker_steps.py', {'multi_process/test_faults.py'}, {'test_notebook.py'}),
    ('spmd_tasks/planning/search.py', {'planning/test_search.py', 'test_main.py'}, {'learning/test_muon.py'}),
    (
      'spmd_tasks/layers/losses.py',
      {'layers/test_losses.py', 'test_notebook.py'},
      {'test_signatures.py'},
    ),
    ('spmd_tasks/planning/rates.toml', {'planning/test_published.py'}, {'layers/test_losses.py'}),
    ('experiments/moe.py', {'planning/test_golden_plans.py'}, {'layers/test_losses.py'}),
    ('scripts/t5x_compare.py', {'bridges/t5x/test_t5x_compare.py', 'test_scripts.py'}, {'layers/test_losses.py'}),
    ('docs/serving.md', {'test_docs.py'}, {'layers/test_losses.py'}),
    ('tests/planning/compiled_steps.py', {'planning/test_collectives.py'}, {'planning/test_search.py'}),
    ('tests/checkpoints/conftest.py', {'checkpoints/test_manifest.py'}, {'test_main.py'}),
    ('tests/conftest.py', {'checkpoints/test_manifest.py', 'test_main.py'}, set()),
  ],
)
def test_a_change_reaches_the_tests_that_use_the_file(changed, reached, not_reached):
  files = {str(path.relative_to(TESTS)) for path in reached_from([ROOT / changed]) if path.is_relative_to(TESTS)}
  assert reached <= files
  assert not not_reached & files


def test_changed_files_are_those_of_the_branch_and_of_the_working_tree(tmp_path):
  def git(*args: str) -> None:
    author = ('-c', 'user.name=a', '-c', 'user.email=a@b')
    subprocess.run(['git', *author, *args], cwd=tmp_path, check=True, capture_output=True)

  for name in ('kept.py', 'committed.py', 'edited.py'):
    (tmp_path / name).write_text('1')
  git('init', '-b', 'main')
  git('add', '.')
  git('commit', '-m', 'first')
  git('checkout', '-b', 'branch')
  (tmp_path / 'committed.py').write_text('2')
  git('commit', '-am', 'second')
  (tmp_path / 'edited.py').write_text('2')
  (tmp_path / 'new.py').write_text('1')
  assert {path.name for path in changed_files(tmp_path)} == {'committed.py', 'edited.py', 'new.py'}
