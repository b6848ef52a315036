"""The tiled head and loss beside the plain step: peaks, time, exactness; and the smallest reachable peak.

    python -m bench.tile [workload ...] [--out bench/results]
    python -m bench.tile --timing     # time alone: rederive + tile against plain

`rederive + tile` runs no layer twice. Peaks at full size are simulated under fake tensors, as `recoup plan` does it on
a roofline; the same plans are then run for real on one example a step: measured beside predicted peak (allocator
events, everything counted), gradients beside plain's, and time as the median of interleaved pairs.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import platform
from pathlib import Path
from typing import Any

import torch

from recoup.cli.allocator import keep_freed_memory
from recoup.cost.devices import get_device
from recoup.cost.roofline import RooflineCost
from recoup.evidence.verify import verify_plan
from recoup.ir.decision import Decision, Rederive
from recoup.planner import request
from recoup.planner.driver import Planner
from recoup.planner.incumbents import Candidate
from recoup.planner.strategies.registry import DEFAULT_ACTIONS
from recoup.planner.strategies.tile import TiledHead
from recoup.planner.strategies.tile_search import TileStrategy
from recoup.targets.resolve import resolve_target

_NO_DROP = "attn_pdrop=0.0,resid_pdrop=0.0,embd_pdrop=0.0"
WORKLOADS: dict[str, tuple[str, dict[str, int]]] = {
    "gpt2": (f"hf:gpt2?n_layer=12,n_embd=512,n_head=8,vocab_size=32000,{_NO_DROP}", {"batch": 4, "seq": 512}),
    "llama": (
        "hf:llama?num_hidden_layers=12,hidden_size=512,intermediate_size=1376,num_attention_heads=8,vocab_size=32000",
        {"batch": 4, "seq": 512},
    ),
    "llama-128k": (
        "hf:llama?num_hidden_layers=8,hidden_size=256,intermediate_size=688,num_attention_heads=4,vocab_size=128000",
        {"batch": 2, "seq": 512},
    ),
    "bert": (
        "hf:bert?num_hidden_layers=6,hidden_size=512,intermediate_size=2048,num_attention_heads=8,vocab_size=32000",
        {"batch": 4, "seq": 384},
    ),
    "t5": ("hf:t5?num_layers=4,d_model=384,d_ff=1024,num_heads=6,vocab_size=32000", {"batch": 4, "seq": 256}),
}
EVERYWHERE = Rederive(path="")


def planner_for(name: str, actions: tuple[str, ...], batch: int | None = None) -> Planner:
    """Returns a planner for a workload, or for another batch of it that is to be measured."""
    target, sizes = WORKLOADS[name]
    torch.manual_seed(0)
    where = {"device": "cpu"} if batch else {"device": "meta"}
    resolved = resolve_target(target, **where, **{**sizes, **({"batch": batch} if batch else {})})
    cost = RooflineCost(get_device("cpu-generic"))
    planner, _, _ = request.planner_for(
        resolved.model, resolved.batch, loss=None, optimizer=None, device="cpu", actions=actions, cost=cost
    )
    return planner


def tiled_head(planner: Planner) -> TiledHead | None:
    """Returns the head that the planner can tile."""
    found = planner.strategy(TileStrategy)
    return found.found.head if found is not None else None


def simulated(planner: Planner, candidate: Candidate) -> dict[str, Any]:
    """Returns the peaks at full size."""
    plain = planner.plain.peak_bytes
    held = sum(s.nbytes for s in planner.trace.storages if s.category in ("parameter", "buffer", "batch"))
    return {
        "plain_bytes": plain,
        "peak_bytes": candidate.peak_bytes,
        "held_bytes": held,
        "share_of_plain": candidate.peak_bytes / plain,
        "share_beyond_held": (candidate.peak_bytes - held) / (plain - held),
        "recomputed_flops": candidate.recomputed_flops,
    }


def measured(planner: Planner, decisions: tuple[Decision, ...]) -> dict[str, Any]:
    """Returns what the decisions measure on one example."""
    candidate = planner.simulate(decisions)
    plan = planner.plan(candidate, budget_bytes=candidate.peak_bytes, budget_text="-", device="cpu")
    evidence = verify_plan(planner.spec.model, plan, planner.spec.batch, max_seconds=60.0)
    assert evidence.baseline_peak_bytes is not None
    return {
        "measured_over_predicted": evidence.peak_bytes / candidate.peak_bytes,
        "measured_of_plain": evidence.peak_bytes / evidence.baseline_peak_bytes,
        "time_ratio": evidence.time_ratio,
        "time_spread": evidence.time_spread,
        "max_gradient_error": evidence.max_gradient_error,
        "loss_error": evidence.loss_error,
        "within_bound": evidence.values_hold,
    }


def run(name: str, *, runs: bool, timing: bool = False) -> list[dict[str, Any]]:
    """Returns the rows of one workload; with `runs`, also what real steps measure.

    Args:
        timing: only the plan with both, and no floors.
    """
    planner = planner_for(name, DEFAULT_ACTIONS)
    small = planner_for(name, DEFAULT_ACTIONS, batch=1) if runs else None
    head = tiled_head(planner)
    small_head = None if small is None else tiled_head(small)
    assert head is not None, f"{name}: no head to tile was found"
    rows: list[dict[str, Any]] = []
    for label, everywhere, tiles in (
        ("rederive", True, False),
        ("tile", False, True),
        ("rederive + tile", True, True),
    ):
        if timing and not (everywhere and tiles):
            continue
        ambient = (EVERYWHERE,) if everywhere else ()
        candidate = planner.simulate((*ambient, *([head.decision] if tiles else [])))
        if small is None or small_head is None:
            rows.append({"plan": label, **simulated(planner, candidate)})
            continue
        # As many tiles as at full size.
        share = (head.decision.tile_tokens or 1) / head.head.tokens
        tile = dataclasses.replace(small_head.decision, tile_tokens=max(1, round(small_head.head.tokens * share)))
        real = measured(small, (*ambient, *([tile] if tiles else [])))
        rows.append({"plan": label, **simulated(planner, candidate), **real})
    if not timing:
        without = planner_for(name, ("rederive", "recompute"))
        for label, chosen in (("floor without tile", without), ("floor", planner)):
            rows.append({"plan": label, **simulated(chosen, chosen.smallest())})
    return [{"workload": name, "tile_tokens": head.decision.tile_tokens, **row} for row in rows]


def as_markdown(rows: list[dict[str, Any]], header: dict[str, str]) -> str:
    """Returns the table."""
    lines = ["# Tiled head and loss, measured", ""]
    lines += [f"- {key}: {value}" for key, value in header.items()]
    lines += [
        "",
        "Bytes in MiB, everything counted, at full size, simulated. *Of the step*: over plain without parameters, "
        "buffers and batch, which are there whatever the plan. The floor is the smallest reachable peak. Measured on "
        "one example a step: *measured* over predicted peak, *time* over plain, *error* of the worst gradient, "
        "relative.",
        "",
        "| workload | plan | plain | peak | of plain | of the step | GFLOP twice | measured | time | error |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [row["workload"], row["plan"], *(f"{row[k] / 2**20:.1f}" for k in ("plain_bytes", "peak_bytes"))]
        cells += [f"{row['share_of_plain']:.3f}", f"{row['share_beyond_held']:.3f}"]
        cells.append(f"{row['recomputed_flops'] / 1e9:.1f}")
        if "time_ratio" in row:
            cells.append(f"{row['measured_over_predicted']:.4f}")
            cells.append(f"{row['time_ratio']:.3f} +- {row['time_spread']:.3f}")
            cells.append(f"{row['max_gradient_error']:.1e}")
        else:
            cells += ["-", "-", "-"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def write(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Writes what there is so far."""
    date = datetime.date.today().isoformat()
    header = {
        "date": date,
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "torch": str(torch.__version__),
        "command": f"python -m bench.tile {' '.join(options.workloads)}"
        f"{' --simulated' if options.simulated else ''}{' --timing' if options.timing else ''}",
    }
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / f"tile-cpu-{date}.json").write_text(json.dumps({**header, "rows": rows}, indent=1) + "\n")
    (out / f"tile-cpu-{date}.md").write_text(as_markdown(rows, header))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workloads", nargs="*", default=list(WORKLOADS))
    parser.add_argument("--out", default="bench/results")
    parser.add_argument("--simulated", action="store_true", help="leave out the real steps")
    parser.add_argument("--timing", action="store_true", help="only rederive + tile against plain, interleaved")
    options = parser.parse_args()
    keep_freed_memory()
    rows: list[dict[str, Any]] = []
    for name in options.workloads:
        rows += run(name, runs=not options.simulated, timing=options.timing)
        for row in rows:
            if row["workload"] == name:
                print(
                    name,
                    row["plan"],
                    f"{row['share_of_plain']:.3f} {row['share_beyond_held']:.3f}",
                    row.get("time_ratio"),
                    row.get("max_gradient_error"),
                )
        write(rows, options)


if __name__ == "__main__":
    main()
