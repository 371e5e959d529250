"""Our target, drafter and decode loop against z-lab/dflash, from a stored golden (no torch)."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dscout_jax.config.models import DrafterConfig, TargetConfig
from dscout_jax.decoding.autoregressive import decode_steps, init_generation, prefill
from dscout_jax.decoding.speculative import (
    decode_cycles,
    init_speculative,
    make_draft_weights,
    prefill_speculative,
)
from dscout_jax.decoding.variant import Variant
from dscout_jax.models.cache import init_cache, rollback, write
from dscout_jax.models.drafter import Context, draft_blocks, project_context
from dscout_jax.models.target import apply_target, compute_logits, embed

GOLDEN = Path(__file__).parents[1] / "golden" / "dflash_tiny.npz"
TOLERANCE = 1e-4
# Compiled once per shape: op by op the same checks take ten times as long.
apply = jax.jit(apply_target, static_argnames=("config", "tap_ids"))
project = jax.jit(project_context, static_argnames=("config",))
draft = jax.jit(draft_blocks, static_argnames=("config",))
PROMPTS = ("target_0", "target_1", "target_2")
RECORDED = ("run_0_block4", "run_1_block8")
RUNS = tuple(f"run_{i}_{kind}" for i in range(3) for kind in ("block4", "block8", "stop"))


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDEN) as stored:
        return dict(stored)


@pytest.fixture(scope="module")
def target(golden):
    fields = json.loads(str(golden["target_config"]))
    return TargetConfig(**fields, qk_norm=True), to_params(golden, "target_weights/")


@pytest.fixture(scope="module")
def drafter(golden):
    fields = json.loads(str(golden["drafter_config"]))
    del fields["max_position_embeddings"]
    fields["target_layer_ids"] = tuple(fields["target_layer_ids"])
    return DrafterConfig(**fields), to_params(golden, "drafter_weights/")


def to_params(golden: dict, prefix: str) -> dict:
    """Nested params from the reference's flat names; torch keeps linear weights [out, in]."""
    params: dict = {}
    for name, value in golden.items():
        if not name.startswith(prefix):
            continue
        path = name.removeprefix(prefix).removeprefix("model.").removesuffix(".weight")
        path = path.replace("layers.", "layers_").split(".")
        if path[-1] == "embed_tokens":
            leaf, array = "embedding", value
        else:
            leaf, array = ("weight", value) if value.ndim == 2 else ("scale", value)
        node = params
        for part in path:
            node = node.setdefault(part, {})
        node[leaf] = jnp.asarray(array)
    return params


def difference(ours, theirs) -> float:
    assert ours.shape == theirs.shape
    return float(np.abs(np.asarray(ours) - theirs).max())


def read_cycles(golden: dict, run: str) -> list[dict]:
    """What the reference's drafter was given and gave: new features, anchor position, hidden."""
    splits = np.cumsum(golden[f"{run}/num_features"])[:-1]
    columns = (
        np.split(golden[f"{run}/features"], splits),
        golden[f"{run}/anchors"],
        golden[f"{run}/hidden"],
    )
    names = ("features", "anchor", "hidden")
    return [dict(zip(names, cycle, strict=True)) for cycle in zip(*columns, strict=True)]


def test_golden_has_drafts_refused_and_whole_blocks_accepted(golden):
    for block, distinct in ((4, 4), (8, 5)):
        runs = [run for run in RUNS if run.endswith(f"block{block}")]
        lengths = np.concatenate([golden[f"{run}/lengths"] for run in runs])
        assert lengths.min() == 1 and lengths.max() >= block - 1
        assert len(set(lengths.tolist())) >= distinct


@pytest.mark.parametrize("prompt", PROMPTS)
def test_target_equals_hugging_face_qwen3_in_logits_and_taps(golden, target, drafter, prompt):
    config, params = target
    tokens = jnp.asarray(golden[f"{prompt}/tokens"])[None]
    out = apply(params, config, tokens, tap_ids=drafter[0].target_layer_ids)
    assert difference(out.hidden[0], golden[f"{prompt}/final"]) < TOLERANCE
    assert difference(out.taps[0], golden[f"{prompt}/taps"]) < TOLERANCE
    logits = compute_logits(params, config, out.hidden)[0]
    assert difference(logits, golden[f"{prompt}/logits"]) < TOLERANCE


@pytest.mark.parametrize("run", RECORDED)
def test_verification_taps_equal_the_reference_in_every_cycle(golden, target, drafter, run):
    """The features the reference hands to its next draft come from our cached verify pass, too."""
    config, params = target
    prompt, output = golden[f"{run}/prompt"], golden[f"{run}/output"]
    tokens = np.concatenate([prompt, output])
    block = int(golden[f"{run}/block_size"])
    cache = init_cache(config, 1, len(tokens) + 2 * block)
    start = 0
    for cycle in read_cycles(golden, run):
        num_new = len(cycle["features"])
        if start + num_new > len(tokens):
            break  # the reference drafts past the limit in its last cycle
        # The verify pass also sees refused drafts; any token may stand there, it is rolled back.
        pass_len = num_new if start == 0 else block
        fed = np.full((pass_len,), 1, np.int32)
        fed[:num_new] = tokens[start : start + num_new]
        out = apply(
            params, config, jnp.asarray(fed)[None], cache=cache, tap_ids=drafter[0].target_layer_ids
        )
        assert difference(out.taps[0, :num_new], cycle["features"]) < TOLERANCE
        start += num_new
        cache = rollback(out.cache, jnp.array([start], jnp.int32))


@pytest.mark.parametrize("run", RECORDED)
def test_drafter_equals_the_reference_in_every_cycle(golden, target, drafter, run):
    """Prefill, first and later cycles, over the context cache as decoding keeps it."""
    config, params = drafter
    prompt, output = golden[f"{run}/prompt"], golden[f"{run}/output"]
    tokens = np.concatenate([prompt, output])
    block = int(golden[f"{run}/block_size"])
    capacity = len(tokens) + 2 * block
    # What lies at and past the anchor is stale in decoding; here it is conspicuous.
    stale = jax.tree.map(lambda x: x + 50.0, init_cache(config, 1, capacity))
    keys, values = stale.keys, stale.values
    anchor = 0
    compared = 0
    for cycle in read_cycles(golden, run):
        num_new = len(cycle["features"])
        start = jnp.array([anchor], jnp.int32)
        positions = jnp.arange(anchor, anchor + num_new)[None]
        new = project(params, config, jnp.asarray(cycle["features"])[None], positions)
        keys = tuple(write(old, k, start) for old, k in zip(keys, new.keys, strict=True))
        values = tuple(write(old, v, start) for old, v in zip(values, new.values, strict=True))
        anchor += num_new
        if anchor >= len(tokens):
            break
        assert anchor == cycle["anchor"]
        slots = anchor + np.arange(block, dtype=np.int32)
        ids = np.full((block,), config.mask_token_id)
        ids[0] = tokens[anchor]
        hidden = draft(
            params,
            config,
            embed(target[1], jnp.asarray(ids))[None, None],
            jnp.asarray(slots)[None, None],
            Context(keys, values),
        )[0, 0]
        assert difference(hidden, cycle["hidden"]) < TOLERANCE
        compared += 1
    assert compared >= 3


def pad_prompts(golden: dict, runs: tuple[str, ...]) -> tuple[jax.Array, jax.Array]:
    prompts = [golden[f"{run}/prompt"] for run in runs]
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    padded = np.zeros((len(runs), lengths.max()), np.int32)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = prompt
    return jnp.asarray(padded), jnp.asarray(lengths)


def cut_lengths(lengths: np.ndarray, num_emitted: int) -> list[int]:
    """The reference counts accepted drafts past the limit and the stop token; we do not."""
    ends = np.minimum(np.cumsum(lengths), num_emitted)
    emitted = np.diff(ends, prepend=0)
    return emitted[emitted > 0].tolist()


BATCHES = (
    tuple(f"run_{i}_block4" for i in range(3)),
    tuple(f"run_{i}_block8" for i in range(3)),
    ("run_0_stop",),
    ("run_1_stop",),
    ("run_2_stop",),
)


@pytest.mark.parametrize("runs", BATCHES, ids=lambda runs: runs[0])
def test_decode_loop_gives_the_references_tokens_and_accepted_lengths(
    golden, target, drafter, runs
):
    prompts, prompt_len = pad_prompts(golden, runs)
    block = int(golden[f"{runs[0]}/block_size"])
    num_new = int(golden[f"{runs[0]}/max_new_tokens"])
    stop_ids = tuple(golden[f"{runs[0]}/stop_ids"].tolist())
    variant = Variant(target[0], drafter[0], block, stop_ids=stop_ids)
    weights = make_draft_weights(target[1], target[0], drafter[1])
    batch = len(runs)
    state = init_speculative(
        target[0], drafter[0], batch, prompts.shape[1] + num_new + block, num_new
    )
    state = prefill_speculative(
        target[1],
        weights,
        state,
        prompts,
        prompt_len,
        jnp.arange(batch),
        jnp.full((batch,), num_new),
        variant=variant,
    )
    state = decode_cycles(target[1], weights, state, num_new, variant=variant)
    assert np.asarray(state.rows.done).all()
    for row, run in enumerate(runs):
        output = golden[f"{run}/output"]
        tokens = np.asarray(state.rows.tokens)[row, prompt_len[row] : state.rows.length[row]]
        np.testing.assert_array_equal(tokens, output)
        emitted = np.asarray(state.emitted)[row, : state.cycles[row]].tolist()
        assert emitted == cut_lengths(golden[f"{run}/lengths"], len(output) - 1)


def test_plain_decoding_gives_the_references_tokens(golden, target):
    runs = BATCHES[0]
    prompts, prompt_len = pad_prompts(golden, runs)
    num_new = int(golden[f"{runs[0]}/max_new_tokens"])
    batch = len(runs)
    static = {"config": target[0], "greedy": True, "stop_ids": ()}
    state = prefill(
        target[1],
        init_generation(target[0], batch, prompts.shape[1] + num_new),
        prompts,
        prompt_len,
        jnp.arange(batch),
        jnp.full((batch,), num_new),
        **static,
    )
    state = decode_steps(target[1], state, num_new, **static)
    for row, run in enumerate(runs):
        tokens = np.asarray(state.tokens)[row, prompt_len[row] : state.length[row]]
        np.testing.assert_array_equal(tokens, golden[f"{run}/output"])
