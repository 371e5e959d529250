import json
import subprocess

import pytest

from dscout_jax.training.provenance import describe_run, git_revision


def test_a_run_is_described_in_json():
    described = json.loads(json.dumps(describe_run()))
    assert described["packages"]["jax"] and described["num_cpus"] >= 1


def test_the_revision_is_that_of_the_checkout_and_tells_changes(tmp_path):
    def git(*arguments):
        subprocess.run(
            ["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", *arguments],
            check=True,
            capture_output=True,
        )

    assert git_revision(tmp_path) is None
    git("init")
    assert git_revision(tmp_path) is None, "no commit yet"
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "-m", "one")
    assert git_revision(tmp_path)["modified"] is False
    assert len(git_revision(tmp_path)["commit"]) == 40
    (tmp_path / "file").write_text("two")
    assert git_revision(tmp_path)["modified"] is True


def test_without_git_the_revision_is_unknown(tmp_path, monkeypatch):
    (tmp_path / ".git").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_revision(tmp_path) is None


@pytest.mark.parametrize("name", ["python", "devices", "git", "command"])
def test_the_description_names_what_a_reader_needs(name):
    assert name in describe_run()
