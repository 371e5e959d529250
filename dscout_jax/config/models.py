"""Shapes of target and drafter, in the names of Hugging Face's `config.json`."""

import dataclasses
from typing import Any

from dscout_jax.config.checks import require, require_positive


@dataclasses.dataclass(frozen=True)
class TargetConfig:
    """Shape of a decoder-only target (Llama family; Qwen3 with `qk_norm`).

    Attributes:
        vocab_size: V, rows of the embedding table.
        hidden_size: D, width of the residual stream.
        intermediate_size: width of the gated MLP.
        num_hidden_layers: L.
        num_attention_heads: N, query heads.
        num_key_value_heads: K_h, key/value heads; divides N.
        head_dim: H, independent of D / N.
        rope_theta: base of the rotary frequencies.
        rms_norm_eps: epsilon of every RMS norm.
        tie_word_embeddings: whether the head is the embedding table.
        qk_norm: whether queries and keys are RMS-normalised per head (Qwen3).
        max_position_embeddings: longest sequence the target was trained for, tokens.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    tie_word_embeddings: bool
    qk_norm: bool
    max_position_embeddings: int

    def __post_init__(self) -> None:
        require_positive(self, "target")
        _check_heads(self, "target")


@dataclasses.dataclass(frozen=True)
class DrafterConfig:
    """Shape of a block-diffusion drafter (DFlash family), whole or cut.

    Attributes:
        hidden_size: D, the target's width (embedding and head are the target's).
        intermediate_size: width of the gated MLP.
        num_hidden_layers: d, drafter layers.
        num_attention_heads: N.
        num_key_value_heads: K_h; divides N.
        head_dim: H.
        rope_theta: base of the rotary frequencies, the target's.
        rms_norm_eps: epsilon of every RMS norm.
        vocab_size: V of the target.
        num_target_layers: L of the target.
        target_layer_ids: C tapped target layers, 0-based, output of layer i, increasing.
        mask_token_id: id whose embedding fills the masked slots.
        block_size: G, largest trained horizon; slot 0 is the anchor.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    vocab_size: int
    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    block_size: int

    def __post_init__(self) -> None:
        require_positive(self, "drafter", besides=("mask_token_id",))
        _check_heads(self, "drafter")
        ids = self.target_layer_ids
        require(
            len(ids) > 0 and list(ids) == sorted(set(ids)) and ids[0] >= 0,
            "drafter.target_layer_ids",
            ids,
            "increasing 0-based layer ids, at least one",
        )
        # The last layer's output is often only to be had after the final norm: never tapped.
        require(
            ids[-1] < self.num_target_layers - 1,
            "drafter.target_layer_ids",
            ids,
            f"ids below {self.num_target_layers - 1}, the target's last layer",
        )
        require(
            0 <= self.mask_token_id < self.vocab_size,
            "drafter.mask_token_id",
            self.mask_token_id,
            f"an id in [0, {self.vocab_size})",
        )
        require(self.block_size >= 2, "drafter.block_size", self.block_size, "2 or more")

    @property
    def qk_norm(self) -> bool:
        """Drafter layers always normalise queries and keys (Qwen3 style)."""
        return True


def _check_heads(config: Any, section: str) -> None:
    require(
        config.num_attention_heads % config.num_key_value_heads == 0,
        f"{section}.num_key_value_heads",
        config.num_key_value_heads,
        f"a divisor of num_attention_heads={config.num_attention_heads}",
    )
    require(
        config.head_dim > 0 and config.head_dim % 2 == 0,
        f"{section}.head_dim",
        config.head_dim,
        "an even number above 0",
    )
