"""What a run takes of its machine: operations, memory, time spent compiling."""

import resource
from typing import Any

import jax

# Dense bfloat16 operations a second of one device, by the start of its `device_kind`. Sources: the
# vendors' data sheets (Cloud TPU documentation; NVIDIA A100, H100 and H200, SXM form).
PEAK_FLOPS = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5p": 459e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
}


def peak_flops(device_kind: str) -> float | None:
    """Returns the operations a second that a device can do at best; None if it is not known."""
    return next((peak for kind, peak in PEAK_FLOPS.items() if device_kind.startswith(kind)), None)


def memory_gib() -> float:
    """Returns the most memory that was held so far: of the first device, else of this process."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"] / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts in KiB


class CompileClock:
    """Adds up the seconds that XLA spends compiling; use it as a context manager."""

    def __init__(self):
        self.seconds = 0.0

    def __enter__(self) -> "CompileClock":
        jax.monitoring.register_event_duration_secs_listener(self._hear)
        return self

    def __exit__(self, *unused: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._hear)

    def _hear(self, event: str, seconds: float, **unused: Any) -> None:
        if event.endswith("backend_compile_duration"):
            self.seconds += seconds
