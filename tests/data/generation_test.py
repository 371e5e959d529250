import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dscout_jax.config.models import TargetConfig
from dscout_jax.data.generation import GenerationSettings, Request, generate
from dscout_jax.data.loops import loop_start
from dscout_jax.models.target import apply_target, compute_logits, init_target

CONFIG = TargetConfig(
    vocab_size=29,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    rope_theta=10000.0,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    qk_norm=False,
    max_position_embeddings=128,
)
STOP_IDS = (2,)
SETTINGS = GenerationSettings(
    slots=16, max_prompt_tokens=12, max_new_tokens=20, refill_steps=4, loop_ngram=None
)


@pytest.fixture(scope="module")
def params():
    # Large weights make the next token depend on the context, so answers differ and some stop.
    return jax.tree.map(lambda p: p * 4.0, init_target(jax.random.key(0), CONFIG))


@pytest.fixture(scope="module")
def requests():
    rng = np.random.default_rng(0)
    return [
        Request(f"p/{i}", tuple(rng.integers(3, 29, rng.integers(1, 13)).tolist()))
        for i in range(40)
    ]


def answer_all(params, requests, settings):
    answers = itertools.chain(*generate(params, CONFIG, requests, STOP_IDS, settings))
    rows = [answer.response for answer in answers]
    assert sorted(r.id for r in rows) == sorted(r.id for r in requests)
    return {r.id: r for r in rows}


def decode_naively(params, prompt, max_new_tokens):
    """Greedy decoding without cache, slots or batches."""
    forward = jax.jit(
        lambda t: compute_logits(params, CONFIG, apply_target(params, CONFIG, t).hidden)
    )
    tokens, start = np.zeros((1, 40), np.int32), len(prompt)
    tokens[0, :start] = prompt
    for end in range(start, start + max_new_tokens):
        tokens[0, end] = int(jnp.argmax(forward(jnp.asarray(tokens))[0, end - 1]))
        if tokens[0, end] in STOP_IDS:
            break
    return tuple(tokens[0, start : end + 1].tolist())


def test_every_answer_equals_decoding_the_prompt_alone(params, requests):
    answers = answer_all(params, requests, SETTINGS)
    for request in requests[:12]:
        assert answers[request.id].prompt == request.prompt
        assert answers[request.id].response == decode_naively(params, request.prompt, 20)
    assert all(r.stopped == (r.response[-1] == 2) for r in answers.values())
    assert 0 < sum(r.stopped for r in answers.values()) < len(requests)


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_answers_do_not_depend_on_slots_order_or_refill_interval(params, requests, temperature):
    settings = dataclasses.replace(SETTINGS, temperature=temperature, loop_ngram=3)
    other = dataclasses.replace(settings, slots=3, refill_steps=7)
    answers = answer_all(params, requests, settings)
    assert answers == answer_all(params, requests[::-1], other)
    seeded = answer_all(params, requests, dataclasses.replace(settings, seed=1))
    assert (answers == seeded) == (temperature == 0.0)


def test_an_answer_ends_with_its_first_repeated_ngram(params, requests):
    free = answer_all(params, requests, SETTINGS)
    cut = answer_all(params, requests, dataclasses.replace(SETTINGS, loop_ngram=3))
    num_cut = 0
    for name, response in free.items():
        end = loop_start(response.response, 3) + 3
        assert cut[name].response == response.response[:end]
        if end < len(response.response):
            assert not cut[name].stopped
            num_cut += 1
    assert num_cut > 0


def test_prompts_that_do_not_fit_are_refused(params):
    for prompt in ((), (5,) * 13):
        with pytest.raises(ValueError, match=f"'p' has {len(prompt)} tokens, allowed are 1 to"):
            next(generate(params, CONFIG, [Request("p", prompt)], STOP_IDS, SETTINGS))


@pytest.mark.parametrize("loop_ngram", [None, 3])
def test_features_are_the_taps_of_a_pass_over_the_whole_answer(params, requests, loop_ngram):
    settings = dataclasses.replace(SETTINGS, tap_ids=(0, 1), loop_ngram=loop_ngram)
    answers = list(itertools.chain(*generate(params, CONFIG, requests, STOP_IDS, settings)))
    plain = answer_all(params, requests, dataclasses.replace(SETTINGS, loop_ngram=loop_ngram))
    forward = jax.jit(lambda t: apply_target(params, CONFIG, t, tap_ids=(0, 1)).taps)
    for answer in answers:
        assert answer.response == plain[answer.response.id]
        tokens = answer.response.prompt + answer.response.response
        assert len(answer.features) in (len(tokens) - 1, len(tokens))
        padded = np.zeros((1, 40), np.int32)
        padded[0, : len(tokens)] = tokens
        expected = np.asarray(forward(padded)[0, : len(answer.features)])
        # Rounded to bfloat16, eight bits.
        found = answer.features.astype(np.float32)
        np.testing.assert_allclose(found, expected, rtol=0.01, atol=0.02)
