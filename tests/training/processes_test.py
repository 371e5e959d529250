import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
import tiny

from dscout_jax.training import processes
from dscout_jax.training.loop import train
from dscout_jax.training.metrics import read_jsonl

FOLDER = pathlib.Path(__file__).parent
LAUNCHER = FOLDER.parents[1] / "launch" / "local.py"

# Runs the tiny experiment as one of several processes; process 1 gets a SIGTERM at its second
# update, or dies there.
PROGRAM = f"""
import argparse, os, signal, sys
sys.path[:0] = [{str(FOLDER)!r}, {str(FOLDER.parents[1])!r}]
parser = argparse.ArgumentParser()
parser.add_argument("workdir")
parser.add_argument("mode")
parser.add_argument("features")
parser.add_argument("signal", type=int)
parser.add_argument("--distributed", action="store_true")
parser.add_argument("--coordinator")
parser.add_argument("--num_processes", type=int)
parser.add_argument("--process_id", type=int)
args = parser.parse_args()
from dscout_jax.training import processes
processes.join(args.coordinator, args.num_processes, args.process_id)
import tiny
from dscout_jax.training.loop import train
data = {{"features": args.features, "feature_cache": args.workdir + "-features"}}
mesh = (2, 2, 1) if args.mode == "jit" else (-1, 1, 1)
experiment = tiny.make_experiment(data=data, train={{"mesh": mesh, "mode": args.mode}})
with processes.SharedStop() as shared:
    asked = 0
    def stop():
        global asked
        asked += 1
        if asked == 2 and args.process_id == 1:
            os.kill(os.getpid(), args.signal)
        return shared()
    result = train(
        experiment, args.workdir, tiny.make_target(), tiny.make_responses(), stop=stop
    )
print("stopped after", result.step, result.finished)
"""


def launch(tmp_path, *arguments):
    script = tmp_path / "run.py"
    script.write_text(PROGRAM)
    return subprocess.run(
        [
            sys.executable, str(LAUNCHER), "--processes=2", "--devices_each=2", "--", str(script),
            str(tmp_path / "run"), *arguments,
        ],
        capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Params after six steps of one process."""
    workdir = tmp_path_factory.mktemp("alone")
    result = train(tiny.make_experiment(), workdir, tiny.make_target(), tiny.make_responses())
    return result.state.params


@pytest.mark.parametrize(("mode", "features"), [("jit", "cached"), ("shard_map", "online")])
def test_two_processes_stop_together_and_one_goes_on_to_the_same_end(
    alone, tmp_path, mode, features
):
    ended = launch(tmp_path, mode, features, "15")
    assert ended.returncode == 0, ended.stdout
    assert ended.stdout.count("stopped on request") == 1  # the first process alone says so
    stops = {line for line in ended.stdout.splitlines() if "stopped after" in line}
    first = next(line for line in stops if line.startswith("[0]"))
    assert first.endswith("False") and stops == {first, first.replace("[0]", "[1]")}
    workdir = tmp_path / "run"
    steps = [row["step"] for row in read_jsonl(workdir / "metrics.jsonl") if "train/loss" in row]
    assert steps == sorted(set(steps)) and steps[-1] < 6
    result = train(tiny.make_experiment(), workdir, tiny.make_target(), tiny.make_responses())
    assert result.finished and (workdir / "drafter").is_dir()
    # Sums over devices round in another order; a step is 3e-3.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), result.state.params, alone
    )


def test_when_one_process_dies_the_others_end_and_the_checkpoint_is_used(alone, tmp_path):
    ended = launch(tmp_path, "jit", "online", "9")
    assert ended.returncode != 0
    workdir = tmp_path / "run"
    result = train(tiny.make_experiment(), workdir, tiny.make_target(), tiny.make_responses())
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), result.state.params, alone
    )


def test_half_an_address_is_refused():
    with pytest.raises(ValueError, match="belong together"):
        processes.join("localhost:1", 2, None)


def test_without_a_cluster_the_way_out_is_named():
    program = "from dscout_jax.training import processes; processes.join()"
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=LAUNCHER.parents[1], capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert "outside a known cluster name coordinator" in ended.stderr
