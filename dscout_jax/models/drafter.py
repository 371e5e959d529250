"""The block-diffusion drafter (DFlash family): target features in, a block of hidden states out.

The drafter owns neither embedding nor head; both are the target's. A block of G slots holds the
anchor token in slot 0 and the mask token elsewhere, attends to the context (all positions strictly
before the anchor) and to itself in both directions, and slot j predicts the token at anchor + j.

One function, `draft_blocks`, serves training (A blocks in every row) and decoding (A = 1).
Depth d is `num_layers`, the nested taps are `taps`: both cut one set of weights.

Source: METHOD section 1; z-lab DFlash.
"""

from collections.abc import Sequence

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from dscout_jax.config.models import DrafterConfig
from dscout_jax.kernels import attention
from dscout_jax.models.layers import (
    MASKED_SCORE,
    DecoderLayer,
    Dense,
    RMSNorm,
    group_queries,
    rotary_table,
    rotate,
    ungroup_queries,
)


@flax.struct.dataclass
class Context:
    """Context keys and values of the drafter, one row per verified token.

    Attributes:
        keys: per drafter layer [B, K_h, S, H], normalised and rotated.
        values: per drafter layer [B, K_h, S, H].
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]


def block_attention(
    q: jax.Array,
    rotary: tuple[jax.Array, jax.Array],
    context: tuple[jax.Array, jax.Array],
    block: tuple[jax.Array, jax.Array],
    anchors: jax.Array,
    slot_mask: jax.Array | None,
) -> jax.Array:
    """Attention of each block to the context before it and, in both directions, to itself.

    Args:
        q: [B, A, G, N, H] queries, not rotated yet.
        rotary: `rotary_table` of their positions.
        context: keys and values [B, K_h, S, H], shared by the blocks of a row.
        block: keys and values [B, A, K_h, G, H].
        anchors: [B, A] int32; context positions strictly before are visible.
        slot_mask: [B, A, G] boolean, True = the slot serves as a key; None = all do.

    Returns:
        [B, A, G, N * H].
    """
    if q.shape[1] == 1 and slot_mask is None and attention.usable(q[:, 0], context[0]):
        return _one_block(q, rotary, context, block, anchors)
    return _blocks_masked(q, rotary, context, block, anchors, slot_mask)


@jax.custom_jvp
def _one_block(q, rotary, context, block, anchors):
    return jax.lax.platform_dependent(
        q, rotary, context, block, anchors, cpu=_one_block_on_cpu, default=_blocks_masked
    )


@_one_block.defjvp
def _one_block_jvp(primals, tangents):
    return jax.jvp(_blocks_masked, primals, tangents)


def _one_block_on_cpu(q, rotary, context, block, anchors):
    visible = jnp.minimum(anchors, context[0].shape[2])  # [B, 1]
    visible = jnp.broadcast_to(visible, (q.shape[0], q.shape[2]))
    q, rotary, block = jax.tree.map(lambda part: part[:, 0], (q, rotary, block))
    return attention.cached_attention(q, rotary, *context, visible, block)[:, None]


def _blocks_masked(q, rotary, context, block, anchors, slot_mask=None):
    batch, num_blocks, num_slots, num_heads, head_dim = q.shape
    num_kv_heads, num_keys = context[0].shape[1:3]
    repeats = num_heads // num_kv_heads
    grouped = group_queries(rotate(q, rotary) * head_dim**-0.5, num_kv_heads)  # [B, A, K_h, gG, H]
    # All blocks of a row meet the context in one product: [B, K_h, A * gG, H] x [B, K_h, S, H].
    flat = jnp.swapaxes(grouped, 1, 2).reshape(batch, num_kv_heads, -1, head_dim)
    to_context = jnp.einsum(
        "bkrh,bksh->bkrs", flat, context[0], preferred_element_type=jnp.float32
    ).reshape(batch, num_kv_heads, num_blocks, repeats * num_slots, num_keys)
    to_block = jnp.einsum("bakrh,bakgh->bkarg", grouped, block[0]).astype(jnp.float32)

    before = jnp.arange(num_keys)[None, None, :] < anchors[:, :, None]  # [B, A, S]
    to_context = jnp.where(before[:, None, :, None, :], to_context, MASKED_SCORE)
    if slot_mask is not None:
        to_block = jnp.where(slot_mask[:, None, :, None, :], to_block, MASKED_SCORE)
    # One softmax over both parts, without joining them: a copy of the scores costs more than them.
    peak = jnp.maximum(to_context.max(axis=-1), to_block.max(axis=-1))
    peak = jax.lax.stop_gradient(peak)[..., None]
    on_context, on_block = jnp.exp(to_context - peak), jnp.exp(to_block - peak)
    total = on_context.sum(axis=-1) + on_block.sum(axis=-1)  # [B, K_h, A, gG]
    on_context = on_context.astype(q.dtype).reshape(batch, num_kv_heads, -1, num_keys)
    out = jnp.einsum("bkrs,bksh->bkrh", on_context, context[1]).reshape(
        batch, num_kv_heads, num_blocks, repeats * num_slots, head_dim
    )
    out = out + jnp.einsum("bkarg,bakgh->bkarh", on_block.astype(q.dtype), block[1])
    out = out / total[..., None].astype(q.dtype)
    return ungroup_queries(jnp.swapaxes(out, 1, 2), num_slots)


class Drafter(nn.Module):
    """Linen module behind `project_context` and `draft_blocks`."""

    config: DrafterConfig

    def setup(self) -> None:
        """Declares fc, hidden_norm, layers and norm under z-lab's names."""
        cfg = self.config
        self.fc = Dense(cfg.hidden_size)
        self.hidden_norm = RMSNorm(cfg.rms_norm_eps)
        self.layers = [DecoderLayer(cfg) for _ in range(cfg.num_hidden_layers)]
        self.norm = RMSNorm(cfg.rms_norm_eps)

    def context(self, features, positions, num_layers):
        """See `project_context`."""
        cfg = self.config
        context = self.hidden_norm(self.fc(features))
        rotary = rotary_table(positions, cfg.head_dim, cfg.rope_theta)
        # No input_layernorm here: the context enters the projections as it is.
        pairs = [layer.self_attn.keys_values(context, rotary) for layer in self.layers[:num_layers]]
        return Context(tuple(k for k, _ in pairs), tuple(v for _, v in pairs))

    def blocks(self, embeddings, positions, context, slot_mask, num_layers, exits, remat):
        """See `draft_blocks`."""
        cfg = self.config
        rotary = rotary_table(positions, cfg.head_dim, cfg.rope_theta)
        anchors = positions[:, :, 0]
        x = embeddings
        outputs = []
        for index in range(len(self.layers[:num_layers])):

            def run(module, x, pair, index=index):
                layer = module.layers[index]
                q, k, v = layer.project(x, rotary)
                attended = block_attention(q, rotary, pair, (k, v), anchors, slot_mask)
                return layer.finish(x, attended)

            pair = (context.keys[index], context.values[index])
            x = (nn.remat(run) if remat else run)(self, x, pair)
            if exits and index + 1 in exits:
                outputs.append(self.norm(x))
        return jnp.stack(outputs) if exits else self.norm(x)

    def everything(self, features, embeddings):
        """Touches every parameter once, for initialisation."""
        context = self.context(features, jnp.zeros((1, 1), jnp.int32), None)
        position = jnp.zeros((1, 1, 1), jnp.int32)
        return self.blocks(embeddings, position, context, None, None, None, False)


@flax.struct.dataclass
class BlockInputs:
    """Input side of A blocks of G slots.

    Attributes:
        tokens: [B, A, G] int32, the anchor in slot 0, the mask id elsewhere.
        positions: [B, A, G] int32 absolute positions, anchor + slot.
    """

    tokens: jax.Array
    positions: jax.Array


def block_inputs(
    anchor_tokens: jax.Array,
    anchors: jax.Array,
    *,
    block_size: int,
    mask_token_id: int,
) -> BlockInputs:
    """Builds what the drafter sees of blocks that start at `anchors`.

    Args:
        anchor_tokens: [B, A] int32 token at each anchor.
        anchors: [B, A] int32 absolute positions.
        block_size: G, static.
        mask_token_id: id of the masked slots.
    """
    shape = (*anchors.shape, block_size)
    slots = jnp.arange(block_size)[None, None, :]
    known = jnp.broadcast_to(anchor_tokens[:, :, None], shape)
    return BlockInputs(
        tokens=jnp.where(slots == 0, known, mask_token_id),
        positions=anchors[:, :, None] + slots,
    )


def init_drafter(key: jax.Array, config: DrafterConfig) -> dict:
    """Returns random float32 params of a drafter (nested dict, weights [out, in])."""
    width = config.hidden_size
    features = jax.ShapeDtypeStruct((1, 1, len(config.target_layer_ids) * width), jnp.float32)
    embeddings = jax.ShapeDtypeStruct((1, 1, 1, width), jnp.float32)
    made = Drafter(config).lazy_init(key, features, embeddings, method=Drafter.everything)
    return made["params"]


def select_taps(params: dict, config: DrafterConfig, taps: Sequence[int] | None) -> dict:
    """Returns params whose `fc` keeps only the column blocks of the chosen taps.

    Args:
        params: drafter weights.
        config: shapes of the whole drafter.
        taps: indices into `config.target_layer_ids`, increasing; None = all. The features given to
            `project_context` must then hold the same taps in the same order.
    """
    if taps is None or tuple(taps) == tuple(range(len(config.target_layer_ids))):
        return params
    width = config.hidden_size
    weight = params["fc"]["weight"].reshape(width, len(config.target_layer_ids), width)
    weight = weight[:, jnp.asarray(taps)].reshape(width, len(taps) * width)
    return {**params, "fc": {"weight": weight}}


def select_features(
    features: jax.Array, config: DrafterConfig, taps: Sequence[int] | None
) -> jax.Array:
    """Returns the columns [..., len(taps) * D] of `features` [..., C * D] that `taps` name."""
    if taps is None:
        return features
    apart = features.reshape(*features.shape[:-1], -1, config.hidden_size)
    return apart[..., jnp.asarray(taps), :].reshape(*features.shape[:-1], -1)


def project_context(
    params: dict,
    config: DrafterConfig,
    features: jax.Array,
    positions: jax.Array,
    *,
    num_layers: int | None = None,
) -> Context:
    """Returns the context keys and values of T tokens, [B, K_h, T, H] per layer.

    Args:
        params: drafter weights (after `select_taps` when taps are cut).
        config: their shapes.
        features: [B, T, C * D] residual stream of the target after the tapped layers.
        positions: [B, T] int32 absolute positions.
        num_layers: static depth d; None = all layers.
    """
    return Drafter(config).apply(
        {"params": params}, features, positions, num_layers, method=Drafter.context
    )


def draft_blocks(
    params: dict,
    config: DrafterConfig,
    embeddings: jax.Array,
    positions: jax.Array,
    context: Context,
    *,
    slot_mask: jax.Array | None = None,
    num_layers: int | None = None,
    exits: tuple[int, ...] | None = None,
    remat: bool = False,
) -> jax.Array:
    """Denoises A blocks of every row in one pass.

    Args:
        params: drafter weights.
        config: their shapes.
        embeddings: [B, A, G, D] target embeddings of the block's tokens (anchor, then masks).
        positions: [B, A, G] int32, anchor position + slot.
        context: of `project_context`, S positions; a block sees those strictly before its anchor.
        slot_mask: [B, A, G] boolean; False removes a slot as a key (its output means nothing).
        num_layers: static depth d; None = all layers.
        exits: static, increasing numbers of layers; the output after each of them, all through the
            final norm, is returned.
        remat: static; keep only the layers' inputs for the backward pass and run each layer again.

    Returns:
        [B, A, G, D] after the final norm, [E, B, A, G, D] with `exits`; the target's head turns
        slot j into logits for the token at anchor + j. Slot 0 means nothing.
    """
    return Drafter(config).apply(
        {"params": params},
        embeddings,
        positions,
        context,
        slot_mask,
        num_layers,
        exits,
        remat,
        method=Drafter.blocks,
    )
