import pytest

from dscout_jax.evaluation.recorded import Run, read_run, write_run
from dscout_jax.evaluation.replayed import ReplayedRow

IDENTITY = {"arm": "dflash", "train": {"num_steps": 9, "log_every": 2}, "horizons": [[16, 4]]}
RUN = Run(
    identity=IDENTITY,
    trained={"drafter_sha256": "abc", "validation": [{"step": 9, "validation/loss": 2.5}]},
    rows={
        "block4": [
            ReplayedRow("easy", "easy/0", 9, 4, 7, 3), ReplayedRow("hard", "h/1", 5, 5, 5, 5)
        ],
        "block8_taps-4": [
            ReplayedRow("easy", "easy/0", 8, 4, 6, 3), ReplayedRow("hard", "h/1", 5, 4, 5, 4)
        ],
    },
)  # fmt: skip


@pytest.fixture
def recorded(tmp_path):
    path = tmp_path / "runs" / "dflash-seed0.json"
    write_run(path, RUN)
    return path


def test_a_run_comes_back_and_a_missing_one_is_none(recorded):
    assert read_run(recorded, IDENTITY) == RUN
    assert read_run(recorded.with_name("other.json"), IDENTITY) is None


def test_a_run_of_another_experiment_is_refused_and_the_field_named(recorded):
    other = IDENTITY | {"train": {"num_steps": 10, "log_every": 3}}
    with pytest.raises(ValueError, match=r"other settings: train.num_steps: 9 -> 10\. Use"):
        read_run(recorded, other, ignored=("train.log_every",))


def test_a_damaged_file_is_refused(recorded):
    for content in ("[]", '{"identity": {}}', recorded.read_text()[:-30]):
        recorded.write_text(content)
        with pytest.raises(ValueError, match="is not a recorded run"):
            read_run(recorded, IDENTITY)
