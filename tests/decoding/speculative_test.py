import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dscout_jax.decoding.autoregressive import decode_steps, init_generation, prefill
from dscout_jax.decoding.replay import anchor_lengths, walk
from dscout_jax.decoding.speculative import (
    decode_cycles,
    init_speculative,
    make_draft_weights,
    prefill_speculative,
)
from dscout_jax.decoding.streaming import stream_cycles
from dscout_jax.decoding.variant import Variant
from dscout_jax.models.target import apply_target

CAPACITY = 64
STOP = (7,)


def prompts_of(batch):
    tokens = jax.random.randint(jax.random.key(8), (batch, 9), 0, 12)
    lengths = jnp.array([9, 5, 3, 8, 1, 2, 9, 4])[:batch]
    limits = jnp.array([20, 30, 9, 1, 25, 2, 40, 17])[:batch]
    return tokens, lengths, limits


def plain(tiny, batch, stop_ids=STOP):
    tokens, lengths, limits = prompts_of(batch)
    static = {"config": tiny.target, "greedy": True, "stop_ids": stop_ids}
    state = init_generation(tiny.target, batch, CAPACITY)
    slots = jnp.arange(batch)
    state = prefill(tiny.params, state, tokens, lengths, slots, limits, **static)
    return decode_steps(tiny.params, state, 100, **static)


def speculative(tiny, batch, variant, token_ids=None, num_cycles=100):
    tokens, lengths, limits = prompts_of(batch)
    weights = make_draft_weights(tiny.params, tiny.target, tiny.drafter_params, token_ids)
    state = init_speculative(tiny.target, tiny.drafter, batch, CAPACITY, 40)
    slots = jnp.arange(batch)
    state = prefill_speculative(
        tiny.params, weights, state, tokens, lengths, slots, limits, variant=variant
    )
    while not bool(state.rows.done.all()):
        state = decode_cycles(tiny.params, weights, state, num_cycles, variant=variant)
    return state, weights


def outputs(state):
    return [
        np.asarray(row)[: int(length)].tolist()
        for row, length in zip(state.tokens, state.length, strict=True)
    ]


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("block_size", [2, 4, 8])
def test_speculative_decoding_emits_what_plain_decoding_emits(tiny, batch, block_size):
    variant = Variant(tiny.target, tiny.drafter, block_size, stop_ids=STOP)
    state, _ = speculative(tiny, batch, variant)
    assert outputs(state.rows) == outputs(plain(tiny, batch))
    emitted = np.asarray(state.emitted)
    generated = state.rows.length - prompts_of(batch)[1]
    # Every token but the prefilled one belongs to a cycle.
    assert emitted.sum(axis=1).tolist() == (generated - 1).tolist()


@pytest.mark.parametrize(
    "cut", [{"num_layers": 1}, {"taps": (0, 2)}, {"num_layers": 1, "taps": (2,)}]
)
def test_a_cut_drafter_changes_the_cycles_never_the_output(tiny, cut):
    variant = Variant(tiny.target, tiny.drafter, 4, stop_ids=STOP, **cut)
    state, _ = speculative(tiny, 3, variant)
    assert outputs(state.rows) == outputs(plain(tiny, 3))


def test_a_pruned_draft_vocabulary_never_changes_the_output(tiny):
    variant = Variant(tiny.target, tiny.drafter, 4, stop_ids=STOP)
    state, weights = speculative(tiny, 3, variant, token_ids=jnp.array([0, 3, 5, 9]))
    assert weights.head.shape == (4, 32)
    assert outputs(state.rows) == outputs(plain(tiny, 3))


def test_stopping_the_loop_between_cycles_changes_nothing(tiny):
    variant = Variant(tiny.target, tiny.drafter, 4, stop_ids=STOP)
    whole, _ = speculative(tiny, 3, variant)
    pieces, _ = speculative(tiny, 3, variant, num_cycles=2)
    assert outputs(whole.rows) == outputs(pieces.rows)
    np.testing.assert_array_equal(whole.emitted, pieces.emitted)


def test_streamed_tokens_of_every_row_are_its_output_cycle_by_cycle(tiny):
    variant = Variant(tiny.target, tiny.drafter, 4, stop_ids=STOP)
    whole, weights = speculative(tiny, 3, variant)
    tokens, lengths, limits = prompts_of(3)
    state = init_speculative(tiny.target, tiny.drafter, 3, CAPACITY, 40)
    state = prefill_speculative(
        tiny.params, weights, state, tokens, lengths, jnp.arange(3), limits, variant=variant
    )
    pieces = [[], [], []]
    stream_cycles(
        tiny.params,
        weights,
        state,
        lengths.tolist(),
        lambda row, piece: pieces[row].append(piece),
        variant=variant,
        cycles_at_once=2,
    )
    for row, output in enumerate(outputs(whole.rows)):
        start = int(lengths[row])
        assert [token for piece in pieces[row] for token in piece] == output[start:]
        cycles = np.asarray(whole.emitted[row])[: int(whole.cycles[row])].tolist()
        assert [len(piece) for piece in pieces[row]] == [1, *cycles]


@pytest.mark.parametrize("cut", [{}, {"num_layers": 1, "taps": (0, 2)}])
@pytest.mark.parametrize("block_size", [2, 4, 8])
def test_replay_gives_the_accepted_lengths_of_decoding_cycle_for_cycle(tiny, block_size, cut):
    variant = Variant(tiny.target, tiny.drafter, block_size, stop_ids=STOP, **cut)
    state, weights = speculative(tiny, 8, variant)
    rows = state.rows
    starts = prompts_of(8)[1]
    taps = apply_target(tiny.params, tiny.target, rows.tokens, tap_ids=variant.tap_ids).taps
    lengths = anchor_lengths(
        tiny.params["embed_tokens"]["embedding"],
        weights,
        taps,
        rows.tokens,
        rows.length,
        starts,
        variant=variant,
        num_anchors=48,
        chunk=16,
    )
    walked = [
        walk(np.asarray(lengths[row]), int(rows.length[row] - starts[row])) for row in range(8)
    ]
    decoded = [
        np.asarray(state.emitted[row])[: int(state.cycles[row])].tolist() for row in range(8)
    ]
    assert walked == decoded
    assert any(tau > 1 for taus in decoded for tau in taus)


def test_walk_steps_over_the_accepted_prefix_and_ends_with_the_response():
    assert walk(np.array([2, 0, 0, 1, 0]), 5) == [3, 1]
    assert walk(np.array([0]), 1) == []


def test_caches_are_donated_and_the_loop_does_not_copy_them(tiny):
    tokens, lengths, limits = prompts_of(1)
    variant = Variant(tiny.target, tiny.drafter, 4)
    weights = make_draft_weights(tiny.params, tiny.target, tiny.drafter_params)
    temporary, aliased, held = [], [], []
    for capacity in (256, 2048):
        state = init_speculative(tiny.target, tiny.drafter, 1, capacity, 40)
        cache_bytes = sum(
            leaf.nbytes for leaf in jax.tree.leaves((state.rows.cache, state.context))
        )
        state = prefill_speculative(
            tiny.params, weights, state, tokens, lengths, jnp.arange(1), limits, variant=variant
        )
        compiled = decode_cycles.lower(tiny.params, weights, state, 5, variant=variant).compile()
        memory = compiled.memory_analysis()
        temporary.append(memory.temp_size_in_bytes)
        aliased.append(memory.alias_size_in_bytes)
        held.append(cache_bytes)
        after = decode_cycles(tiny.params, weights, state, 1, variant=variant)
        assert state.rows.cache.keys[0].is_deleted()
        assert state.context.keys[0].is_deleted()
        assert not after.rows.cache.keys[0].is_deleted()
    assert aliased[0] > held[0]
    assert aliased[1] > held[1]
    # One row of attention scores grows with S; a copied cache would grow with all layers of it.
    assert temporary[1] - temporary[0] < 0.1 * (held[1] - held[0])


def test_one_program_per_block_size_whatever_the_number_of_cycles(tiny):
    before = decode_cycles._cache_size()
    for block_size in (3, 5, 3, 5):
        variant = Variant(tiny.target, tiny.drafter, block_size, stop_ids=(5,))
        speculative(tiny, 1, variant, num_cycles=block_size)
        speculative(tiny, 1, variant, num_cycles=7)
    assert decode_cycles._cache_size() - before == 2


@pytest.mark.parametrize(
    "cut", [{"num_layers": 0}, {"num_layers": 3}, {"taps": ()}, {"taps": (2, 0)}, {"taps": (3,)}]
)
def test_a_depth_or_taps_that_the_drafter_lacks_are_refused(tiny, cut):
    with pytest.raises(ValueError, match=next(iter(cut))):
        Variant(tiny.target, tiny.drafter, 4, **cut)


@pytest.mark.parametrize("block_size", [0, 1, 9, 16])
def test_a_block_size_outside_the_trained_range_is_refused(tiny, block_size):
    with pytest.raises(ValueError, match=rf"block_size={block_size} .*\[2, 8\]"):
        Variant(tiny.target, tiny.drafter, block_size)
