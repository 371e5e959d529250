import json

import pytest

from dscout_jax.training.metrics import MetricWriter, Throughput, read_jsonl


def test_records_come_back_as_they_were_written(tmp_path):
    with MetricWriter(tmp_path) as writer:
        writer.write(1, {"train/loss": 2.5, "validation/accuracy_per_slot": [0.5, 0.25]})
        writer.write(2, {"train/loss": 2})
    assert read_jsonl(tmp_path / "metrics.jsonl") == [
        {"step": 1, "train/loss": 2.5, "validation/accuracy_per_slot": [0.5, 0.25]},
        {"step": 2, "train/loss": 2},
    ]
    assert list((tmp_path / "tensorboard").glob("events*"))


def test_resuming_cuts_off_the_steps_after_the_restored_one(tmp_path):
    with MetricWriter(tmp_path) as writer:
        for step in (1, 2, 3):
            writer.write(step, {"train/loss": step})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "train/lo')  # killed in the middle of a record
    with MetricWriter(tmp_path, resume_step=2) as writer:
        writer.write(3, {"train/loss": 30})
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    assert [(row["step"], row["train/loss"]) for row in rows] == [(1, 1), (2, 2), (3, 30)]


def test_a_fresh_run_starts_an_empty_file(tmp_path):
    for _ in range(2):
        with MetricWriter(tmp_path) as writer:
            writer.write(1, {"a": 1.0})
    assert len(read_jsonl(tmp_path / "metrics.jsonl")) == 1


def test_a_broken_record_inside_the_file_is_an_error_that_names_the_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"step": 1}) + "\n{oops\n" + json.dumps({"step": 2}) + "\n")
    with pytest.raises(ValueError, match="line 2 is not JSON: '{oops'"):
        read_jsonl(path)


def test_throughput_leaves_pauses_out():
    now = [0.0]
    meter = Throughput(lambda: now[0])
    now[0] = 2.0
    meter.add(100, 6.0)
    with meter.excluded():
        now[0] = 10.0
    now[0] = 12.0
    meter.add(100)
    assert meter.read() == {"tokens_per_s": 50.0, "steps_per_s": 0.5, "flops_per_s": 1.5}
    now[0] = 13.0
    meter.add(7)
    assert meter.read() == {"tokens_per_s": 7.0, "steps_per_s": 1.0, "flops_per_s": 0.0}
