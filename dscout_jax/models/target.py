"""The frozen target: decoder-only transformer (Llama family, Qwen3 by configuration)."""

from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from dscout_jax.config.models import TargetConfig
from dscout_jax.kernels.product import product
from dscout_jax.models.cache import KVCache, write
from dscout_jax.models.layers import DecoderLayer, Dense, RMSNorm, attend, rotary_table


@flax.struct.dataclass
class TargetOutput:
    """What one pass of the target returns.

    Attributes:
        hidden: [B, T, D] after the final norm; `compute_logits` turns it into logits. With
            `num_layers` given it is None: the final norm belongs to the last layer's output.
        taps: [B, T, C * D] residual stream after the tapped layers, in list order; None without.
        cache: the cache with T more valid positions in each active row; None without one.
    """

    hidden: jax.Array | None
    taps: jax.Array | None
    cache: KVCache | None


class Target(nn.Module):
    """Linen module behind `apply_target` and `compute_logits`."""

    config: TargetConfig

    def setup(self) -> None:
        """Declares embedding, layers, norm and, when untied, the head."""
        cfg = self.config
        self.embed_tokens = nn.Embed(cfg.vocab_size, cfg.hidden_size)
        self.layers = [DecoderLayer(cfg) for _ in range(cfg.num_hidden_layers)]
        self.norm = RMSNorm(cfg.rms_norm_eps)
        if not cfg.tie_word_embeddings:
            self.lm_head = Dense(cfg.vocab_size)

    def __call__(self, tokens, cache, tap_ids, active, num_layers):
        """See `apply_target`."""
        cfg = self.config
        batch, num_tokens = tokens.shape
        steps = jnp.arange(num_tokens)[None, :]
        start = jnp.zeros((batch,), jnp.int32) if cache is None else cache.length
        positions = start[:, None] + steps  # [B, T]
        rotary = rotary_table(positions, cfg.head_dim, cfg.rope_theta)
        capacity = num_tokens if cache is None else cache.capacity
        # A query sees itself and all before it; past the buffer's end nothing more can be seen.
        visible = jnp.minimum(positions + 1, capacity)
        # A finished row writes past the end of its buffer, where writes are dropped.
        offset = start if active is None else jnp.where(active, start, capacity)

        x = self.embed_tokens(tokens)
        keys, values, taps = [], [], []
        for index, layer in enumerate(self.layers[:num_layers]):
            q, k, v = layer.project(x, rotary)
            if cache is not None:
                k = write(cache.keys[index], k, offset)
                v = write(cache.values[index], v, offset)
                keys.append(k)
                values.append(v)
            x = layer.finish(x, attend(q, rotary, k, v, visible))
            if index in tap_ids:
                taps.append(x)
        if cache is not None:
            length = start + num_tokens
            length = length if active is None else jnp.where(active, length, start)
            cache = KVCache(tuple(keys), tuple(values), length)
        return TargetOutput(
            hidden=self.norm(x) if num_layers is None else None,
            taps=jnp.concatenate(taps, axis=-1) if tap_ids else None,
            cache=cache,
        )

    def tail(self, residual, first_layer):
        """See `finish_target`."""
        cfg = self.config
        positions = jnp.broadcast_to(jnp.arange(residual.shape[1])[None], residual.shape[:2])
        rotary = rotary_table(positions, cfg.head_dim, cfg.rope_theta)
        x = residual
        for layer in self.layers[first_layer:]:
            q, k, v = layer.project(x, rotary)
            x = layer.finish(x, attend(q, rotary, k, v, positions + 1))
        return self.norm(x)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """See `compute_logits`."""
        if self.config.tie_word_embeddings:
            logits = apply_head(self.embed_tokens.embedding, hidden)
        else:
            logits = self.lm_head(hidden)
        return logits.astype(jnp.float32)

    def everything(self, tokens: jax.Array) -> jax.Array:
        """Touches every parameter once, for initialisation."""
        return self.logits(self(tokens, None, (), None, None).hidden)


def init_target(key: jax.Array, config: TargetConfig) -> dict:
    """Returns random float32 params of a target (nested dict, weights [out, in])."""
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    return Target(config).lazy_init(key, tokens, method=Target.everything)["params"]


def round_matrices(params: dict, dtype: Any) -> dict:
    """Returns target weights with matrices [out, in] rounded, so that they multiply in `dtype`.

    The embedding, and with it a tied head, the norms, activations and caches stay as they are.
    """

    def rounded(path: tuple, x: jax.Array) -> jax.Array:
        return x.astype(dtype) if path[-1].key == "weight" and x.ndim == 2 else x

    return jax.tree_util.tree_map_with_path(rounded, params)


def apply_target(
    params: dict,
    config: TargetConfig,
    tokens: jax.Array,
    *,
    cache: KVCache | None = None,
    tap_ids: tuple[int, ...] = (),
    active: jax.Array | None = None,
    num_layers: int | None = None,
) -> TargetOutput:
    """Runs the target over T tokens of each row.

    Args:
        params: target weights.
        config: their shapes.
        tokens: [B, T] int32.
        cache: None for a full forward from position 0; otherwise token j of row b stands at
            position `cache.length[b] + j`, is written there, and sees everything before it. The
            caller sees to `length + T <= S`; what does not fit is not written.
        tap_ids: static, increasing 0-based layers whose output (residual stream) is returned.
        active: [B] boolean; rows that are False neither write nor advance. None = all.
        num_layers: static; stop after this many layers (features only, no `hidden`).

    Returns:
        `TargetOutput`.

    Source: METHOD section 1 (taps are taken after layer i, before the final norm).
    """
    return Target(config).apply(
        {"params": params}, tokens, cache, tuple(tap_ids), active, num_layers
    )


def finish_target(
    params: dict, config: TargetConfig, residual: jax.Array, first_layer: int
) -> jax.Array:
    """Returns the final hidden states [B, T, D] of rows whose residual stream is known half-way.

    Args:
        params: target weights; those of `tail_params` are enough.
        config: their shapes.
        residual: [B, T, D] residual stream before layer `first_layer`, positions 0 to T - 1; a tap
            of layer `first_layer - 1`.
        first_layer: static, 0-based first layer to run.
    """
    return Target(config).apply({"params": params}, residual, first_layer, method=Target.tail)


def tail_params(params: dict, config: TargetConfig, first_layer: int) -> dict:
    """Returns the weights that `finish_target` reads: layers from `first_layer` on, final norm."""
    names = [f"layers_{index}" for index in range(first_layer, config.num_hidden_layers)]
    return {name: params[name] for name in (*names, "norm")}


def compute_logits(params: dict, config: TargetConfig, hidden: jax.Array) -> jax.Array:
    """Returns float32 logits [..., V] of final hidden states [..., D]."""
    return Target(config).apply({"params": params}, hidden, method=Target.logits)


def embed(params: dict, tokens: jax.Array) -> jax.Array:
    """Returns the target's embeddings [..., D] of `tokens` [...]."""
    return jnp.take(params["embed_tokens"]["embedding"], tokens, axis=0)


def apply_head(rows: jax.Array, hidden: jax.Array) -> jax.Array:
    """Returns logits [..., V] of `hidden` [..., D] under the head's rows [V, D]."""
    flat = product(hidden.reshape(-1, hidden.shape[-1]), rows)
    return flat.reshape(*hidden.shape[:-1], rows.shape[0])


def head_rows(params: dict, config: TargetConfig, token_ids: jax.Array | None = None) -> jax.Array:
    """Returns the head as rows [V, D], or the rows [Vd, D] of a pruned draft vocabulary.

    Args:
        params: target weights.
        config: their shapes.
        token_ids: [Vd] int32 ids kept in the draft vocabulary; None = all.
    """
    if config.tie_word_embeddings:
        rows = params["embed_tokens"]["embedding"]
    else:
        rows = params["lm_head"]["weight"]
    return rows if token_ids is None else jnp.take(rows, token_ids, axis=0)
