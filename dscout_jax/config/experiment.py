"""Sections of a training experiment, one to one the `ConfigDict` of `experiments/configs/*.py`."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from dscout_jax.config.checks import build, require, require_positive


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
        require_positive(self, "drafter", besides=("mask_token_id",))


@dataclasses.dataclass(frozen=True)
class DataSection:
    """Training rows: `store` is an array_record folder, `seq_len` tokens a row (S).

    Attributes:
        features: `online` runs the target in each step, `cached` once, into `feature_cache`.
        feature_dtype: in which features are kept.
        target_dtype: in which the target's matrices are multiplied for the features; `bfloat16` is
            what accelerators and recent CPUs are fastest at. Sums stay float32.
    """

    store: str
    seq_len: int
    validation_fraction: float = 0.04
    seed: int = 0
    features: str = "online"
    feature_cache: str | None = None
    feature_dtype: str = "bfloat16"
    target_dtype: str = "float32"

    def __post_init__(self) -> None:
        require_positive(self, "data", besides=("seed",))
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
        for name in ("feature_dtype", "target_dtype"):
            value, allowed = getattr(self, name), ("bfloat16", "float32")
            require(value in allowed, f"data.{name}", value, "'bfloat16' or 'float32'")


REVEALS = ("prefix", "random")
EXITS = ("sampled", "all")
WEIGHTINGS = (
    "uniform", "exp_decay", "reach", "marginal", "until_mismatch", "anchored_decay", "horizon_decay"
)  # fmt: skip
ACCEPTANCES = ("target_prob", "greedy_match", "overlap", "argmax_target", "ema")
PREDICTIONS = ("ce", "soft_ce", "reverse_kl", "tv", "lk_hybrid", "nla", "expected_length")
NORMALIZERS = ("weights", "count", "blocks", "none")


def parse_sum(formula: str) -> tuple[tuple[float, str], ...]:
    """Returns the factors and names of a weighted sum such as `ce` or `0.1*ce + 0.9*tv`.

    Raises:
        ConfigError: it cannot be read, or a factor is not above 0.
    """
    terms = []
    for term in formula.split("+"):
        factor, _, name = term.rpartition("*")
        try:
            terms.append((float(factor or 1.0), name.strip()))
        except ValueError:
            terms.append((0.0, name.strip()))
    require(
        all(0.0 < factor < float("inf") for factor, _ in terms),
        "objective.prediction",
        formula,
        "names with factors above 0, like '0.1*ce + 0.9*tv'",
    )
    return tuple(terms)


def _require_pairs(pairs: tuple, field: str, what: str, least: int | tuple = 2) -> None:
    """Checks pairs (choice, share): choices distinct and not below `least`, shares above 0."""
    require(
        all(choice >= least and share > 0 for choice, share in pairs),
        field,
        pairs,
        f"pairs ({what})",
    )
    choices = [choice for choice, _ in pairs]
    require(len(set(choices)) == len(choices), field, pairs, "distinct choices")


@dataclasses.dataclass(frozen=True)
class ObjectiveConfig:
    """loss = inclusion x weighting x prediction; each factor chosen by name.

    Attributes:
        horizons: block sizes trained in each row and how many anchors each gets, e.g. `((16, 32),)`
            for DFlash or `((4, 16), (8, 16), (16, 8))` for mixed horizons in fixed shares.
        depths: elastic depth, pairs (drafter layers, share): each block is drafted with so many
            layers; empty = all layers always.
        exits: `sampled` draws one of the depths for each block, at no cost; `all` adds up the
            losses of all of them by their shares, at the cost of one head more for each.
        taps: elastic conditioning, pairs (indices into the drafter's taps, share): each row is
            conditioned on one such list; empty = all taps always.
        reveal: which slots a block that reveals true tokens shows: `prefix` or `random`.
        reveal_rate: rho in [0, 1], share of the blocks that reveal any.
        reveal_decay: beta in (0, 1], a prefix of r tokens is revealed with weight beta**r; 1 makes
            all lengths alike.
        weighting: `uniform`, `exp_decay`, `reach`, `marginal`, `until_mismatch`, `anchored_decay`
            or `horizon_decay`.
        gamma: decay length in slots; None takes DFlash's value for each horizon.
        acceptance: estimate that `reach` and `marginal` multiply: `target_prob`, `greedy_match`,
            `overlap`, `argmax_target` or `ema`.
        smoothing: s in [0, 1); an acceptance a counts as (1 - s) a + s.
        floor: least weight of a supervised slot, in [0, 1].
        weight_warmup: share of the steps, in [0, 1], over which weights turn from `exp_decay` into
            the chosen ones.
        horizon_correction: divide weights by pi(h > k), undoing the decay that mixing is.
        horizon_shares: pi for the two controls of mixing, pairs (block size, share); empty =
            the shares of `horizons`.
        prediction: `ce`, `soft_ce`, `reverse_kl`, `tv`, `lk_hybrid`, `nla`, `expected_length`, or a
            weighted sum like `0.1*ce + 0.9*tv`.
        normalizer: `weights`, `count`, `blocks` or `none`.
        chunk_anchors: blocks of each row whose activations and logits exist at the same time.
    """

    horizons: tuple[tuple[int, int], ...]
    depths: tuple[tuple[int, float], ...] = ()
    exits: str = "sampled"
    taps: tuple[tuple[tuple[int, ...], float], ...] = ()
    reveal: str = "prefix"
    reveal_rate: float = 0.0
    reveal_decay: float = 1.0
    weighting: str = "exp_decay"
    gamma: float | None = None
    acceptance: str = "target_prob"
    smoothing: float = 0.5
    floor: float = 0.0
    weight_warmup: float = 0.0
    horizon_correction: bool = False
    horizon_shares: tuple[tuple[int, float], ...] = ()
    prediction: str = "ce"
    normalizer: str = "weights"
    chunk_anchors: int = 8

    def __post_init__(self) -> None:
        require(len(self.horizons) > 0, "objective.horizons", self.horizons, "at least one pair")
        _require_pairs(self.horizons, "objective.horizons", "block size >= 2, anchors >= 1")
        _require_pairs(
            self.horizon_shares, "objective.horizon_shares", "block size >= 2, share above 0"
        )
        _require_pairs(self.depths, "objective.depths", "layers >= 1, share above 0", 1)
        increasing = list(self.depths) == sorted(self.depths)
        require(increasing, "objective.depths", self.depths, "depths in increasing order")
        _require_pairs(self.taps, "objective.taps", "indices of taps, share above 0", (0,))
        for indices, _ in self.taps:
            increasing = list(indices) == sorted(set(indices))
            require(increasing, "objective.taps", indices, "increasing indices")
        for name, value, allowed in (
            ("exits", self.exits, EXITS),
            ("reveal", self.reveal, REVEALS),
            ("weighting", self.weighting, WEIGHTINGS),
            ("acceptance", self.acceptance, ACCEPTANCES),
            ("normalizer", self.normalizer, NORMALIZERS),
            *(("prediction", name, PREDICTIONS) for _, name in parse_sum(self.prediction)),
        ):
            require(value in allowed, f"objective.{name}", value, f"one of {', '.join(allowed)}")
        for name in ("reveal_rate", "smoothing", "floor", "weight_warmup"):
            value = getattr(self, name)
            require(0.0 <= value <= 1.0, f"objective.{name}", value, "a number in [0, 1]")
        require(self.reveal_decay <= 1.0, "objective.reveal_decay", self.reveal_decay, "at most 1")
        require(self.smoothing < 1.0, "objective.smoothing", self.smoothing, "a number below 1")
        require_positive(
            self, "objective", besides=("reveal_rate", "smoothing", "floor", "weight_warmup")
        )


_FRACTIONS = ("beta1", "beta2", "weight_decay", "warmup_fraction", "final_fraction")


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW or Muon with warm-up and a schedule; `warmup_fraction`, `final_fraction` in [0, 1)."""

    name: str = "adamw"
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
        require_positive(self, "optimizer", besides=_FRACTIONS)
        require(self.name in ("adamw", "muon"), "optimizer.name", self.name, "'adamw' or 'muon'")
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
    """Length and cadence of a run, all in steps; `batch_size` in rows.

    Attributes:
        mode: `jit`, `shard_map` or `pmap`, ways of running the same step.
        mesh: devices along `data`, `fsdp` and `tensor`; -1 = all that are left.
        accumulate: parts in which the rows of a device are taken, to save memory.
        remat: keep only the inputs of the drafter's layers for the backward pass: less memory, one
            more forward pass.
        compute_dtype: of activations, `float32` or `bfloat16`; weights, statistics and losses are
            float32 always.
        ema_decay: keep a running mean of the weights and evaluate and export that; None = no.
        max_skipped: updates in a row that may be left out because a gradient is not finite.
    """

    num_steps: int
    batch_size: int = 8
    seed: int = 0
    log_every: int = 20
    eval_every: int = 500
    eval_rows: int = 64
    checkpoint_every: int = 500
    keep_checkpoints: int = 2
    mode: str = "jit"
    mesh: tuple[int, int, int] = (-1, 1, 1)
    accumulate: int = 1
    remat: bool = False
    compute_dtype: str = "float32"
    ema_decay: float | None = None
    max_skipped: int = 5

    def __post_init__(self) -> None:
        require_positive(self, "train", besides=("seed",))
        for name, allowed in (
            ("mode", ("jit", "shard_map", "pmap")),
            ("compute_dtype", ("float32", "bfloat16")),
        ):
            value = getattr(self, name)
            require(value in allowed, f"train.{name}", value, f"one of {', '.join(allowed)}")
        require(
            self.ema_decay is None or self.ema_decay < 1.0,
            "train.ema_decay",
            self.ema_decay,
            "a number between 0 and 1, or None",
        )


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
        drafter = self.drafter
        for depth, _ in self.objective.depths:
            require(
                depth <= drafter.num_hidden_layers,
                "objective.depths",
                depth,
                f"at most drafter.num_hidden_layers={drafter.num_hidden_layers}",
            )
        for indices, _ in self.objective.taps:
            require(
                indices[-1] < len(drafter.target_layer_ids),
                "objective.taps",
                indices,
                f"indices below {len(drafter.target_layer_ids)}, the number of taps",
            )


def from_config_dict(values: Mapping[str, Any]) -> ExperimentConfig:
    """Returns the checked `ExperimentConfig` of a nested mapping such as a `ConfigDict`.

    Raises:
        ConfigError: an unknown or missing field, a wrong type, or a value out of range.
    """
    return build(ExperimentConfig, values)
