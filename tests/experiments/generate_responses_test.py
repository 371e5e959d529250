import subprocess
import sys

import pytest

SCRIPT = "experiments/generate_responses.py"


def run_script(root, *arguments):
    return subprocess.run(
        [sys.executable, SCRIPT, *arguments],
        cwd=root,
        env={"PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "gpt5"], "value should be one of <smollm2-135m>"),
        (["--data_dir", "nowhere"], "--output is missing"),
        (["--output", "{tmp}/a.jsonl", "--data_dir", "nowhere"], "no folder nowhere/train_prompts"),
        (["--output", "{tmp}/a.jsonl", "--mixture", "math=1"], "'math=1' is not part=share"),
        (["--store", "{tmp}/store", "--build_store_only", "--output", "{tmp}/a.jsonl"],
         "no responses file"),
    ],
)  # fmt: skip
def test_bad_flags_end_with_one_clear_line(tmp_path, pytestconfig, arguments, message):
    result = run_script(pytestconfig.rootpath, *(a.format(tmp=tmp_path) for a in arguments))
    assert result.returncode != 0
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert not list(tmp_path.iterdir())


def test_the_store_is_built_from_several_files_without_a_model(tmp_path, pytestconfig):
    line = '{{"id": "{}", "prompt": [1, 4], "response": [5, 2], "stopped": true}}\n'
    (tmp_path / "a.jsonl").write_text(line.format("x") + line.format("y"))
    (tmp_path / "b.jsonl").write_text(line.format("y") + line.format("z"))
    result = run_script(
        pytestconfig.rootpath, "--build_store_only", "--store", str(tmp_path / "store"),
        "--skip_jsonl", str(tmp_path / "a.jsonl"), "--skip_jsonl", str(tmp_path / "b.jsonl"),
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "3 rows" in result.stderr
