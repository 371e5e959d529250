import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dscout_jax.config.experiment import ObjectiveConfig
from dscout_jax.models.drafter import select_features, select_taps
from dscout_jax.models.target import apply_target, head_rows
from dscout_jax.objective.inclusion import row_keys
from dscout_jax.objective.loss import Frozen, loss_sums, reads_target

OBJECTIVES = {
    "one horizon": ObjectiveConfig(horizons=((8, 6),), chunk_anchors=4),
    "two horizons, uneven chunks": ObjectiveConfig(horizons=((4, 3), (8, 5)), chunk_anchors=2),
    "uniform": ObjectiveConfig(horizons=((4, 5),), weighting="uniform", chunk_anchors=100),
    "reach": ObjectiveConfig(
        horizons=((4, 3), (8, 5)), reveal_rate=0.5, weighting="reach", acceptance="ema", floor=0.05
    ),
    # Combinations of the factors are gone through in slots_test.py, without a model.
    "everything": ObjectiveConfig(
        horizons=((4, 3), (8, 5)),
        reveal="random",
        reveal_rate=1.0,
        weighting="marginal",
        acceptance="overlap",
        weight_warmup=0.5,
        horizon_correction=True,
        prediction="0.3*soft_ce + 0.7*tv + ce",
        chunk_anchors=2,
    ),
}


@pytest.fixture(scope="module")
def batch(tiny):
    tokens = jax.random.randint(jax.random.key(1), (3, 24), 0, 12)
    rows = {
        "tokens": tokens,
        "length": jnp.array([24, 20, 9]),
        "response_start": jnp.array([5, 3, 8]),  # the last row has no valid anchor
    }
    out = apply_target(tiny.params, tiny.target, tokens, tap_ids=(1, 2, 4))
    return rows | {"target_hidden": out.hidden}, out.taps


@pytest.fixture(scope="module")
def frozen(tiny):
    return Frozen(tiny.params["embed_tokens"]["embedding"], head_rows(tiny.params, tiny.target))


def loss(tiny, frozen, features, rows, objective, *, naive=False, params=None):
    def value(params):
        numerator, denominator, sums = loss_sums(
            params,
            frozen,
            features,
            rows,
            row_keys(jax.random.key(3), 0, len(rows["tokens"])),
            config=tiny.drafter,
            objective=objective,
            warmth=0.7,
            acceptance=tuple(jnp.linspace(0.9, 0.2, size - 1) for size, _ in objective.horizons),
            naive=naive,
        )
        return numerator / jnp.maximum(denominator, 1e-9), (denominator, sums)

    params = tiny.drafter_params if params is None else params
    return jax.jit(jax.value_and_grad(value, has_aux=True))(params)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_value_and_gradient_equal_the_naive_twin(tiny, frozen, batch, name):
    rows, features = batch
    (value, (_, sums)), gradient = loss(tiny, frozen, features, rows, OBJECTIVES[name])
    (naive, (_, naive_sums)), naive_gradient = loss(
        tiny, frozen, features, rows, OBJECTIVES[name], naive=True
    )
    np.testing.assert_allclose(value, naive, rtol=1e-6)
    # Sums over chunks run in another order: float32 rounding, nothing more.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), gradient, naive_gradient)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6), sums, naive_sums)


def test_only_what_reads_the_target_asks_for_its_hidden_states(tiny, frozen, batch):
    rows, features = batch
    del (rows := dict(rows))["target_hidden"]
    reading = {name for name, objective in OBJECTIVES.items() if reads_target(objective)}
    assert reading == {"everything"}
    assert reads_target(ObjectiveConfig(horizons=((4, 1),), prediction="0.1*ce + 0.9*tv"))
    assert not reads_target(ObjectiveConfig(horizons=((4, 1),), prediction="expected_length"))
    loss(tiny, frozen, features, rows, OBJECTIVES["reach"])
    with pytest.raises(KeyError, match="target_hidden"):
        loss(tiny, frozen, features, rows, OBJECTIVES["everything"])


def test_soft_labels_are_the_targets_next_token_distributions(tiny, frozen, batch):
    rows, features = batch
    # The drafter's own distribution as target: a divergence of 0 only where they are aligned.
    soft = ObjectiveConfig(horizons=((4, 1),), prediction="soft_ce", weighting="uniform")
    rows = rows | {"response_start": jnp.array([20, 19, 8])}  # row 0: anchors 20 to 22
    (base, _), _ = loss(tiny, frozen, features, rows, soft)
    hidden = rows["target_hidden"]
    for at, seen in ((19, False), (22, True), (23, False)):
        moved = rows | {"target_hidden": hidden.at[0, at].multiply(-1.0)}
        (value, _), _ = loss(tiny, frozen, features, moved, soft)
        # The state at a token says what comes next: position 22 decides about the last token.
        assert (abs(float(value) - float(base)) > 1e-6) == seen, at


ELASTIC = ObjectiveConfig(
    horizons=((8, 6),), depths=((1, 1.0), (2, 3.0)), taps=(((2,), 1.0), ((0, 1, 2), 1.0))
)


@pytest.mark.parametrize("exits", ["sampled", "all"])
def test_elastic_losses_equal_the_naive_twin(tiny, frozen, batch, exits):
    rows, features = batch
    objective = dataclasses.replace(ELASTIC, exits=exits, chunk_anchors=2)
    (value, _), gradient = loss(tiny, frozen, features, rows, objective)
    (naive, _), naive_gradient = loss(tiny, frozen, features, rows, objective, naive=True)
    np.testing.assert_allclose(value, naive, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), gradient, naive_gradient)


@pytest.mark.parametrize("exits", ["sampled", "all"])
def test_a_single_cut_is_the_loss_of_the_cut_drafter(tiny, frozen, batch, exits):
    """One depth and one list of taps: as if layers and columns of fc were not there."""
    rows, features = batch
    objective = ObjectiveConfig(horizons=((8, 6),), depths=((1, 0.5),), taps=(((0, 2), 2.0),))
    objective = dataclasses.replace(objective, exits=exits)
    (value, _), gradient = loss(tiny, frozen, features, rows, objective)
    taps = (0, 2)
    small = dataclasses.replace(tiny.drafter, num_hidden_layers=1, target_layer_ids=(1, 4))
    params = select_taps(tiny.drafter_params, tiny.drafter, taps)
    params = {name: leaf for name, leaf in params.items() if name != "layers_1"}
    cut = SimpleNamespace(drafter=small)
    (expected, _), _ = loss(
        cut, frozen, select_features(features, tiny.drafter, taps), rows,
        ObjectiveConfig(horizons=((8, 6),)), params=params,
    )  # fmt: skip
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(gradient["layers_1"]))
    width = tiny.drafter.hidden_size
    assert not np.any(gradient["fc"]["weight"][:, width : 2 * width])


def test_features_at_or_after_the_anchors_do_not_move_the_loss(tiny, frozen, batch):
    rows, features = batch
    one = dataclasses.replace(OBJECTIVES["uniform"], horizons=((4, 1),))
    # Row 0 has a single eligible anchor, at position 22; rows 1 and 2 have none.
    rows = rows | {"response_start": jnp.array([22, 19, 8])}
    (base, (count, _)), _ = loss(tiny, frozen, features, rows, one)
    assert float(count) == 1.0
    (after, _), _ = loss(tiny, frozen, features.at[0, 22:].add(9.0), rows, one)
    (before, _), _ = loss(tiny, frozen, features.at[0, 21].add(9.0), rows, one)
    (others, _), _ = loss(tiny, frozen, features.at[1:].add(9.0), rows, one)
    assert float(after) == float(base)
    assert abs(float(before) - float(base)) > 1e-6
    assert float(others) == float(base)


def test_a_batch_without_any_anchor_has_zero_sums_and_a_finite_gradient(tiny, frozen, batch):
    rows, features = batch
    rows = rows | {"response_start": rows["length"]}
    (value, (denominator, _)), gradient = loss(
        tiny, frozen, features, rows, OBJECTIVES["one horizon"]
    )
    assert float(value) == 0.0
    assert float(denominator) == 0.0
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(gradient))


def test_padding_and_rows_without_anchors_contribute_nothing(tiny, frozen, batch):
    rows, features = batch
    objective = dataclasses.replace(OBJECTIVES["one horizon"], horizons=((8, 15),))
    (value, _), gradient = loss(tiny, frozen, features, rows, objective)
    poisoned = features.at[1, 20:].set(1e6).at[2].set(-1e6)
    tokens = rows["tokens"].at[1, 20:].set(7).at[2].set(3)
    (same, _), same_gradient = loss(tiny, frozen, poisoned, rows | {"tokens": tokens}, objective)
    np.testing.assert_allclose(value, same, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), gradient, same_gradient)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("count", 15.0), ("blocks", 6.0), ("none", 1.0), ("weights", 6 + 5 * np.exp(-0.5) + 4 / np.e)],
)
def test_normalizers_count_what_they_say(tiny, frozen, batch, name, expected):
    rows, features = batch
    # Row 0: all of its six anchors 17..22; blocks of 4 are cut at 24: 3+3+3+3+2+1 slots.
    rows = rows | {"response_start": jnp.array([17, 20, 9])}
    objective = ObjectiveConfig(horizons=((4, 6),), normalizer=name)
    (_, (denominator, _)), _ = loss(tiny, frozen, features, rows, objective)
    np.testing.assert_allclose(denominator, expected, rtol=1e-6)


def test_a_pruned_vocabulary_restricts_the_softmax_and_cuts_blocks(tiny, frozen, batch):
    rows, features = batch
    kept = jnp.array([0, 1, 2, 3, 4, 5, 6, 7, 9])
    index = jnp.full((13,), -1).at[kept].set(jnp.arange(9))
    pruned = Frozen(frozen.embedding, frozen.head[kept], index)
    (value, (count, _)), _ = loss(tiny, pruned, features, rows, OBJECTIVES["uniform"])
    (_, (whole_count, _)), _ = loss(tiny, frozen, features, rows, OBJECTIVES["uniform"])
    assert 0 < float(count) < float(whole_count)
    assert np.isfinite(float(value))


def test_chunks_need_a_fraction_of_the_memory(tiny, batch):
    """With many blocks and a large vocabulary; read from the compiled programs."""
    rows, features = batch
    objective = ObjectiveConfig(horizons=((8, 16),), chunk_anchors=1)
    table = jnp.zeros((4000, tiny.target.hidden_size))
    large = Frozen(table, table)

    def temporaries(naive):
        def value(params):
            return loss_sums(
                params, large, features, rows, row_keys(jax.random.key(3), 0, 3),
                config=tiny.drafter, objective=objective, naive=naive,
            )[0]  # fmt: skip

        compiled = jax.jit(jax.grad(value)).lower(tiny.drafter_params).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(naive=False) <= temporaries(naive=True) / 4


def test_bfloat16_changes_the_loss_by_its_rounding_only(tiny, frozen, batch):
    rows, features = batch
    objective = OBJECTIVES["one horizon"]

    def gradient(dtype):
        def value(params):
            numerator, denominator, _ = loss_sums(
                params, frozen, features, rows, row_keys(jax.random.key(3), 0, 3),
                config=tiny.drafter, objective=objective, dtype=dtype,
            )  # fmt: skip
            return numerator / denominator

        return jax.jit(jax.value_and_grad(value))(tiny.drafter_params)

    (whole, grads), (rounded, rounded_grads) = gradient(jnp.float32), gradient(jnp.bfloat16)
    assert 0 < abs(float(whole) - float(rounded)) < 0.02 * float(whole)
    assert {leaf.dtype for leaf in jax.tree.leaves(rounded_grads)} == {jnp.dtype("float32")}
    size = optax.tree.norm(grads)
    assert optax.tree.norm(jax.tree.map(jnp.subtract, grads, rounded_grads)) < 0.05 * size
