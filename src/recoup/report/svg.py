"""Axes, ticks and paths as inline SVG text: no library, numbers with one decimal, colours left to the style sheet."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from html import escape


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A drawing of `width` by `height` units whose plot area leaves the margins free; x and y run from 0 or `x_min`."""

    width: int
    height: int
    x_max: float
    y_max: float
    x_min: float = 0.0
    y_min: float = 0.0
    left: int = 58
    right: int = 14
    top: int = 36
    bottom: int = 40

    def x(self, value: float) -> float:
        """Returns the horizontal position of `value`, in the drawing's units."""
        span = self.x_max - self.x_min or 1.0
        return self.left + (value - self.x_min) / span * (self.width - self.left - self.right)

    def y(self, value: float) -> float:
        """Returns the vertical position of `value`, in the drawing's units."""
        span = self.y_max - self.y_min or 1.0
        return self.height - self.bottom - (value - self.y_min) / span * (self.height - self.top - self.bottom)


def second_unit(seconds: float) -> tuple[float, str]:
    """Returns the unit that suits a scale up to `seconds`, as (seconds, name)."""
    for size, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= 0.9 * size:
            return size, name
    return 1e-6, "us"


def ticks(low: float, high: float, count: int) -> list[float]:
    """Returns about `count` round values (1, 2 or 5 times a power of ten apart) between `low` and `high`."""
    if not high > low:
        return [low]
    rough = (high - low) / max(count, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(s * power for s in (1, 2, 5, 10) if s * power >= 0.8 * rough)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def number(value: float) -> str:
    """Returns a tick's number without needless zeros."""
    return f"{value:.10g}" if abs(value) < 1e6 else f"{value:.3g}"


def text(x: float, y: float, words: str, *, anchor: str = "start", kind: str = "") -> str:
    """Returns a text element."""
    style = f' class="{kind}"' if kind else ""
    where = f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{where}{style}>{escape(words)}</text>'


def axes(frame: Frame, *, x_unit: tuple[float, str], y_unit: tuple[float, str], x_name: str, y_name: str) -> str:
    """Returns grid lines, tick labels and axis names with their units."""
    parts = []
    wide = frame.width > 500
    for value in ticks(frame.y_min / y_unit[0], frame.y_max / y_unit[0], 5 if frame.height > 200 else 3):
        y = frame.y(value * y_unit[0])
        parts.append(f'<path class="grid" d="M{frame.left} {y:.1f}H{frame.width - frame.right}"/>')
        parts.append(text(frame.left - 6, y + 4, number(value), anchor="end"))
    for value in ticks(frame.x_min / x_unit[0], frame.x_max / x_unit[0], 10 if wide else 4):
        x, base = frame.x(value * x_unit[0]), frame.height - frame.bottom
        parts.append(f'<path class="axis" d="M{x:.1f} {base}v4"/>')
        parts.append(text(x, base + 17, number(value), anchor="middle"))
    base = frame.height - frame.bottom
    parts.append(f'<path class="axis" d="M{frame.left} {base}H{frame.width - frame.right}"/>')
    parts.append(text((frame.left + frame.width - frame.right) / 2, frame.height - 6, x_name, anchor="middle"))
    parts.append(text(4, 13, y_name))
    return "".join(parts)


def steps(frame: Frame, xs: Sequence[float], ys: Sequence[float], *, end: float) -> str:
    """Returns the path data of a step curve: each y holds from its x to the next; the last ends at `end`."""
    data, last = [], None
    for x, y in zip(xs, ys, strict=True):
        if y != last:
            at = f"{frame.y(y):.1f}"
            data.append(f"M{frame.x(x):.1f} {at}" if last is None else f"H{frame.x(x):.1f}V{at}")
            last = y
    return "".join(data) + f"H{frame.x(end):.1f}"


def area(frame: Frame, xs: Sequence[float], low: Sequence[float], high: Sequence[float], *, end: float) -> str:
    """Returns the path of the area between two step curves."""
    top = steps(frame, xs, high, end=end)
    data, last = [], None
    for i in range(len(xs) - 1, -1, -1):
        right = xs[i + 1] if i + 1 < len(xs) else end
        if low[i] != last:
            data.append(
                f"H{frame.x(right):.1f}V{frame.y(low[i]):.1f}" if last is not None else f"V{frame.y(low[i]):.1f}"
            )
            last = low[i]
    return f"{top}{''.join(data)}H{frame.x(xs[0]):.1f}Z" if xs else ""
