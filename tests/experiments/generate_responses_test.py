import pytest


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "gpt5"], "value should be one of <smollm2-135m>"),
        (["--data_dir", "nowhere"], "--output is missing"),
        (["--output", "{tmp}/a.jsonl", "--data_dir", "nowhere"], "no folder nowhere/train_prompts"),
        (["--output", "{tmp}/a.jsonl", "--mixture", "math=1"], "'math=1' is not part=share"),
        (["--output", "{tmp}/a.jsonl", "--prompts", "nowhere"], "no prompts in nowhere"),
        (["--output", "{tmp}/a.jsonl", "--prompts", "experiments/prompts", "--mixture", "code=1"],
         "--prompts and --mixture exclude each other"),
        (["--output", "{tmp}/a.jsonl", "--store", "/proc/nowhere/store"], "cannot write in"),
        (["--output", "{tmp}/a.jsonl", "--store", "tests"], "is not a store"),
        (["--store", "{tmp}/store", "--build_store_only", "--output", "{tmp}/a.jsonl"],
         "no responses file"),
    ],
)  # fmt: skip
def test_bad_flags_end_with_one_clear_line(run_script, tmp_path, arguments, message):
    result = run_script("generate_responses", *(a.format(tmp=tmp_path) for a in arguments))
    assert result.returncode != 0
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert not list(tmp_path.iterdir())


def test_the_store_is_built_from_several_files_without_a_model(run_script, tmp_path):
    line = '{{"id": "{}", "prompt": [1, 4], "response": [5, 2], "stopped": true}}\n'
    (tmp_path / "a.jsonl").write_text(line.format("x") + line.format("y"))
    (tmp_path / "b.jsonl").write_text(line.format("y") + line.format("z"))
    result = run_script(
        "generate_responses", "--build_store_only", "--store", str(tmp_path / "store"),
        "--skip_jsonl", str(tmp_path / "a.jsonl"), "--skip_jsonl", str(tmp_path / "b.jsonl"),
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "3 rows" in result.stderr
