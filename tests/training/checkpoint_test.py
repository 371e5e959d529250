import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dscout_jax.config.experiment import OptimizerConfig
from dscout_jax.training.checkpoint import Checkpointer, CheckpointError, changed_fields
from dscout_jax.training.state import init_state, make_optimizer


def make_state(value=0.0):
    params = {"fc": {"weight": jnp.full((8, 4), value)}, "norm": {"scale": jnp.ones((4,))}}
    state = init_state(params, make_optimizer(OptimizerConfig(), 10), jax.random.key(3))
    return state.replace(step=jnp.int32(value))


def save(checkpoints, step, score=None):
    checkpoints.save(
        step, make_state(step), data_state={"next_index": step}, meta={"a": 1}, score=score
    )


def largest_file(directory):
    return max(directory.rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)


def assert_restores(directory, step):
    with Checkpointer(directory) as checkpoints:
        restored = checkpoints.restore(make_state())
    assert restored.step == step
    assert restored.data_state == {"next_index": step}
    np.testing.assert_array_equal(restored.state.params["fc"]["weight"], np.full((8, 4), step))


def test_a_restored_state_equals_the_saved_one_in_every_leaf(tmp_path):
    with Checkpointer(tmp_path / "c") as checkpoints:
        assert checkpoints.restore(make_state()) is None
        save(checkpoints, 3)
    with Checkpointer(tmp_path / "c") as checkpoints:
        restored = checkpoints.restore(make_state())
        assert checkpoints.read_meta() == {"a": 1}
    expected = make_state(3)
    assert jax.tree.structure(restored.state) == jax.tree.structure(expected)
    assert jnp.array_equal(
        jax.random.key_data(restored.state.key), jax.random.key_data(expected.key)
    )
    jax.tree.map(
        np.testing.assert_array_equal,
        restored.state.replace(key=None),
        expected.replace(key=None),
    )


def test_the_newest_and_the_best_checkpoint_are_kept(tmp_path):
    with Checkpointer(tmp_path, max_to_keep=2) as checkpoints:
        for step, score in {1: 1.5, 2: 3.0, 3: None, 4: 2.0, 5: None}.items():
            save(checkpoints, step, score)
        checkpoints.wait()
        assert (checkpoints.latest, checkpoints.best) == (5, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "4", "5"]
    with Checkpointer(tmp_path, max_to_keep=2) as checkpoints:
        assert checkpoints.best == 2
        save(checkpoints, 6, 3.5)
        checkpoints.wait()
        assert checkpoints.best == 6
    assert sorted(path.name for path in tmp_path.iterdir()) == ["5", "6"]


def test_saving_a_step_twice_keeps_the_first(tmp_path):
    with Checkpointer(tmp_path) as checkpoints:
        save(checkpoints, 1)
        save(checkpoints, 1)
        assert checkpoints.latest == 1


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove", "unseal", "unfinished"])
def test_a_broken_checkpoint_is_set_aside_and_the_previous_one_used(tmp_path, damage, caplog):
    with Checkpointer(tmp_path) as checkpoints:
        save(checkpoints, 1)
        save(checkpoints, 2)
    broken = tmp_path / "2"
    victim = largest_file(broken / "state")
    if damage == "truncate":
        victim.write_bytes(victim.read_bytes()[:-7])
    elif damage == "flip":
        content = bytearray(victim.read_bytes())
        content[len(content) // 2] ^= 1
        victim.write_bytes(content)
    elif damage == "remove":
        victim.unlink()
    elif damage == "unseal":
        (broken / "seal.json").unlink()
    else:
        broken.rename(tmp_path / "2.orbax-checkpoint-tmp")
    with caplog.at_level("WARNING"):
        assert_restores(tmp_path, 1)
    assert "checkpoint 2" in caplog.text and "ignored" in caplog.text
    with Checkpointer(tmp_path) as checkpoints:
        save(checkpoints, 2)
    assert_restores(tmp_path, 2)


@pytest.mark.parametrize("during", ["save", "wait"])
def test_a_full_disk_is_reported_with_the_last_good_checkpoint(tmp_path, monkeypatch, during):
    def fail(*args, **kwargs):
        raise ValueError('RESOURCE_EXHAUSTED: Error writing "w/0": No space left on device')

    told = "No space left on device; the last good one is step 3"
    with pytest.raises(CheckpointError, match=told):  # noqa: SIM117 (raised on leaving the inner)
        with Checkpointer(tmp_path) as checkpoints:
            save(checkpoints, 3)
            checkpoints.wait()
            name = "save" if during == "save" else "wait_until_finished"
            monkeypatch.setattr(checkpoints._manager, name, fail)
            save(checkpoints, 4)
            checkpoints.wait()
    monkeypatch.undo()
    with Checkpointer(tmp_path) as checkpoints:
        assert checkpoints.restore(make_state(), 3).step == 3


def test_asking_for_a_step_that_is_not_saved_names_those_that_are(tmp_path):
    with Checkpointer(tmp_path) as checkpoints:
        save(checkpoints, 4)
        with pytest.raises(ValueError, match=r"step=7 is not saved in .*; saved are \[4\]"):
            checkpoints.restore(make_state(), step=7)


def test_changed_fields_are_named_and_the_ignored_ones_left_out():
    saved = {"drafter": {"ids": [1, 2], "depth": 3}, "train": {"num_steps": 5, "seed": 0}}
    current = {"drafter": {"ids": (1, 2), "depth": 2}, "train": {"num_steps": 9, "seed": 0}, "x": 1}
    assert changed_fields(saved, current, ignored=("train.num_steps",)) == [
        "drafter.depth: 3 -> 2",
        "x: absent -> 1",
    ]
    assert changed_fields(json.loads(json.dumps(saved)), saved) == []
    assert changed_fields(saved, current, ignored=("train", "drafter", "x")) == []
