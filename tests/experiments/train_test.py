import pathlib
import runpy

import pytest

from dscout_jax.config.checks import to_dict
from dscout_jax.config.experiment import from_config_dict
from dscout_jax.objective.methods import METHODS

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = "experiments/configs/smollm2_dflash.py"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([f"--config={CONFIG}", "--config.optimizer.lerning_rate=1"], "learning_rate"),
        ([f"--config={CONFIG}:smok"], "config variant 'smok' is unknown; allowed: mixed, smoke"),
        (
            [f"--config={CONFIG}", "--config.objective.weighting=wide"],
            "objective.weighting='wide' is not allowed; use one of uniform, exp_decay, reach",
        ),
        ([f"--config={CONFIG}", "--config.train.zzz=1"], "the config has no field 'zzz'"),
        (["--config=nowhere.py"], "No such file or directory: 'nowhere.py'"),
        ([], "--config is missing"),
        ([f"--config={CONFIG}", "--config.train.num_steps=0"], "train.num_steps=0 is not allowed"),
        ([f"--config={CONFIG}", "--workdir={tmp}/file/run"], "cannot write in"),
        ([f"--config={CONFIG}", "--config.data.store={tmp}/none"], "no response store in"),
    ],
)  # fmt: skip
def test_bad_input_ends_with_one_clear_line(run_script, tmp_path, arguments, message):
    (tmp_path / "file").write_text("")
    arguments = [argument.format(tmp=tmp_path) for argument in arguments]
    ended = run_script("train", f"--workdir={tmp_path}/run", *arguments)
    assert ended.returncode == 1
    lines = [line for line in ended.stderr.splitlines() if line.startswith("train: ")]
    assert len(lines) == 1 and message in lines[0]
    assert "Traceback" not in ended.stderr.replace(lines[0], "")


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("smollm2_dflash", ""),
        ("smollm2_dflash", "mixed"),
        ("smollm2_dflash", "smoke"),
        ("smollm2_dscout", "smoke"),
        *(("smollm2_dscout", method) for method in METHODS),
    ],
)
def test_every_variant_of_a_config_is_a_valid_experiment(name, variant):
    path = ROOT / "experiments" / "configs" / f"{name}.py"
    experiment = from_config_dict(runpy.run_path(path)["get_config"](variant).to_dict())
    assert experiment.drafter.target_layer_ids == (1, 8, 14, 21, 27)
    assert (experiment.train.num_steps < 100) == (variant == "smoke")
    if variant in METHODS:
        slots = sum(size * anchors for size, anchors in experiment.objective.horizons)
        assert slots == 176  # every method pays for the same number of slots


def test_every_field_stands_in_the_config_so_that_flags_can_set_it():
    values = runpy.run_path(ROOT / CONFIG)["get_config"]()
    experiment = from_config_dict(values.to_dict())
    for section, fields in to_dict(experiment).items():
        if isinstance(fields, dict):
            assert set(values[section]) == set(fields), section
