"""Which drafts stand, and what the cycle emits."""

import jax
import jax.numpy as jnp


def accepted_length(drafts: jax.Array, verified: jax.Array) -> jax.Array:
    """Counts the leading drafts that the target agrees with.

    Args:
        drafts: [..., G-1] int32 proposed tokens.
        verified: [..., G-1] int32 target choices at the same positions.

    Returns:
        [...] int32 in [0, G-1].

    Source: greedy verification, Leviathan et al. 2023, algorithm 1 at temperature 0.
    """
    return jnp.cumprod((drafts == verified).astype(jnp.int32), axis=-1).sum(axis=-1)


def reject_drafts(
    law: jax.Array,
    draft_law: jax.Array,
    drafts: jax.Array,
    keys: jax.Array,
    token_ids: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Keeps drawn drafts so that the target's law is unchanged, and draws one token more.

    A draft y of slot k stands with probability min(1, p_k(y) / q_k(y)); at the first one that does
    not, a token is drawn from (p_k - q_k)+; if all stand, the last one is drawn from p.

    Args:
        law: [B, G, V] log probabilities p of the target after anchor and each draft.
        draft_law: [B, G-1, Vd] log probabilities q that the drafts were drawn from, independent of
            each other.
        drafts: [B, G-1] int32 indices into the draft vocabulary.
        keys: pair of keys [B, G-1] and [B, G], for the acceptance of each draft and for the token
            drawn after it; independent of each other and of the keys of the drafts.
        token_ids: [Vd] int32 target ids of the draft vocabulary; None = the same ids.

    Returns:
        accepted [B] int32 in [0, G-1], and tokens [B, G] int32: the accepted drafts, at slot
        `accepted` the token drawn; what follows is undefined.

    Source: Leviathan et al. 2023, algorithm 1 and theorem 3.5; METHOD section 3.
    """
    accept_keys, token_keys = keys
    ids = drafts if token_ids is None else jnp.take(token_ids, drafts)
    target = jnp.take_along_axis(law[:, :-1], ids[..., None], axis=-1)[..., 0]
    drafted = jnp.take_along_axis(draft_law, drafts[..., None], axis=-1)[..., 0]
    uniform = jax.vmap(jax.vmap(jax.random.uniform))(accept_keys)
    stands = uniform < jnp.exp(target - drafted)  # both in log space: no 0 / 0
    accepted = jnp.cumprod(stands.astype(jnp.int32), axis=-1).sum(axis=-1)

    rows, num_drafts = jnp.arange(law.shape[0]), drafts.shape[1]
    there = jnp.exp(law[rows, accepted])  # [B, V]
    rejected = jnp.exp(draft_law[rows, jnp.minimum(accepted, num_drafts - 1)])  # [B, Vd]
    rejected = jnp.where((accepted < num_drafts)[:, None], rejected, 0.0)
    rest = there - rejected if token_ids is None else there.at[:, token_ids].add(-rejected)
    rest = jnp.maximum(rest, 0.0)
    # Nothing is left only where p and q differ by rounding.
    rest = jnp.where(rest.sum(axis=-1, keepdims=True) > 0, rest, there)
    drawn = jax.vmap(jax.random.categorical)(token_keys[rows, accepted], jnp.log(rest))
    drawn = drawn.astype(jnp.int32)
    tokens = jnp.pad(ids, ((0, 0), (0, 1))).at[rows, accepted].set(drawn)
    return accepted, tokens


def is_stop(tokens: jax.Array, stop_ids: tuple[int, ...]) -> jax.Array:
    """Returns a boolean array like `tokens`, True at any of the static `stop_ids`."""
    stops = jnp.zeros(tokens.shape, bool)
    for stop_id in stop_ids:
        stops = stops | (tokens == stop_id)
    return stops


def emitted_length(
    verified: jax.Array, accepted: jax.Array, budget: jax.Array, stop_ids: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
    """Counts the tokens a cycle emits, and says whether the row ends with them.

    Args:
        verified: [B, G] int32 accepted drafts, then the correction or bonus; the target's own
            choices are that too.
        accepted: [B] int32 drafts that stand.
        budget: [B] int32 tokens the row may still emit, at least 1.
        stop_ids: static ids that end a row; the stop token itself is emitted.

    Returns:
        emitted [B] int32 in [1, G], the tau of METHOD section 0 cut at stop token and budget, and
        ends [B] boolean.
    """
    emitted = jnp.minimum(accepted + 1, budget)
    slots = jnp.arange(verified.shape[1])[None, :]
    stops = is_stop(verified, stop_ids) & (slots < emitted[:, None])
    first = jnp.min(jnp.where(stops, slots, verified.shape[1]), axis=1)
    has_stop = jnp.any(stops, axis=1)
    emitted = jnp.where(has_stop, first + 1, emitted)
    return emitted.astype(jnp.int32), has_stop | (emitted >= budget)
