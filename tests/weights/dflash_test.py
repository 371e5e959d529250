import dataclasses
import json
import stat

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dscout_jax.weights.dflash import (
    config_json,
    export_drafter,
    load_drafter,
    param_path,
    tensor_shapes,
)
from dscout_jax.weights.download import WeightsError


@pytest.fixture
def folder(tiny, tmp_path):
    return export_drafter(
        tmp_path / "drafter",
        tiny.drafter,
        tiny.drafter_params,
        token_ids=np.array([1, 4, 9]),
        trained_on={"target": "tiny"},
    )


def edit_config(folder, **changes):
    path = folder / "config.json"
    values = json.loads(path.read_text())
    for dotted, value in changes.items():
        *sections, name = dotted.split("__")
        node = values
        for section in sections:
            node = node[section]
        if value is None:
            del node[name]
        else:
            node[name] = value
    path.write_text(json.dumps(values))


def edit_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_a_drafter_comes_back_rounded_to_bfloat16(tiny, folder):
    loaded = load_drafter(folder, tiny.target)
    assert loaded.config == tiny.drafter
    assert loaded.token_ids.tolist() == [1, 4, 9]
    assert loaded.trained_on == {"target": "tiny"}

    def compare(ours, theirs):
        rounded = np.asarray(theirs).astype(ml_dtypes.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(ours, rounded)

    jax.tree.map(compare, loaded.params, dict(tiny.drafter_params))


def test_import_then_export_is_byte_equal(tiny, folder, tmp_path):
    loaded = load_drafter(folder)
    again = export_drafter(
        tmp_path / "again",
        loaded.config,
        loaded.params,
        token_ids=loaded.token_ids,
        trained_on=loaded.trained_on,
    )
    for name in ("model.safetensors", "config.json", "draft_vocab.json"):
        assert (again / name).read_bytes() == (folder / name).read_bytes()


def test_the_layout_is_the_one_that_other_engines_read(tiny, folder):
    values = json.loads((folder / "config.json").read_text())
    assert values["architectures"] == ["DFlashDraftModel"]
    assert values["block_size"] == values["dflash_config"]["block_size"] == 8
    assert values["dflash_config"]["target_layer_ids"] == [1, 2, 4]
    assert values["dflash_config"]["mask_token_id"] == 12
    assert values["dflash_config"]["sample_from_anchor"] is False
    assert values["rope_theta"] == values["rope_parameters"]["rope_theta"] == 1e6
    tensors = load_file(folder / "model.safetensors")
    assert tensors["fc.weight"].shape == (32, 96)  # [out, in]
    assert tensors["layers.1.mlp.down_proj.weight"].shape == (32, 64)
    assert all(value.dtype == ml_dtypes.bfloat16 for value in tensors.values())
    assert not [name for name in tensors if "embed" in name or "head" in name]


def test_a_file_is_readable_by_others_and_nothing_partial_stays(folder):
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "draft_vocab.json",
        "model.safetensors",
    ]
    mode = (folder / "model.safetensors").stat().st_mode
    assert mode & stat.S_IROTH


def test_exporting_without_a_draft_vocabulary_removes_an_old_one(tiny, folder):
    export_drafter(folder, tiny.drafter, tiny.drafter_params)
    assert load_drafter(folder).token_ids is None


def test_a_model_prefix_and_a_nested_block_size_are_understood(tiny, folder):
    def add_prefix(tensors):
        for name in list(tensors):
            tensors[f"model.{name}"] = tensors.pop(name)

    edit_tensors(folder, add_prefix)
    edit_config(folder, block_size=None, rope_theta=None)
    assert load_drafter(folder, tiny.target).config == tiny.drafter


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"block_size": 3, "dflash_config__block_size": 1}, ["drafter.block_size=1"]),
        ({"dflash_config__target_layer_ids": None}, ["target_layer_ids", "guessed"]),
        ({"dflash_config__target_layer_ids": [1, 2, 5]}, ["target_layer_ids", "below 5"]),
        ({"dflash_config__mask_token_id": None}, ["mask_token_id"]),
        ({"dflash_config__mask_token_id": 13}, ["mask_token_id=13", "[0, 13)"]),
        ({"dflash_config__sample_from_anchor": True}, ["sample_from_anchor"]),
        ({"layer_types": ["sliding_attention", "full_attention"]}, ["sliding_attention"]),
        ({"num_hidden_layers": 3}, ["missing", "layers.2."]),
        ({"num_hidden_layers": 1}, ["unused", "layers.1."]),
        ({"intermediate_size": 32}, ["gate_proj", "(64, 32)", "(32, 32)"]),
    ],
)
def test_a_bad_config_is_one_clear_line(folder, changes, words):
    edit_config(folder, **changes)
    with pytest.raises(WeightsError) as error:
        load_drafter(folder)
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [("hidden_size", 64), ("vocab_size", 20), ("num_hidden_layers", 8), ("rope_theta", 1e4)],
)
def test_a_drafter_of_another_target_is_refused(tiny, folder, field, value):
    other = dataclasses.replace(tiny.target, **{field: value})
    with pytest.raises(WeightsError, match="another target"):
        load_drafter(folder, other)


def test_wrong_tensor_names_are_listed(folder):
    edit_tensors(folder, lambda tensors: tensors.update({"fcc.weight": tensors.pop("fc.weight")}))
    with pytest.raises(WeightsError, match=r"missing \['fc.weight'\], unused \['fcc.weight'\]"):
        load_drafter(folder)


@pytest.mark.parametrize("ids", ["[4, 1]", "[1, 13]", "[-1]", "[]", "[[1]]", '"x"', "{"])
def test_a_bad_draft_vocabulary_is_refused(folder, ids):
    (folder / "draft_vocab.json").write_text(ids)
    with pytest.raises(WeightsError, match=r"draft_vocab.json"):
        load_drafter(folder)


def test_missing_and_broken_files_are_named(folder, tmp_path):
    with pytest.raises(WeightsError, match="no drafter at"):
        load_drafter(tmp_path / "nowhere")
    (folder / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(WeightsError, match="not a safetensors file"):
        load_drafter(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match="has no model.safetensors"):
        load_drafter(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(WeightsError, match="cannot be read"):
        load_drafter(folder)


def test_params_that_do_not_fit_the_config_are_not_written(tiny, tmp_path):
    wide = dataclasses.replace(tiny.drafter, intermediate_size=128)
    with pytest.raises(WeightsError, match="gate_proj"):
        export_drafter(tmp_path / "drafter", wide, tiny.drafter_params)
    assert not (tmp_path / "drafter").exists()


def test_a_folder_that_cannot_be_written_is_a_clear_error(tiny, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(WeightsError, match="cannot write the drafter"):
        export_drafter(tmp_path / "file" / "drafter", tiny.drafter, tiny.drafter_params)


def test_every_param_of_a_drafter_has_exactly_one_name(tiny):
    paths = {param_path(name) for name in tensor_shapes(tiny.drafter)}
    leaves = jax.tree.leaves_with_path(tiny.drafter_params)
    assert paths == {tuple(key.key for key in path) for path, _ in leaves}
    assert config_json(tiny.drafter, {})["num_hidden_layers"] == 2
