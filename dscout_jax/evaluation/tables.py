"""Tables for the console, for markdown pages and for spreadsheets, from the same rows."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

from dscout_jax.evaluation.statistics import Estimate

Rows = Sequence[Mapping[str, Any]]


def markdown_table(rows: Rows) -> str:
    """Returns a markdown table; the columns are the keys of the first row, numbers align right.

    Raises:
        ValueError: no rows, or a row with other keys than the first.
    """
    columns, cells = _cells(rows)
    numeric = _numeric_columns(rows, columns)
    rule = ["---:" if is_numeric else "---" for is_numeric in numeric]
    escaped = [[cell.replace("|", "\\|") for cell in line] for line in [columns, *cells]]
    lines = [escaped[0], rule, *escaped[1:]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def console_table(rows: Rows) -> str:
    """Returns aligned columns with a rule under the header; same rows as `markdown_table`."""
    columns, cells = _cells(rows)
    numeric = _numeric_columns(rows, columns)
    widths = [max(len(line[i]) for line in [columns, *cells]) for i in range(len(columns))]

    def align(line: Sequence[str]) -> str:
        parts = [
            cell.rjust(width) if is_numeric else cell.ljust(width)
            for cell, width, is_numeric in zip(line, widths, numeric, strict=True)
        ]
        return "  ".join(parts).rstrip()

    return (
        "\n".join([align(columns), "  ".join("-" * w for w in widths), *map(align, cells)]) + "\n"
    )


def csv_table(rows: Rows) -> str:
    """Returns comma-separated values with a header, numbers at full precision."""
    columns = _columns(rows)
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _plain(row[name]) for name in columns} for row in rows)
    return text.getvalue()


def format_cell(value: Any) -> str:
    """Returns what a person reads: two decimals, yes or no, an interval in brackets, - for None."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Estimate):
        return f"{value.value:.2f} [{value.low:.2f}, {value.high:.2f}]"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Estimate) else value


def _columns(rows: Rows) -> list[str]:
    if not rows:
        raise ValueError("a table needs at least one row")
    columns = list(rows[0])
    for number, row in enumerate(rows):
        if list(row) != columns:
            raise ValueError(f"row {number} has the columns {list(row)}, the first has {columns}")
    return columns


def _cells(rows: Rows) -> tuple[list[str], list[list[str]]]:
    columns = _columns(rows)
    return columns, [[format_cell(row[name]) for name in columns] for row in rows]


def _numeric_columns(rows: Rows, columns: Sequence[str]) -> list[bool]:
    def is_number(value: Any) -> bool:
        return isinstance(value, int | float | Estimate) and not isinstance(value, bool)

    return [all(row[name] is None or is_number(row[name]) for row in rows) for name in columns]
