"""Key/value cache of the target: rows advance unequally, roll-back is a length."""

import flax.struct
import jax
import jax.numpy as jnp


@flax.struct.dataclass
class KVCache:
    """Keys and values of the tokens processed so far, left aligned.

    Attributes:
        keys: one array per layer, [B, K_h, S, H]; rotated keys. Undefined at or past `length`.
        values: one array per layer, [B, K_h, S, H].
        length: [B] int32, valid positions of each row, in [0, S].
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    length: jax.Array

    @property
    def capacity(self) -> int:
        """S, the number of positions a row can hold."""
        return self.keys[0].shape[2]


def init_cache(config, batch: int, capacity: int, dtype=jnp.float32) -> KVCache:
    """Returns an empty cache of `batch` rows and `capacity` positions (S) for a target or drafter.

    Args:
        config: TargetConfig or DrafterConfig; layers, key/value heads and head dim are read.
        batch: B.
        capacity: S, at least the longest prompt plus new tokens plus one block.
        dtype: storage type of keys and values.
    """
    shape = (batch, config.num_key_value_heads, capacity, config.head_dim)

    # One buffer per layer: a stacked array would have to be copied to change one layer.
    def layers():
        return tuple(jnp.zeros(shape, dtype) for _ in range(config.num_hidden_layers))

    return KVCache(keys=layers(), values=layers(), length=jnp.zeros((batch,), jnp.int32))


def rollback(cache: KVCache, length: jax.Array) -> KVCache:
    """Returns the cache with `length` [B] valid positions; nothing is moved or cleared."""
    return cache.replace(length=length)


def write(buffer: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
    """Writes `new` at each row's own offset, in place when `buffer` is donated.

    Args:
        buffer: [B, K_h, S, H].
        new: [B, K_h, T, H].
        start: [B] int32 position of the first new entry. Entries at or past S are dropped, so a row
            is left untouched by `start = S`.

    Returns:
        [B, K_h, S, H].
    """
    batch, heads, capacity, _ = buffer.shape
    num_new = new.shape[2]
    positions = start[:, None] + jnp.arange(num_new)[None, :]  # [B, T]
    rows = jnp.arange(batch)[:, None, None]
    return buffer.at[rows, jnp.arange(heads)[None, :, None], positions[:, None, :]].set(
        new.astype(buffer.dtype), mode="drop", unique_indices=True
    )
