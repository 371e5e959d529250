"""Which device holds what: a mesh of three axes and the layout of states, tables and batches on it.

`data` and `fsdp` split the rows of a batch; `fsdp` also splits weights and optimiser state, which
are gathered where they are used; `tensor` splits heads, feed-forward width and vocabulary.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from dscout_jax.config.checks import require

AXES = ("data", "fsdp", "tensor")
ROWS = PartitionSpec(("data", "fsdp"))
# Weights are [out, in]. Behind a split width the inputs are split, and their products added up.
_SPLIT_INPUTS = ("o_proj", "down_proj")
_SPLIT_OUTPUTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


def make_mesh(sizes: Sequence[int], batch_size: int) -> Mesh:
    """Returns a mesh over the first devices, as many as it needs.

    Args:
        sizes: devices along `data`, `fsdp` and `tensor`; at most one -1 takes what is left.
        batch_size: rows of a batch, all of which must find a place.

    Raises:
        ConfigError: the sizes do not fit the devices, or the rows do not fit the sizes.
    """
    devices = jax.devices()
    known = math.prod(size for size in sizes if size != -1)
    filled = [len(devices) // known if size == -1 else size for size in sizes]
    count = math.prod(filled)
    require(
        min(filled) >= 1 and list(sizes).count(-1) <= 1 and count <= len(devices),
        "train.mesh",
        tuple(sizes),
        f"three sizes above 0, one of which may be -1, for {len(devices)} devices",
    )
    require(
        jax.process_count() == 1 or count == len(devices),
        "train.mesh",
        tuple(sizes),
        f"all {len(devices)} devices of the {jax.process_count()} processes",
    )
    rows = filled[0] * filled[1]
    require(
        batch_size % rows == 0, "train.batch_size", batch_size, f"a multiple of {rows} (train.mesh)"
    )
    types = (AxisType.Auto,) * len(AXES)
    return jax.make_mesh(tuple(filled), AXES, axis_types=types, devices=devices[:count])


def weight_layout(path: Sequence[Any], shape: Sequence[int], mesh: Mesh) -> NamedSharding:
    """Returns how a weight, or what an optimiser keeps of it, lies on a mesh.

    An axis that its devices do not divide is not split; whatever is no matrix is on every device.

    Args:
        path: key path of the leaf, as `jax.tree_util.tree_map_with_path` gives it.
        shape: of the leaf.
        mesh: of `make_mesh`.
    """
    if len(shape) != 2:
        return whole_layout(mesh)
    names = {str(getattr(key, "key", getattr(key, "name", ""))) for key in path}
    wanted: tuple[str | None, str | None] = ("fsdp", None)
    if names & set(_SPLIT_OUTPUTS):
        wanted = ("tensor", "fsdp")
    elif names & set(_SPLIT_INPUTS):
        wanted = ("fsdp", "tensor")
    elif names & {"embedding", "head"}:
        wanted = ("tensor", None)
    fits = [
        axis if axis is not None and size % mesh.shape[axis] == 0 else None
        for axis, size in zip(wanted, shape, strict=True)
    ]
    return NamedSharding(mesh, PartitionSpec(*fits))


def whole_layout(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of what lies whole on every device."""
    return NamedSharding(mesh, PartitionSpec())


def tree_layout(tree: Any, mesh: Mesh) -> Any:
    """Returns the sharding of every leaf of a tree of arrays or shapes (see `weight_layout`)."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: weight_layout(path, leaf.shape, mesh), tree
    )


def place_rows(batch: dict[str, Any], mesh: Mesh) -> dict[str, Any]:
    """Returns a batch as arrays over the mesh, rows split; only `held_rows` of it are read."""
    if mesh.size == 1:
        return batch
    layout = NamedSharding(mesh, ROWS)
    return {
        name: jax.make_array_from_callback(values.shape, layout, values.__getitem__)
        for name, values in batch.items()
    }


def place_whole(tree: Any, mesh: Mesh) -> Any:
    """Returns a tree, alike in every process, whole on every device of a mesh."""

    def place(leaf):
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(place(jax.random.key_data(leaf)))
        return jax.device_put(leaf, whole_layout(mesh))

    return jax.tree.map(place, tree)


def held_rows(mesh: Mesh, batch_size: int) -> set[int]:
    """Returns the positions in a batch of the rows that devices of this process work on."""
    layout = NamedSharding(mesh, ROWS)
    indices = layout.addressable_devices_indices_map((batch_size,)).values()
    return {row for (rows,) in indices for row in range(batch_size)[rows]}
