"""From logits to the next token: greedy, or drawn by temperature, top-k and top-p.

All randomness of a row comes from its own key, folded with the position of the token and with what
it is drawn for. So a row's tokens depend neither on its companions nor on its slot, and a position
that is decided anew in a later cycle finds the same draws: those of the earlier cycle were thrown
away unread.
"""

import flax.struct
import jax
import jax.numpy as jnp

# What a draw is for, folded into the key of its position.
TOKEN, DRAFT, ACCEPTANCE = 0, 1, 2


@flax.struct.dataclass
class Sampling:
    """How each row chooses its tokens.

    Attributes:
        keys: [B] typed PRNG keys.
        temperature: [B] float32, at least 0; 0 is greedy.
        top_k: [B] int32, at least 1: only the so many most likely tokens; V or more = all.
        top_p: [B] float32 in (0, 1]: only the fewest most likely tokens with so much probability
            together, of those that top_k leaves; 1 = all.
    """

    keys: jax.Array
    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array


def make_sampling(
    keys: jax.Array,
    temperature: jax.Array | float = 0.0,
    top_k: jax.Array | int | None = None,
    top_p: jax.Array | float = 1.0,
) -> Sampling:
    """Returns the `Sampling` of B rows; scalars hold for all of them, `top_k` None = all tokens."""
    rows = keys.shape
    return Sampling(
        keys=keys,
        temperature=jnp.broadcast_to(jnp.asarray(temperature, jnp.float32), rows),
        top_k=jnp.broadcast_to(
            jnp.asarray(jnp.iinfo(jnp.int32).max if top_k is None else top_k, jnp.int32), rows
        ),
        top_p=jnp.broadcast_to(jnp.asarray(top_p, jnp.float32), rows),
    )


def greedy_sampling(num_rows: int) -> Sampling:
    """Returns the `Sampling` of rows that are greedy."""
    return make_sampling(jax.random.split(jax.random.key(0), num_rows))


def greedy_tokens(logits: jax.Array) -> jax.Array:
    """Returns the most likely token [...] int32 of logits [..., V]; the lowest id wins a tie.

    A maximum and a minimum over ids, each of which CPUs vectorise; `argmax` is 1.5 to 3.5 times
    slower there.
    """
    best = logits.max(axis=-1, keepdims=True)
    size = logits.shape[-1]
    ids = jnp.arange(size, dtype=jnp.int32).reshape((1,) * (logits.ndim - 1) + (size,))
    # The upper bound keeps a row of NaN inside the vocabulary.
    return jnp.minimum(jnp.where(logits == best, ids, size).min(axis=-1), size - 1)


def log_law(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """Returns the log probabilities that rows draw from, [B, T, V] float32.

    Temperature first, then top-k, then top-p, as transformers does; tokens as likely as the last
    kept one are kept too. Rows of temperature 0 have all probability on the greedy token.

    Args:
        logits: [B, T, V].
        sampling: of the B rows.
    """
    size = logits.shape[-1]
    temperature = sampling.temperature[:, None, None]
    tempered = logits.astype(jnp.float32) / jnp.where(temperature > 0, temperature, 1.0)
    filters = jnp.any((sampling.top_k < size) | (sampling.top_p < 1.0))
    # Sorting a vocabulary costs as much as a pass of a small model: only if a row asks for it.
    tempered = jax.lax.cond(filters, _filtered, lambda x, _: x, tempered, sampling)
    drawn = jax.nn.log_softmax(tempered, axis=-1)
    ids = jnp.arange(size, dtype=jnp.int32)[None, None]
    greedy = jnp.where(ids == greedy_tokens(logits)[..., None], 0.0, -jnp.inf)
    return jnp.where(temperature > 0, drawn, greedy)


def _filtered(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """Returns logits [B, T, V] with -inf at the tokens that top-k and top-p leave out."""
    size = logits.shape[-1]
    ordered = -jnp.sort(-logits, axis=-1)
    ranks = jnp.arange(size)[None, None]
    ordered = jnp.where(ranks < sampling.top_k[:, None, None], ordered, -jnp.inf)
    law = jax.nn.softmax(ordered, axis=-1)
    before = jnp.cumsum(law, axis=-1) - law  # probability of the more likely tokens
    kept = (before < sampling.top_p[:, None, None]) & (ordered > -jnp.inf)
    least = jnp.where(kept, ordered, jnp.inf).min(axis=-1, keepdims=True)
    return jnp.where(logits >= least, logits, -jnp.inf)


def fold_positions(keys: jax.Array, positions: jax.Array, purpose: int) -> jax.Array:
    """Returns keys [B, T] for draws of one purpose at positions [B, T] int32 of rows' keys [B]."""

    def of_token(key, position):
        return jax.random.fold_in(jax.random.fold_in(key, position), purpose)

    return jax.vmap(jax.vmap(of_token, in_axes=(None, 0)))(keys, positions)


def draw_tokens(law: jax.Array, keys: jax.Array) -> jax.Array:
    """Returns tokens [B, T] int32 drawn from log probabilities [B, T, V] with keys [B, T]."""
    return jax.vmap(jax.vmap(jax.random.categorical))(keys, law).astype(jnp.int32)


def choose_tokens(
    logits: jax.Array, sampling: Sampling, positions: jax.Array, *, greedy: bool
) -> jax.Array:
    """Returns the target's own choice at each position, [B, T] int32.

    Args:
        logits: [B, T, V] float32.
        sampling: of the B rows.
        positions: [B, T] int32 at which the chosen tokens will stand.
        greedy: static; all rows are greedy and `sampling` is not read.
    """
    if greedy:
        return greedy_tokens(logits)
    keys = fold_positions(sampling.keys, positions, TOKEN)
    return draw_tokens(log_law(logits, sampling), keys)
