"""Plain decoding: prefill into slots, then one token per row and step, whole loop on the device."""

from functools import partial

import flax.struct
import jax
import jax.numpy as jnp

from dscout_jax.config.models import TargetConfig
from dscout_jax.decoding.sampling import Sampling, choose_tokens, greedy_sampling
from dscout_jax.decoding.verification import is_stop
from dscout_jax.models.cache import KVCache, init_cache
from dscout_jax.models.target import apply_target, compute_logits


@flax.struct.dataclass
class GenerationState:
    """Rows in flight. Rows advance unequally and end on their own.

    Attributes:
        tokens: [B, S] int32, prompt then emitted tokens; undefined at or past `length`.
        length: [B] int32, known tokens; the last one is not yet in the cache.
        limit: [B] int32, length at which the row ends.
        done: [B] boolean; a done row neither writes nor advances.
        cache: target cache with S positions; `cache.length == length - 1` while running.
        sampling: how each row chooses; not read by greedy programs.
        taps: [B, S, C * D] uint16, the bfloat16 words of the tapped residual streams of the tokens
            in the cache; None where none are asked for. (On a CPU, XLA would turn a whole buffer of
            bfloat16 into float32 and back to write one position.)
    """

    tokens: jax.Array
    length: jax.Array
    limit: jax.Array
    done: jax.Array
    cache: KVCache
    sampling: Sampling
    taps: jax.Array | None = None


def init_generation(
    config: TargetConfig, batch: int, capacity: int, num_taps: int = 0
) -> GenerationState:
    """Returns `batch` empty slots (all done) of `capacity` positions (S), with C = `num_taps`."""
    zeros = jnp.zeros((batch,), jnp.int32)
    width = num_taps * config.hidden_size
    return GenerationState(
        tokens=jnp.zeros((batch, capacity), jnp.int32),
        length=zeros,
        limit=jnp.zeros((batch,), jnp.int32),
        done=jnp.ones((batch,), bool),
        cache=init_cache(config, batch, capacity),
        sampling=greedy_sampling(batch),
        taps=jnp.zeros((batch, capacity, width), jnp.uint16) if num_taps else None,
    )


def prefill_rows(params, config, prompts, prompt_len, tap_ids=()):
    """Runs the target over right-padded prompts.

    Args:
        params: target weights.
        config: their shapes.
        prompts: [R, P] int32.
        prompt_len: [R] int32 in [1, P].
        tap_ids: static tapped layers.

    Returns:
        logits [R, V] after each prompt's last token, and the `TargetOutput` with a cache of P
        positions (entries at or past `prompt_len` are undefined).
    """
    cache = init_cache(config, prompts.shape[0], prompts.shape[1])
    out = apply_target(params, config, prompts, cache=cache, tap_ids=tap_ids)
    last = jnp.take_along_axis(out.hidden, (prompt_len - 1)[:, None, None], axis=1)[:, 0]
    return compute_logits(params, config, last), out


def place(buffer: jax.Array, rows: jax.Array, slots: jax.Array) -> jax.Array:
    """Writes rows [R, K_h, P, H] into slots [R] of a buffer [B, K_h, S, H]; drops slots >= B."""
    return buffer.at[slots, :, : rows.shape[2]].set(rows.astype(buffer.dtype), mode="drop")


def admit_rows(
    state: GenerationState,
    logits: jax.Array,
    prompt_cache: KVCache,
    prompts: jax.Array,
    prompt_len: jax.Array,
    slots: jax.Array,
    max_new_tokens: jax.Array,
    sampling: Sampling | None,
    *,
    greedy: bool,
    stop_ids: tuple[int, ...],
    taps: jax.Array | None = None,
) -> GenerationState:
    """Puts prefilled prompts into slots and emits the first token of each.

    Args:
        state: rows in flight; the named slots are overwritten whole.
        logits: [R, V] of `prefill_rows`.
        prompt_cache: its cache, [R, K_h, P, H] a layer.
        prompts: [R, P] int32.
        prompt_len: [R] int32.
        slots: [R] int32 distinct slots; an entry >= B is a padding row and is dropped.
        max_new_tokens: [R] int32, at least 1; `prompt_len + max_new_tokens <= S`.
        sampling: of the R rows; None = they are greedy.
        greedy: static; all rows are.
        stop_ids: static.
        taps: [R, P, C * D] uint16 words of the prompts' taps, where the state keeps them.
    """
    if sampling is None:
        sampling = greedy_sampling(prompts.shape[0])
    first = choose_tokens(logits[:, None], sampling, prompt_len[:, None], greedy=greedy)[:, 0]
    limit = prompt_len + max_new_tokens
    tokens = state.tokens.at[slots, : prompts.shape[1]].set(prompts, mode="drop")
    tokens = tokens.at[slots, prompt_len].set(first, mode="drop")
    ends = is_stop(first, stop_ids) | (prompt_len + 1 >= limit)
    cache = state.cache
    cache = KVCache(
        keys=tuple(place(b, r, slots) for b, r in zip(cache.keys, prompt_cache.keys, strict=True)),
        values=tuple(
            place(b, r, slots) for b, r in zip(cache.values, prompt_cache.values, strict=True)
        ),
        length=cache.length.at[slots].set(prompt_len, mode="drop"),
    )
    return GenerationState(
        tokens=tokens,
        length=state.length.at[slots].set(prompt_len + 1, mode="drop"),
        limit=state.limit.at[slots].set(limit, mode="drop"),
        done=state.done.at[slots].set(ends, mode="drop"),
        cache=cache,
        sampling=jax.tree.map(
            lambda old, new: old.at[slots].set(new, mode="drop"), state.sampling, sampling
        ),
        taps=None if taps is None else state.taps.at[slots, : taps.shape[1]].set(taps, mode="drop"),
    )


def to_words(taps: jax.Array) -> jax.Array:
    """Returns taps as the bfloat16 words [...] uint16 that a state keeps."""
    return jax.lax.bitcast_convert_type(taps.astype(jnp.bfloat16), jnp.uint16)


def from_words(words: jax.Array) -> jax.Array:
    """Returns kept taps as float32 [...]; a bfloat16 is the upper half of a float32."""
    return jax.lax.bitcast_convert_type(words.astype(jnp.uint32) << 16, jnp.float32)


@partial(
    jax.jit,
    static_argnames=("config", "greedy", "stop_ids", "tap_ids"),
    donate_argnames=("state",),
)
def prefill(
    params: dict,
    state: GenerationState,
    prompts: jax.Array,
    prompt_len: jax.Array,
    slots: jax.Array,
    max_new_tokens: jax.Array,
    sampling: Sampling | None = None,
    *,
    config: TargetConfig,
    greedy: bool,
    stop_ids: tuple[int, ...],
    tap_ids: tuple[int, ...] = (),
) -> GenerationState:
    """Prefills R prompts into slots (see `admit_rows`). Compiled once per (R, P, B, S).

    Donates `state`, which keeps taps where `tap_ids` are given.
    """
    logits, out = prefill_rows(params, config, prompts, prompt_len, tap_ids)
    return admit_rows(
        state,
        logits,
        out.cache,
        prompts,
        prompt_len,
        slots,
        max_new_tokens,
        sampling,
        greedy=greedy,
        stop_ids=stop_ids,
        taps=None if out.taps is None else to_words(out.taps),
    )


def decode_one(params, config, state, *, greedy, stop_ids, tap_ids=()) -> GenerationState:
    """Emits one token in each running row."""
    batch = state.tokens.shape[0]
    running = ~state.done
    rows = jnp.arange(batch)
    last = state.tokens[rows, state.length - 1]
    out = apply_target(
        params, config, last[:, None], cache=state.cache, active=running, tap_ids=tap_ids
    )
    logits = compute_logits(params, config, out.hidden)
    token = choose_tokens(logits, state.sampling, state.length[:, None], greedy=greedy)[:, 0]
    at = jnp.where(running, state.length, state.tokens.shape[1])
    length = jnp.where(running, state.length + 1, state.length)
    taps = state.taps
    if tap_ids:
        fed = jnp.where(running, state.length - 1, taps.shape[1])
        taps = taps.at[rows, fed].set(to_words(out.taps[:, 0]), mode="drop")
    return state.replace(
        tokens=state.tokens.at[rows, at].set(token, mode="drop"),
        length=length,
        done=state.done | is_stop(token, stop_ids) | (length >= state.limit),
        cache=out.cache,
        taps=taps,
    )


@partial(
    jax.jit,
    static_argnames=("config", "greedy", "stop_ids", "tap_ids"),
    donate_argnames=("state",),
)
def decode_steps(
    params: dict,
    state: GenerationState,
    num_steps: jax.Array | int,
    *,
    config: TargetConfig,
    greedy: bool,
    stop_ids: tuple[int, ...],
    tap_ids: tuple[int, ...] = (),
) -> GenerationState:
    """Decodes at most `num_steps` (traced) tokens in every running row, or until all are done.

    Compiled once per (B, S). Donates `state`: the caches are updated in place.
    """

    def unfinished(carry):
        step, state = carry
        return (step < num_steps) & ~jnp.all(state.done)

    def body(carry):
        step, state = carry
        step_fn = partial(decode_one, greedy=greedy, stop_ids=stop_ids, tap_ids=tap_ids)
        return step + 1, step_fn(params, config, state)

    return jax.lax.while_loop(unfinished, body, (jnp.int32(0), state))[1]
