"""Settings that every test runs under; imported by pytest before any test module."""

import os
import pathlib
import subprocess
import sys
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("MPLBACKEND", "Agg")
# Compiling is most of the time: a test process, and the scripts that it starts, compile a program
# once. Each process has its own folder, because two may write the same file at once.
_COMPILED = tempfile.TemporaryDirectory(prefix="dscout_jax-compiled-")
os.environ["JAX_COMPILATION_CACHE_DIR"] = _COMPILED.name
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"

import jax  # noqa: E402

# Four simulated devices: enough for a 2 x 2 mesh; no measurable cost to single-device tests.
jax.config.update("jax_num_cpu_devices", 4)
# A silent broadcast between ranks is nearly always a bug.
jax.config.update("jax_numpy_rank_promotion", "raise")

from types import SimpleNamespace  # noqa: E402

import pytest  # noqa: E402

from dscout_jax.config.models import DrafterConfig, TargetConfig  # noqa: E402
from dscout_jax.models.drafter import init_drafter  # noqa: E402
from dscout_jax.models.target import init_target  # noqa: E402
from dscout_jax.weights.download import WeightsError  # noqa: E402
from dscout_jax.weights.targets import LoadedTarget, load_target  # noqa: E402

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture(scope="session")
def run_script():
    """Runs a script of experiments/ in the repository's root with little of the environment."""

    def run(name: str, *arguments: str) -> subprocess.CompletedProcess:
        kept = ("JAX_PLATFORMS", "JAX_COMPILATION_CACHE_DIR", "HOME", "PATH")
        return subprocess.run(
            [sys.executable, f"experiments/{name}.py", *arguments],
            cwd=ROOT,
            env={"PYTHONPATH": str(ROOT)} | {k: os.environ[k] for k in kept if k in os.environ},
            capture_output=True,
            text=True,
            check=False,
        )

    return run


@pytest.fixture(scope="session")
def smollm2() -> LoadedTarget:
    """The real target; without it tests skip, or fail where DSCOUT_REQUIRE_TARGET=1 asks for it."""
    try:
        return load_target("smollm2-135m")
    except WeightsError as error:
        if "could not download" not in str(error) or os.environ.get("DSCOUT_REQUIRE_TARGET") == "1":
            raise
        pytest.skip(f"SmolLM2 is not cached and cannot be fetched: {error}")


@pytest.fixture(scope="session")
def tiny() -> SimpleNamespace:
    """A random Qwen3-style target and drafter; so few words that some drafts are accepted."""
    target = TargetConfig(
        vocab_size=13,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        qk_norm=True,
        max_position_embeddings=512,
    )
    drafter = DrafterConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        vocab_size=13,
        num_target_layers=6,
        target_layer_ids=(1, 2, 4),
        mask_token_id=12,
        block_size=8,
    )
    return SimpleNamespace(
        target=target,
        params=init_target(jax.random.key(0), target),
        drafter=drafter,
        drafter_params=init_drafter(jax.random.key(4), drafter),
    )
