"""Batched generation by the target: slots of the batch are refilled as rows finish.

What a row's answer is does not depend on its slot, on its companions or on when it was looked at:
sampled rows draw from a key folded from the prompt's id, and a loop ends an answer at a place that
depends on its tokens only. (Batches of another shape can still swap two logits that nearly tie.)
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from dscout_jax.config.models import TargetConfig
from dscout_jax.data.features import FeatureWriter
from dscout_jax.data.loops import LOOP_NGRAM, loop_start
from dscout_jax.data.responses import Response, ResponseWriter
from dscout_jax.decoding.autoregressive import decode_steps, init_generation, prefill
from dscout_jax.decoding.sampling import Sampling, make_sampling

SLOTS_PER_PREFILL_ROW = 8  # 64 slots: 8 prompts prefilled at once, about what ends in a round
PROMPT_BUCKETS = (64, 96, 128, 192, 256, 384, 512, 768, 1024)  # few lengths, few programs
LOOKAHEAD = 256  # waiting prompts among which companions of similar length are looked for


@dataclass(frozen=True)
class Request:
    """A prompt ready to be answered.

    Attributes:
        id: the prompt's id.
        prompt: token ids, chat template included.
    """

    id: str
    prompt: tuple[int, ...]


@dataclass(frozen=True)
class Answer:
    """What one request came to.

    Attributes:
        response: the answer.
        features: [T, C * D] bfloat16 tapped residual streams of the first T tokens of prompt and
            answer, all but perhaps the last; None where no taps are asked for.
    """

    response: Response
    features: np.ndarray | None = None


@dataclass(frozen=True)
class GenerationSettings:
    """How answers are generated.

    Attributes:
        slots: rows decoded side by side.
        max_prompt_tokens: longest prompt; with max_new_tokens it sizes the cache.
        max_new_tokens: longest answer.
        refill_steps: tokens between two looks at finished rows.
        temperature: 0 is greedy.
        seed: of sampling.
        loop_ngram: an answer ends once an n-gram of this length repeats; None lets it run.
        tap_ids: 0-based target layers whose residual stream is kept as features; empty = none.
    """

    slots: int = 64
    max_prompt_tokens: int = 192
    max_new_tokens: int = 256
    refill_steps: int = 16
    temperature: float = 0.0
    seed: int = 0
    loop_ngram: int | None = LOOP_NGRAM
    tap_ids: tuple[int, ...] = ()


def generate(
    params: dict,
    config: TargetConfig,
    requests: Sequence[Request],
    stop_ids: tuple[int, ...],
    settings: GenerationSettings,
) -> Iterator[list[Answer]]:
    """Yields finished answers after every `refill_steps` tokens (a list that may be empty).

    Args:
        params: target weights.
        config: their shapes.
        requests: in the order of preference; prompts of similar length are started together.
        stop_ids: tokens that end an answer.
        settings: see `GenerationSettings`.

    Raises:
        ValueError: a prompt is empty or longer than `max_prompt_tokens`.
    """
    for request in requests:
        if not 0 < len(request.prompt) <= settings.max_prompt_tokens:
            raise ValueError(
                f"prompt {request.id!r} has {len(request.prompt)} tokens, allowed are 1 to "
                f"max_prompt_tokens={settings.max_prompt_tokens}"
            )
    static = {
        "config": config,
        "greedy": settings.temperature == 0,
        "stop_ids": stop_ids,
        "tap_ids": settings.tap_ids,
    }
    state = init_generation(
        config,
        settings.slots,
        settings.max_prompt_tokens + settings.max_new_tokens,
        num_taps=len(settings.tap_ids),
    )
    waiting = list(requests)
    running: dict[int, Request] = {}
    rows_at_once = max(1, settings.slots // SLOTS_PER_PREFILL_ROW)
    while waiting or running:
        free = [slot for slot in range(settings.slots) if slot not in running]
        # A prefill costs the same with few rows as with all, so it waits until it is full.
        while waiting and (len(free) >= rows_at_once or not running):
            group = _take_group(waiting, rows_at_once, settings.max_prompt_tokens)
            slots, free = free[: len(group)], free[len(group) :]
            running.update(zip(slots, group, strict=True))
            arrays = _prefill_arrays(group, slots, rows_at_once, settings)
            state = prefill(params, state, *arrays, **static)
        state = decode_steps(params, state, settings.refill_steps, **static)
        tokens, length, done = jax.device_get((state.tokens, state.length, state.done))
        finished = []
        for slot, request in list(running.items()):
            answer = tokens[slot, len(request.prompt) : length[slot]].tolist()
            kept = _cut_at_loop(answer, settings.loop_ngram)
            if done[slot] or len(kept) < len(answer):
                stopped = len(kept) == len(answer) and answer[-1] in stop_ids
                response = Response(request.id, request.prompt, tuple(kept), stopped)
                features = None
                if settings.tap_ids:
                    num_fed = min(len(request.prompt) + len(kept), length[slot] - 1)
                    words = np.asarray(state.taps[slot])[:num_fed]
                    features = words.view(ml_dtypes.bfloat16)
                finished.append(Answer(response, features))
                del running[slot]
        still_running = np.asarray([slot in running for slot in range(settings.slots)])
        state = state.replace(done=jnp.asarray(~still_running))
        yield finished


def generate_into(
    writer: ResponseWriter,
    features: FeatureWriter | None,
    params: dict,
    config: TargetConfig,
    requests: Sequence[Request],
    stop_ids: tuple[int, ...],
    settings: GenerationSettings,
) -> Iterator[list[Response]]:
    """Writes answers as they are finished, and yields them.

    Args:
        writer: of the answers.
        features: of their features, where `settings.tap_ids` asks for some. A killed run may lose
            the features of a shard that is not full; they are computed again before training.
        params: target weights; see `generate` for this and what follows.
        config: shapes.
        requests: prompts.
        stop_ids: tokens that end an answer.
        settings: how answers are generated.
    """
    for answers in generate(params, config, requests, stop_ids, settings):
        responses = [answer.response for answer in answers]
        writer.append(responses)
        for answer in answers if features is not None else ():
            row = answer.response
            tokens = (row.prompt + row.response)[: len(answer.features)]
            features.add(row.id, tokens, answer.features)
        yield responses


def _cut_at_loop(answer: list[int], n: int | None) -> list[int]:
    """Returns the answer up to the end of its first repeated n-gram, wherever decoding stands."""
    return answer if n is None else answer[: loop_start(answer, n) + n]


def _bucket(length: int, max_prompt_tokens: int) -> int:
    """Returns the padded length of a prompt."""
    fitting = [bucket for bucket in PROMPT_BUCKETS if length <= bucket < max_prompt_tokens]
    return fitting[0] if fitting else max_prompt_tokens


def _take_group(waiting: list[Request], num_rows: int, max_prompt_tokens: int) -> list[Request]:
    """Removes and returns the first request with companions that pad to the same length."""
    bucket = _bucket(len(waiting[0].prompt), max_prompt_tokens)
    chosen = [
        index
        for index, request in enumerate(waiting[:LOOKAHEAD])
        if _bucket(len(request.prompt), max_prompt_tokens) == bucket
    ][:num_rows]
    group = [waiting[index] for index in chosen]
    for index in reversed(chosen):
        del waiting[index]
    return group


def _prefill_arrays(
    group: Sequence[Request], slots: Sequence[int], num_rows: int, settings: GenerationSettings
) -> tuple[jax.Array | Sampling, ...]:
    """Returns prompts, prompt_len, slots, max_new_tokens and sampling as `prefill` takes them."""
    padded_len = _bucket(len(group[0].prompt), settings.max_prompt_tokens)
    prompts = np.zeros((num_rows, padded_len), np.int32)
    prompt_len = np.ones((num_rows,), np.int32)
    slot_of_row = settings.slots + np.arange(num_rows, dtype=np.int32)  # past the end: dropped
    hashes = np.zeros((num_rows,), np.uint32)
    for row, (request, slot) in enumerate(zip(group, slots, strict=True)):
        prompts[row, : len(request.prompt)] = request.prompt
        prompt_len[row] = len(request.prompt)
        slot_of_row[row] = slot
        hashes[row] = int.from_bytes(hashlib.sha256(request.id.encode()).digest()[:4], "big")
    fold = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
    keys = fold(jax.random.key(settings.seed), jnp.asarray(hashes))
    return (
        jnp.asarray(prompts),
        jnp.asarray(prompt_len),
        jnp.asarray(slot_of_row),
        jnp.full((num_rows,), settings.max_new_tokens, jnp.int32),
        make_sampling(keys, settings.temperature),
    )
