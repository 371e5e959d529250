"""Parts shared by target and drafter: RMS norm, rotary positions, attention, gated MLP, layer.

Statistics of norms and the softmax are in float32 whatever the dtype of the inputs.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from dscout_jax.kernels import attention
from dscout_jax.kernels.product import product

# Finite, so that a fully masked query gives a mean of values (masked later) instead of NaN.
MASKED_SCORE = -1e30


class Dense(nn.Module):
    """x @ weight.T without bias; the weight is [out, in], as checkpoints have it.

    All leading axes are joined: with several of them XLA's CPU backend takes the gradient of the
    weight far more slowly than the same product of two matrices.
    """

    features: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., in] -> [..., features]."""
        initializer = nn.initializers.lecun_normal(in_axis=-1, out_axis=-2)
        weight = self.param("weight", initializer, (self.features, x.shape[-1]))
        flat = product(x.reshape(-1, x.shape[-1]), weight)
        return flat.reshape(*x.shape[:-1], self.features)


class RMSNorm(nn.Module):
    """x / rms(x) * scale over the last axis, with the rounding order of the Hugging Face models.

    Source: Zhang and Sennrich 2019, equation 4.
    """

    eps: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the normalised input; same shape and dtype."""
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        x32 = x.astype(jnp.float32)
        inverse = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + self.eps)
        shape = (1,) * (x.ndim - 1) + (-1,)
        return (x32 * inverse).astype(x.dtype) * scale.astype(x.dtype).reshape(shape)


def rotary_table(positions: jax.Array, head_dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """Returns cos and sin, each [..., H/2] float32, of absolute `positions` [...].

    Source: Su et al. 2021, equation 34, in the half-split layout of Hugging Face.
    """
    frequency = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)  # [H/2]
    frequency = frequency.reshape((1,) * positions.ndim + (-1,))
    angle = positions.astype(jnp.float32)[..., None] * frequency
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x: jax.Array, rotary: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates pairs (i, i + H/2) of `x` [..., heads, H] by the table [..., H/2]."""
    cos, sin = (table[..., None, :].astype(x.dtype) for table in rotary)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def group_queries(q: jax.Array, num_kv_heads: int) -> jax.Array:
    """[..., T, N, H] -> [..., K_h, (N/K_h) * T, H]: query heads of one key head together."""
    *lead, t, n, h = q.shape
    q = jnp.moveaxis(q.reshape(*lead, t, num_kv_heads, n // num_kv_heads, h), -4, -2)
    return q.reshape(*lead, num_kv_heads, (n // num_kv_heads) * t, h)


def ungroup_queries(out: jax.Array, num_tokens: int) -> jax.Array:
    """[..., K_h, (N/K_h) * T, H] -> [..., T, N * H], undoes `group_queries` and joins the heads."""
    *lead, k, gt, h = out.shape
    out = jnp.moveaxis(out.reshape(*lead, k, gt // num_tokens, num_tokens, h), -2, -4)
    return out.reshape(*lead, num_tokens, k * (gt // num_tokens) * h)


def attend(
    q: jax.Array,
    rotary: tuple[jax.Array, jax.Array],
    k: jax.Array,
    v: jax.Array,
    visible: jax.Array,
) -> jax.Array:
    """Grouped-query attention over a cache; each query sees a prefix of it.

    Args:
        q: [B, T, N, H] queries, not rotated yet.
        rotary: `rotary_table` of their positions.
        k: [B, K_h, S, H] rotated keys, in the layout of the cache: it is read without a copy.
        v: [B, K_h, S, H].
        visible: [B, T] int32 in [1, S], the number of keys that each query sees.

    Returns:
        [B, T, N * H] in the dtype of `q`.

    Source: Ainslie et al. 2023 (GQA); scale H**-0.5.
    """
    if attention.usable(q, k):
        return jax.lax.platform_dependent(
            q, rotary, k, v, visible, cpu=attention.cached_attention, default=_attend_masked
        )
    return _attend_masked(q, rotary, k, v, visible)


def _attend_masked(q, rotary, k, v, visible):
    num_tokens, num_heads, head_dim = q.shape[1:]
    num_kv_heads = k.shape[1]
    grouped = group_queries(rotate(q, rotary) * head_dim**-0.5, num_kv_heads)  # [B, K_h, gT, H]
    scores = jnp.einsum("bkrh,bksh->bkrs", grouped, k, preferred_element_type=jnp.float32)
    repeats = num_heads // num_kv_heads
    mask = jnp.arange(k.shape[2])[None, None] < visible[:, :, None]  # [B, T, S]
    mask = jnp.tile(mask[:, None], (1, 1, repeats, 1))  # [B, 1, gT, S]
    weights = jax.nn.softmax(jnp.where(mask, scores, MASKED_SCORE), axis=-1)
    out = jnp.einsum("bkrs,bksh->bkrh", weights.astype(v.dtype), v)
    return ungroup_queries(out, num_tokens)


class Attention(nn.Module):
    """Projections of one attention layer; who attends to whom is the caller's business."""

    config: object

    def setup(self) -> None:
        """Declares the projections under Hugging Face's names."""
        cfg = self.config
        width_q = cfg.num_attention_heads * cfg.head_dim
        width_kv = cfg.num_key_value_heads * cfg.head_dim
        self.q_proj = Dense(width_q)
        self.k_proj = Dense(width_kv)
        self.v_proj = Dense(width_kv)
        self.o_proj = Dense(cfg.hidden_size)
        if cfg.qk_norm:
            self.q_norm = RMSNorm(cfg.rms_norm_eps)
            self.k_norm = RMSNorm(cfg.rms_norm_eps)

    def queries(self, x: jax.Array) -> jax.Array:
        """Queries [..., T, N, H], not rotated yet, of normalised inputs [..., T, D]."""
        cfg = self.config
        q = self.q_proj(x).reshape(*x.shape[:-1], cfg.num_attention_heads, cfg.head_dim)
        return self.q_norm(q) if cfg.qk_norm else q

    def keys_values(
        self, x: jax.Array, rotary: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        """Rotated keys and values, each [..., K_h, T, H], of inputs [..., T, D]."""
        cfg = self.config
        shape = (*x.shape[:-1], cfg.num_key_value_heads, cfg.head_dim)
        k, v = self.k_proj(x).reshape(shape), self.v_proj(x).reshape(shape)
        if cfg.qk_norm:
            k = self.k_norm(k)
        return jnp.swapaxes(rotate(k, rotary), -3, -2), jnp.swapaxes(v, -3, -2)

    def output(self, attended: jax.Array) -> jax.Array:
        """[..., T, N * H] -> [..., T, D]."""
        return self.o_proj(attended)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)). Source: Shazeer 2020 (SwiGLU)."""

    config: object

    def setup(self) -> None:
        """Declares the three projections under Hugging Face's names."""
        width = self.config.intermediate_size
        self.gate_proj = Dense(width)
        self.up_proj = Dense(width)
        self.down_proj = Dense(self.config.hidden_size)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., D] -> [..., D]."""
        return self.down_proj(nn.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """A pre-norm layer in two halves, so that the caller supplies the attention between them."""

    config: object

    def setup(self) -> None:
        """Declares norms, attention projections and MLP under Hugging Face's names."""
        self.input_layernorm = RMSNorm(self.config.rms_norm_eps)
        self.self_attn = Attention(self.config)
        self.post_attention_layernorm = RMSNorm(self.config.rms_norm_eps)
        self.mlp = GatedMLP(self.config)

    def project(self, x: jax.Array, rotary: tuple[jax.Array, jax.Array]):
        """Queries [..., T, N, H], rotated keys and values [..., K_h, T, H] of the residual."""
        x = self.input_layernorm(x)
        return self.self_attn.queries(x), *self.self_attn.keys_values(x, rotary)

    def finish(self, x: jax.Array, attended: jax.Array) -> jax.Array:
        """Residual [..., T, D] after attention output [..., T, N * H] and MLP are added."""
        x = x + self.self_attn.output(attended)
        return x + self.mlp(self.post_attention_layernorm(x))
