"""Decodes prompts plainly and speculatively, times both and compares them token by token.

Decoders come in as functions, so that this module knows nothing of models; `runners` makes them.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from absl import logging

from dscout_jax.data.loops import loop_start
from dscout_jax.data.prompts import Prompt
from dscout_jax.data.tokenizer import Tokenizer
from dscout_jax.evaluation.statistics import Answer, Decoded

# Passes over one token and over G tokens sum in different orders; logits closer than this may swap.
NEAR_TIE_MARGIN = 1e-3


@dataclasses.dataclass(frozen=True)
class Generated:
    """What a decoder made of one prompt.

    Attributes:
        tokens: the answer, stop token included.
        cycles: tokens emitted by each cycle after the prefill's token; ones for plain decoding.
        prefill_s: seconds from the prompt to the first token.
        decode_s: seconds from there to the last token.
    """

    tokens: tuple[int, ...]
    cycles: tuple[int, ...]
    prefill_s: float
    decode_s: float


Decode = Callable[[Sequence[int], int], Generated]
"""(prompt ids, most new tokens) -> Generated; already compiled."""

Margin = Callable[[Sequence[int], Sequence[int]], float]
"""(token ids, next tokens) -> how far the worst of these lies below the target's best logit."""


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One answer at one block size.

    Attributes:
        workload: name of the benchmark.
        block_size: G.
        prompt_len: tokens of the prompt, earlier turns included.
        answer: times, cycles and the comparison.
        text: the plain decoder's answer without special tokens.
    """

    workload: str
    block_size: int
    prompt_len: int
    answer: Answer
    text: str


def measure_prompt(
    prompt: Prompt,
    *,
    tokenizer: Tokenizer,
    plain: Decode,
    speculative: Mapping[int, Decode],
    margin: Margin,
    max_new_tokens: int,
) -> Iterator[Measurement]:
    """Yields the measurements of all turns, each decoded plainly once and at every block size.

    All decoders see the same context: in later turns the plain decoder's earlier answers. A
    conversation ends early where an answer is empty, because there is nothing to reply to.

    Args:
        prompt: the conversation; the wrapper is already around its turns.
        tokenizer: of the target.
        plain: the plain decoder.
        speculative: block size to decoder.
        margin: looks up logits where two answers differ.
        max_new_tokens: most tokens of an answer.
    """
    messages = []
    for turn, user_text in enumerate(prompt.turns):
        messages.append({"role": "user", "content": user_text})
        prompt_ids = tokenizer.chat_prompt(messages)
        expected = plain(prompt_ids, max_new_tokens)
        text = tokenizer.decode(expected.tokens, skip_special=True)
        for block_size, decode in speculative.items():
            answer = compare(
                prompt.id, turn, prompt_ids, expected, decode(prompt_ids, max_new_tokens), margin
            )
            yield Measurement(prompt.workload, block_size, len(prompt_ids), answer, text)
        if not text.strip():
            if turn + 1 < len(prompt.turns):
                logging.warning("%s: turn %d has an empty answer and ends it", prompt.id, turn)
            return
        messages.append({"role": "assistant", "content": text})


def compare(
    prompt_id: str,
    turn: int,
    prompt_ids: Sequence[int],
    plain: Generated,
    speculative: Generated,
    margin: Margin,
) -> Answer:
    """Returns the comparison of two answers; the first difference is looked up in the logits."""
    divergence = first_difference(plain.tokens, speculative.tokens)
    gap = None
    if divergence is not None:
        pair = [answer.tokens[divergence : divergence + 1] for answer in (plain, speculative)]
        # An answer that merely ends earlier is no tie between two tokens.
        ended = not all(pair)
        context = [*prompt_ids, *plain.tokens[:divergence]]
        gap = math.inf if ended else margin(context, [tokens[0] for tokens in pair])
        logging.info("%s: token %d differs, margin %.2e", prompt_id, divergence, gap)
    return Answer(
        prompt_id=prompt_id,
        turn=turn,
        plain=_decoded(plain),
        speculative=_decoded(speculative),
        divergence=divergence,
        margin=gap,
        is_near_tie=gap is not None and gap <= NEAR_TIE_MARGIN,
    )


def first_difference(first: Sequence[int], second: Sequence[int]) -> int | None:
    """Returns the index of the first differing token, also where one list ends; None if equal."""
    for index, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return index
    return None if len(first) == len(second) else min(len(first), len(second))


def as_row(measurement: Measurement) -> dict[str, Any]:
    """Returns a measurement as JSON values, one flat row; lists are the cycles and the text."""
    answer = measurement.answer
    plain, speculative = answer.plain, answer.speculative
    return {
        "workload": measurement.workload,
        "id": answer.prompt_id,
        "turn": answer.turn,
        "block_size": measurement.block_size,
        "prompt_len": measurement.prompt_len,
        "num_tokens": speculative.num_tokens,
        "loop_start": speculative.loop_start,
        "num_cycles": len(speculative.cycles),
        "mat": (speculative.num_tokens - 1) / max(len(speculative.cycles), 1),
        "plain_prefill_s": plain.prefill_s,
        "plain_decode_s": plain.decode_s,
        "speculative_prefill_s": speculative.prefill_s,
        "speculative_decode_s": speculative.decode_s,
        "identical": answer.divergence is None,
        "divergence": answer.divergence,
        "margin": answer.margin,
        "near_tie": answer.is_near_tie,
        "cycles": list(speculative.cycles),
        "text": measurement.text,
    }


def _decoded(generated: Generated) -> Decoded:
    return Decoded(
        num_tokens=len(generated.tokens),
        loop_start=loop_start(generated.tokens),
        cycles=generated.cycles,
        prefill_s=generated.prefill_s,
        decode_s=generated.decode_s,
    )
