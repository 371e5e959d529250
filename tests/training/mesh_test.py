import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from dscout_jax.config.checks import ConfigError
from dscout_jax.training.mesh import make_mesh, place_rows, tree_layout


def test_what_is_left_goes_to_the_axis_that_asks_for_it():
    assert dict(make_mesh((-1, 2, 1), 8).shape) == {"data": 2, "fsdp": 2, "tensor": 1}
    assert make_mesh((1, 1, 1), 3).size == 1


@pytest.mark.parametrize("sizes", [(8, 1, 1), (-1, -1, 1), (0, 1, 1), (-1, 8, 1)])
def test_sizes_that_do_not_fit_the_devices_are_refused(sizes):
    with pytest.raises(ConfigError, match="train.mesh=.* for 4 devices"):
        make_mesh(sizes, 8)


def test_rows_that_do_not_fit_the_sizes_are_refused():
    with pytest.raises(
        ConfigError, match=r"train.batch_size=6 is not allowed; use a multiple of 4"
    ):
        make_mesh((2, 2, 1), 6)


def test_matrices_are_split_where_their_devices_divide_them_and_nothing_else_is():
    mesh = make_mesh((1, 2, 2), 2)
    shapes = {
        "layers_0": {
            "q_proj": {"weight": (8, 6)},
            "o_proj": {"weight": (6, 8)},
            "norm": {"scale": (6,)},
        },
        "fc": {"weight": (6, 12)},
        "k_proj": {"weight": (3, 6)},
        "embedding": (10, 6),
    }
    tree = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )
    specs = jax.tree.map(lambda layout: layout.spec, tree_layout(tree, mesh))
    assert specs["layers_0"]["q_proj"]["weight"] == PartitionSpec("tensor", "fsdp")
    assert specs["layers_0"]["o_proj"]["weight"] == PartitionSpec("fsdp", "tensor")
    assert specs["layers_0"]["norm"]["scale"] == PartitionSpec()
    assert specs["fc"]["weight"] == PartitionSpec("fsdp", None)
    assert specs["k_proj"]["weight"] == PartitionSpec(None, "fsdp")  # 3 rows on 2 devices
    assert specs["embedding"] == PartitionSpec("tensor", None)


def test_each_device_gets_its_share_of_the_rows():
    placed = place_rows({"length": jnp.arange(8)}, make_mesh((2, 2, 1), 8))["length"]
    assert sorted(tuple(s.data.tolist()) for s in placed.addressable_shards) == [
        (0, 1), (2, 3), (4, 5), (6, 7)
    ]  # fmt: skip
