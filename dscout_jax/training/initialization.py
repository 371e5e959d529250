"""First weights of a drafter: random, or grown from the target's own layers.

A drafter that starts as a copy of the target's deep layers, fed with the deepest tap, begins close
to a working model and needs far fewer steps than one from random weights. What a copy lacks is
made up here: `fc` passes the deepest tap on, and the norms of queries and keys, which a Llama
target does not have, start at the size that the target's own queries and keys have.
"""

import jax
import jax.numpy as jnp

from dscout_jax.config.checks import ConfigError
from dscout_jax.config.experiment import DrafterSection
from dscout_jax.config.models import DrafterConfig, TargetConfig
from dscout_jax.models.target import apply_target

_NOISE = 0.02  # of the deepest tap's weight in `fc`; breaks the ties between the other taps
_SHARED = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rope_theta",
    "rms_norm_eps",
)


def copied_layers(config: DrafterConfig) -> tuple[int, ...]:
    """Returns the target layers that the drafter starts from, 0-based.

    They end with the layer that follows the deepest tap: its input is what that tap shows.
    Example: 3 layers, deepest tap 27 of 30 layers: (26, 27, 28).

    Raises:
        ConfigError: the deepest tap has fewer layers below it than the drafter needs.
    """
    last = config.target_layer_ids[-1] + 1
    first = last - config.num_hidden_layers + 1
    if first < 0:
        raise ConfigError(
            f"drafter.num_hidden_layers={config.num_hidden_layers} is not allowed with "
            f"drafter.init='target_layers'; use at most {last + 1}, or tap a deeper layer than "
            f"{last - 1}"
        )
    return tuple(range(first, last + 1))


def init_from_target(
    key: jax.Array,
    config: DrafterConfig,
    target_params: dict,
    target_config: TargetConfig,
    tokens: jax.Array,
    length: jax.Array,
) -> dict:
    """Returns drafter weights grown from the target's layers `copied_layers(config)`.

    - layer i: the target's attention, MLP and norms; `q_norm` and `k_norm` are the target's where
      it has them, else constant at the root mean square of its q / k projections (over tokens,
      heads and elements), so that attention scores start at the target's own size;
    - `fc`: identity on the deepest tap plus normal noise; `hidden_norm`: the input norm of the
      layer after that tap; `norm`: the target's final norm.

    Args:
        key: PRNG key of the noise.
        config: shapes of the drafter; must equal the target's in width, MLP and heads.
        target_params: weights of the target.
        target_config: their shapes.
        tokens: [B, T] int32, ordinary text to measure on; a few rows suffice.
        length: [B] int32, valid tokens of each row.

    Raises:
        ConfigError: a shape differs from the target's, or `copied_layers` does.
    """
    for name in _SHARED:
        given, needed = getattr(config, name), getattr(target_config, name)
        if given != needed:
            raise ConfigError(
                f"drafter.{name}={given} is not allowed with drafter.init='target_layers'; "
                f"use {needed}, the target's"
            )
    layers = copied_layers(config)
    params = {}
    if target_config.qk_norm:
        scales = {i: None for i in layers}
    else:
        scales = _measure_scales(target_params, target_config, layers, tokens, length)
    for index, source in enumerate(layers):
        layer = target_params[f"layers_{source}"]
        attention = dict(layer["self_attn"])
        if scales[source] is not None:
            for name, scale in zip(("q_norm", "k_norm"), scales[source], strict=True):
                attention[name] = {"scale": jnp.full((config.head_dim,), scale, jnp.float32)}
        params[f"layers_{index}"] = {**layer, "self_attn": attention}
    width, num_taps = config.hidden_size, len(config.target_layer_ids)
    deepest = jnp.eye(width, num_taps * width, (num_taps - 1) * width)
    noise = jax.random.normal(key, deepest.shape) * (_NOISE / num_taps * width**-0.5)
    params["fc"] = {"weight": deepest + noise}
    params["hidden_norm"] = target_params[f"layers_{layers[-1]}"]["input_layernorm"]
    params["norm"] = target_params["norm"]
    return params


def _measure_scales(
    params: dict,
    config: TargetConfig,
    layers: tuple[int, ...],
    tokens: jax.Array,
    length: jax.Array,
) -> dict[int, tuple[jax.Array, jax.Array]]:
    """Root mean squares of the un-normalised queries and keys of each layer."""
    # The input of layer i is the output of layer i - 1; layer 0 reads the embeddings.
    taps = tuple(i - 1 for i in layers if i > 0)
    output = apply_target(params, config, tokens, tap_ids=taps, num_layers=max(taps) + 1)
    inputs = dict(zip(taps, jnp.split(output.taps, len(taps), axis=-1), strict=True))
    inputs[-1] = params["embed_tokens"]["embedding"][tokens]
    valid = jnp.arange(tokens.shape[1])[None, :] < length[:, None]  # [B, T]
    scales = {}
    for layer in layers:
        weights = params[f"layers_{layer}"]
        x = inputs[layer - 1].astype(jnp.float32)
        x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + config.rms_norm_eps)
        x = x * weights["input_layernorm"]["scale"].reshape(1, 1, -1)
        projected = (x @ weights["self_attn"][name]["weight"].T for name in ("q_proj", "k_proj"))
        scales[layer] = tuple(
            jnp.sqrt(jnp.mean(jnp.square(y), axis=-1).mean(where=valid)) for y in projected
        )
    return scales


def check_same_shapes(given: dict, expected: dict) -> None:
    """Compares two weight trees, for a warm start.

    Raises:
        ConfigError: names or shapes differ; the message lists the first few.
    """
    shapes = [
        {jax.tree_util.keystr(path): leaf.shape for path, leaf in jax.tree.leaves_with_path(tree)}
        for tree in (given, expected)
    ]
    differing = [
        f"{name}: {shapes[0].get(name, 'absent')} instead of {shapes[1].get(name, 'absent')}"
        for name in sorted(shapes[0].keys() | shapes[1].keys())
        if shapes[0].get(name) != shapes[1].get(name)
    ]
    if differing:
        raise ConfigError(
            f"drafter.init: the given drafter has other weights than the configured one; "
            f"{len(differing)} differ, first {'; '.join(differing[:3])}"
        )


def drafter_config(
    target: TargetConfig,
    *,
    num_hidden_layers: int,
    target_layer_ids: tuple[int, ...],
    mask_token_id: int,
    block_size: int,
) -> DrafterConfig:
    """Returns a drafter with the target's width, MLP, heads, rotary base and vocabulary."""
    shared = {name: getattr(target, name) for name in _SHARED}
    return DrafterConfig(
        **shared,
        num_hidden_layers=num_hidden_layers,
        vocab_size=target.vocab_size,
        num_target_layers=target.num_hidden_layers,
        target_layer_ids=target_layer_ids,
        mask_token_id=mask_token_id,
        block_size=block_size,
    )


def drafter_of(target: TargetConfig, section: DrafterSection) -> DrafterConfig:
    """Returns the shapes of the drafter that an experiment's section describes."""
    return drafter_config(
        target,
        num_hidden_layers=section.num_hidden_layers,
        target_layer_ids=section.target_layer_ids,
        mask_token_id=section.mask_token_id,
        block_size=section.block_size,
    )
