"""How values print themselves: rows of names and values, at most 100 columns, readable without colour."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence

from recoup.ir.decision import Decision, describe_decisions
from recoup.thresholds import TEXT_COLUMNS

_BARS = " .:-=+*#%@"


def width() -> int:
    """Returns the columns of printed text: 100, or those of a narrower terminal (or of `COLUMNS`)."""
    return max(40, min(TEXT_COLUMNS, shutil.get_terminal_size((TEXT_COLUMNS, 24)).columns))


def format_rows(rows: Sequence[tuple[str, str]], indent: int = 2) -> str:
    """Returns the rows as two columns; long values are wrapped within theirs."""
    longest = max(len(name) for name, _ in rows)
    lines = []
    for name, value in rows:
        wrapped = textwrap.wrap(value, width() - indent - longest - 2) or [""]
        lines.append(" " * indent + name.ljust(longest) + "  " + wrapped[0])
        lines += [" " * (indent + longest + 2) + rest for rest in wrapped[1:]]
    return "\n".join(lines)


def format_percent(ratio: float) -> str:
    """Returns a change with its sign: 0.05 is "+5.0 %"."""
    return f"{100 * ratio:+.1f} %"


def format_share(part: float, whole: float) -> str:
    """Returns a part of a whole in percent; "-" of nothing."""
    return f"{100 * part / whole:.0f} %" if whole else "-"


def format_decisions(decisions: Sequence[Decision]) -> str:
    """Returns decisions in words, one item each."""
    return "\n".join(
        textwrap.fill(line, width(), initial_indent="  - ", subsequent_indent="    ")
        for line in describe_decisions(decisions)
    )


def sparkline(values: Sequence[int], columns: int = 72) -> str:
    """Returns the values as one line of characters, the largest of each column."""
    if not values:
        return ""
    top = max(values) or 1
    columns = min(columns, len(values))
    line = ""
    for i in range(columns):
        chunk = values[
            i * len(values) // columns : max((i + 1) * len(values) // columns, i * len(values) // columns + 1)
        ]
        line += _BARS[round(max(chunk) / top * (len(_BARS) - 1))]
    return line
