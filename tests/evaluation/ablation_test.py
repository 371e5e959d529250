import numpy as np
import pytest

from dscout_jax.evaluation.ablation import HELD_OUT, Latency, compare, estimate, sample_arm
from dscout_jax.evaluation.plots import ablation_arms
from dscout_jax.evaluation.replayed import ReplayedRow


def rows(workload, tokens, cycles):
    """One answer a prompt; what lies before the loop is all but one token and one cycle."""
    return [
        ReplayedRow(workload, f"{workload}/{i}", t + 1, c + 1, t, c)
        for i, (t, c) in enumerate(zip(tokens, cycles, strict=True))
    ]


def arm(scale):
    """Two workloads, one that likes long blocks and one that does not, and a cut."""
    return {
        "block4": rows("easy", [20 * scale, 30 * scale], [10, 10])
        + rows("hard", [12 * scale, 12 * scale], [10, 10]),
        "block8": rows("easy", [40 * scale, 60 * scale], [10, 10])
        + rows("hard", [13 * scale, 13 * scale], [10, 10]),
        "block8_depth1": rows("easy", [10, 10], [10, 10]) + rows("hard", [10, 10], [10, 10]),
    }


LATENCY = Latency({"plain": 1.0, "block4": 1.25, "block8": 2.0, "block8_depth1": 1.5}, [])


def test_figures_are_those_computed_by_hand():
    found = compare({"dflash": [arm(1)], "dscout": [arm(2)], "elastic": [arm(2)]}, LATENCY)
    summary = found["summary"]
    mat = summary["results"]["dflash"]["mat"]
    assert mat["easy"] == pytest.approx({"block4": 2.5, "block8": 5.0, "block8_depth1": 1.0})
    assert mat["hard"] == pytest.approx({"block4": 1.2, "block8": 1.3, "block8_depth1": 1.0})
    # easy: 5 / 2 at block size 8; hard: 1.2 / 1.25 at 4. Cuts do not compete.
    assert summary["results"]["dflash"]["best_variant"] == {"easy": "block8", "hard": "block4"}
    assert summary["results"]["dflash"]["speedup_mean"] == pytest.approx((2.5 + 0.96) / 2)
    assert summary["dscout_over_dflash_speedup"] == pytest.approx(2.0)
    # With loops each answer has a token and a cycle more: 102 / 22 and 28 / 22, at 8 and at 4.
    whole = summary["results"]["dflash"]
    assert whole["mat_mean_whole_output"]["block8"] == pytest.approx((102 / 22 + 28 / 22) / 2)
    assert whole["speedup_mean_whole_output"] == pytest.approx((102 / 22 / 2 + 26 / 22 / 1.25) / 2)
    assert found["rows"][0]["mat_whole_output"] == pytest.approx(52 / 22)
    # Every resampled set of prompts gives both arms the same prompts.
    assert summary["dscout_over_dflash_speedup_interval"] == pytest.approx([2.0, 2.0])
    assert summary["dscout_over_dflash_mat"] == pytest.approx({"block4": 2.0, "block8": 2.0})
    assert summary["elastic_over_dedicated_mat"] == pytest.approx(1.0)
    assert summary["elastic_over_dscout_cut_mat"] == pytest.approx({"block8_depth1": 1.0})
    line = found["table"][1]
    assert line["arm"] == "dscout" and line["over dflash"].value == pytest.approx(2.0)
    assert line["MAT block8"].value == pytest.approx((10.0 + 2.6) / 2)
    assert len(found["rows"]) == 3 * 2 * 3


def test_seeds_of_a_prompt_are_resampled_together():
    once = {"v": arm(1)["block4"]}
    for a, b in zip(
        sample_arm([once]).mat.values(), sample_arm([once, once]).mat.values(), strict=True
    ):
        np.testing.assert_allclose(a["v"], b["v"])
    easy = {"v": [row for row in once["v"] if row.workload == "easy"]}
    free, whole = (
        estimate(sample_arm([easy], loop_free=loop_free).mat["easy"]["v"])
        for loop_free in (True, False)
    )
    assert free.value == 2.5
    assert whole.value == pytest.approx(52 / 22)
    assert free.low == 2.0 and free.high == 3.0


def test_seeds_are_pooled_and_shown_apart():
    found = compare({"dflash": [arm(1), arm(1)], "dscout": [arm(2), arm(4)]}, LATENCY)["summary"]
    ours, base = found["results"]["dscout"], found["results"]["dflash"]["speedup_mean"]
    assert ours["speedup_mean"] == pytest.approx(3 * base)
    assert ours["speedup_mean_by_seed"] == pytest.approx([2 * base, 4 * base])
    assert found["dscout_over_dflash_speedup_by_seed"] == pytest.approx([2.0, 4.0])


def test_held_out_rows_are_shown_apart_and_change_no_benchmark():
    def with_held_out(scale):
        held_out = rows(HELD_OUT, [50 * scale, 10 * scale], [10, 10])
        return {name: found + held_out for name, found in arm(1).items()}

    plain = compare({"dflash": [arm(1)]}, LATENCY)
    found = compare({"dflash": [with_held_out(1)], "dscout": [with_held_out(2)]}, LATENCY)
    for name, value in plain["table"][0].items():
        assert found["table"][0][name] == value or name == "held-out speedup"
    assert plain["table"][0]["held-out speedup"] is None
    assert found["table"][1]["held-out speedup"].value == pytest.approx(6 / 1.25)
    figures = found["summary"]["results"]["dscout"]
    assert figures["held_out_mat"] == pytest.approx(dict.fromkeys(arm(1), 6.0))
    assert figures["held_out_speedup"] == pytest.approx(6 / 1.25)
    assert HELD_OUT not in figures["mat"] and len(found["rows"]) == 2 * len(plain["rows"])


def test_arms_without_cuts_stand_beside_arms_with_some():
    without = {name: found for name, found in arm(1).items() if name != "block8_depth1"}
    found = compare({"dflash": [without], "dscout": [arm(2)]}, LATENCY)
    assert [row["arm"] for row in found["table"]] == ["dflash", "dscout"]
    assert [row["arm"] for row in found["cuts"]] == ["dscout"]
    assert set(found["summary"]["results"]["dflash"]["mat_mean"]) == {"block4", "block8"}


def test_a_single_arm_is_its_own_base_and_can_be_drawn(tmp_path):
    found = compare({"mixed": [arm(1)]}, LATENCY)
    assert found["table"][0]["over dflash"].value == 1.0
    assert found["summary"].keys() == {"results"}
    assert list(found["cuts"][0]) == ["arm", "MAT block8_depth1"]
    ablation_arms(found["table"], tmp_path / "ablation.png")
    assert (tmp_path / "ablation.png").stat().st_size > 5000
