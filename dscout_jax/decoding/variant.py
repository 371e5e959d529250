"""The static choices of one compiled decoding program.

Three rules say which drafts stand (METHOD section 3). `greedy`: those equal to the target's most
likely tokens. `match`: greedy drafts equal to what the target draws; since a draw depends on the
row's key and the position alone, the output is that of plain sampling with the same key, token for
token, as it is for `greedy`. `rejection`: drafts are drawn too and stand with probability
min(1, p / q); the output has the law of plain sampling, but other tokens.
"""

import flax.struct

from dscout_jax.config.models import DrafterConfig, TargetConfig

RULES = ("greedy", "match", "rejection")


@flax.struct.dataclass(frozen=True)
class Variant:
    """Static choices of one compiled program.

    Attributes:
        target: target shapes.
        drafter: drafter shapes.
        block_size: G in [2, trained block size].
        num_layers: drafter depth d; None = all.
        taps: indices into `drafter.target_layer_ids`; None = all.
        stop_ids: ids that end a row.
        rule: `greedy`, `match` or `rejection`; the first wants rows of temperature 0 only.
    """

    target: TargetConfig = flax.struct.field(pytree_node=False)
    drafter: DrafterConfig = flax.struct.field(pytree_node=False)
    block_size: int = flax.struct.field(pytree_node=False)
    num_layers: int | None = flax.struct.field(pytree_node=False, default=None)
    taps: tuple[int, ...] | None = flax.struct.field(pytree_node=False, default=None)
    stop_ids: tuple[int, ...] = flax.struct.field(pytree_node=False, default=())
    rule: str = flax.struct.field(pytree_node=False, default="greedy")

    def __post_init__(self) -> None:
        largest = self.drafter.block_size
        if not 2 <= self.block_size <= largest:
            raise ValueError(
                f"block_size={self.block_size} is not in [2, {largest}], what the drafter was "
                "trained for"
            )
        depth, num_taps = self.drafter.num_hidden_layers, len(self.drafter.target_layer_ids)
        if self.num_layers is not None and not 1 <= self.num_layers <= depth:
            raise ValueError(f"num_layers={self.num_layers} is not in [1, {depth}]")
        taps = range(num_taps) if self.taps is None else self.taps
        if not taps or list(taps) != sorted(set(taps) & set(range(num_taps))):
            raise ValueError(f"taps={self.taps} must be increasing indices below {num_taps}")
        if self.rule not in RULES:
            raise ValueError(f"rule={self.rule!r} is not one of {', '.join(RULES)}")

    @property
    def name(self) -> str:
        """Block size and cuts, such as `block8` or `block8_depth1_taps3`."""
        depth = "" if self.num_layers is None else f"_depth{self.num_layers}"
        taps = "" if self.taps is None else f"_taps{len(self.taps)}"
        return f"block{self.block_size}{depth}{taps}"

    @property
    def is_cut(self) -> bool:
        """Whether it uses less than all layers and taps of the drafter."""
        return self.num_layers is not None or self.taps is not None

    @property
    def tap_ids(self) -> tuple[int, ...]:
        """The target layers that this variant taps."""
        ids = self.drafter.target_layer_ids
        return ids if self.taps is None else tuple(ids[i] for i in self.taps)
