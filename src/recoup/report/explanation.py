"""Why a plan is what it is, as text."""

from __future__ import annotations

import textwrap

from recoup.ir.explanation import Explanation, Trade
from recoup.units import format_bytes, format_seconds

_WIDTH = 100


def format_trade(trade: Trade) -> str:
    """Returns one sentence: what changes between the two plans."""
    change = trade.to_bytes - trade.from_bytes
    what = f"{format_bytes(abs(change))} {'more' if change >= 0 else 'fewer'} at the peak"
    if trade.seconds < 0:
        ratio = -trade.seconds / trade.from_seconds if trade.from_seconds else 0.0
        return f"{what}: {format_seconds(-trade.seconds)} a step saved ({100 * ratio:.1f} %)"
    ratio = trade.seconds / trade.from_seconds if trade.from_seconds else 0.0
    return f"{what}: {format_seconds(trade.seconds)} a step more ({100 * ratio:.1f} %)"


def format_explanation(explanation: Explanation) -> str:
    """Returns the explanation, at most 100 columns wide."""
    largest = ", ".join(f"{name} {format_bytes(size)}" for name, size in explanation.tensors[:4])
    extra = explanation.step_seconds - explanation.plain_step_seconds
    lines = [
        f"Peak {format_bytes(explanation.peak_bytes)}, set by the {explanation.phase}; largest there: {largest}",
        f"Step {format_seconds(explanation.step_seconds)}, "
        + (f"{format_seconds(extra)} of it run twice " if extra >= 0 else f"plain {format_seconds(-extra)} more ")
        + f"({explanation.cost_source})",
        "",
        "What each choice is worth, against the same plan without it:",
        f"  {'freed at peak':>13}  {'freed saved':>12}  {'a step costs':>12}  {'freed per s':>12}  choice",
    ]
    for price in explanation.prices:
        is_bought = price.freed_peak_bytes < 0 and price.extra_seconds < 0  # a scan that may take more than by itself
        cost_seconds = price.extra_seconds if is_bought else max(price.extra_seconds, 0.0)
        rate = "free" if price.extra_seconds <= 0 else format_bytes(round(price.bytes_per_second))
        rate = "-" if is_bought else rate
        head = (
            f"  {format_bytes(price.freed_peak_bytes):>13}  {format_bytes(price.freed_saved_bytes):>12}  "
            f"{format_seconds(cost_seconds):>12}  {rate:>12}  "
        )
        wrapped = textwrap.wrap(price.choice, _WIDTH - len(head)) or [""]
        lines.append(head + wrapped[0])
        lines += [" " * len(head) + rest for rest in wrapped[1:]]
    if not explanation.prices:
        lines.append("  nothing is changed")
    lines.append("")
    step = format_bytes(explanation.step_bytes)
    less = "no plan found is that small" if explanation.less is None else format_trade(explanation.less)
    lines.append(f"{step} less: {less}")
    more = "buys nothing: this is the plain step" if explanation.more is None else format_trade(explanation.more)
    lines.append(f"{step} more: {more}")
    return "\n".join(
        textwrap.fill(line, _WIDTH, subsequent_indent="  ") if line[:1] not in (" ", "") else line for line in lines
    )
