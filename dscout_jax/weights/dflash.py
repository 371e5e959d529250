"""Drafters on disk, in the z-lab DFlash layout that SGLang and vLLM read.

A folder holds `config.json` (Qwen3 fields plus `dflash_config`), `model.safetensors` (bfloat16,
[out, in] matrices, no `model.` prefix, neither embedding nor head) and, when the draft vocabulary
is pruned, `draft_vocab.json`, which other engines ignore.
"""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from dscout_jax.config.checks import ConfigError
from dscout_jax.config.models import DrafterConfig, TargetConfig
from dscout_jax.weights.download import WeightsError

ARCHITECTURE = "DFlashDraftModel"
WEIGHTS_FILE = "model.safetensors"
VOCABULARY_FILE = "draft_vocab.json"


@flax.struct.dataclass
class LoadedDrafter:
    """A drafter read from a folder.

    Attributes:
        config: its shapes.
        params: float32 params (nested dict, weights [out, in]).
        token_ids: [Vd] int32 draft vocabulary, increasing; None = the whole vocabulary.
        trained_on: what its maker recorded (`dscout_config` of config.json).
    """

    config: DrafterConfig = flax.struct.field(pytree_node=False)
    params: dict
    token_ids: jax.Array | None
    trained_on: dict[str, Any] = flax.struct.field(pytree_node=False)


def tensor_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Returns every tensor name of the layout with its shape ([out, in] for matrices)."""
    width, head = config.hidden_size, config.head_dim
    width_q, width_kv = config.num_attention_heads * head, config.num_key_value_heads * head
    inner = config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (width, len(config.target_layer_ids) * width),
        "hidden_norm.weight": (width,),
        "norm.weight": (width,),
    }
    for index in range(config.num_hidden_layers):
        layer = {
            "input_layernorm": (width,),
            "post_attention_layernorm": (width,),
            "self_attn.q_proj": (width_q, width),
            "self_attn.k_proj": (width_kv, width),
            "self_attn.v_proj": (width_kv, width),
            "self_attn.o_proj": (width, width_q),
            "self_attn.q_norm": (head,),
            "self_attn.k_norm": (head,),
            "mlp.gate_proj": (inner, width),
            "mlp.up_proj": (inner, width),
            "mlp.down_proj": (width, inner),
        }
        shapes |= {f"layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


def param_path(name: str) -> tuple[str, ...]:
    """Returns the path in our params of a tensor of the layout.

    Example: `layers.0.self_attn.q_proj.weight` -> ("layers_0", "self_attn", "q_proj", "weight").
    """
    parts = name.removesuffix(".weight").split(".")
    if parts[0] == "layers":
        parts = [f"layers_{parts[1]}", *parts[2:]]
    return (*parts, "scale" if parts[-1].endswith("norm") else "weight")


def config_json(config: DrafterConfig, trained_on: dict[str, Any]) -> dict[str, Any]:
    """Returns config.json: what the engines read, with each disputed field in both its places."""
    depth = config.num_hidden_layers
    return {
        "architectures": [ARCHITECTURE],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "model_type": "qwen3",
        "block_size": config.block_size,
        "num_target_layers": config.num_target_layers,
        "dflash_config": {
            "block_size": config.block_size,
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
            "sample_from_anchor": False,
        },
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": depth,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
        "rope_scaling": None,
        "vocab_size": config.vocab_size,
        "layer_types": ["full_attention"] * depth,
        "max_window_layers": depth,
        "sliding_window": None,
        "use_sliding_window": False,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "dscout_config": trained_on,
    }


def export_drafter(
    path: str | Path,
    config: DrafterConfig,
    params: dict,
    *,
    token_ids: np.ndarray | None = None,
    trained_on: dict[str, Any] | None = None,
) -> Path:
    """Writes a drafter folder; each file appears whole or not at all, config.json last.

    Args:
        path: the folder, made when missing.
        config: drafter shapes.
        params: drafter weights, rounded to bfloat16.
        token_ids: [Vd] draft vocabulary; None = whole.
        trained_on: JSON-able record of target, data, horizons and metrics.

    Raises:
        WeightsError: the folder cannot be written, or params do not have the shapes of `config`.
    """
    folder = Path(path)
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        value = params
        for key in param_path(name):
            value = value[key]
        array = np.asarray(value, np.float32)
        if array.shape != shape:
            raise WeightsError(f"{name}: params give shape {array.shape}, config asks for {shape}")
        tensors[name] = np.ascontiguousarray(array).astype(ml_dtypes.bfloat16)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".partial-") as partial:
            staged = Path(partial)
            save_file(tensors, staged / WEIGHTS_FILE, metadata={"format": "pt"})
            (staged / WEIGHTS_FILE).chmod(0o644)  # the library makes it readable to its owner only
            os.replace(staged / WEIGHTS_FILE, folder / WEIGHTS_FILE)
            if token_ids is None:
                (folder / VOCABULARY_FILE).unlink(missing_ok=True)
            else:
                text = json.dumps([int(i) for i in token_ids])
                (staged / VOCABULARY_FILE).write_text(text + "\n", encoding="utf-8")
                os.replace(staged / VOCABULARY_FILE, folder / VOCABULARY_FILE)
            text = json.dumps(config_json(config, trained_on or {}), indent=2)
            (staged / "config.json").write_text(text + "\n", encoding="utf-8")
            os.replace(staged / "config.json", folder / "config.json")
    except OSError as error:
        raise WeightsError(f"cannot write the drafter to {folder}: {error}") from error
    return folder


def load_drafter(path: str | Path, target: TargetConfig | None = None) -> LoadedDrafter:
    """Reads a drafter folder and checks it against its own config and, when given, the target.

    Args:
        path: a folder in the z-lab layout; tensor names may carry a `model.` prefix.
        target: the target it will be used with.

    Raises:
        WeightsError: files missing or broken, names or shapes off, or made for another target.
    """
    folder = Path(path)
    config, trained_on = _read_config(folder)
    if target is not None:
        check_target(config, target, folder)
    try:
        tensors = load_file(folder / WEIGHTS_FILE)
    except FileNotFoundError:
        raise WeightsError(f"{folder} has no {WEIGHTS_FILE}") from None
    except SafetensorError as error:
        raise WeightsError(f"{folder / WEIGHTS_FILE} is not a safetensors file: {error}") from error
    tensors = {name.removeprefix("model."): value for name, value in tensors.items()}
    shapes = tensor_shapes(config)
    missing, unused = sorted(shapes.keys() - tensors), sorted(tensors.keys() - shapes)
    if missing or unused:
        raise WeightsError(
            f"{folder / WEIGHTS_FILE} does not match its config.json: "
            f"missing {missing or 'nothing'}, unused {unused or 'nothing'}"
        )
    params: dict = {}
    for name, shape in shapes.items():
        value = tensors[name]
        if value.shape != shape:
            raise WeightsError(
                f"{folder / WEIGHTS_FILE}: {name} has shape {value.shape}, config.json asks for "
                f"{shape}"
            )
        *parents, leaf = param_path(name)
        node = params
        for key in parents:
            node = node.setdefault(key, {})
        node[leaf] = jnp.asarray(value.astype(np.float32))
    return LoadedDrafter(config, params, _read_vocabulary(folder, config), trained_on)


def check_target(config: DrafterConfig, target: TargetConfig, source: str | Path) -> None:
    """Raises WeightsError naming each field in which the drafter was made for another target."""
    pairs = {
        "hidden_size": (config.hidden_size, target.hidden_size),
        "vocab_size": (config.vocab_size, target.vocab_size),
        "num_target_layers": (config.num_target_layers, target.num_hidden_layers),
        "rope_theta": (config.rope_theta, target.rope_theta),
    }
    wrong = [
        f"{name} is {mine}, the target's is {theirs}"
        for name, (mine, theirs) in pairs.items()
        if mine != theirs
    ]
    if wrong:
        raise WeightsError(f"drafter {source} was made for another target: {'; '.join(wrong)}")


def _read_config(folder: Path) -> tuple[DrafterConfig, dict[str, Any]]:
    path = folder / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise WeightsError(
            f"no drafter at {folder}: expected config.json and {WEIGHTS_FILE}"
        ) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise WeightsError(f"{path} cannot be read: {error}") from error
    dflash = values.get("dflash_config", {})
    if dflash.get("sample_from_anchor", False):
        raise WeightsError(
            f"{path}: sample_from_anchor is true; only anchor-first blocks (slot 0 known) are read"
        )
    sliding = [kind for kind in values.get("layer_types", []) if kind != "full_attention"]
    if sliding:
        raise WeightsError(f"{path}: layer_types {sorted(set(sliding))} are not supported")

    def field(name: str) -> Any:
        # Older checkpoints keep block_size at the top, newer ones inside dflash_config.
        if name in dflash:
            return dflash[name]
        if name in values:
            return values[name]
        if name == "rope_theta" and "rope_theta" in values.get("rope_parameters", {}):
            return values["rope_parameters"]["rope_theta"]
        raise WeightsError(f"{path} has no {name}; it cannot be guessed")

    try:
        config = DrafterConfig(
            **{
                name: field(name)
                for name in (
                    "hidden_size",
                    "intermediate_size",
                    "num_hidden_layers",
                    "num_attention_heads",
                    "num_key_value_heads",
                    "head_dim",
                    "rms_norm_eps",
                    "vocab_size",
                    "num_target_layers",
                    "mask_token_id",
                    "block_size",
                )
            },
            rope_theta=float(field("rope_theta")),
            target_layer_ids=tuple(field("target_layer_ids")),
        )
    except ConfigError as error:
        raise WeightsError(f"{path}: {error}") from error
    return config, values.get("dscout_config", {})


def _read_vocabulary(folder: Path, config: DrafterConfig) -> jax.Array | None:
    path = folder / VOCABULARY_FILE
    if not path.exists():
        return None
    try:
        ids = np.asarray(json.loads(path.read_text(encoding="utf-8")), np.int32)
    except (ValueError, OverflowError) as error:
        raise WeightsError(f"{path} is not a list of token ids: {error}") from error
    increasing = ids.ndim == 1 and ids.size > 0 and np.all(np.diff(ids) > 0)
    if not increasing or ids[0] < 0 or ids[-1] >= config.vocab_size:
        raise WeightsError(f"{path} must hold increasing ids in [0, {config.vocab_size})")
    return jnp.asarray(ids)
