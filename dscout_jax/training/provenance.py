"""Where a result comes from: versions, machine, git revision."""

import importlib.metadata
import os
import pathlib
import platform
import subprocess
import sys
from typing import Any

import jax

_PACKAGES = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "grain",
    "tensorflow-datasets",
    "numpy",
)


def describe_run() -> dict[str, Any]:
    """Returns versions, devices, processor count, git revision and the command line."""
    return {
        "python": platform.python_version(),
        "packages": {name: importlib.metadata.version(name) for name in _PACKAGES},
        "platform": platform.platform(),
        "devices": [device.device_kind for device in jax.devices()],
        "num_processes": jax.process_count(),
        "num_cpus": os.cpu_count(),
        "git": git_revision(pathlib.Path(__file__).parents[2]),
        "command": sys.argv,
    }


def git_revision(directory: pathlib.Path) -> dict[str, Any] | None:
    """Returns the commit checked out at `directory` and whether files differ from it.

    None if `directory` is not the top of a git checkout with a commit, or git is not installed.
    """
    if not (directory / ".git").exists():
        return None

    def git(*arguments: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            ["git", "-C", str(directory), *arguments], capture_output=True, text=True, check=False
        )

    try:
        head = git("rev-parse", "--verify", "--quiet", "HEAD")
    except FileNotFoundError:
        return None
    if head.returncode != 0:
        return None
    changed = git("status", "--porcelain", "--untracked-files=no").stdout
    return {"commit": head.stdout.strip(), "modified": bool(changed.strip())}
