import json

from dscout_jax.evaluation import report


def test_the_environment_is_json_and_names_what_matters():
    environment = json.loads(json.dumps(report.describe_environment()))
    assert environment["machine"]["cores"] >= 1
    assert environment["versions"]["jax"]
    assert "git_revision" in environment
