import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dscout_jax.decoding import engine as engine_module
from dscout_jax.decoding.autoregressive import decode_steps, from_words, init_generation, prefill
from dscout_jax.decoding.engine import Engine
from dscout_jax.decoding.requests import QueueFull, Request
from dscout_jax.decoding.sampling import make_sampling
from dscout_jax.decoding.slots import context_of, init_staging, prefill_chunk
from dscout_jax.decoding.speculative import decode_cycles, make_draft_weights
from dscout_jax.decoding.variant import Variant
from dscout_jax.models.target import apply_target

CAPACITY = 96
STOP = (7,)


def text_of(tokens):
    return "".join(chr(97 + token) for token in tokens)


@pytest.fixture(scope="module")
def plan(tiny):
    """All kinds of change: block size, taps, depth, and no speculation at all."""
    return {
        1: Variant(tiny.target, tiny.drafter, 8),
        2: Variant(tiny.target, tiny.drafter, 4, num_layers=1, taps=(0, 2)),
        4: Variant(tiny.target, tiny.drafter, 4),
        6: None,
    }


@pytest.fixture
def make_engine(tiny, plan):
    weights = make_draft_weights(tiny.params, tiny.target, tiny.drafter_params)

    def make(plan=plan, **settings):
        settings = {"capacity": CAPACITY, "stop_ids": STOP, "decode_text": text_of} | settings
        return Engine(tiny.params, tiny.target, weights, tiny.drafter, plan, **settings)

    return make


def alone(tiny, request, stop_ids=STOP):
    """The answer of plain decoding, one request at a time."""
    prompt = np.zeros((1, 64), np.int32)
    prompt[0, : len(request.prompt)] = request.prompt
    sampling = make_sampling(
        jax.random.key(request.seed)[None], request.temperature, request.top_k, request.top_p
    )
    static = {"config": tiny.target, "greedy": request.temperature == 0, "stop_ids": stop_ids}
    state = prefill(
        tiny.params,
        init_generation(tiny.target, 1, CAPACITY),
        jnp.asarray(prompt),
        jnp.array([len(request.prompt)]),
        jnp.arange(1),
        jnp.array([request.max_new_tokens]),
        sampling,
        **static,
    )
    state = decode_steps(tiny.params, state, CAPACITY, **static)
    tokens = state.tokens[0, len(request.prompt) : int(state.length[0])].tolist()
    for at, token in enumerate(tokens):
        if token in request.stop_ids:
            return tokens[: at + 1]
        ends = [text_of(tokens[: at + 1]).find(stop) for stop in request.stop_strings]
        if any(end >= 0 for end in ends):
            return tokens[: at + 1]
    return tokens


def make_requests(count, seed=0):
    rng = random.Random(seed)
    shared = [rng.randrange(12) for _ in range(40)]
    requests = []
    for index in range(count):
        prompt = [rng.randrange(12) for _ in range(rng.randint(1, 50))]
        if index % 3 == 0:  # a conversation that goes on
            prompt = (shared[: rng.randint(20, 40)] + prompt)[:55]
        requests.append(
            Request(
                tuple(prompt),
                max_new_tokens=rng.randint(1, 30),
                temperature=rng.choice([0.0, 0.0, 0.6, 1.0]),
                top_k=rng.choice([None, 4]),
                top_p=rng.choice([1.0, 0.9]),
                seed=rng.randrange(100),
                stop_ids=rng.choice([(), (3,)]),
                stop_strings=rng.choice([(), ("ab",), ("bb", "ca")]),
            )
        )
    return requests


def test_every_answer_is_that_of_the_request_alone(tiny, make_engine):
    requests = make_requests(30)
    engine = make_engine(max_waiting=40)
    tickets = [engine.submit(request) for request in requests[:20]]
    for request in requests[20:]:  # the others come while these run
        engine.step()
        tickets.append(engine.submit(request))
    engine.run()
    for ticket in tickets:
        assert ticket.tokens == alone(tiny, ticket.request)
        assert ticket.finish_reason in ("stop", "length")
    assert engine.num_active == engine.num_waiting == 0


def test_the_batch_follows_the_plan_up_and_down(tiny, make_engine, monkeypatch):
    variants = set()

    def checked(params, weights, state, num_cycles, *, variant):
        """Whatever decoded before, the context is that of this variant's taps and layers."""
        variants.add(variant)
        fresh = context_of(weights, tiny.drafter, variant.taps, state.rows.taps)
        depth = variant.num_layers or tiny.drafter.num_hidden_layers
        for row in np.flatnonzero(~np.asarray(state.rows.done)):
            known = int(state.rows.length[row]) - 1
            for layer in range(depth):
                np.testing.assert_allclose(
                    state.context.values[layer][row, :, :known],
                    fresh.values[layer][row, :, :known],
                    atol=0.02,  # taps are kept as bfloat16
                )
        return decode_cycles(params, weights, state, num_cycles, variant=variant)

    monkeypatch.setattr(engine_module, "decode_cycles", checked)
    engine, sizes, tickets = make_engine(cycles_at_once=1, stop_ids=()), [], []
    for i in range(6):
        tickets.append(engine.submit(Request((1, 2, 3, i), 70 - 10 * i, seed=i)))
        engine.step()
        sizes.append(engine._size)
    while engine.step():
        sizes.append(engine._size)
    assert set(sizes) == {1, 2, 4, 6} and len(variants) == 3
    assert sizes.index(6) < len(sizes) - 1 - sizes[::-1].index(1)  # and back to one row
    for ticket in tickets:
        assert ticket.tokens == alone(tiny, ticket.request, stop_ids=())


def test_a_prefix_that_a_slot_holds_is_taken_over(tiny, make_engine, monkeypatch):
    runs = []

    def counted(params, staging, chunk, num_tokens, **static):
        runs.append(int(num_tokens))
        return prefill_chunk(params, staging, chunk, num_tokens, **static)

    monkeypatch.setattr(engine_module, "prefill_chunk", counted)
    engine = make_engine()
    first = engine.submit(Request(tuple(range(12)) * 3, 12))
    engine.run()
    assert sum(runs) == 36
    runs.clear()
    turn = (*first.request.prompt, *first.tokens, 4, 5)
    second = engine.submit(Request(turn, 12))
    engine.run()
    # All but the answer's last token, which no pass has seen, and the two new ones.
    assert sum(runs) == 3
    assert second.tokens == alone(tiny, second.request)


def test_a_prompt_may_fill_a_slot_to_its_end(tiny, make_engine):
    engine = make_engine(capacity=44)
    ticket = engine.submit(Request(tuple(range(12)) * 2 + (1,) * 10, 2))
    engine.run()
    assert ticket.tokens == alone(tiny, ticket.request)


def test_chunked_prefill_is_full_prefill_also_for_the_taps(tiny):
    prompt = jax.random.randint(jax.random.key(3), (1, 37), 0, 12)
    ids = tiny.drafter.target_layer_ids
    staging = init_staging(tiny.target, tiny.drafter, 64)
    for start, count in ((0, 16), (16, 16), (32, 5)):
        chunk = jnp.pad(prompt[:, start : start + count], ((0, 0), (0, 16 - count)))
        staging, logits = prefill_chunk(
            tiny.params, staging, chunk, jnp.int32(count), config=tiny.target, tap_ids=ids
        )
    whole = apply_target(tiny.params, tiny.target, prompt, tap_ids=ids)
    taps = np.asarray(from_words(staging.taps[0, :37]))
    np.testing.assert_allclose(taps, whole.taps[0], rtol=2**-7, atol=1e-5)
    assert staging.tokens[0, :37].tolist() == prompt[0].tolist()
    assert staging.cache.length.tolist() == [37]
    last = prefill(
        tiny.params,
        init_generation(tiny.target, 1, 64),
        prompt,
        jnp.array([37]),
        jnp.arange(1),
        jnp.array([2]),
        config=tiny.target,
        greedy=True,
        stop_ids=(),
    )
    assert int(jnp.argmax(logits)) == int(last.tokens[0, 37])
    for a, b in zip(staging.cache.keys, last.cache.keys, strict=True):
        np.testing.assert_allclose(a[:, :, :37], b[:, :, :37], atol=1e-4)


def test_streams_are_the_answer_in_pieces_and_text_never_takes_anything_back(make_engine):
    engine = make_engine(cycles_at_once=2)
    other = engine.submit(Request((5, 6), 40))
    ticket = engine.submit(Request((1, 2, 3), 40, temperature=1.0, stop_strings=("ka", "bcd")))
    pieces, texts = [], []
    for piece in engine.stream(ticket):
        pieces += piece
        texts.append(ticket.text)
    assert pieces == ticket.tokens and len(texts) > 1
    assert all(ticket.text.startswith(text) for text in texts)
    assert "ka" not in ticket.text and "bcd" not in ticket.text
    engine.run()
    assert other.done


def test_a_cancelled_request_harms_nobody_wherever_it_was(tiny, make_engine):
    engine = make_engine(plan={2: Variant(tiny.target, tiny.drafter, 4)}, cycles_at_once=1)
    requests = [Request((1, 2, i), 30, temperature=float(i % 2), seed=i) for i in range(6)]
    tickets = [engine.submit(request) for request in requests]
    engine.cancel(tickets[5])  # waiting
    engine.step()
    engine.step()
    running = next(t for t in tickets if t.tokens and not t.done)
    engine.cancel(running)
    engine.run()
    for ticket in tickets:
        if ticket in (running, tickets[5]):
            assert ticket.finish_reason == "cancelled"
        else:
            assert ticket.tokens == alone(tiny, ticket.request)
    before = list(tickets[0].tokens)
    engine.cancel(tickets[0])
    assert tickets[0].finish_reason != "cancelled" or tickets[0] is running
    assert tickets[0].tokens == before


def test_programs_are_compiled_once_for_each_size_of_the_plan(tiny, make_engine):
    plan = {1: Variant(tiny.target, tiny.drafter, 5), 3: Variant(tiny.target, tiny.drafter, 3)}
    before = decode_cycles._cache_size()
    for _ in range(2):
        engine = make_engine(plan=plan)
        for request in make_requests(8, seed=1):
            engine.submit(Request(request.prompt, request.max_new_tokens))
        engine.run()
        single = engine.submit(Request((1, 2), 9))
        engine.run()
        assert single.done
    assert decode_cycles._cache_size() - before == 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": ()}, "prompt is empty"),
        ({"max_new_tokens": 0}, "max_new_tokens=0 must be at least 1"),
        ({"temperature": -0.5}, "temperature=-0.5 must be a number of at least 0"),
        ({"temperature": float("nan")}, "temperature=nan must be"),
        ({"top_k": 0}, "top_k=0 must be at least 1"),
        ({"top_p": 0.0}, r"top_p=0.0 must be in \(0, 1\]"),
        ({"stop_strings": ("",)}, "must be texts that are not empty"),
        ({"prompt": (1,) * 70, "max_new_tokens": 30}, "need 108 positions, a slot has 96"),
        ({"prompt": (13,)}, r"prompt token 13 is not in \[0, 12\]"),
    ],
)
def test_bad_requests_are_refused_and_the_engine_goes_on(make_engine, fields, message):
    engine = make_engine()
    good = engine.submit(Request((1, 2), 5))
    with pytest.raises(ValueError, match=message):
        engine.submit(Request(**({"prompt": (1,), "max_new_tokens": 5} | fields)))
    engine.run()
    assert len(good.tokens) <= 5 and good.done


def test_a_full_queue_refuses_and_takes_in_again_later(make_engine):
    engine = make_engine(max_waiting=2)
    for _ in range(2):
        engine.submit(Request((1,), 2))
    with pytest.raises(QueueFull, match="2 requests wait already"):
        engine.submit(Request((1,), 2))
    engine.run()
    assert engine.submit(Request((1,), 2)) is not None


def test_bad_engines_are_refused(make_engine):
    with pytest.raises(ValueError, match="plan sizes"):
        make_engine(plan={})
    with pytest.raises(ValueError, match="rule='greedy'"):
        make_engine(rule="greedy")
    with pytest.raises(ValueError, match="stop_strings need"):
        make_engine(decode_text=None).submit(Request((1,), 5, stop_strings=("a",)))
