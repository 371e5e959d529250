"""Mean accepted tokens, speedups and their uncertainty, from answers decoded both ways.

Every figure comes twice: over the whole output, and loop-free, i.e. only up to the first repeated
16-gram of the answer, because any drafter predicts a verbatim loop.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

BOOTSTRAP_SAMPLES = 2000


@dataclasses.dataclass(frozen=True)
class Decoded:
    """One answer as one decoder produced it.

    Attributes:
        num_tokens: tokens of the answer, the stop token included, at least 1. The prefill emits the
            first one; cycles emit the others.
        loop_start: index of the first looping token, `num_tokens` where nothing loops.
        cycles: tokens emitted by each cycle (tau), cut at stop token and budget; ones for plain
            decoding. Their sum is `num_tokens - 1`.
        prefill_s: seconds from the prompt to the first token.
        decode_s: seconds from there to the last token.
    """

    num_tokens: int
    loop_start: int
    cycles: tuple[int, ...]
    prefill_s: float
    decode_s: float

    def __post_init__(self) -> None:
        if sum(self.cycles) != self.num_tokens - 1:
            raise ValueError(
                f"cycles emit {sum(self.cycles)} tokens but the answer has {self.num_tokens}; "
                "the sum must be one less, because the prefill emits the first token"
            )
        if not 0 <= self.loop_start <= self.num_tokens:
            raise ValueError(f"loop_start={self.loop_start} must lie in [0, {self.num_tokens}]")


@dataclasses.dataclass(frozen=True)
class Answer:
    """One answer, decoded plainly and speculatively.

    Attributes:
        prompt_id: the prompt; all turns of a conversation share it.
        turn: 0-based turn of the conversation.
        plain: the plain decoder's answer.
        speculative: the speculative decoder's answer.
        divergence: index of the first differing token, None where the answers are identical.
        margin: how far the worse of the two tokens lies below the target's best logit at the
            divergence (infinite where one answer merely ends), else None.
        is_near_tie: whether the answers differ and the margin explains it.
    """

    prompt_id: str
    turn: int
    plain: Decoded
    speculative: Decoded
    divergence: int | None = None
    margin: float | None = None
    is_near_tie: bool = False


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A figure with its bootstrap 95 % interval over prompts."""

    value: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class Summary:
    """What a workload showed at one block size; rates are tokens per second.

    Attributes:
        num_prompts: prompts, each with all its turns.
        num_answers: answers.
        mat_pooled: tokens of all cycles / all cycles.
        mat_macro: mean over prompts of the prompt's tokens / cycles.
        mat_loop_free: `mat_pooled` up to the loop of each answer.
        mat_macro_loop_free: `mat_macro` up to the loop of each answer.
        plain_tokens_per_s: plain decoding without prefill.
        speculative_tokens_per_s: speculative decoding without prefill.
        speedup: ratio of the two.
        speedup_loop_free: the same up to the loop of each answer.
        speedup_end_to_end: ratio of the rates with prefill.
        loop_free_share: share of speculative tokens before the loops.
        num_identical: answers equal token for token.
        near_ties: answers that differ from a near tie on.
        identical: whether all answers are equal, near ties aside.
    """

    num_prompts: int
    num_answers: int
    mat_pooled: Estimate
    mat_macro: Estimate
    mat_loop_free: Estimate
    mat_macro_loop_free: Estimate
    plain_tokens_per_s: float
    speculative_tokens_per_s: float
    speedup: Estimate
    speedup_loop_free: Estimate
    speedup_end_to_end: Estimate
    loop_free_share: float
    num_identical: int
    near_ties: int
    identical: bool


def walk_prefix(cycles: Sequence[int], prefix: int) -> tuple[int, int]:
    """Counts the cycles that begin inside a prefix of the answer, and their tokens in it.

    Cycles emit tokens 1, 2, ... of the answer (token 0 is the prefill's). The cycle that crosses
    the end of the prefix counts whole, its tokens only up to the end, so nothing is flattered.

    Example: `walk_prefix([3, 2, 4], 5)` is `(2, 4)`: tokens 1-3 and token 4.

    Args:
        cycles: tokens emitted by each cycle.
        prefix: tokens of the answer that count, token 0 included.

    Returns:
        (cycles, tokens).
    """
    num_cycles, emitted = 0, 0
    for tokens in cycles:
        if 1 + emitted >= prefix:
            break
        num_cycles += 1
        emitted += tokens
    return num_cycles, min(emitted, max(prefix - 1, 0))


def accepted_length_histogram(answers: Sequence[Answer], block_size: int) -> np.ndarray:
    """Returns how many cycles emitted 1, 2, ..., G tokens, [G] int64."""
    lengths = [tokens for answer in answers for tokens in answer.speculative.cycles]
    if lengths and not 1 <= min(lengths) <= max(lengths) <= block_size:
        raise ValueError(f"a cycle emitted {max(lengths)} tokens, outside [1, {block_size}]")
    return np.bincount(np.asarray(lengths, np.int64), minlength=block_size + 1)[1:]


def arithmetic_mean(values: Sequence[float]) -> float:
    """Returns the arithmetic mean.

    Raises:
        ValueError: no values.
    """
    if not len(values):
        raise ValueError("no values to average")
    return float(np.mean(values))


def geometric_mean(values: Sequence[float]) -> float:
    """Returns the geometric mean.

    Raises:
        ValueError: no values, or one that is not above 0.
    """
    if not len(values) or min(values) <= 0:
        raise ValueError(f"a geometric mean needs values above 0, got {list(values)}")
    return float(np.exp(np.mean(np.log(values))))


def summarize(answers: Sequence[Answer], *, seed: int = 0) -> Summary:
    """Returns the figures of a workload at one block size.

    Args:
        answers: of all its prompts; an answer that ends with the prefill's token has no cycle and
            counts in the comparison only.
        seed: of the bootstrap.

    Raises:
        ValueError: no answer, or none with a cycle.
    """
    if not any(answer.speculative.cycles for answer in answers):
        raise ValueError(f"{len(answers)} answers without any decoding cycle; nothing to summarize")
    sums = _prompt_sums(answers)

    def estimate(statistic: Callable[[dict[str, np.ndarray]], np.ndarray]) -> Estimate:
        return bootstrap(sums, statistic, seed=seed)

    plain, speculative = _rate(sums, "plain"), _rate(sums, "speculative")
    differing = [answer for answer in answers if answer.divergence is not None]
    near_ties = sum(answer.is_near_tie for answer in differing)
    return Summary(
        num_prompts=len(sums["cycles"]),
        num_answers=len(answers),
        mat_pooled=estimate(lambda s: _pooled(s["speculative_tokens"], s["cycles"])),
        mat_macro=estimate(lambda s: _macro(s["speculative_tokens"], s["cycles"])),
        mat_loop_free=estimate(lambda s: _pooled(s["speculative_free_tokens"], s["free_cycles"])),
        mat_macro_loop_free=estimate(
            lambda s: _macro(s["speculative_free_tokens"], s["free_cycles"])
        ),
        plain_tokens_per_s=float(plain),
        speculative_tokens_per_s=float(speculative),
        speedup=estimate(lambda s: _rate(s, "speculative") / _rate(s, "plain")),
        speedup_loop_free=estimate(lambda s: _rate(s, "speculative_free") / _rate(s, "plain_free")),
        speedup_end_to_end=estimate(
            lambda s: _rate(s, "speculative_whole") / _rate(s, "plain_whole")
        ),
        loop_free_share=float(
            sums["speculative_free_tokens"].sum() / sums["speculative_tokens"].sum()
        ),
        num_identical=len(answers) - len(differing),
        near_ties=near_ties,
        identical=near_ties == len(differing),
    )


def bootstrap(
    sums: dict[str, np.ndarray],
    statistic: Callable[[dict[str, np.ndarray]], np.ndarray],
    *,
    seed: int = 0,
    num_samples: int = BOOTSTRAP_SAMPLES,
) -> Estimate:
    """Returns a figure with its percentile bootstrap 95 % interval.

    Args:
        sums: per-prompt quantities, each [P].
        statistic: reduces the last axis of such arrays, [..., P] to [...].
        seed: of the resampling.
        num_samples: resamples of P prompts with replacement.
    """
    num_prompts = len(next(iter(sums.values())))
    rng = np.random.default_rng(seed)
    chosen = rng.integers(num_prompts, size=(num_samples, num_prompts))
    # A resample may hold only prompts without a cycle; it says nothing and is left out.
    with np.errstate(divide="ignore", invalid="ignore"):
        samples = statistic({name: values[chosen] for name, values in sums.items()})
        value = float(statistic(sums))
    low, high = (
        np.nanpercentile(samples, [2.5, 97.5]) if np.isfinite(samples).any() else [np.nan] * 2
    )
    return Estimate(value, float(low), float(high))


def _prompt_sums(answers: Sequence[Answer]) -> dict[str, np.ndarray]:
    """Returns the per-prompt sums that every figure is a function of, each [P] float."""
    rows: dict[str, list[dict[str, float]]] = {}
    for answer in answers:
        row = {}
        for name, decoded in (("plain", answer.plain), ("speculative", answer.speculative)):
            free_cycles, free_tokens = walk_prefix(decoded.cycles, decoded.loop_start)
            num_cycles = len(decoded.cycles)
            row[f"{name}_tokens"] = decoded.num_tokens - 1
            row[f"{name}_s"] = decoded.decode_s if num_cycles else 0.0
            row[f"{name}_free_tokens"] = free_tokens
            row[f"{name}_free_s"] = decoded.decode_s * free_cycles / max(num_cycles, 1)
            row[f"{name}_whole_tokens"] = decoded.num_tokens
            row[f"{name}_whole_s"] = decoded.prefill_s + decoded.decode_s
        row["cycles"], row["free_cycles"] = num_cycles, free_cycles  # of the speculative answer
        rows.setdefault(answer.prompt_id, []).append(row)
    return {
        name: np.array([sum(row[name] for row in turns) for turns in rows.values()], float)
        for name in next(iter(rows.values()))[0]
    }


def _pooled(tokens: np.ndarray, cycles: np.ndarray) -> np.ndarray:
    return tokens.sum(-1) / cycles.sum(-1)


def _macro(tokens: np.ndarray, cycles: np.ndarray) -> np.ndarray:
    used = cycles > 0
    ratio = np.where(used, tokens / np.where(used, cycles, 1), 0.0)
    return ratio.sum(-1) / used.sum(-1)


def _rate(sums: dict[str, np.ndarray], name: str) -> np.ndarray:
    return sums[f"{name}_tokens"].sum(-1) / sums[f"{name}_s"].sum(-1)
