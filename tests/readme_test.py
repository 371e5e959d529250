"""The README promises only what CI runs, or says that it is not run."""

import pathlib
import re
import tomllib

import pytest

REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
NOT_RUN = re.compile(r"#.*\bnot run here\b")


def readme_commands(text: str) -> list[str]:
    """Returns the lines of the bash blocks."""
    blocks = re.findall(r"^```bash\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    return [line.strip() for block in blocks for line in block.splitlines() if line.strip()]


def unrun_commands(readme: str, ci: str) -> list[str]:
    """Returns commands that CI does not run, alone or with --smoke, and that are not disclaimed."""
    run = {line.strip() for line in ci.splitlines()}
    run |= {part for line in run for part in line.split(" && ")}
    return [
        command
        for command in readme_commands(readme)
        if not NOT_RUN.search(command) and not {command, f"{command} --smoke"} & run
    ]


@pytest.fixture(scope="module")
def readme() -> str:
    return (REPOSITORY / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def ci() -> str:
    return (REPOSITORY / ".ci" / "run").read_text(encoding="utf-8")


def test_every_command_is_run_by_ci_or_marked(readme, ci):
    assert unrun_commands(readme, ci) == []


def test_the_two_promised_commands_stand_in_the_readme(readme):
    commands = readme_commands(readme)
    assert "pip install -r requirements.txt && python experiments/quickstart.py" in commands
    assert "pip install -r requirements.txt && pytest" in commands


def test_a_command_that_ci_does_not_run_is_seen():
    readme = "```bash\npytest\nmake all\npython a.py  # not run here\n```\n"
    assert unrun_commands(readme, "pip install -r r.txt && pytest\n") == ["make all"]


def test_files_named_in_commands_exist(readme):
    named = re.findall(r"experiments/[\w/]+\.py", "\n".join(readme_commands(readme)))
    assert named
    assert [name for name in named if not (REPOSITORY / name).is_file()] == []


def test_links_to_files_lead_somewhere(readme):
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", readme) if "://" not in link]
    assert [link for link in links if not (REPOSITORY / link).exists()] == []


def test_the_readme_and_the_package_name_the_same_dimensions(readme):
    import dscout_jax

    in_package = re.findall(
        r"^    (\w+) +\w.*", dscout_jax.__doc__.split("letters")[1], re.MULTILINE
    )
    table = readme.split("## Dimensions")[1].split("## ")[0]
    assert in_package
    assert [letter for letter in in_package if f"| {letter} |" not in table] == []


def test_requirements_install_the_package_with_all_that_the_commands_need():
    lines = (REPOSITORY / "requirements.txt").read_text().splitlines()
    required = [line for line in lines if line and not line.startswith("#")]
    assert required == ["-e .[weights,train,cpu,dev]"]


def test_dependencies_have_lower_bounds_only():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    declared = [*project["dependencies"], *extras["weights"], *extras["train"], *extras["dev"]]
    assert [line for line in declared if not re.fullmatch(r"[\w-]+>=[\d.]+", line)] == []
