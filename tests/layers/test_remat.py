import pytest

from spmd_tasks.layers.remat import REMAT_POLICIES, remat_policy


def test_every_name_but_none_is_a_policy():
  assert remat_policy('none') is None
  assert all(callable(remat_policy(name)) for name in REMAT_POLICIES if name != 'none')


def test_unknown_names_list_the_known_ones():
  with pytest.raises(
    ValueError, match=r"'minimal' is unknown: choose one of \['none', 'dots', 'dots_no_batch', 'full'\]"
  ):
    remat_policy('minimal')
