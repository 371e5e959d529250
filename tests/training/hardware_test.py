import jax
import jax.numpy as jnp
import pytest

from dscout_jax.training.hardware import CompileClock, memory_gib, peak_flops


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("TPU v5 lite", 197e12),
        ("TPU v5p", 459e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("cpu", None),
    ],
)
def test_peaks_are_found_by_the_kind_of_the_device(kind, peak):
    assert peak_flops(kind) == peak


def test_memory_is_a_plausible_number():
    assert 0.05 < memory_gib() < 1000


def test_only_compiling_inside_is_counted():
    with CompileClock() as clock:
        jax.jit(lambda x: jnp.sin(x) * 3.25)(jnp.ones(7))
    inside = clock.seconds
    assert inside > 0
    jax.jit(lambda x: jnp.cos(x) * 3.5)(jnp.ones(9))
    assert clock.seconds == inside
