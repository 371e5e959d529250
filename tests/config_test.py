import dataclasses

import pytest

from dscout_jax.config.checks import ConfigError, to_dict
from dscout_jax.config.experiment import from_config_dict
from dscout_jax.config.models import TargetConfig


def experiment(**changes):
    values = {
        "target": "smollm2-135m",
        "drafter": {
            "num_hidden_layers": 2,
            "target_layer_ids": [1, 3],
            "block_size": 8,
            "mask_token_id": 16,
        },
        "data": {"store": "runs/store", "seq_len": 64},
        "objective": {"horizons": [[8, 4]]},
        "optimizer": {"learning_rate": 1},
        "train": {"num_steps": 3},
    }
    for dotted, value in changes.items():
        *sections, name = dotted.split("__")
        node = values
        for section in sections:
            node = node[section]
        node[name] = value
    return values


def test_a_valid_mapping_becomes_dataclasses_and_back():
    config = from_config_dict(experiment())
    assert config.objective.horizons == ((8, 4),)
    assert config.optimizer.learning_rate == 1.0
    assert from_config_dict(to_dict(config)) == config


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"train__num_stepz": 3}, ["train.num_stepz", "num_steps"]),
        ({"train__num_steps": "3"}, ["train.num_steps='3'", "int"]),
        ({"train__num_steps": True}, ["train.num_steps=True"]),
        ({"train__num_steps": 0}, ["train.num_steps=0", "above 0"]),
        ({"objective__weighting": "exp"}, ["objective.weighting='exp'", "exp_decay"]),
        ({"objective__horizons": [[8]]}, ["objective.horizons", "2 values"]),
        ({"objective__horizons": []}, ["objective.horizons"]),
        ({"objective__horizons": [[4, 4]]}, ["drafter.block_size=8", "4"]),
        ({"data__features": "cached"}, ["data.feature_cache=None"]),
        ({"optimizer__beta2": 1.0}, ["optimizer.beta2=1.0"]),
        ({"drafter": 3}, ["drafter=3", "section"]),
    ],
)
def test_a_bad_value_names_its_dotted_field_and_what_is_allowed(change, words):
    with pytest.raises(ConfigError) as error:
        from_config_dict(experiment(**change))
    for word in words:
        assert word in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_field_is_named():
    values = experiment()
    del values["data"]["store"]
    with pytest.raises(ConfigError, match="data.store is missing"):
        from_config_dict(values)


def test_query_heads_must_be_a_multiple_of_key_heads(tiny):
    values = dataclasses.asdict(tiny.target) | {"num_key_value_heads": 3}
    with pytest.raises(ConfigError, match="target.num_key_value_heads=3"):
        TargetConfig(**values)


@pytest.mark.parametrize(
    "change", [{"target_layer_ids": (1, 5)}, {"target_layer_ids": (2, 1)}, {"mask_token_id": 13}]
)
def test_a_drafter_never_taps_the_last_layer_nor_masks_outside_the_table(tiny, change):
    with pytest.raises(ConfigError, match=next(iter(change))):
        dataclasses.replace(tiny.drafter, **change)
