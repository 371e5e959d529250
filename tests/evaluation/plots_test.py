import numpy as np
import pytest

from dscout_jax.evaluation import plots

PNG_START = b"\x89PNG"


@pytest.mark.parametrize("num_workloads", [1, 4, 6])
def test_accepted_lengths_become_a_picture(tmp_path, num_workloads):
    path = tmp_path / "lengths.png"
    plots.accepted_lengths({f"w{i}": np.array([3, 2, 0, 1]) for i in range(num_workloads)}, path)
    assert path.read_bytes().startswith(PNG_START)


def test_speeds_become_a_picture(tmp_path):
    path = tmp_path / "speed.png"
    plots.tokens_per_second({"maths": 50.0, "chat": 48.0}, {"chat": 60.0, "maths": 90.0}, path)
    assert path.read_bytes().startswith(PNG_START)
