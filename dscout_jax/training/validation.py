"""Held-out loss and accuracy per slot, and MAT by replay of whole rows."""

from collections.abc import Callable, Iterable, Mapping

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from dscout_jax.config.models import TargetConfig
from dscout_jax.decoding.replay import anchor_lengths, walk
from dscout_jax.decoding.speculative import DraftWeights
from dscout_jax.decoding.variant import Variant
from dscout_jax.models.drafter import select_features
from dscout_jax.models.target import head_rows
from dscout_jax.objective.loss import Frozen, SlotSums

_CHUNK = 64  # anchors drafted at once in replay


@flax.struct.dataclass
class FrozenTarget:
    """What training reads of the target, without gradient.

    Attributes:
        tables: embedding, head rows and draft vocabulary.
        token_ids: [Vd] int32 target id of each head row; None when Vd = V.
        params: weights that the step runs: all for features computed in it, the layers after the
            deepest tap for losses on the target's distribution; None where it runs none.
    """

    tables: Frozen
    token_ids: jax.Array | None
    params: dict | None


def freeze(
    params: dict,
    config: TargetConfig,
    token_ids: np.ndarray | None,
    *,
    kept: dict | None = None,
) -> FrozenTarget:
    """Returns what training and replay read of a target.

    Args:
        params: the target's weights.
        config: their shapes.
        token_ids: [Vd] int32 draft vocabulary, increasing; None = the whole vocabulary.
        kept: weights that the step runs; see `FrozenTarget`.
    """
    index = None
    if token_ids is not None:
        index = np.full(config.vocab_size, -1, np.int32)
        index[np.asarray(token_ids)] = np.arange(len(token_ids))
        token_ids, index = jnp.asarray(token_ids), jnp.asarray(index)
    return FrozenTarget(
        tables=Frozen(
            embedding=params["embed_tokens"]["embedding"],
            head=head_rows(params, config, token_ids),
            draft_index=index,
        ),
        token_ids=token_ids,
        params=kept,
    )


def validate(
    params: dict,
    frozen: FrozenTarget,
    batches: Iterable[dict],
    *,
    eval_sums: Callable,
    variants: Mapping[str, Variant],
) -> dict[str, float | list[float]]:
    """Measures a drafter on held-out rows.

    Args:
        params: drafter weights.
        frozen: the target's part.
        batches: with `features`; rows are whole responses. Padding rows have length 0.
        eval_sums: `(params, frozen, batch) -> (numerator, denominator, sums by horizon)`.
        variants: what to replay, by the suffix of its metrics: one for each block size, the largest
            with an empty suffix, and cuts in depth or taps.

    Returns:
        `validation/loss`; `mat_mean`, the pooled MAT of the uncut drafter averaged over the block
        sizes; for the largest
        horizon the lists of `per_slot`; `mat_pooled` (emitted tokens
        / cycles over all rows) and `mat_macro` (mean over rows of the row's mean), each with the
        variant's suffix.
    """
    totals = None
    taus: dict[str, list[list[int]]] = {suffix: [] for suffix in variants}
    for batch in batches:
        sums = jax.device_get(eval_sums(params, frozen, batch))
        totals = sums if totals is None else jax.tree.map(np.add, totals, sums)
        for suffix, variant in variants.items():
            taus[suffix] += replay(params, frozen, batch, variant)
    numerator, denominator, by_horizon = totals
    pooled = {suffix: float(np.mean(np.concatenate(rows))) for suffix, rows in taus.items()}
    whole = [suffix for suffix, variant in variants.items() if not variant.is_cut]
    values = {
        "validation/loss": float(numerator / max(denominator, 1e-9)),
        "validation/mat_mean": float(np.mean([pooled[suffix] for suffix in whole])),
    }
    values |= per_slot(by_horizon[variants[""].block_size], "validation")
    for suffix, rows in taus.items():
        values[f"validation/mat_pooled{suffix}"] = pooled[suffix]
        values[f"validation/mat_macro{suffix}"] = float(np.mean([np.mean(row) for row in rows]))
    return values


def per_slot(sums: SlotSums, group: str) -> dict[str, list[float]]:
    """Returns means over the supervised slots of a horizon, lists with slot 1 first.

    `<group>/loss_per_slot`, `accuracy_per_slot`, `acceptance_per_slot` (by the objective's own
    estimate) and `weight_per_slot`.
    """
    count = np.maximum(np.asarray(sums.count)[1:], 1)
    parts = {
        "loss": sums.loss,
        "accuracy": sums.correct,
        "acceptance": sums.accepted,
        "weight": sums.weight,
    }
    return {
        f"{group}/{name}_per_slot": (np.asarray(total)[1:] / count).tolist()
        for name, total in parts.items()
    }


def effective_share(sums: Iterable[SlotSums]) -> float:
    """Returns (sum W)^2 / sum W^2 over the number of supervised slots, in (0, 1].

    The effective sample size as a share: 1 when all slots count the same. Without any supervised
    slot it is 1. Source: METHOD section 2.2 (Kish 1965).
    """
    count, weight, square = (
        sum(float(np.sum(getattr(part, name))) for part in sums)
        for name in ("count", "weight", "weight_square")
    )
    return weight**2 / (square * count) if square > 0 and count > 0 else 1.0


def replay(params: dict, frozen: FrozenTarget, batch: dict, variant: Variant) -> list[list[int]]:
    """Tokens emitted by each cycle, for each row that has at least one."""
    num_tokens = batch["length"] - batch["response_start"]  # [B]
    longest = int(num_tokens.max())
    lengths = anchor_lengths(
        frozen.tables.embedding,
        DraftWeights(params, frozen.tables.head, frozen.token_ids),
        select_features(batch["features"], variant.drafter, variant.taps),
        batch["tokens"],
        batch["length"],
        batch["response_start"],
        variant=variant,
        num_anchors=-(-longest // _CHUNK) * _CHUNK,
        chunk=_CHUNK,
    )
    walked = [walk(row, int(n)) for row, n in zip(np.asarray(lengths), num_tokens, strict=True)]
    return [row for row in walked if row]
