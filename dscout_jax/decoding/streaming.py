"""Tokens to the host while the loop runs: the device is asked once in several cycles."""

from collections.abc import Callable, Sequence

import jax

from dscout_jax.decoding.speculative import DraftWeights, SpeculativeState, decode_cycles
from dscout_jax.decoding.variant import Variant

OnTokens = Callable[[int, tuple[int, ...]], None]
"""(row, tokens of one cycle): the accepted drafts, then the target's own token."""


def stream_cycles(
    params: dict,
    weights: DraftWeights,
    state: SpeculativeState,
    prompt_len: Sequence[int],
    on_tokens: OnTokens,
    *,
    variant: Variant,
    cycles_at_once: int = 4,
) -> SpeculativeState:
    """Decodes every row to its end and hands over the tokens of each cycle as they come.

    Args:
        params: target weights.
        weights: what drafting reads.
        state: just prefilled; donated.
        prompt_len: [B] prompt lengths; a row's first call holds the prefill's token alone.
        on_tokens: called in the order of the cycles of each row.
        variant: static choices.
        cycles_at_once: cycles that the device runs between two looks, at least 1.

    Returns:
        The final state.

    Raises:
        ValueError: `cycles_at_once` is below 1.
    """
    if cycles_at_once < 1:
        raise ValueError(f"cycles_at_once={cycles_at_once} must be at least 1")
    shown = [0] * len(prompt_len)  # cycles handed over, the prefill counted as one
    place = list(prompt_len)
    while True:
        rows = state.rows
        tokens, cycles, emitted, done = jax.device_get(
            (rows.tokens, state.cycles, state.emitted, rows.done)
        )
        for row in range(len(place)):
            counts = [1, *emitted[row, : cycles[row]].tolist()]
            for count in counts[shown[row] :]:
                on_tokens(row, tuple(tokens[row, place[row] : place[row] + count].tolist()))
                place[row] += count
            shown[row] = len(counts)
        if done.all():
            return state
        state = decode_cycles(params, weights, state, cycles_at_once, variant=variant)
