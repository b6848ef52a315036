"""The smoke test of `bench.peers`: what does not wobble, on a few workloads, nothing timed.

    python -m bench.quick [workload ...]

Checked: no plan measures over its budget; every plan's step is bit-equal to plain's; predicted peaks are within 2 % of
measured ones; no plan runs more FLOPs than the every-layer checkpointing whose bytes it was given; and the FLOPs of
plain and of the peers are those of the committed results under the same torch, their bytes within 0.1 %: kernels of
another processor have other workspaces (a 3-D convolution's differ by 27 KB of 89 MB). Exit status 1 names what is
broken.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from bench.peers import Session, latest, line
from bench.workloads import WORKLOADS

METHODS = ("every layer", "every 2nd layer", "SAC, matmuls kept")
QUICK = ("mlp-chain", "moe", "gru")
_PREDICTION = 0.02
_WORKSPACE = 0.001
Row = dict[str, Any]


def check(row: Row, committed: Row | None) -> list[str]:
    """Returns what is wrong with a measured row, in words; nothing if all is well.

    Args:
        committed: the same row of the committed results, if they were taken under this torch.
    """
    name = f"{row['workload']}, {row['method']}"
    if "why_not" in row:
        return [f"{name}: not measured, {row['why_not']}"]
    wrong = []
    for key, share in (("plain_bytes", _WORKSPACE), ("plain_flops", 0.0), ("peak_bytes", _WORKSPACE), ("flops", 0.0)):
        if committed is not None and key in committed and abs(row[key] - committed[key]) > share * committed[key]:
            wrong.append(f"{name}: {key} {row[key]}, committed {committed[key]}")
    ours = row["recoup"]
    if "peak_bytes" not in ours:
        return [*wrong, f"{name}: recoup has no plan: {ours['why_not']}"]
    if ours["peak_bytes"] > ours["budget_bytes"]:
        wrong.append(f"{name}: measured {ours['peak_bytes']} bytes, budget {ours['budget_bytes']}")
    if not ours["exact"]:
        wrong.append(f"{name}: not equal to plain: {ours.get('difference')}")
    if abs(ours["predicted_bytes"] / ours["peak_bytes"] - 1) > _PREDICTION:
        wrong.append(f"{name}: predicted {ours['predicted_bytes']} bytes, measured {ours['peak_bytes']}")
    if row["method"] == "every layer" and ours["flops"] > row["flops"]:
        wrong.append(f"{name}: {ours['flops']} FLOPs, the peer {row['flops']}")
    return wrong


def main(argv: list[str] | None = None) -> int:
    """Returns 0 if everything checked holds, else 1."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workloads", nargs="*", default=list(QUICK), help=f"of {', '.join(WORKLOADS)}")
    parser.add_argument("--method", action="append", help="only this row (may be given several times)")
    arguments = parser.parse_args(argv)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the committed results were taken
    file = latest(Path("bench/results"))
    before = json.loads(file.read_text()) if file.exists() else {"versions": {}, "rows": []}
    same = before["versions"].get("torch") == str(torch.__version__)
    known = {(r["workload"], r["method"]): r for r in before["rows"]} if same else {}
    wrong = []
    begun = time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name in arguments.workloads:
                session = Session(name, rounds=0)
                for method in arguments.method or METHODS:
                    row = session.measure(method)
                    wrong += check(row, known.get((name, method)))
                    print(f"{time.perf_counter() - begun:6.0f} s  {line(row)}", flush=True)
    finally:
        torch.set_num_threads(threads)
    for words in wrong:
        print(f"broken: {words}", file=sys.stderr)
    against = file.name if known else "nothing committed"
    print(f"{len(wrong)} broken, in {time.perf_counter() - begun:.0f} s; compared with {against}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
