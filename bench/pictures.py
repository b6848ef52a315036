"""SVG pictures of side-by-side runs; readable on light and on dark pages, offline, no library."""

from __future__ import annotations

import math
from collections.abc import Sequence

from bench.points import Point, fastest_within

_STYLE = (
    "<style>svg{font-family:system-ui,sans-serif}.bg{fill:#fff}.t{fill:#1f2328}.m{fill:#59636e}"
    ".g{stroke:#d1d9e0}.o{fill:#0969da}.p{fill:#bc4c00}.lo{stroke:#0969da}.lp{stroke:#bc4c00}"
    "@media (prefers-color-scheme:dark){.bg{fill:#0d1117}.t{fill:#f0f6fc}.m{fill:#9198a1}.g{stroke:#3d444d}"
    ".o{fill:#4493f8}.p{fill:#f0883e}.lo{stroke:#4493f8}.lp{stroke:#f0883e}}</style>"
)


class Axes:
    """A rectangle of the picture with linear scales."""

    def __init__(
        self, left: float, top: float, width: float, height: float, x: tuple[float, float], y: tuple[float, float]
    ):
        self.left, self.top, self.width, self.height, self.x_range, self.y_range = left, top, width, height, x, y

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Returns where a value is, held inside the rectangle."""
        across = (x - self.x_range[0]) / (self.x_range[1] - self.x_range[0])
        up = (y - self.y_range[0]) / (self.y_range[1] - self.y_range[0])
        clip = [min(max(v, 0.0), 1.0) for v in (across, up)]
        return self.left + clip[0] * self.width, self.top + (1 - clip[1]) * self.height

    def grid(self, xs: Sequence[float], ys: Sequence[float], *, x_format: str, y_format: str, size: int) -> list[str]:
        """Returns lines and their numbers."""
        parts = []
        for value in xs:
            x, _ = self.at(value, self.y_range[0])
            parts.append(f'<line class="g" x1="{x:.1f}" x2="{x:.1f}" y1="{self.top}" y2="{self.top + self.height}"/>')
            parts.append(_text(x, self.top + self.height + size + 3, x_format.format(value), size, "m", "middle"))
        for value in ys:
            _, y = self.at(self.x_range[0], value)
            parts.append(f'<line class="g" x1="{self.left}" x2="{self.left + self.width}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(_text(self.left - 5, y + size / 3, y_format.format(value), size, "m", "end"))
        return parts


def _text(x: float, y: float, words: str, size: int = 12, kind: str = "t", anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">{words}</text>'


def _mark(x: float, y: float, *, ours: bool, title: str, size: float = 5) -> str:
    if ours:
        return f'<circle class="o" cx="{x:.1f}" cy="{y:.1f}" r="{size}"><title>{title}</title></circle>'
    side = 2 * size - 1
    return (
        f'<rect class="p" x="{x - side / 2:.1f}" y="{y - side / 2:.1f}" width="{side}" height="{side}">'
        f"<title>{title}</title></rect>"
    )


def _svg(width: int, height: int, label: str, parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{label}">'
    return (
        "\n".join([head, _STYLE, f'<rect class="bg" width="{width}" height="{height}" rx="6"/>', *parts, "</svg>"])
        + "\n"
    )


def _ticks(low: float, high: float, step: float) -> list[float]:
    return [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


Box = tuple[float, float, float, float]  # left, top, right, bottom


def _free_box(words: str, x: float, y: float, taken: Sequence[Box]) -> Box | None:
    """Returns where words of size 10 lie beside a mark: the first of some places over nothing else, None if all are."""
    width, height = 5.3 * len(words), 11.0  # a letter's mean width at this size
    for left, middle in ((x + 8, y), (x - 8 - width, y), *((x - width / 2, y + up) for up in (-13, 13))):
        box = left, middle - height / 2, left + width, middle + height / 2
        is_inside = left > 60 and box[2] < 735 and middle < 370
        if is_inside and not any(box[0] < b[2] and b[0] < box[2] and box[1] < b[3] and b[1] < box[3] for b in taken):
            return box
    return None


def draw_pareto(name: str, here: Sequence[Point]) -> str:
    """Returns step time over peak bytes of one workload: peers are squares with names, recoup is circles."""
    top = min(max(1.3, *(p.time for p in here)) + 0.05, 3.0)
    axes = Axes(60, 44, 660, 330, (min(0.2, min(p.bytes for p in here) - 0.03), 1.05), (0.9, top))
    step = 0.1 if top < 1.8 else 0.25
    parts = [
        _text(20, 26, f"{name}: step time over peak bytes, both over the plain step's", 15),
        *axes.grid(
            _ticks(*axes.x_range, 0.1), _ticks(*axes.y_range, step), x_format="{:.1f}", y_format="{:.2f}", size=11
        ),
        _text(390, 408, "peak bytes of the whole step, weights included (plain = 1)", 12, "m", "middle"),
    ]
    marks = [(p, *axes.at(p.bytes, p.time)) for p in sorted(here, key=lambda p: p.is_ours)]
    taken = [(x - 5, y - 5, x + 5, y + 5) for _, x, y in marks]
    for p, x, y in marks:
        parts.append(_mark(x, y, ours=p.is_ours, title=f"{p.method}: {p.bytes:.3f} bytes, {p.time:.2f} time"))
        box = None if p.is_ours else _free_box(p.method, x, y, taken)
        if box is not None:
            taken.append(box)
            parts.append(_text(box[0], box[3] - 2, p.method, 10, "m"))
    parts += [
        _mark(530, 22, ours=True, title="recoup"),
        _text(540, 26, "recoup"),
        _mark(610, 22, ours=False, title="peers"),
    ]
    return _svg(740, 420, f"time over bytes, {name}", [*parts, _text(620, 26, "other methods")])


def draw_summary(groups: dict[str, Sequence[Point]]) -> str:
    """Returns one small panel a workload: at each budget, the slow-down of recoup and of the best other method."""
    columns, wide, high = 4, 236, 170
    rows = math.ceil(len(groups) / columns)
    parts = [
        _text(16, 26, "Slow-down of a training step at each memory budget", 17),
        _mark(20, 46, ours=True, title="recoup"),
        _text(31, 50, "recoup", 13),
        _mark(100, 46, ours=False, title="others"),
        _text(
            111,
            50,
            "fastest other method that fits (checkpointing by hand, SAC, auto-SAC, memory budget, torch-remat)",
            13,
        ),
    ]
    for index, (name, here) in enumerate(groups.items()):
        left, top = 58 + (index % columns) * wide, 90 + (index // columns) * high
        axes = Axes(left, top, wide - 68, high - 62, (1.0, 0.2), (0.0, 100.0))
        parts += axes.grid([1.0, 0.8, 0.6, 0.4, 0.2], [0, 50, 100], x_format="{:.0%}", y_format="+{:.0f} %", size=10)
        parts.append(_text(left, top - 8, name, 13))
        for ours in (False, True):
            line: list[tuple[float, float]] = []
            for percent in range(100, 19, -1):
                time = fastest_within(here, percent / 100, ours=ours)
                if time is None:
                    break
                line.append(axes.at(percent / 100, 100 * (time - 1)))
            drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in line)
            parts.append(f'<polyline class="l{"o" if ours else "p"}" points="{drawn}" fill="none" stroke-width="2.5"/>')
            parts.append(_mark(*line[-1], ours=ours, title="smallest peak reached", size=4))
    parts.append(
        _text(
            16,
            90 + rows * high - 6,
            "Budget: peak bytes of the whole step over the plain step's. A line ends at the smallest peak reached.",
            12,
            "m",
        )
    )
    return _svg(960, 100 + rows * high, "slow-down at each budget, recoup beside other methods", parts)


def draw_predictions(pairs: Sequence[tuple[str, float, float, float, float]]) -> str:
    """Returns two scatters of (name, predicted MiB, measured MiB, predicted time, measured time)."""
    most = max(max(p[1], p[2]) for p in pairs) * 1.05
    slow = max(max(p[3], p[4]) for p in pairs) * 1.03
    parts = [_text(20, 26, "Predicted and measured, every plan of the run", 15)]
    step = 10 ** math.floor(math.log10(most)) / 2
    ticks = _ticks(0, most, step if most / step < 9 else 2 * step)
    for left, words, limits, marks, i in (
        (60, "peak, MiB", (0.0, most), ticks, 1),
        (440, "step time over plain", (0.9, slow), _ticks(0.9, slow, 0.2), 3),
    ):
        axes = Axes(left, 50, 290, 290, limits, limits)
        shown = "{:.0f}" if i == 1 else "{:.1f}"
        parts += axes.grid(marks, marks, x_format=shown, y_format=shown, size=10)
        a, b = axes.at(limits[0], limits[0]), axes.at(limits[1], limits[1])
        parts.append(
            f'<line class="g" x1="{a[0]:.1f}" y1="{a[1]:.1f}" x2="{b[0]:.1f}" y2="{b[1]:.1f}" stroke-width="2"/>'
        )
        parts += [
            _mark(*axes.at(p[i], p[i + 1]), ours=True, title=f"{p[0]}: {p[i]:.2f}, {p[i + 1]:.2f}", size=3)
            for p in pairs
        ]
        parts.append(_text(left + 145, 378, f"predicted {words} (across), measured (up)", 12, "m", "middle"))
    return _svg(760, 395, "predicted and measured peak and time", parts)
