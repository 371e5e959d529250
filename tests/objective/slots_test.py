"""Hand-computed blocks: logits are chosen as logarithms, so probabilities can be read off."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dscout_jax.config.experiment import ACCEPTANCES, PREDICTIONS, WEIGHTINGS, ObjectiveConfig
from dscout_jax.objective import acceptance, prediction, weighting
from dscout_jax.objective.acceptance import Scores
from dscout_jax.objective.chunks import split_chunks, sum_chunks
from dscout_jax.objective.methods import METHODS
from dscout_jax.objective.slots import Schedule, Slots, slot_terms

PLAIN = ObjectiveConfig(horizons=((4, 1),), smoothing=0.0)


def make_scores(q, labels, *, p=None, included=None, revealed=None):
    """Scores of blocks whose drafter and target have the probabilities q and p."""
    labels = jnp.asarray(labels)
    return Scores(
        logits=jnp.log(jnp.asarray(q, jnp.float32)),
        labels=labels,
        included=jnp.ones(labels.shape, bool) if included is None else jnp.asarray(included),
        revealed=jnp.zeros(labels.shape, bool) if revealed is None else jnp.asarray(revealed),
        ema=jnp.array([0.9, 0.6, 0.3])[: labels.shape[-1]],
        target_logits=None if p is None else jnp.log(jnp.asarray(p, jnp.float32)),
    )


# Two blocks of three drafts over three tokens; the label is token 0, with probabilities
# .5 (the mode), .2 (a mismatch), .6 (the mode) and .8 (the mode), .4 (the mode), .1 (a mismatch).
Q = [
    [[0.5, 0.3, 0.2], [0.2, 0.7, 0.1], [0.6, 0.2, 0.2]],
    [[0.8, 0.1, 0.1], [0.4, 0.3, 0.3], [0.1, 0.6, 0.3]],
]
P = [
    [[0.6, 0.2, 0.2], [0.5, 0.4, 0.1], [0.1, 0.1, 0.8]],
    [[0.7, 0.2, 0.1], [0.4, 0.4, 0.2], [0.2, 0.6, 0.2]],
]
SCORES = make_scores(Q, np.zeros((2, 3), int), p=P)


def weights(scores=SCORES, warmth=1.0, **changes):
    objective = dataclasses.replace(PLAIN, gamma=2.0, **changes)
    return np.asarray(weighting.slot_weights(objective, 4, scores, jnp.float32(warmth)))


def test_the_names_in_the_configuration_are_the_factors_there_are():
    assert set(ACCEPTANCES) == set(acceptance.ACCEPTANCES)
    assert set(PREDICTIONS) == set(prediction.PREDICTIONS)
    assert set(WEIGHTINGS) == set(weighting.WEIGHTINGS)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("target_prob", [[0.5, 0.2, 0.6], [0.8, 0.4, 0.1]]),
        ("greedy_match", [[1, 0, 1], [1, 1, 0]]),
        ("overlap", [[0.9, 0.7, 0.4], [0.9, 0.9, 0.9]]),
        ("argmax_target", [[0.6, 0.4, 0.1], [0.7, 0.4, 0.6]]),
        ("ema", [[0.9, 0.6, 0.3]] * 2),
    ],
)
def test_acceptance_estimates(name, expected):
    np.testing.assert_allclose(acceptance.acceptance(name, SCORES), expected, rtol=1e-5)
    smooth = acceptance.acceptance(name, SCORES, smoothing=0.5)
    np.testing.assert_allclose(smooth, np.asarray(expected) / 2 + 0.5, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("uniform", [[1, 1, 1], [1, 1, 1]]),
        ("exp_decay", [[1, np.exp(-0.5), np.exp(-1)]] * 2),
        ("reach", [[1, 0.5, 0.1], [1, 0.8, 0.32]]),
        ("marginal", [[0.66, 0.16, 0.06], [1.152, 0.352, 0.032]]),
        ("until_mismatch", [[1, 1, 0], [1, 1, 1]]),
        ("anchored_decay", [[1, 1, np.exp(-0.5)], [1, 1, 1]]),
        ("horizon_decay", [[1, 0.75, 0.75]] * 2),
    ],
)
def test_weightings(name, expected):
    got = weights(weighting=name, horizon_shares=((2, 1), (4, 3)))
    np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_smoothing_floor_warm_up_and_correction():
    # (.75, .6, .8) and (.9, .7, .55) after smoothing by a half.
    smooth = weights(weighting="reach", smoothing=0.5)
    np.testing.assert_allclose(smooth, [[1, 0.75, 0.45], [1, 0.9, 0.63]], rtol=1e-5)
    floored = weights(weighting="reach", floor=0.2)
    np.testing.assert_allclose(floored, [[1, 0.5, 0.2], [1, 0.8, 0.32]], rtol=1e-5)
    decay = np.exp([0.0, -0.5, -1.0])
    for warmth in (0.0, 0.25, 1.0):
        mixed = weights(weighting="reach", weight_warmup=0.5, warmth=warmth)
        expected = (1 - warmth) * decay + warmth * np.array([[1, 0.5, 0.1], [1, 0.8, 0.32]])
        np.testing.assert_allclose(mixed, expected, rtol=1e-5)
    corrected = weights(
        weighting="uniform", horizon_correction=True, horizon_shares=((2, 1), (4, 3))
    )
    np.testing.assert_allclose(corrected, [[1, 4 / 3, 4 / 3]] * 2, rtol=1e-5)


def test_revealed_slots_are_certain_and_slots_past_the_end_are_not():
    revealed = [[True, False, False], [False, True, False]]
    included = [[False, True, True], [True, False, False]]
    scores = make_scores(Q, np.zeros((2, 3), int), included=included, revealed=revealed)
    # The decay starts behind a revealed prefix; slot 3 of the second block is past the end.
    np.testing.assert_allclose(
        weights(scores, weighting="exp_decay"), [[0, 1, np.exp(-0.5)], [1, 0, 0]], rtol=1e-5
    )
    np.testing.assert_allclose(weights(scores, weighting="reach"), [[0, 1, 0.2], [1, 0, 0]])
    np.testing.assert_allclose(
        weights(scores, weighting="marginal"), [[0, 0.32, 0.12], [0.8, 0, 0]], rtol=1e-5
    )
    # Slot 2 fails in one block, slot 1 in the other, whose slot 2 is shown: no step of the decay.
    labels, shown = [[0, 0, 0], [1, 0, 0]], [[False, False, False], [False, True, False]]
    scores = make_scores(Q, labels, included=~np.array(shown), revealed=shown)
    np.testing.assert_allclose(
        weights(scores, weighting="anchored_decay"),
        [[1, 1, np.exp(-0.5)], [1, 0, np.exp(-0.5)]],
        rtol=1e-5,
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ce", -np.log([[0.5, 0.2, 0.6], [0.8, 0.4, 0.1]])),
        ("soft_ce", -(np.array(P) * np.log(Q)).sum(-1)),
        ("reverse_kl", (np.array(Q) * np.log(np.array(Q) / P)).sum(-1)),
        ("tv", [[0.1, 0.3, 0.6], [0.1, 0.1, 0.1]]),
        ("nla", -np.log([[0.9, 0.7, 0.4], [0.9, 0.9, 0.9]])),
        ("expected_length", [[-0.5, -0.1, -0.06], [-0.8, -0.32, -0.032]]),
        ("0.1*ce + 2*tv", -0.1 * np.log([[0.5, 0.2, 0.6], [0.8, 0.4, 0.1]])
         + [[0.2, 0.6, 1.2], [0.2, 0.2, 0.2]]),
    ],
)  # fmt: skip
def test_predictions(name, expected):
    np.testing.assert_allclose(prediction.slot_losses(name, SCORES), expected, rtol=1e-4, atol=1e-6)


def test_lk_hybrid_turns_from_divergence_to_variation_as_the_overlap_grows():
    kl = (np.array(P) * np.log(np.array(P) / Q)).sum(-1)
    overlap = np.minimum(P, Q).sum(-1)
    share = np.exp(-3 * overlap)
    np.testing.assert_allclose(
        prediction.lk_hybrid(SCORES), share * kl + (1 - share) * (1 - overlap), rtol=1e-4, atol=1e-6
    )


def test_cross_entropy_agrees_with_optax():
    logits = jax.random.normal(jax.random.key(0), (3, 4, 11)) * 5
    labels = jax.random.randint(jax.random.key(1), (3, 4), 0, 11)
    scores = make_scores(jnp.exp(logits), labels).replace(logits=logits)
    expected = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    np.testing.assert_allclose(prediction.cross_entropy(scores), expected, rtol=1e-5, atol=1e-6)


def test_the_decay_of_a_block_size_is_the_published_one_or_must_be_given():
    for block_size, gamma in ((16, 7.0), (10, 5.0), (8, 4.0)):
        assert weighting.decay_length(PLAIN, block_size) == gamma
    with pytest.raises(ValueError, match="block size 6"):
        weighting.decay_length(PLAIN, 6)


def random_slots(seed, num_blocks, num_slots, *, revealed=True):
    keys = jax.random.split(jax.random.key(seed), 6)
    shape = (num_blocks, num_slots)
    hidden, target = (jax.random.normal(key, (*shape, 6)) for key in keys[:2])
    head = jax.random.normal(keys[2], (9, 6))
    # The response ends somewhere in the block; before, some slots are revealed.
    end = jax.random.randint(keys[3], (num_blocks, 1), 0, num_slots + 1)
    inside = jnp.arange(num_slots)[None] < end
    shown = inside & jax.random.bernoulli(keys[4], 0.3, shape) & revealed
    labels = jax.random.randint(keys[5], shape, 0, 9)
    slots = Slots(labels, inside & ~shown, shown, target)
    return hidden, head, slots, Schedule(jnp.float32(0.6), jnp.linspace(0.9, 0.3, num_slots))


@pytest.mark.parametrize("seed", [0, 1])
def test_the_marginal_weights_give_the_gradient_of_the_expected_length(seed):
    """METHOD section 2.2: with l = -log a and no smoothing the two gradients are one."""
    hidden, head, slots, schedule = random_slots(seed, 5, 7)
    weighted = dataclasses.replace(PLAIN, weighting="marginal", gamma=2.0)
    exact = dataclasses.replace(weighted, weighting="uniform", prediction="expected_length")
    gradients = [
        jax.grad(lambda h, o=objective: slot_terms(o, h, head, slots, schedule)[0])(hidden)
        for objective in (weighted, exact)
    ]
    assert np.abs(gradients[0]).max() > 1e-3
    np.testing.assert_allclose(*gradients, rtol=1e-4, atol=1e-6)


def toy_blocks(objective, scale, constants, blocks):
    """The loss of blocks [1, M, K, ...] whose drafter is one matrix."""
    inputs, slots = jax.tree.map(lambda x: x[0], blocks)
    head, schedule = constants
    total, terms = slot_terms(objective, inputs @ scale, head, slots, schedule)
    return total, jax.tree.map(lambda x: x.sum(axis=0), terms)


def require_same(objective, chunk, hidden, head, slots, schedule):
    """Value, reports and gradient over chunks equal those of all blocks at once."""
    blocks = jax.tree.map(lambda x: x[None], (hidden, slots))
    block_fn = functools.partial(toy_blocks, objective)
    scale = jnp.eye(6) + 0.1 * jax.random.normal(jax.random.key(9), (6, 6))

    def chunked(scale):
        chunks = split_chunks(blocks, -(-len(hidden) // chunk))
        total, terms = sum_chunks(block_fn, scale, (head, schedule), chunks)
        return 3.0 * total, terms

    def naive(scale):
        total, terms = block_fn(scale, (head, schedule), blocks)
        return 3.0 * total, terms

    ours, expected = (
        jax.jit(jax.value_and_grad(way, has_aux=True))(scale) for way in (chunked, naive)
    )
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-5), ours, expected
    )


def test_chunks_equal_the_whole_for_every_pair_of_factors():
    args = random_slots(0, 4, 5)
    for (i, weight_name), (j, loss_name) in itertools.product(
        enumerate(WEIGHTINGS), enumerate(PREDICTIONS)
    ):
        objective = ObjectiveConfig(
            horizons=((6, 1),), weighting=weight_name, prediction=loss_name, gamma=3.0, floor=0.01,
            acceptance=ACCEPTANCES[(i + j) % len(ACCEPTANCES)], weight_warmup=0.5,
        )  # fmt: skip
        with jax.disable_jit():  # programs for all would take minutes to compile
            require_same(objective, 3, *args)


@settings(deadline=None, max_examples=4)
@given(st.integers(1, 9), st.integers(1, 7), st.integers(1, 10))
def test_chunks_equal_the_whole_whatever_the_shape(num_blocks, num_slots, chunk):
    objective = ObjectiveConfig(
        horizons=((num_slots + 1, 1),), weighting="reach", acceptance="overlap", gamma=3.0,
        prediction="ce + tv",
    )  # fmt: skip
    require_same(objective, chunk, *random_slots(num_blocks, num_blocks, num_slots))


def test_what_is_not_supervised_has_no_gradient_at_all():
    hidden, head, slots, schedule = random_slots(3, 6, 5)
    objective = dataclasses.replace(PLAIN, weighting="marginal", gamma=2.0, prediction="lk_hybrid")
    gradient = jax.grad(lambda h: slot_terms(objective, h, head, slots, schedule)[0])(hidden)
    outside = np.asarray(~slots.included)
    assert outside.any() and not np.any(np.asarray(gradient)[outside])
    assert np.any(np.asarray(gradient)[~outside])


def test_reports_carry_no_gradient():
    hidden, head, slots, schedule = random_slots(4, 3, 2)

    def reported(hidden):
        objective = dataclasses.replace(PLAIN, gamma=2.0)
        return slot_terms(objective, hidden, head, slots, schedule)[1].loss.sum()

    assert not np.any(jax.grad(reported)(hidden))


# Values of W and l of both blocks, by hand from Q and P above; the decay length is 2.
CE = -np.log([[0.5, 0.2, 0.6], [0.8, 0.4, 0.1]])
SOFT = -(np.array(P) * np.log(Q)).sum(-1)
DECAY = np.exp([[0.0, -0.5, -1.0]] * 2)


@pytest.mark.parametrize(
    ("name", "weight", "loss"),
    [
        ("dflash", DECAY, CE),
        # Smoothed acceptances (.75, .6, .8) and (.9, .7, .55).
        ("d_pace", [[1.56, 0.81, 0.36], [1.8765, 0.9765, 0.3465]], CE),
        ("pard2", [[1, 0.5, 0.1], [1, 0.8, 0.32]], CE + SOFT),
        ("spec_auf", [[1, 1, 0], [1, 1, 1]], CE),
        ("vat", [[1, 1, np.exp(-0.5)], [1, 1, 1]], SOFT),
        ("d2sd", [[0, 1, np.exp(-0.5)], [0, 0, 1]], CE),
        ("dspark", DECAY, 0.1 * CE + 1.8 * np.array([[0.1, 0.3, 0.6], [0.1, 0.1, 0.1]])),
        ("dscout", [[1, 0.75, 0.45], [1, 0.9, 0.63]], CE),
    ],
)
def test_a_published_method_is_a_point_of_the_product(name, weight, loss):
    objective = ObjectiveConfig(horizons=((4, 1),), gamma=2.0, **METHODS[name])
    revealed = np.zeros((2, 3), bool)
    if objective.reveal_rate == 1.0:
        revealed = np.array([[True, False, False], [True, True, False]])
    hidden, target = (jnp.log(jnp.asarray(x, jnp.float32)) for x in (Q, P))
    slots = Slots(jnp.zeros((2, 3), int), jnp.asarray(~revealed), jnp.asarray(revealed), target)
    # With the identity as head, the hidden states are the logits.
    total, terms = slot_terms(
        objective, hidden, jnp.eye(3), slots, Schedule(jnp.float32(1.0), jnp.ones(3))
    )
    np.testing.assert_allclose(terms.weight, weight, rtol=1e-5)
    np.testing.assert_allclose(terms.loss, np.where(revealed, 0.0, loss), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(total, (np.array(weight) * loss).sum(), rtol=1e-4)


def test_every_published_method_is_examined():
    examined = test_a_published_method_is_a_point_of_the_product.pytestmark[0].args[1]
    assert {name for name, *_ in examined} == set(METHODS)
