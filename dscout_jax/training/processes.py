"""Several processes, one run: joining them, waiting for each other, gathering what they share.

Every process runs the same program over its own devices; arrays that span them are global. Files
are written by the first process only, and batches are drawn alike in all (`data.pipeline`), so a
run goes on with another number of processes where it stopped.
"""

import os
import signal
from types import FrameType
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

# A process that dies is noticed by the others after so many seconds, if not by a broken connection.
HEARTBEAT_S = 20
_LONGEST_WAIT_S = 24 * 3600  # for work that one process does, such as a feature cache


def join(
    coordinator: str | None = None, num_processes: int | None = None, index: int | None = None
) -> None:
    """Makes this process one of several; call it before anything touches a device.

    Args:
        coordinator: `host:port` of the first process. All three None: found by JAX, which knows
            Slurm, Open MPI, Kubernetes and TPU pods.
        num_processes: how many there are.
        index: of this one, from 0.

    Raises:
        ValueError: JAX knows no cluster here, or the arguments are incomplete.
    """
    given = (coordinator, num_processes, index)
    if any(value is None for value in given) and any(value is not None for value in given):
        raise ValueError(
            "coordinator, num_processes and process_id belong together; one is missing"
        )
    try:
        jax.distributed.initialize(*given, heartbeat_timeout_seconds=HEARTBEAT_S)
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"the processes could not be joined: {str(error).splitlines()[0]}; outside a known "
            "cluster name coordinator, num_processes and process_id"
        ) from error


def is_first() -> bool:
    """Whether this process is the one that writes files and talks; true for a single process."""
    return jax.process_index() == 0


def wait_for_all(name: str) -> None:
    """Returns when every process has come here; `name` says where."""
    if jax.process_count() > 1:
        ocp.multihost.sync_global_processes(name, timeout=_LONGEST_WAIT_S)


def local_copy(tree: Any) -> Any:
    """Returns a tree whose leaves lie whole in this process; every process must call it alike."""
    if jax.process_count() == 1:
        return tree
    # Gathering ends in host memory; on the device they are there for every later call.
    return jax.device_put(multihost_utils.process_allgather(tree, tiled=True))


class SharedStop:
    """Context manager; `stop()`, asked once an update, is true at the same update everywhere.

    SIGTERM to one process is enough: JAX's coordinator picks an update that no process has reached.
    Ctrl-C counts as SIGTERM, a second one ends the process.
    """

    def __init__(self) -> None:
        self._asked = 0
        self._previous: Any = None

    def __call__(self) -> bool:
        """Whether all processes stop now."""
        self._asked += 1
        return multihost_utils.reached_preemption_sync_point(self._asked)

    def __enter__(self) -> "SharedStop":
        self._previous = signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(self, *unused: object) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.kill(os.getpid(), signal.SIGTERM)
