import numpy as np
import pytest

from dscout_jax.objective.weighting import exp_decay, uniform


def test_exp_decay_starts_at_one_and_never_weighs_the_anchor():
    np.testing.assert_allclose(
        exp_decay(4, gamma=2.0), [0.0, 1.0, np.exp(-0.5), np.exp(-1.0)], rtol=1e-6
    )


@pytest.mark.parametrize(("block_size", "gamma"), [(16, 7.0), (10, 5.0), (8, 4.0)])
def test_the_default_decay_is_the_one_published_for_the_block_size(block_size, gamma):
    np.testing.assert_array_equal(exp_decay(block_size), exp_decay(block_size, gamma))


def test_an_unknown_block_size_asks_for_gamma():
    with pytest.raises(ValueError, match="block size 6"):
        exp_decay(6)


def test_uniform_weighs_all_drafted_slots_alike():
    assert uniform(4).tolist() == [0.0, 1.0, 1.0, 1.0]
