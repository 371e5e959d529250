import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest
import tiny

from dscout_jax.config.checks import ConfigError
from dscout_jax.training.interrupt import StopRequest
from dscout_jax.training.loop import TrainingError, train
from dscout_jax.training.metrics import read_jsonl
from dscout_jax.training.setup import prepare
from dscout_jax.weights.dflash import load_drafter


@pytest.fixture(scope="module", autouse=True)
def compilation_cache(tmp_path_factory):
    """Runs of one experiment share their programs: each is compiled once for this file."""
    directory = tmp_path_factory.mktemp("programs")
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    yield directory
    jax.config.update("jax_compilation_cache_dir", None)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """A run of six steps and its workdir."""
    workdir = tmp_path_factory.mktemp("uninterrupted")
    return run(workdir), workdir


def run(workdir, stop=lambda: False, **changes):
    return train(
        tiny.make_experiment(**changes),
        workdir,
        tiny.make_target(),
        tiny.make_responses(),
        stop=stop,
    )


def stop_after(count):
    calls = iter(range(1, 1000))
    return lambda: next(calls) >= count


def losses(workdir, name="train/loss"):
    rows = read_jsonl(workdir / "metrics.jsonl")
    return [(row["step"], row[name]) for row in rows if name in row]


def assert_same_state(one, other):
    def compare(a, b):
        if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_array_equal(a, b)

    jax.tree.map(compare, one, other)


def test_a_finished_run_leaves_metrics_provenance_and_a_drafter(uninterrupted):
    result, workdir = uninterrupted
    assert result.finished and result.step == 6
    assert json.loads((workdir / "config.json").read_text())["train"]["num_steps"] == 6
    provenance = json.loads((workdir / "run.json").read_text())
    assert provenance["packages"]["jax"] == jax.__version__
    drafter = load_drafter(workdir / "drafter", tiny.CONFIG)
    assert drafter.config.target_layer_ids == (0, 2)
    assert drafter.token_ids.shape == (48,)
    assert drafter.trained_on["target_sha256"] == "0" * 64
    assert [step for step, _ in losses(workdir)] == [2, 3, 4, 6]
    validations = [row for row in read_jsonl(workdir / "metrics.jsonl") if "validation/loss" in row]
    assert [row["step"] for row in validations] == [0, 3, 6]
    for row in validations:
        assert len(row["validation/accuracy_per_slot"]) == 3
        assert 1 <= row["validation/mat_pooled"] <= 4


def test_a_stopped_and_resumed_run_equals_an_uninterrupted_one_bitwise(uninterrupted, tmp_path):
    whole, whole_dir = uninterrupted
    first = run(tmp_path, stop=stop_after(4))
    assert (first.step, first.finished) == (4, False)
    assert not (tmp_path / "drafter").exists()
    second = run(tmp_path)
    assert second.finished
    assert_same_state(second.state, whole.state)
    assert losses(tmp_path) == losses(whole_dir)
    assert losses(tmp_path, "validation/loss") == losses(whole_dir, "validation/loss")


def test_a_run_goes_on_with_another_number_of_devices(uninterrupted, tmp_path):
    whole, _ = uninterrupted
    run(tmp_path, stop=stop_after(4))
    second = run(tmp_path, train={"mesh": (2, 2, 1)})
    assert second.finished
    assert len(second.state.params["fc"]["weight"].sharding.device_set) == 4
    # Sums over devices round in another order; a step is 3e-3.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4),
        second.state.params,
        whole.state.params,
    )


def test_a_killed_and_resumed_run_equals_an_uninterrupted_one_bitwise(
    uninterrupted, tmp_path, compilation_cache
):
    program = f"""
import os, signal, sys
sys.path.insert(0, {str(pathlib.Path(__file__).parent)!r})
import jax
jax.config.update("jax_num_cpu_devices", 4)
import tiny
from dscout_jax.training.loop import train
calls = iter(range(1, 1000))
def stop():
    if next(calls) == 5:
        os.kill(os.getpid(), signal.SIGKILL)
train(
    tiny.make_experiment(),
    {str(tmp_path)!r},
    tiny.make_target(),
    tiny.make_responses(),
    stop=stop,
)
"""
    environment = os.environ | {
        "PYTHONPATH": str(pathlib.Path(__file__).parents[2]),
        "JAX_COMPILATION_CACHE_DIR": str(compilation_cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    ended = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, check=False
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()
    saved = [path.name for path in (tmp_path / "checkpoints").iterdir() if path.name.isdigit()]
    assert saved, "the run was killed after at least one checkpoint"
    whole, whole_dir = uninterrupted
    assert_same_state(run(tmp_path).state, whole.state)
    assert losses(tmp_path) == losses(whole_dir)


def test_a_finished_run_that_is_started_again_does_nothing(uninterrupted):
    whole, workdir = uninterrupted
    before = (workdir / "metrics.jsonl").read_text()
    again = run(workdir)
    assert again.finished
    assert_same_state(again.state, whole.state)
    assert (workdir / "metrics.jsonl").read_text() == before


def test_more_steps_may_be_added_but_another_drafter_is_refused(uninterrupted):
    _, workdir = uninterrupted
    with pytest.raises(ConfigError, match=r"another experiment: objective.horizons: .*\. Use its"):
        run(workdir, objective={"horizons": ((4, 5),)}, train={"num_steps": 7})


def test_cached_features_train_as_features_computed_in_the_step_do(uninterrupted, tmp_path):
    _, online = uninterrupted
    cached = {"features": "cached", "feature_cache": str(tmp_path / "features")}
    run(tmp_path / "run", data=cached)
    for name in ("train/loss", "validation/loss"):
        # The cache is filled in other batch shapes: float32 sums may round to another bfloat16.
        np.testing.assert_allclose(losses(tmp_path / "run", name), losses(online, name), rtol=2e-3)


def test_soft_labels_from_cached_features_equal_those_of_the_whole_target(tmp_path):
    soft = {"prediction": "soft_ce", "weighting": "reach", "acceptance": "overlap"}
    cached = {"features": "cached", "feature_cache": str(tmp_path / "cache")}
    run(tmp_path / "online", objective=soft)
    run(tmp_path / "cached", objective=soft, data=cached)
    np.testing.assert_allclose(losses(tmp_path / "cached"), losses(tmp_path / "online"), rtol=2e-3)
    last = read_jsonl(tmp_path / "cached/metrics.jsonl")[-2]
    for name in ("loss", "accuracy", "acceptance", "weight"):
        assert len(last[f"train/{name}_per_slot"]) == 3
    assert last["train/weight_per_slot"][0] == 1.0
    assert 0 < last["train/effective_share"] <= 1


def test_an_elastic_run_validates_its_cuts(tmp_path):
    objective = {
        "depths": ((1, 1.0), (2, 1.0)),
        "taps": (((1,), 1.0), ((0, 1), 1.0)),
        "exits": "all",
    }
    run(tmp_path, objective=objective, drafter={"num_hidden_layers": 2}, train={"num_steps": 2})
    last = read_jsonl(tmp_path / "metrics.jsonl")[-1]
    mats = {name: value for name, value in last.items() if "mat_pooled" in name}
    assert mats.keys() == {
        "validation/mat_pooled",
        "validation/mat_pooled_block4_depth1",
        "validation/mat_pooled_block4_taps1",
    }
    assert last["validation/mat_mean"] == mats["validation/mat_pooled"]


def test_training_learns_what_there_is_to_learn(tmp_path):
    cadence = {"num_steps": 120, "log_every": 10, "eval_every": 120, "checkpoint_every": 120}
    run(tmp_path, optimizer={"learning_rate": 1e-2}, train=cadence)
    values = [loss for _, loss in losses(tmp_path)]
    assert values[-1] < 0.75 * values[0]
    for name in ("validation/loss_per_slot", "validation/accuracy_per_slot"):
        (_, first), (_, last) = losses(tmp_path, name)
        assert last[0] < first[0] if "loss" in name else last[0] > first[0]


def test_a_warm_start_begins_where_the_drafter_stood(uninterrupted, tmp_path):
    _, workdir = uninterrupted
    drafter = {"init": str(workdir / "drafter")}
    run(tmp_path, drafter=drafter, train={"num_steps": 1})
    best = max(losses(workdir, "validation/mat_pooled"), key=lambda pair: pair[1])[1]
    before = [loss for _, loss in losses(workdir, "validation/loss")]
    start = losses(tmp_path, "validation/loss")[0][1]
    assert min(abs(start - loss) for loss in before) < 0.02, "weights are rounded to bfloat16"
    assert losses(tmp_path, "validation/mat_pooled")[0][1] >= best - 0.05


def test_a_resumed_warm_start_needs_its_first_drafter_no_more(uninterrupted, tmp_path):
    folder = shutil.copytree(uninterrupted[1] / "drafter", tmp_path / "init")
    drafter = {"init": str(folder)}
    first = run(tmp_path / "run", stop=stop_after(1), drafter=drafter, train={"num_steps": 2})
    assert not first.finished
    shutil.rmtree(folder)
    second = run(tmp_path / "run", drafter=drafter, train={"num_steps": 2})
    assert second.finished and second.step == 2


def test_a_warm_start_from_a_drafter_with_other_taps_is_refused(uninterrupted, tmp_path):
    _, workdir = uninterrupted
    drafter = {"init": str(workdir / "drafter"), "target_layer_ids": (0, 1)}
    with pytest.raises(ConfigError, match=r"drafter.target_layer_ids=\(0, 1\) .* \(0, 2\), as"):
        run(tmp_path, drafter=drafter)


def test_pmap_in_several_processes_is_refused(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    config = tiny.make_experiment(train={"mode": "pmap", "mesh": (4, 1, 1)})
    with pytest.raises(ConfigError, match="train.mode='pmap' .* 'shard_map' in 2 processes"):
        prepare(config, tiny.make_target(), tiny.make_responses(), say=print)


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_last_checkpoint(tmp_path):
    with pytest.raises(TrainingError, match=r"loss \w+ at step \d+ .*last good checkpoint"):
        run(tmp_path, optimizer={"learning_rate": 1e30, "clip_norm": 1e30})


def test_a_signal_asks_for_a_stop_once_and_the_handlers_come_back():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with StopRequest() as stop:
        assert not stop()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop() and stop.received == signal.SIGTERM
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            signal.pause()
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
