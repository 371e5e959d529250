"""What a benchmark leaves behind: its rows, its summary, and the machine that they depend on."""

import json
import os
import pathlib
import platform
from collections.abc import Mapping, Sequence
from typing import Any

from dscout_jax.files import write_json, write_text
from dscout_jax.training.hardware import memory_gib
from dscout_jax.training.provenance import describe_run


def describe_environment() -> dict[str, Any]:
    """Returns machine, most memory held, versions and git revision as JSON values."""
    run = describe_run()
    return {
        "machine": {
            "processor": _processor(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_gib": round(
                os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1
            ),
            "devices": run["devices"],
            "platform": run["platform"],
        },
        "peak_memory_gib": memory_gib(),
        "versions": {"python": run["python"], **run["packages"]},
        "git_revision": run["git"],
        # Results are for others to read: names of files, no folders of this machine.
        "command": [os.path.basename(a) if os.path.isabs(a) else a for a in run["command"]],
    }


def write_samples(
    folder: pathlib.Path, samples: Sequence[Mapping[str, float]], summary: Mapping[str, Any]
) -> None:
    """Writes the raw rows of a benchmark to rows.jsonl, and summary.json with the machine."""
    rows = "".join(json.dumps(sample) + "\n" for sample in samples)
    write_text(folder / "rows.jsonl", rows)
    write_json(folder / "summary.json", {**summary, "environment": describe_environment()})


def _processor() -> str:
    """Returns the processor's name; Linux keeps it in /proc/cpuinfo."""
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
