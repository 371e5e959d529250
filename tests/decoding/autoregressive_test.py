import jax
import jax.numpy as jnp
import numpy as np

from dscout_jax.decoding.autoregressive import decode_steps, init_generation, prefill
from dscout_jax.models.target import apply_target, compute_logits

GREEDY = {"greedy": True, "stop_ids": ()}


def test_greedy_decoding_equals_rerunning_the_whole_sequence(tiny):
    prompt = jnp.array([[3, 1, 4, 1, 5], [9, 2, 6, 0, 0]])
    lengths = jnp.array([5, 3])
    state = init_generation(tiny.target, 2, 24)
    limits = jnp.array([10, 6])
    state = prefill(
        tiny.params,
        state,
        prompt,
        lengths,
        jnp.arange(2),
        limits,
        config=tiny.target,
        **GREEDY,
    )
    state = decode_steps(tiny.params, state, 99, config=tiny.target, **GREEDY)
    assert state.length.tolist() == [15, 9]

    @jax.jit
    def best_after(tokens, count):
        hidden = apply_target(tiny.params, tiny.target, tokens).hidden[0, count - 1]
        return jnp.argmax(compute_logits(tiny.params, tiny.target, hidden))

    for row in range(2):
        tokens = prompt[row, : int(lengths[row])].tolist()
        for _ in range(int(limits[row])):
            padded = jnp.array([tokens + [0] * (state.tokens.shape[1] - len(tokens))])
            tokens.append(int(best_after(padded, len(tokens))))
        assert state.tokens[row, : len(tokens)].tolist() == tokens


def test_a_row_stops_at_a_stop_token_and_the_others_go_on(tiny):
    prompt = jnp.array([[3, 1, 4], [9, 2, 6]])

    def run(stop_ids):
        state = init_generation(tiny.target, 2, 24)
        static = {"config": tiny.target, "greedy": True, "stop_ids": stop_ids}
        many = jnp.array([12, 12])
        slots = jnp.arange(2)
        lengths = jnp.array([3, 3])
        state = prefill(tiny.params, state, prompt, lengths, slots, many, **static)
        return decode_steps(tiny.params, state, 99, **static)

    free = np.asarray(run(()).tokens)[:, 3:15]
    only_first = next(int(t) for t in free[0] if t not in free[1])
    cut = free[0].tolist().index(only_first) + 1
    stopped = run((only_first,))
    assert stopped.length.tolist() == [3 + cut, 15]
    assert stopped.tokens[0, 3 : 3 + cut].tolist() == free[0, :cut].tolist()
    assert stopped.tokens[1, 3:15].tolist() == free[1].tolist()


def test_a_refilled_slot_gives_what_it_gives_alone(tiny):
    static = {"config": tiny.target, **GREEDY}

    def start(state, tokens, slot):
        one = jnp.array([len(tokens)])
        return prefill(
            tiny.params,
            state,
            jnp.array([tokens]),
            one,
            jnp.array([slot]),
            jnp.array([8]),
            **static,
        )

    alone = start(init_generation(tiny.target, 3, 24), [5, 6, 7, 8], 0)
    alone = decode_steps(tiny.params, alone, 99, **static)
    state = start(init_generation(tiny.target, 3, 24), [1, 2, 3, 4, 5, 6], 1)
    state = decode_steps(tiny.params, state, 99, **static)
    state = start(state, [4, 4], 0)
    state = decode_steps(tiny.params, state, 3, **static)
    state = start(state, [5, 6, 7, 8], 1)
    state = decode_steps(tiny.params, state, 99, **static)
    assert state.tokens[1, :12].tolist() == alone.tokens[0, :12].tolist()


def test_the_plain_loop_donates_its_cache_and_does_not_copy_it(tiny):
    def memory(capacity):
        state = init_generation(tiny.target, 1, capacity)
        lowered = decode_steps.lower(tiny.params, state, 5, config=tiny.target, **GREEDY)
        cache_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state.cache))
        return lowered.compile().memory_analysis(), cache_bytes

    (small, small_cache), (large, large_cache) = memory(256), memory(2048)
    assert large.alias_size_in_bytes > large_cache
    growth = large.temp_size_in_bytes - small.temp_size_in_bytes
    assert growth < 0.1 * (large_cache - small_cache)
