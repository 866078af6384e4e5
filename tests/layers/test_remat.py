import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import pytest

from spmd_tasks.layers.remat import REMAT_POLICIES, ROUTING_NAME, remat_policy


def test_every_name_but_none_is_a_policy():
  assert remat_policy('none') is None
  assert all(callable(remat_policy(name)) for name in REMAT_POLICIES if name != 'none')


@pytest.mark.parametrize('name', [name for name in REMAT_POLICIES if name != 'none'])
def test_every_policy_keeps_decisions_and_computes_elementwise_results_again(name):
  def layer(x):
    choice = checkpoint_name(jnp.argmax(jnp.sin(x), axis=1), ROUTING_NAME)
    return jnp.sum(jnp.exp(x) * (choice[:, None] == jnp.arange(4)[None, :]))

  _, pullback = jax.vjp(jax.checkpoint(layer, policy=remat_policy(name)), jnp.ones((3, 4)))
  saved = sorted((value.shape, value.dtype.name) for value in jax.tree.leaves(pullback))
  assert saved == [((3,), 'int32'), ((3, 4), 'float32')]


def test_unknown_names_list_the_known_ones():
  with pytest.raises(
    ValueError, match=r"'minimal' is unknown: choose one of \['none', 'dots', 'dots_no_batch', 'full'\]"
  ):
    remat_policy('minimal')
