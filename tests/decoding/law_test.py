"""The law of sampled output, against exact enumeration."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from dscout_jax.decoding import speculative
from dscout_jax.decoding.autoregressive import decode_steps, init_generation, prefill
from dscout_jax.decoding.sampling import log_law, make_sampling
from dscout_jax.decoding.speculative import (
    cycle,
    init_speculative,
    make_draft_weights,
    prefill_speculative,
)
from dscout_jax.decoding.variant import Variant
from dscout_jax.models.drafter import init_drafter
from dscout_jax.models.target import apply_target, compute_logits, init_target
from dscout_jax.weights.dflash import load_drafter

PROMPT = [2, 0, 1]
NEW = 4  # the first token comes from the prefill, three from cycles
BATCH, BATCHES = 2048, 10


@pytest.fixture(scope="module")
def toy(tiny):
    """The tiny models over four words, mask included."""
    target = dataclasses.replace(tiny.target, vocab_size=4)
    drafter = dataclasses.replace(tiny.drafter, vocab_size=4, mask_token_id=3)
    params = init_target(jax.random.key(1), target)
    weights = make_draft_weights(params, target, init_drafter(jax.random.key(2), drafter))
    return target, params, drafter, weights


def exact_law(config, params, prompt, num_tokens, choices, settings):
    """Probability of each continuation, in the order of itertools.product(choices, ...)."""
    prefixes = list(itertools.product(choices, repeat=num_tokens - 1))
    tokens = jnp.array([[*prompt, *prefix] for prefix in prefixes])
    out = apply_target(params, config, tokens)
    logits = compute_logits(params, config, out.hidden[:, len(prompt) - 1 :])
    sampling = make_sampling(jax.random.split(jax.random.key(0), len(prefixes)), **settings)
    laws = np.exp(np.asarray(log_law(logits, sampling), np.float64))
    found = []
    for row, prefix in enumerate(prefixes):
        before = np.prod([laws[row, i, token] for i, token in enumerate(prefix)])
        found += [before * laws[row, -1, token] for token in choices]
    return np.array(found)


def p_value(counts, law):
    """Chi-square of observed counts; cells that expect fewer than five are taken together."""
    expected = law * counts.sum()
    assert counts[expected == 0].sum() == 0
    small = expected < 5
    observed = np.append(counts[~small], counts[small].sum())
    expected = np.append(expected[~small], expected[small].sum())
    if expected[-1] == 0:
        observed, expected = observed[:-1], expected[:-1]
    return stats.chisquare(observed, expected * observed.sum() / expected.sum()).pvalue


def count_continuations(toy, rule, settings, block_size=4):
    """How often each continuation came out, and the mean accepted tokens of the first cycle."""
    target, params, drafter, weights = toy
    variant = Variant(target, drafter, block_size, rule=rule)
    step = jax.jit(lambda state: cycle(params, weights, variant, state))
    counts, emitted = np.zeros(4**NEW), []
    for batch in range(BATCHES):
        keys = jax.random.split(jax.random.key(batch), BATCH)
        state = prefill_speculative(
            params,
            weights,
            init_speculative(target, drafter, BATCH, 16, NEW),
            jnp.broadcast_to(jnp.array([PROMPT]), (BATCH, len(PROMPT))),
            jnp.full((BATCH,), len(PROMPT)),
            jnp.arange(BATCH),
            jnp.full((BATCH,), NEW),
            make_sampling(keys, **settings),
            variant=variant,
        )
        for _ in range(NEW - 1):
            state = step(state)
        assert bool(state.rows.done.all())
        tokens = np.asarray(state.rows.tokens)[:, len(PROMPT) : len(PROMPT) + NEW]
        counts += np.bincount(tokens @ 4 ** np.arange(NEW)[::-1], minlength=4**NEW)
        emitted.append(np.asarray(state.emitted)[:, 0].mean())
    return counts, float(np.mean(emitted))


SETTINGS = {"temperature": 0.3}


@pytest.mark.parametrize(
    "settings", [SETTINGS, {"temperature": 0.5, "top_k": 3}, {"temperature": 0.4, "top_p": 0.9}]
)
@pytest.mark.parametrize("rule", ["match", "rejection"])
def test_sampled_continuations_follow_the_exact_law(toy, rule, settings):
    law = exact_law(toy[0], toy[1], PROMPT, NEW, range(4), settings)
    counts, emitted = count_continuations(toy, rule, settings)
    assert counts.sum() >= 20_000 and law.sum() == pytest.approx(1, abs=1e-5)
    assert 1.1 < emitted < 3.0  # some drafts stand and some do not
    assert p_value(counts, law) > 1e-3


def accept_everything(law, draft_law, drafts, keys, token_ids=None):
    accepted, tokens = speculative_rule(law, draft_law, drafts, keys, token_ids)
    accepted = jnp.full_like(accepted, drafts.shape[1])
    return accepted, tokens.at[:, :-1].set(drafts)


def draw_again_from_the_target(law, draft_law, drafts, keys, token_ids=None):
    accepted, tokens = speculative_rule(law, draft_law, drafts, keys, token_ids)
    rows = jnp.arange(len(drafts))
    drawn = jax.vmap(jax.random.categorical)(keys[1][rows, accepted], law[rows, accepted])
    return accepted, tokens.at[rows, accepted].set(drawn.astype(jnp.int32))


speculative_rule = speculative.reject_drafts


@pytest.mark.parametrize("broken", [accept_everything, draw_again_from_the_target])
def test_a_broken_rule_fails_the_same_test(toy, broken, monkeypatch):
    monkeypatch.setattr(speculative, "reject_drafts", broken)
    law = exact_law(toy[0], toy[1], PROMPT, NEW, range(4), SETTINGS)
    counts, _ = count_continuations(toy, "rejection", SETTINGS)
    assert p_value(counts, law) < 1e-9


def test_a_pruned_draft_vocabulary_keeps_the_law(toy):
    target, params, drafter, weights = toy
    ids = jnp.array([0, 2])
    pruned = make_draft_weights(params, target, weights.drafter, ids)
    law = exact_law(target, params, PROMPT, NEW, range(4), SETTINGS)
    counts, _ = count_continuations((target, params, drafter, pruned), "rejection", SETTINGS)
    assert p_value(counts, law) > 1e-3


@pytest.mark.parametrize("block_size", [2, 4, 8])
def test_match_gives_the_tokens_of_plain_sampling_with_the_same_keys(tiny, block_size):
    prompts = jax.random.randint(jax.random.key(8), (6, 7), 0, 12)
    lengths, limits = jnp.array([7, 5, 3, 6, 1, 2]), jnp.array([20, 30, 9, 1, 25, 14])
    sampling = make_sampling(
        jax.random.split(jax.random.key(3), 6),
        jnp.array([1.0, 0.7, 0.0, 1.0, 0.3, 2.0]),
        jnp.array([5, 13, 13, 13, 4, 2]),
        jnp.array([1.0, 0.8, 0.5, 1.0, 1.0, 0.9]),
    )
    inputs = (prompts, lengths, jnp.arange(6), limits, sampling)
    static = {"config": tiny.target, "greedy": False, "stop_ids": (7,)}
    plain = prefill(tiny.params, init_generation(tiny.target, 6, 64), *inputs, **static)
    plain = decode_steps(tiny.params, plain, 100, **static)
    variant = Variant(tiny.target, tiny.drafter, block_size, stop_ids=(7,), rule="match")
    weights = make_draft_weights(tiny.params, tiny.target, tiny.drafter_params)
    state = init_speculative(tiny.target, tiny.drafter, 6, 64, 40)
    state = prefill_speculative(tiny.params, weights, state, *inputs, variant=variant)
    state = speculative.decode_cycles(tiny.params, weights, state, 100, variant=variant)
    assert state.rows.length.tolist() == plain.length.tolist()
    for row, end in enumerate(plain.length.tolist()):
        assert state.rows.tokens[row, :end].tolist() == plain.tokens[row, :end].tolist()
    assert int(state.emitted.max()) > 1


@pytest.mark.parametrize("rule", ["match", "rejection"])
def test_a_request_gives_the_same_tokens_in_any_slot_beside_any_companions(tiny, rule):
    prompts = jax.random.randint(jax.random.key(8), (6, 7), 0, 12)
    lengths, limits = jnp.array([7, 5, 3, 6, 1, 2]), jnp.array([20, 30, 9, 21, 25, 14])
    keys = jax.random.split(jax.random.key(3), 6)
    variant = Variant(tiny.target, tiny.drafter, 4, stop_ids=(7,), rule=rule)
    weights = make_draft_weights(tiny.params, tiny.target, tiny.drafter_params)

    def answers(order, temperatures):
        state = prefill_speculative(
            tiny.params,
            weights,
            init_speculative(tiny.target, tiny.drafter, 6, 64, 40),
            prompts[order],
            lengths[order],
            jnp.arange(6),
            limits[order],
            make_sampling(keys[order], temperatures[order]),
            variant=variant,
        )
        rows = speculative.decode_cycles(tiny.params, weights, state, 100, variant=variant).rows
        found = {}
        for slot, request in enumerate(order.tolist()):
            found[request] = rows.tokens[slot, : int(rows.length[slot])].tolist()
        return found

    temperatures = jnp.array([1.0, 0.7, 0.5, 1.5, 0.3, 2.0])
    straight = answers(jnp.arange(6), temperatures)
    assert answers(jnp.array([3, 5, 1, 0, 4, 2]), temperatures) == straight
    others = answers(jnp.array([3, 5, 1, 0, 4, 2]), temperatures.at[jnp.array([3, 4])].set(0.9))
    assert all(others[request] == straight[request] for request in (0, 1, 2, 5))


def test_pairs_of_the_real_model_follow_its_law(smollm2):
    loaded = load_drafter("drafters/smollm2-135m-dscout", smollm2.cfg)
    token_ids = jnp.asarray(loaded.token_ids)
    weights = make_draft_weights(smollm2.params, smollm2.cfg, loaded.params, token_ids)
    variant = Variant(smollm2.cfg, loaded.config, 4, rule="rejection")
    prompt, rows, new = [1, 504, 2365, 282, 4649, 314], 64, 4
    settings = {"temperature": 1.0, "top_k": 3}
    one = prefill_speculative(
        smollm2.params,
        weights,
        init_speculative(smollm2.cfg, loaded.config, 1, 16, new),
        jnp.array([prompt]),
        jnp.array([len(prompt)]),
        jnp.arange(1),
        jnp.array([new]),
        variant=variant,
    )
    step = jax.jit(lambda state: cycle(smollm2.params, weights, variant, state))
    pairs = []
    for batch in range(3):
        keys = jax.random.split(jax.random.key(batch), rows)
        state = jax.tree.map(lambda leaf: jnp.repeat(leaf, rows, axis=0), one)
        state = state.replace(rows=state.rows.replace(sampling=make_sampling(keys, **settings)))
        for _ in range(2):
            state = step(state)
        first = len(prompt) + 1  # the prefill's own token is the same in all rows
        pairs.append(np.asarray(state.rows.tokens)[:, first : first + 2])
        start = np.asarray(state.rows.tokens)[0, :first].tolist()
    pairs = np.concatenate(pairs)

    def law_after(prefixes):
        out = apply_target(smollm2.params, smollm2.cfg, jnp.array(prefixes)).hidden[:, -1:]
        logits = compute_logits(smollm2.params, smollm2.cfg, out)
        sampling = make_sampling(jax.random.split(jax.random.key(0), len(prefixes)), **settings)
        return np.exp(np.asarray(log_law(logits, sampling), np.float64))[:, 0]

    law = law_after([start])[0]
    firsts = np.flatnonzero(law)
    seconds = law_after([[*start, int(token)] for token in firsts])
    cells = {
        (int(a), int(b)): law[a] * seconds[i, b]
        for i, a in enumerate(firsts)
        for b in np.flatnonzero(seconds[i])
    }
    counts = np.array([(pairs == pair).all(axis=1).sum() for pair in cells])
    assert counts.sum() == len(pairs)
    first_counts = np.array([(pairs[:, 0] == token).sum() for token in firsts])
    assert p_value(first_counts, law[firsts]) > 1e-3
    assert p_value(counts, np.array(list(cells.values()))) > 1e-3
