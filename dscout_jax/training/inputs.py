"""What a run trains and validates on: rows, features, draft vocabulary."""

import dataclasses
import hashlib
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from dscout_jax.config.checks import ConfigError, require
from dscout_jax.config.experiment import ExperimentConfig
from dscout_jax.config.models import TargetConfig
from dscout_jax.data.features import (
    FeatureCache,
    FeaturesFn,
    feature_settings,
    fill_feature_cache,
    num_bytes,
)
from dscout_jax.data.pipeline import ExampleSet, RowFeatures, make_examples, split_examples
from dscout_jax.data.responses import Response, read_responses
from dscout_jax.data.store import ResponseStore, open_store
from dscout_jax.training.processes import is_first, wait_for_all


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Rows of one run.

    Attributes:
        training: rows that are trained on.
        validation: whole held-out rows drawn at random once, the same for every run on these data.
        features: cached target features by row; None when the step computes them.
        draft_vocab_ids: [Vd] int32, increasing; None = the whole vocabulary.
        fingerprint: sha256 over all rows, held-out ones included.
    """

    training: ExampleSet
    validation: ExampleSet
    features: RowFeatures | None
    draft_vocab_ids: np.ndarray | None
    fingerprint: str


def load_responses(store: str) -> Sequence[Response]:
    """Opens a store folder, or reads a `.jsonl` file of responses.

    Raises:
        FileNotFoundError: neither is there.
        ValueError: it is damaged.
    """
    return read_responses([store]) if store.endswith(".jsonl") else open_store(store)


def prepare_inputs(
    config: ExperimentConfig,
    target: TargetConfig,
    target_sha256: str,
    responses: Sequence[Response],
    *,
    compute_features: FeaturesFn,
    say: Callable[[str], None],
    stop: Callable[[], bool] = lambda: False,
) -> Inputs:
    """Cuts, splits and counts the rows; writes or opens the feature cache if one is configured.

    Args:
        config: sections data, drafter and train are read.
        target: shapes of the target.
        target_sha256: digest of its weights; ties a feature cache to them.
        responses: the target's answers.
        compute_features: `(tokens, length) -> features`, for a cache that is not there yet.
        say: shows a line to the person who waits.
        stop: asked after each shard of a feature cache.

    Raises:
        InterruptedError: a stop was asked for; the shards written so far are kept.
        ConfigError: the responses are another target's, or the draft vocabulary is too large.
        ValueError: no rows are left, or the feature cache belongs to other rows or weights.
    """
    data = config.data
    _require_same_target(responses, target_sha256, data.store)
    examples = make_examples(responses, data.seq_len)
    largest = max(int(example.tokens.max()) for example in examples)
    require(
        largest < target.vocab_size,
        "data.store",
        data.store,
        f"responses of this target; one holds token {largest}, the vocabulary has "
        f"{target.vocab_size}",
    )
    training, held_out = split_examples(examples, data.validation_fraction)
    validation = sample_rows(held_out, config.train.eval_rows, seed=data.seed)
    draft_vocab_ids = None
    if config.drafter.draft_vocab_size is not None:
        draft_vocab_ids = most_frequent_tokens(
            training, config.drafter.draft_vocab_size, target.vocab_size
        )
        say(
            f"draft vocabulary: {len(draft_vocab_ids)} tokens, covering "
            f"{coverage(training, draft_vocab_ids):.2%} of the training and "
            f"{coverage(held_out, draft_vocab_ids):.2%} of the held-out response tokens"
        )
    say(
        f"rows: {len(training)} for training with {training.num_response_tokens} response tokens, "
        f"{len(held_out)} held out, {len(validation)} of them validated on"
    )
    features = None
    if data.features == "cached":
        features = _feature_cache(
            config, target, target_sha256, examples, compute_features, say, stop
        )
    return Inputs(training, validation, features, draft_vocab_ids, examples.fingerprint())


def _require_same_target(responses: Sequence[Response], target_sha256: str, store: str) -> None:
    """Compares the digests that a store names with the target's; a JSONL file names none."""
    settings = responses.settings if isinstance(responses, ResponseStore) else {}
    for source in settings.get("sources", []):
        made_by = (source["settings"] or {}).get("target_sha256")
        require(
            made_by in (None, target_sha256),
            "data.store",
            store,
            f"answers of the target with sha256 {target_sha256[:12]}; those of {source['file']} "
            f"were made by {made_by and made_by[:12]}",
        )


def sample_rows(examples: ExampleSet, count: int, *, seed: int) -> ExampleSet:
    """Returns `count` rows (all, if there are fewer) drawn at random, longest response first.

    A row's rank is a hash of its id and the seed, so that adding rows changes as little as can be.
    """

    def rank(example) -> bytes:
        return hashlib.sha256(f"{seed}:{example.id}".encode()).digest()

    chosen = sorted(examples, key=rank)[:count]
    chosen.sort(key=lambda example: (example.response_start - len(example.tokens), example.id))
    return dataclasses.replace(examples, examples=tuple(chosen))


def most_frequent_tokens(examples: ExampleSet, size: int, vocab_size: int) -> np.ndarray:
    """Returns the ids of the `size` most frequent response tokens, increasing, [size] int32.

    Equal counts go by id, so the set is the same wherever it is computed.

    Raises:
        ConfigError: `size` is above `vocab_size`.
    """
    require(
        size <= vocab_size, "drafter.draft_vocab_size", size, f"at most {vocab_size}, the target's"
    )
    counts = np.zeros(vocab_size, np.int64)
    for example in examples:
        counts += np.bincount(example.tokens[example.response_start :], minlength=vocab_size)
    return np.sort(np.argsort(-counts, kind="stable")[:size]).astype(np.int32)


def coverage(examples: ExampleSet, token_ids: np.ndarray) -> float:
    """Returns the share of response tokens whose id is among `token_ids`."""
    tokens = np.concatenate([example.tokens[example.response_start :] for example in examples])
    return float(np.isin(tokens, token_ids).mean())


def trim_batch(
    batch: dict[str, np.ndarray], multiple: int, *, at_least: int = 1
) -> dict[str, np.ndarray]:
    """Cuts padding that no row of the batch needs, down to a multiple of `multiple` positions.

    Few distinct lengths remain, so few programs are compiled, and short rows cost less.
    """
    longest = max(int(batch["length"].max()), at_least)
    end = min(-(-longest // multiple) * multiple, batch["tokens"].shape[1])
    wide = ("tokens", "features")
    return {name: value[:, :end] if name in wide else value for name, value in batch.items()}


def _feature_cache(
    config: ExperimentConfig,
    target: TargetConfig,
    target_sha256: str,
    examples: ExampleSet,
    compute_features: FeaturesFn,
    say: Callable[[str], None],
    stop: Callable[[], bool],
) -> FeatureCache:
    if config.data.feature_dtype != "bfloat16":
        raise ConfigError(
            f"data.feature_dtype={config.data.feature_dtype!r} is not allowed with "
            "data.features='cached'; use 'bfloat16', which is what a cache holds"
        )
    tap_ids = config.drafter.target_layer_ids
    width = len(tap_ids) * target.hidden_size
    settings = feature_settings(target_sha256, tap_ids, width, config.data.target_dtype)
    folder = pathlib.Path(config.data.feature_cache)
    say(f"feature cache: {num_bytes(examples, settings) / 1e9:.2f} GB in {folder}")
    if is_first():
        _fill(folder, examples, settings, compute_features, say, stop)
    wait_for_all("feature cache")
    return FeatureCache(folder, settings)


def _fill(
    folder: pathlib.Path,
    examples: ExampleSet,
    settings: dict[str, Any],
    compute_features: FeaturesFn,
    say: Callable[[str], None],
    stop: Callable[[], bool],
) -> None:
    reported = len(examples)
    for missing in fill_feature_cache(folder, examples, settings, compute_features):
        if missing == 0 or missing <= reported - 0.05 * len(examples):
            reported = missing
            say(f"feature cache: {len(examples) - missing} of {len(examples)} rows written")
        if jax.process_count() == 1 and stop():  # several stop together, at an update
            raise InterruptedError(
                f"stopped on request with {missing} rows of the feature cache to go; the same "
                "command writes the rest"
            )
