"""Plain decoding against greedy responses that another implementation made of the same weights."""

import json
import random
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dscout_jax.decoding.autoregressive import decode_steps, init_generation, prefill
from dscout_jax.evaluation.benchmarks import NEAR_TIE_MARGIN
from dscout_jax.models.target import apply_target, compute_logits

RESPONSES = Path(__file__).parents[3] / "shared" / "data" / "responses" / "smollm2_greedy.jsonl"
NUM_ROWS = 50
BATCH = 25
NUM_NEW = 256


@pytest.fixture(scope="module")
def rows():
    if not RESPONSES.is_file():
        pytest.skip(f"{RESPONSES} is absent")
    with RESPONSES.open() as lines:
        return random.Random(0).sample([json.loads(line) for line in lines], NUM_ROWS)


def decode_all(smollm2, rows, prompt_width: int) -> list[list[int]]:
    """Returns the greedy response to each row's prompt, BATCH rows at a time, one compilation."""
    static = {"config": smollm2.cfg, "greedy": True, "stop_ids": (smollm2.vocabulary.eos_id,)}
    answers = []
    for first in range(0, len(rows), BATCH):
        batch = rows[first : first + BATCH]
        lengths = np.array([len(row["prompt"]) for row in batch], np.int32)
        prompts = np.zeros((BATCH, prompt_width), np.int32)
        for prompt, row in zip(prompts, batch, strict=True):
            prompt[: len(row["prompt"])] = row["prompt"]
        state = prefill(
            smollm2.params,
            init_generation(smollm2.cfg, BATCH, prompt_width + NUM_NEW),
            jnp.asarray(prompts),
            jnp.asarray(lengths),
            jnp.arange(BATCH),
            jnp.full((BATCH,), NUM_NEW),
            **static,
        )
        state = decode_steps(smollm2.params, state, NUM_NEW, **static)
        ends = np.asarray(state.length)
        for tokens, start, end in zip(np.asarray(state.tokens), lengths, ends, strict=True):
            answers.append(tokens[start:end].tolist())
    return answers


def margin_after(smollm2, tokens: list[int], width: int) -> float:
    """Returns the gap between the two best logits for the token after `tokens`."""
    padded = np.zeros((1, width), np.int32)
    padded[0, : len(tokens)] = tokens
    hidden = apply_target(smollm2.params, smollm2.cfg, jnp.asarray(padded)).hidden
    logits = compute_logits(smollm2.params, smollm2.cfg, hidden[0, len(tokens) - 1])
    best, second = jax.lax.top_k(logits, 2)[0]
    return float(best - second)


def test_sampled_responses_come_out_the_same_but_for_near_ties(rows, smollm2):
    width = max(len(row["prompt"]) for row in rows)
    differences = []
    for row, ours in zip(rows, decode_all(smollm2, rows, width), strict=True):
        theirs = row["response"]
        if ours == theirs:
            continue
        pairs = zip(ours, theirs, strict=False)
        shared = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
        assert shared < min(len(ours), len(theirs)), f"{row['id']}: one response is cut short"
        margin = margin_after(smollm2, row["prompt"] + theirs[:shared], width + NUM_NEW)
        differences.append((row["id"], shared, margin))
    for row_id, shared, margin in differences:
        print(f"{row_id}: differs at token {shared}, margin {margin:.2e}")
    assert all(margin < NEAR_TIE_MARGIN for _, _, margin in differences), differences
    assert len(differences) <= 0.05 * NUM_ROWS, differences
