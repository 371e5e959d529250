"""Static choices as frozen dataclasses, checked once when they are made.

Model sections use the names of Hugging Face's `config.json`; experiment sections mirror the
`ConfigDict` of `experiments/configs/*.py` one to one. Every error names the dotted field, the value
that was given and what is allowed.
"""

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any


class ConfigError(ValueError):
    """A configuration value that cannot be used; the message is one line for the user."""


def require(condition: bool, field: str, value: Any, allowed: str) -> None:
    """Raises ConfigError naming `field`, `value` and what is `allowed` unless `condition`."""
    if not condition:
        raise ConfigError(f"{field}={value!r} is not allowed; use {allowed}")


def _require_positive(config: Any, section: str, *, besides: tuple[str, ...] = ()) -> None:
    """Checks every number of a section but `besides` to be above 0."""
    for name, value in vars(config).items():
        if name not in besides and isinstance(value, int | float) and not isinstance(value, bool):
            require(value > 0, f"{section}.{name}", value, "a number above 0")


@dataclasses.dataclass(frozen=True)
class TargetConfig:
    """Shape of a decoder-only target (Llama family; Qwen3 with `qk_norm`).

    Attributes:
        vocab_size: V, rows of the embedding table.
        hidden_size: D, width of the residual stream.
        intermediate_size: width of the gated MLP.
        num_hidden_layers: L.
        num_attention_heads: N, query heads.
        num_key_value_heads: K_h, key/value heads; divides N.
        head_dim: H, independent of D / N.
        rope_theta: base of the rotary frequencies.
        rms_norm_eps: epsilon of every RMS norm.
        tie_word_embeddings: whether the head is the embedding table.
        qk_norm: whether queries and keys are RMS-normalised per head (Qwen3).
        max_position_embeddings: longest sequence the target was trained for, tokens.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    tie_word_embeddings: bool
    qk_norm: bool
    max_position_embeddings: int

    def __post_init__(self) -> None:
        _require_positive(self, "target")
        _check_heads(self, "target")


@dataclasses.dataclass(frozen=True)
class DrafterConfig:
    """Shape of a block-diffusion drafter (DFlash family), whole or cut.

    Attributes:
        hidden_size: D, the target's width (embedding and head are the target's).
        intermediate_size: width of the gated MLP.
        num_hidden_layers: d, drafter layers.
        num_attention_heads: N.
        num_key_value_heads: K_h; divides N.
        head_dim: H.
        rope_theta: base of the rotary frequencies, the target's.
        rms_norm_eps: epsilon of every RMS norm.
        vocab_size: V of the target.
        num_target_layers: L of the target.
        target_layer_ids: C tapped target layers, 0-based, output of layer i, increasing.
        mask_token_id: id whose embedding fills the masked slots.
        block_size: G, largest trained horizon; slot 0 is the anchor.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    vocab_size: int
    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    block_size: int

    def __post_init__(self) -> None:
        _require_positive(self, "drafter", besides=("mask_token_id",))
        _check_heads(self, "drafter")
        ids = self.target_layer_ids
        require(
            len(ids) > 0 and list(ids) == sorted(set(ids)) and ids[0] >= 0,
            "drafter.target_layer_ids",
            ids,
            "increasing 0-based layer ids, at least one",
        )
        # The last layer's output is often only to be had after the final norm: never tapped.
        require(
            ids[-1] < self.num_target_layers - 1,
            "drafter.target_layer_ids",
            ids,
            f"ids below {self.num_target_layers - 1}, the target's last layer",
        )
        require(
            0 <= self.mask_token_id < self.vocab_size,
            "drafter.mask_token_id",
            self.mask_token_id,
            f"an id in [0, {self.vocab_size})",
        )
        require(self.block_size >= 2, "drafter.block_size", self.block_size, "2 or more")

    @property
    def qk_norm(self) -> bool:
        """Drafter layers always normalise queries and keys (Qwen3 style)."""
        return True


def _check_heads(config: Any, section: str) -> None:
    require(
        config.num_attention_heads % config.num_key_value_heads == 0,
        f"{section}.num_key_value_heads",
        config.num_key_value_heads,
        f"a divisor of num_attention_heads={config.num_attention_heads}",
    )
    require(
        config.head_dim > 0 and config.head_dim % 2 == 0,
        f"{section}.head_dim",
        config.head_dim,
        "an even number above 0",
    )


@dataclasses.dataclass(frozen=True)
class DrafterSection:
    """What to train. `init` is `target_layers`, `random` or a drafter directory."""

    num_hidden_layers: int
    target_layer_ids: tuple[int, ...]
    block_size: int
    mask_token_id: int
    init: str = "target_layers"
    draft_vocab_size: int | None = None

    def __post_init__(self) -> None:
        _require_positive(self, "drafter", besides=("mask_token_id",))


@dataclasses.dataclass(frozen=True)
class DataSection:
    """Training rows: `store` is an array_record folder, `seq_len` tokens a row (S)."""

    store: str
    seq_len: int
    validation_fraction: float = 0.04
    seed: int = 0
    features: str = "online"
    feature_cache: str | None = None
    feature_dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        _require_positive(self, "data", besides=("seed",))
        require(
            0.0 < self.validation_fraction < 1.0,
            "data.validation_fraction",
            self.validation_fraction,
            "a fraction between 0 and 1",
        )
        require(
            self.features in ("online", "cached"),
            "data.features",
            self.features,
            "'online' or 'cached'",
        )
        require(
            self.features == "online" or bool(self.feature_cache),
            "data.feature_cache",
            self.feature_cache,
            "a folder when data.features='cached'",
        )
        require(
            self.feature_dtype in ("bfloat16", "float32"),
            "data.feature_dtype",
            self.feature_dtype,
            "'bfloat16' or 'float32'",
        )


@dataclasses.dataclass(frozen=True)
class ObjectiveConfig:
    """loss = inclusion x weighting x prediction; each factor chosen by name.

    Attributes:
        horizons: block sizes trained in each row and how many anchors each gets, e.g. `((16, 32),)`
            for DFlash or `((4, 16), (8, 16), (16, 8))` for mixed horizons.
        weighting: `exp_decay` or `uniform`.
        gamma: decay length in slots; None takes DFlash's value for each horizon.
        prediction: `ce`.
        normalizer: `weights`, `count`, `blocks` or `none`.
        chunk_blocks: blocks whose logits exist at the same time.
    """

    horizons: tuple[tuple[int, int], ...]
    weighting: str = "exp_decay"
    gamma: float | None = None
    prediction: str = "ce"
    normalizer: str = "weights"
    chunk_blocks: int = 64

    def __post_init__(self) -> None:
        require(
            len(self.horizons) > 0
            and all(len(pair) == 2 and pair[0] >= 2 and pair[1] >= 1 for pair in self.horizons),
            "objective.horizons",
            self.horizons,
            "pairs (block size >= 2, anchors >= 1)",
        )
        sizes = [block_size for block_size, _ in self.horizons]
        require(
            len(set(sizes)) == len(sizes), "objective.horizons", self.horizons, "distinct sizes"
        )
        for name, allowed in (
            ("weighting", ("uniform", "exp_decay")),
            ("prediction", ("ce",)),
            ("normalizer", ("weights", "count", "blocks", "none")),
        ):
            value = getattr(self, name)
            require(value in allowed, f"objective.{name}", value, f"one of {', '.join(allowed)}")
        _require_positive(self, "objective")


_FRACTIONS = ("beta1", "beta2", "weight_decay", "warmup_fraction", "final_fraction")


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with warm-up and a schedule; `warmup_fraction`, `final_fraction` in [0, 1)."""

    learning_rate: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    schedule: str = "cosine"
    warmup_fraction: float = 0.04
    decay_fraction: float = 0.2
    final_fraction: float = 0.1

    def __post_init__(self) -> None:
        _require_positive(self, "optimizer", besides=_FRACTIONS)
        require(
            self.schedule in ("cosine", "wsd"),
            "optimizer.schedule",
            self.schedule,
            "'cosine' or 'wsd' (warm-up, stable, decay)",
        )
        for name in _FRACTIONS:
            value = getattr(self, name)
            require(0.0 <= value < 1.0, f"optimizer.{name}", value, "a number in [0, 1)")
        require(
            0.0 < self.decay_fraction <= 1.0,
            "optimizer.decay_fraction",
            self.decay_fraction,
            "a number in (0, 1]",
        )


@dataclasses.dataclass(frozen=True)
class TrainSection:
    """Length and cadence of a run, all in steps; `batch_size` in rows."""

    num_steps: int
    batch_size: int = 8
    seed: int = 0
    log_every: int = 20
    eval_every: int = 500
    eval_rows: int = 64
    checkpoint_every: int = 500
    keep_checkpoints: int = 2

    def __post_init__(self) -> None:
        _require_positive(self, "train", besides=("seed",))


@dataclasses.dataclass(frozen=True)
class ExperimentConfig:
    """One training experiment."""

    target: str
    drafter: DrafterSection
    data: DataSection
    objective: ObjectiveConfig
    optimizer: OptimizerConfig
    train: TrainSection

    def __post_init__(self) -> None:
        largest = max(horizon for horizon, _ in self.objective.horizons)
        require(
            largest == self.drafter.block_size,
            "drafter.block_size",
            self.drafter.block_size,
            f"the largest trained horizon, {largest}",
        )


def from_config_dict(values: Mapping[str, Any]) -> ExperimentConfig:
    """Returns the checked `ExperimentConfig` of a nested mapping such as a `ConfigDict`.

    Raises:
        ConfigError: an unknown or missing field, a wrong type, or a value out of range.
    """
    return _build(ExperimentConfig, values, "")


def to_dict(config: Any) -> dict[str, Any]:
    """Returns the nested plain dict of a config dataclass (tuples become lists)."""
    return _plain(dataclasses.asdict(config))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value


def _build(cls: type, values: Mapping[str, Any], path: str) -> Any:
    fields = {field.name: field for field in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    for name in values:
        if name not in fields:
            raise ConfigError(f"{path}{name} is not a field; allowed here: {', '.join(fields)}")
    arguments = {}
    for name, field in fields.items():
        dotted = f"{path}{name}"
        if name in values:
            arguments[name] = _convert(hints[name], values[name], dotted)
        elif field.default is dataclasses.MISSING:
            raise ConfigError(f"{dotted} is missing; it has no default")
    return cls(**arguments)


def _convert(hint: Any, value: Any, dotted: str) -> Any:
    if dataclasses.is_dataclass(hint):
        require(isinstance(value, Mapping), dotted, value, "a section with fields")
        return _build(hint, value, f"{dotted}.")
    if isinstance(hint, types.UnionType):
        if value is None:
            return None
        hint = next(arg for arg in typing.get_args(hint) if arg is not type(None))
    if typing.get_origin(hint) is tuple:
        require(isinstance(value, tuple | list), dotted, value, "a tuple")
        item = typing.get_args(hint)
        kinds = [item[0]] * len(value) if len(item) == 2 and item[1] is Ellipsis else list(item)
        require(len(kinds) == len(value), dotted, value, f"a tuple of {len(kinds)} values")
        return tuple(
            _convert(kind, element, dotted) for kind, element in zip(kinds, value, strict=True)
        )
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    kind_ok = isinstance(value, hint) and not (hint is int and isinstance(value, bool))
    require(kind_ok, dotted, value, f"a value of type {hint.__name__}")
    return value
