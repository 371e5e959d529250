import jax
import jax.numpy as jnp
import numpy as np

from dscout_jax.decoding.phases import draft_phase, verify_phase
from dscout_jax.decoding.speculative import decode_cycles, make_draft_weights
from dscout_jax.decoding.variant import Variant
from dscout_jax.throughput.latency import (
    Setting,
    cycle_timer,
    interleave,
    medians,
    phase_timers,
    plain_timer,
    speculative_state,
)

SETTING = Setting(batch=2, context=40, steps=3)
REPEATS = 2


def make(tiny):
    weights = make_draft_weights(tiny.params, tiny.target, tiny.drafter_params)
    return weights, Variant(tiny.target, tiny.drafter, 4)


def random_state(variant):
    """The profiled state with tokens and caches that are not all zero."""
    state = speculative_state(variant, SETTING, SETTING.capacity(4))
    leaves, structure = jax.tree.flatten((state.rows.cache.keys, state.context))
    keys = jax.random.split(jax.random.key(0), len(leaves))
    filled = [jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)]
    cache_keys, context = jax.tree.unflatten(structure, filled)
    tokens = jax.random.randint(jax.random.key(1), state.rows.tokens.shape, 0, 12)
    cache = state.rows.cache.replace(keys=cache_keys)
    return state.replace(rows=state.rows.replace(tokens=tokens, cache=cache), context=context)


def test_two_phases_in_a_row_are_what_the_loop_does(tiny):
    weights, variant = make(tiny)
    looped = decode_cycles(tiny.params, weights, random_state(variant), 1, variant=variant)

    state = random_state(variant)
    start = state.rows.length - 1
    anchors = state.rows.tokens[jnp.arange(2), start]
    # Features of the positions before the anchor would overwrite the context: offer them none.
    taps = jnp.zeros((2, 0, 3 * 32))
    drafts, context = draft_phase(
        tiny.params, weights, state.context, anchors, start, taps, variant=variant
    )
    block = jnp.concatenate([anchors[:, None], drafts], axis=1)
    state = state.replace(context=context)
    verified, _, after = verify_phase(tiny.params, state, block, variant=variant)
    for row in range(2):
        emitted = int(looped.emitted[row, 0])
        first = int(start[row]) + 1
        np.testing.assert_array_equal(
            looped.rows.tokens[row, first : first + emitted], verified[row, :emitted]
        )
    assert after.rows.cache.length.tolist() == start.tolist()


def test_every_program_is_timed_in_every_round(tiny):
    weights, variant = make(tiny)
    timers = {
        "plain": plain_timer(tiny.params, tiny.target, SETTING, 4),
        "cycle": cycle_timer(tiny.params, weights, variant, SETTING),
        **phase_timers(tiny.params, weights, variant, SETTING),
    }
    samples = list(interleave(timers, REPEATS))
    assert len(samples) == REPEATS
    assert all(set(sample) == set(timers) for sample in samples)
    assert all(seconds > 0 for sample in samples for seconds in sample.values())


def test_the_profiled_rows_outlast_the_timed_steps(tiny):
    weights, variant = make(tiny)
    state = speculative_state(variant, SETTING, SETTING.capacity(4))
    state = decode_cycles(tiny.params, weights, state, SETTING.steps, variant=variant)
    assert state.cycles.tolist() == [SETTING.steps] * 2


def test_the_median_is_taken_for_each_program():
    samples = [{"a": 1.0, "b": 9.0}, {"a": 3.0, "b": 7.0}, {"a": 2.0, "b": 8.0}]
    assert medians(samples) == {"a": 2.0, "b": 8.0}
