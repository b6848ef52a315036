"""Host overhead of a scan: time a step above the plain loop, less what the steps evaluated again cost.

    python -m bench.recurrent_overhead [SETTING ...] [--profile SETTING]

A tiny LIF network, so that Python is all there is. Above plain: (time of the scan) - (time of the plain loop) - (step
evaluations beyond one each) x (time of a plain evaluation without a graph), each the lower quartile of interleaved
rounds in processor time; the difference of the least times is printed too.
"""

from __future__ import annotations

import cProfile
import pstats
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from bench.recurrent import Lif, plain
from recoup.recurrent import ScanReport, scan

_STEPS = 1000
_ROUNDS = 21
SETTINGS: dict[str, dict[str, Any]] = {
    "all taped": {"chunk": _STEPS},
    "chunks of sqrt(T)": {},
    "50 %": {"budget": "50%"},
    "20 %": {"budget": "20%"},
    "5 %": {"budget": "5%"},
    "2 %": {"budget": "2%"},
    "treeverse, 12 slots": {"slots": 12},
    "chunks, rederived": {"rederive": True},
}


def _seconds(run: Callable[[], Any]) -> float:
    begin = time.process_time()
    run()
    return time.process_time() - begin


def main(arguments: list[str]) -> None:
    """Prints a line for each setting."""
    torch.manual_seed(0)
    network = Lif(16, 32, 10)
    x = (torch.rand(_STEPS, 4, 16) < 0.3).float()

    def train(options: dict[str, Any] | None, report: ScanReport | None = None) -> None:
        if options is None:
            ys = plain(network.step, x, network.start(4), outputs="sum")[1]
        else:
            ys = scan(network.step, x, network.start(4), outputs="sum", report=report, **options)[1]
        ys.sum().backward()

    def forward() -> None:
        with torch.no_grad():
            plain(network.step, x, network.start(4), outputs="sum")

    if arguments[:1] == ["--profile"]:
        options = SETTINGS[arguments[1]]
        train(options)
        profile = cProfile.Profile()
        profile.runcall(train, options)
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)
        return
    wanted = arguments or list(SETTINGS)
    times: dict[str, list[float]] = {}
    evaluations: dict[str, float] = {}
    for _ in range(_ROUNDS):  # schedules are computed in the first, and kept
        times.setdefault("plain", []).append(_seconds(lambda: train(None)))
        times.setdefault("again", []).append(_seconds(forward))
        for name in wanted:
            report = ScanReport()
            times.setdefault(name, []).append(_seconds(lambda n=name, r=report: train(SETTINGS[n], r)))
            evaluations[name] = report.evaluations / _STEPS

    def above(name: str, rank: int) -> float:
        spent, base, again = (sorted(times[key])[rank] for key in (name, "plain", "again"))
        return (spent - base - (evaluations[name] - 1) * again) / _STEPS * 1e6

    print(f"plain {sorted(times['plain'])[_ROUNDS // 4] / _STEPS * 1e6:.0f} us a step")
    for name in wanted:
        print(
            f"{name}: {evaluations[name]:.2f} evaluations a step, {above(name, _ROUNDS // 4):.0f} us above "
            f"({above(name, 0):.0f} by the least times)"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
