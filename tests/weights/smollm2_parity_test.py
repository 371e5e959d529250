"""SmolLM2 through our loader and target against Hugging Face transformers, from a stored golden."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dscout_jax.data.tokenizer import Tokenizer
from dscout_jax.decoding.autoregressive import decode_steps, init_generation, prefill
from dscout_jax.models.target import apply_target, compute_logits

GOLDEN = Path(__file__).parents[1] / "golden" / "smollm2.npz"
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDEN) as stored:
        return dict(stored)


@pytest.fixture(scope="module")
def logits(golden, smollm2):
    """[256, V] of the golden's text."""

    @jax.jit
    def forward(params, tokens):
        hidden = apply_target(params, smollm2.cfg, tokens).hidden
        return compute_logits(params, smollm2.cfg, hidden)[0]

    return np.asarray(forward(smollm2.params, jnp.asarray(golden["text"])[None]))


def test_logits_equal_hugging_face_over_256_positions(golden, logits):
    assert logits.shape[0] == 256
    assert np.abs(logits[:, golden["columns"]] - golden["logits"]).max() < TOLERANCE
    log_sum_exp = np.logaddexp.reduce(logits.astype(np.float64), axis=-1)
    assert np.abs(log_sum_exp - golden["log_sum_exp"]).max() < TOLERANCE


def test_best_tokens_equal_hugging_face_over_256_positions(golden, logits):
    same = logits.argmax(-1) == golden["best_ids"]
    assert same[golden["best_margins"] > TOLERANCE].all()
    best, second = -np.partition(-logits, 1, axis=-1)[:, :2].T
    assert np.abs(best - second - golden["best_margins"]).max() < 2 * TOLERANCE


def test_chat_prompts_have_the_ids_of_hugging_faces_tokenizer(golden, smollm2):
    tokenizer = Tokenizer(smollm2.vocabulary)
    for text, ids, length in zip(
        golden["prompt_text"], golden["prompts"], golden["prompt_len"], strict=True
    ):
        messages = [{"role": "user", "content": str(text)}]
        assert tokenizer.chat_prompt(messages) == ids[:length].tolist()


def test_greedy_tokens_equal_hugging_face_on_twenty_prompts(golden, smollm2):
    prompt_len = golden["prompt_len"]
    prompts = golden["prompts"][:, : prompt_len.max()]
    num_rows, num_new = golden["tokens"].shape
    assert (num_rows, num_new) == (20, 64)
    state = init_generation(smollm2.cfg, num_rows, prompts.shape[1] + num_new)
    static = {"config": smollm2.cfg, "greedy": True, "stop_ids": (smollm2.vocabulary.eos_id,)}
    state = prefill(
        smollm2.params,
        state,
        jnp.asarray(prompts),
        jnp.asarray(prompt_len),
        jnp.arange(num_rows),
        jnp.full((num_rows,), num_new),
        **static,
    )
    state = decode_steps(smollm2.params, state, num_new, **static)
    ours, length = np.asarray(state.tokens), np.asarray(state.length)
    for row in range(num_rows):
        theirs = golden["tokens"][row, : golden["token_len"][row]]
        answer = ours[row, prompt_len[row] : length[row]]
        np.testing.assert_array_equal(answer, theirs, err_msg=str(golden["prompt_text"][row]))
