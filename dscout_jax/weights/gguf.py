"""GGUF files of the llama family: tensors, model configuration, tokenizer metadata.

Two things differ from the layout of `models/target.py`. Linear weights are stored `[out, in]`, ours
are `[in, out]`. And the rows of `attn_q` and `attn_k` are reordered within each head, so that
rotary embedding can rotate neighbouring rows; ours rotates halves, so `undo_rope_permutation` puts
them back.
"""

import dataclasses
from pathlib import Path

import gguf
import numpy as np

from dscout_jax.config.models import TargetConfig
from dscout_jax.weights.download import WeightsError

_ARCHITECTURES = ("llama",)


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """What a GGUF file says about its tokenizer.

    Attributes:
        tokens: V strings, in the tokenizer's own byte alphabet.
        token_types: V ints of `gguf.TokenType` (1 normal, 3 control, ...).
        merges: byte-pair merges in order of priority, `left right`.
        model: tokenizer family, `gpt2` for byte-level byte-pair encoding.
        pre: name of the pre-tokenizer.
        chat_template: Jinja source, None where the file has none.
        bos_id: id that begins a text or a turn, None where absent.
        eos_id: id that ends a turn, None where absent.
        pad_id: padding id, None where absent.
        unk_id: unknown id, None where absent.
        add_bos: whether plain text gets `bos_id` in front.
        add_space_prefix: whether plain text gets a space in front.
    """

    tokens: tuple[str, ...]
    token_types: tuple[int, ...]
    merges: tuple[str, ...]
    model: str
    pre: str
    chat_template: str | None
    bos_id: int | None
    eos_id: int | None
    pad_id: int | None
    unk_id: int | None
    add_bos: bool = False
    add_space_prefix: bool = False


def open_gguf(path: Path) -> gguf.GGUFReader:
    """Maps a GGUF file into memory.

    Args:
        path: the file; its tensors stay on disk until they are read.

    Raises:
        WeightsError: the file cannot be read, is no GGUF, or ends too early.
    """
    try:
        return gguf.GGUFReader(path)
    except OSError as error:
        raise WeightsError(f"cannot read {path}: {error.strerror}; check the path") from error
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise WeightsError(
            f"{path} is no complete GGUF file ({error}); delete it and fetch it again"
        ) from error


def read_target_config(reader: gguf.GGUFReader) -> TargetConfig:
    """Returns the model's configuration.

    Raises:
        WeightsError: another architecture, a missing field, or position scaling, which is not
            implemented.
    """
    architecture = _field(reader, "general.architecture")
    if architecture not in _ARCHITECTURES:
        raise WeightsError(
            f"architecture {architecture!r} is not supported; allowed: {_ARCHITECTURES}"
        )
    scaling = _field(reader, "llama.rope.scaling.type", "none")
    if scaling != "none":
        raise WeightsError(f"rope scaling {scaling!r} is not supported; allowed: 'none'")
    hidden_size = _field(reader, "llama.embedding_length")
    num_heads = _field(reader, "llama.attention.head_count")
    head_dim = _field(reader, "llama.attention.key_length", hidden_size // num_heads)
    rope_dim = _field(reader, "llama.rope.dimension_count", head_dim)
    if rope_dim != head_dim:
        raise WeightsError(f"{rope_dim} rotary dimensions in heads of {head_dim}; must be equal")
    return TargetConfig(
        vocab_size=len(_field(reader, "tokenizer.ggml.tokens")),
        hidden_size=hidden_size,
        intermediate_size=_field(reader, "llama.feed_forward_length"),
        num_hidden_layers=_field(reader, "llama.block_count"),
        num_attention_heads=num_heads,
        num_key_value_heads=_field(reader, "llama.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        rope_theta=_shortest(_field(reader, "llama.rope.freq_base", 10000.0)),
        rms_norm_eps=_shortest(_field(reader, "llama.attention.layer_norm_rms_epsilon")),
        tie_word_embeddings=all(tensor.name != "output.weight" for tensor in reader.tensors),
        qk_norm=False,
        max_position_embeddings=_field(reader, "llama.context_length"),
    )


def read_vocabulary(reader: gguf.GGUFReader) -> Vocabulary:
    """Returns the file's tokenizer metadata, as it stands.

    Raises:
        WeightsError: tokens, types or merges are missing.
    """
    prefix = "tokenizer.ggml."
    return Vocabulary(
        tokens=tuple(_field(reader, prefix + "tokens")),
        token_types=tuple(_field(reader, prefix + "token_type")),
        merges=tuple(_field(reader, prefix + "merges")),
        model=_field(reader, prefix + "model"),
        pre=_field(reader, prefix + "pre"),
        chat_template=_field(reader, "tokenizer.chat_template", None),
        bos_id=_field(reader, prefix + "bos_token_id", None),
        eos_id=_field(reader, prefix + "eos_token_id", None),
        pad_id=_field(reader, prefix + "padding_token_id", None),
        unk_id=_field(reader, prefix + "unknown_token_id", None),
        add_bos=_field(reader, prefix + "add_bos_token", False),
        add_space_prefix=_field(reader, prefix + "add_space_prefix", False),
    )


def read_tensors(reader: gguf.GGUFReader, cfg: TargetConfig) -> dict:
    """Returns the weights as `models/target.py` wants them.

    Args:
        reader: an open file.
        cfg: the file's configuration; it fixes names and shapes.

    Returns:
        Nested dict of float32 numpy arrays, weights `[out, in]`, scales `[D]`.

    Raises:
        WeightsError: a tensor is missing, left over, or of another shape.
    """
    layout = target_layout(cfg)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    missing, unused = sorted(layout.keys() - stored), sorted(stored.keys() - layout)
    if missing or unused:
        raise WeightsError(f"GGUF tensors do not fit: missing {missing}, unused {unused}")
    heads = {"q_proj": cfg.num_attention_heads, "k_proj": cfg.num_key_value_heads}
    params: dict = {}
    for name, (path, shape) in layout.items():
        tensor = stored[name]
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)  # [out, in] or [D]
        values = np.asarray(values, np.float32)
        if values.shape != shape:
            raise WeightsError(
                f"GGUF tensor {name} has shape {values.shape}; the file's own configuration says "
                f"{shape}"
            )
        if path[-2] in heads:
            values = undo_rope_permutation(values, heads[path[-2]])
        node = params
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = np.ascontiguousarray(values)
    return params


def target_layout(cfg: TargetConfig) -> dict[str, tuple[tuple[str, ...], tuple[int, ...]]]:
    """Maps each GGUF tensor name to its place in the parameter tree and its shape there."""
    width, ffn, head_dim = cfg.hidden_size, cfg.intermediate_size, cfg.head_dim
    query, keyval = cfg.num_attention_heads * head_dim, cfg.num_key_value_heads * head_dim
    linear = {
        "attn_q": (("self_attn", "q_proj"), (query, width)),
        "attn_k": (("self_attn", "k_proj"), (keyval, width)),
        "attn_v": (("self_attn", "v_proj"), (keyval, width)),
        "attn_output": (("self_attn", "o_proj"), (width, query)),
        "ffn_gate": (("mlp", "gate_proj"), (ffn, width)),
        "ffn_up": (("mlp", "up_proj"), (ffn, width)),
        "ffn_down": (("mlp", "down_proj"), (width, ffn)),
    }
    norms = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    layout: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
        "token_embd.weight": (("embed_tokens", "embedding"), (cfg.vocab_size, width)),
        "output_norm.weight": (("norm", "scale"), (width,)),
    }
    if not cfg.tie_word_embeddings:
        layout["output.weight"] = (("lm_head", "weight"), (cfg.vocab_size, width))
    for i in range(cfg.num_hidden_layers):
        for name, (path, shape) in linear.items():
            layout[f"blk.{i}.{name}.weight"] = ((f"layers_{i}", *path, "weight"), shape)
        for name, norm in norms.items():
            layout[f"blk.{i}.{name}.weight"] = ((f"layers_{i}", norm, "scale"), (width,))
    return layout


def undo_rope_permutation(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Turns rows ordered for neighbour rotation into rows ordered for half rotation.

    Within a head of size H the file holds rows 0, H/2, 1, H/2 + 1, ...; we want 0, 1, ..., H - 1.

    Args:
        weight: [num_heads * H, in], H even.
        num_heads: query heads for `attn_q`, key/value heads for `attn_k`.

    Returns:
        [num_heads * H, in], the same rows in the other order.
    """
    rows, width = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, width)  # [N, H/2, 2, in]
    return pairs.swapaxes(1, 2).reshape(rows, width)


_REQUIRED = object()


def _field(reader: gguf.GGUFReader, name: str, default: object = _REQUIRED):
    """Returns a metadata value, or `default` where the file lacks it."""
    if name in reader.fields:
        return reader.fields[name].contents()
    if default is _REQUIRED:
        raise WeightsError(f"the GGUF file has no field {name!r}")
    return default


def _shortest(value: float) -> float:
    """Returns the float64 that a float32 field was written from (1e-05, not 9.9999997e-06)."""
    return float(str(np.float32(value)))
