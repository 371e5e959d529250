import csv
import io

import pytest

from dscout_jax.evaluation.statistics import Estimate
from dscout_jax.evaluation.tables import console_table, csv_table, format_cell, markdown_table

ROWS = [
    {"workload": "maths", "MAT": Estimate(2.345678, 2.1, 2.6), "identical": True, "n": 8},
    {"workload": "chat|long", "MAT": Estimate(1.5, 1.4, 1.6), "identical": False, "n": 16},
]


def test_markdown_aligns_numbers_right_and_escapes_bars():
    assert markdown_table(ROWS) == (
        "| workload | MAT | identical | n |\n"
        "| --- | ---: | --- | ---: |\n"
        "| maths | 2.35 [2.10, 2.60] | yes | 8 |\n"
        "| chat\\|long | 1.50 [1.40, 1.60] | no | 16 |\n"
    )


def test_console_columns_line_up():
    lines = console_table(ROWS).splitlines()
    assert lines[0].index("identical") == lines[2].index("yes") == lines[3].index("no")
    assert len(lines) == 4
    assert all(line.endswith(end) for line, end in zip(lines[2:], ("8", "16"), strict=True))


def test_csv_keeps_full_precision():
    first = next(csv.DictReader(io.StringIO(csv_table(ROWS))))
    assert float(first["MAT"]) == 2.345678
    assert first["workload"] == "maths"


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (float("nan"), "-"), (True, "yes"), (1.005, "1.00"), (3, "3"), ("x", "x")],
)
def test_cells_read_well(value, text):
    assert format_cell(value) == text


def test_no_rows_and_uneven_rows_are_errors():
    with pytest.raises(ValueError, match="at least one row"):
        markdown_table([])
    with pytest.raises(ValueError, match="row 1 has the columns"):
        console_table([{"a": 1}, {"b": 1}])
