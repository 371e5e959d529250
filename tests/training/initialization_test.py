import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dscout_jax.config.checks import ConfigError
from dscout_jax.config.models import TargetConfig
from dscout_jax.models.drafter import init_drafter
from dscout_jax.models.target import apply_target, init_target
from dscout_jax.training.initialization import (
    check_same_shapes,
    copied_layers,
    drafter_config,
    init_from_target,
)

TARGET = TargetConfig(
    vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, rope_theta=10000.0,
    rms_norm_eps=1e-5, tie_word_embeddings=True, qk_norm=False, max_position_embeddings=128,
)  # fmt: skip


def make_config(num_hidden_layers=2, target_layer_ids=(0, 1, 2), target=TARGET):
    return drafter_config(
        target,
        num_hidden_layers=num_hidden_layers,
        target_layer_ids=target_layer_ids,
        mask_token_id=60,
        block_size=4,
    )


@functools.cache
def make_params(config=None, target=TARGET):
    config = make_config(target=target) if config is None else config
    target_params = jax.jit(init_target, static_argnums=1)(jax.random.key(0), target)
    tokens = jax.random.randint(jax.random.key(1), (2, 16), 0, 60)
    length = jnp.asarray([16, 9])
    params = jax.jit(init_from_target, static_argnums=(1, 3))(
        jax.random.key(2), config, target_params, target, tokens, length
    )
    return params, target_params, tokens, length


def test_copied_layers_end_with_the_one_that_reads_the_deepest_tap():
    target = dataclasses.replace(TARGET, num_hidden_layers=30)
    assert copied_layers(make_config(3, (1, 8, 14, 21, 27), target)) == (26, 27, 28)
    with pytest.raises(ConfigError, match="drafter.num_hidden_layers=3 .* use at most 2"):
        copied_layers(make_config(3, (0,), target))


def test_the_tree_is_that_of_a_drafter_with_random_weights():
    random = jax.eval_shape(lambda key: init_drafter(key, make_config()), jax.random.key(0))
    check_same_shapes(make_params()[0], random)


def test_layers_and_norms_are_the_targets_own():
    params, target_params, _, _ = make_params()
    for index, source in enumerate((2, 3)):
        ours, theirs = params[f"layers_{index}"], target_params[f"layers_{source}"]
        attention = {k: v for k, v in ours["self_attn"].items() if not k.endswith("norm")}
        jax.tree.map(np.testing.assert_array_equal, attention, theirs["self_attn"])
        jax.tree.map(np.testing.assert_array_equal, ours["mlp"], theirs["mlp"])
    assert params["norm"]["scale"].shape == target_params["norm"]["scale"].shape


def test_fc_passes_the_deepest_tap_on():
    params, target_params, tokens, _ = make_params()
    taps = apply_target(target_params, TARGET, tokens, tap_ids=(0, 1, 2)).taps
    passed = taps @ params["fc"]["weight"].T
    deepest = taps[..., -32:]
    error = jnp.linalg.norm(passed - deepest) / jnp.linalg.norm(deepest)
    assert 0 < error < 0.1


def test_norm_scales_equal_the_size_of_the_targets_queries_and_keys():
    params, target_params, tokens, length = make_params()
    hidden = apply_target(target_params, TARGET, tokens, tap_ids=(1, 2)).taps
    for index, x in enumerate(np.split(np.asarray(hidden), 2, axis=-1)):
        x = np.concatenate([row[:n] for row, n in zip(x, length, strict=True)])
        x = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-5)
        attention = params[f"layers_{index}"]["self_attn"]
        for name in ("q", "k"):
            size = np.sqrt(np.mean((x @ attention[f"{name}_proj"]["weight"].T) ** 2))
            np.testing.assert_allclose(attention[f"{name}_norm"]["scale"], size, rtol=1e-4)


def test_a_target_with_its_own_query_and_key_norms_lends_them():
    target = dataclasses.replace(TARGET, qk_norm=True)
    params, target_params, _, _ = make_params(target=target)
    for name in ("q_norm", "k_norm"):
        ours, theirs = params["layers_1"]["self_attn"], target_params["layers_3"]["self_attn"]
        np.testing.assert_array_equal(ours[name]["scale"], theirs[name]["scale"])


def test_another_width_than_the_targets_is_refused():
    config = dataclasses.replace(make_config(), intermediate_size=40)
    with pytest.raises(ConfigError, match="drafter.intermediate_size=40 .* use 48"):
        make_params(config)


def test_a_warm_start_with_other_shapes_names_them():
    params, _, _, _ = make_params()
    check_same_shapes(params, params)
    layer = {name: value for name, value in params["layers_1"].items() if name != "mlp"}
    other = {**params, "fc": {"weight": jnp.zeros((32, 32))}, "layers_1": layer}
    with pytest.raises(
        ConfigError, match=r"4 differ, first .*fc.*\(32, 32\) instead of \(32, 96\)"
    ):
        check_same_shapes(other, params)
