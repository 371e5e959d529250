"""A tiny random target with made-up answers, and an experiment small enough for a test."""

import functools

import jax
import numpy as np

from dscout_jax.config.experiment import from_config_dict
from dscout_jax.config.models import TargetConfig
from dscout_jax.data.responses import Response
from dscout_jax.models.target import init_target
from dscout_jax.weights.targets import LoadedTarget

CONFIG = TargetConfig(
    vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, rope_theta=10000.0,
    rms_norm_eps=1e-5, tie_word_embeddings=True, qk_norm=False, max_position_embeddings=128,
)  # fmt: skip


@functools.cache
def make_target() -> LoadedTarget:
    params = jax.jit(init_target, static_argnums=1)(jax.random.key(0), CONFIG)
    return LoadedTarget("tiny", CONFIG, params, None, "0" * 64)


@functools.cache
def make_responses(count=24) -> tuple[Response, ...]:
    random = np.random.default_rng(0)
    responses = []
    for index in range(count):
        # A walk with few steps, so that there is something to learn.
        answer = np.cumsum(random.integers(1, 3, random.integers(4, 30))) % 50
        prompt = random.integers(0, 50, random.integers(2, 8))
        responses.append(Response(f"r{index}", tuple(prompt), tuple(answer), False))
    return tuple(
        Response(r.id, tuple(map(int, r.prompt)), tuple(map(int, r.response)), r.stopped)
        for r in responses
    )


def make_experiment(**changes):
    """Sections as keyword arguments with the fields to change, e.g. `train={"num_steps": 3}`."""
    values = {
        "target": "tiny",
        "drafter": {
            "num_hidden_layers": 1,
            "target_layer_ids": (0, 2),
            "block_size": 4,
            "mask_token_id": 60,
            "draft_vocab_size": 48,
        },
        "data": {
            "store": "unused",
            "seq_len": 40,
            "validation_fraction": 0.2,
            "feature_dtype": "bfloat16",
        },
        "objective": {"horizons": ((4, 6),), "chunk_anchors": 4},
        "optimizer": {"learning_rate": 3e-3},
        "train": {
            "num_steps": 6,
            "batch_size": 4,
            "log_every": 2,
            "eval_every": 3,
            "eval_rows": 5,
            "checkpoint_every": 2,
            "mesh": (1, 1, 1),
        },
    }
    for section, fields in changes.items():
        values[section] = {**values[section], **fields} if isinstance(fields, dict) else fields
    return from_config_dict(values)
