"""What a plan made without a card predicts, against PyTorch's CUDA allocator: allocated bytes, and the card it needs.

    python -m bench.cuda_predictions [case ...] [--small] [--out bench/results]

Needs a CUDA device, or the stub GPU (shared/cuda_stub: the allocator and the ops are real there, values and times are
not). Each case runs in a process of its own: the model is planned on `meta` for the device named below, then built on
the card, where a step's `max_memory_allocated` is taken, and the smallest `set_per_process_memory_fraction` under which
it is built and three steps run: as on a card of that size, the limit holds from the start. How much of a card
fragments take depends on what the process did before, so the smallest card is also taken with a block that was let go
before the first step, and with the optimizer's state loaded before it; the worst of the three is in the table beside
the plain one, against what is predicted for a resumed training. cuDNN's workspaces are
no part of a prediction; on the stub set STUB_GPU_CONV_WORKSPACE=0, STUB_GPU_BATCH_NORM_WORKSPACE=0 and
STUB_GPU_BATCH_NORM_RESERVE=0.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import gc
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

import recoup
from bench.gpu_models import WORKLOADS, Autocast, Workload, gpt2
from recoup._torch import clear_cublas_workspaces

CASES = ("gpt2-dropout", "gpt2-autocast", *WORKLOADS)
DEVICES = {(7, 5): "t4", (8, 0): "a100-80gb", (8, 9): "rtx-4090", (9, 0): "h100-sxm", (10, 0): "b200"}
BUDGETS = ("100%", "60%")
_PRECISION_BYTES = 4 << 20
Row = dict[str, Any]


def make(name: str, device: torch.device, *, small: bool) -> Workload:
    """Returns a case's model and batch on a device."""
    if not name.startswith("gpt2"):
        work = WORKLOADS[name](device, small=small)
        if name == "unet" and os.environ.get("TORCH_CUDNN_V8_API_DISABLED"):  # the stub: no bfloat16 in cuDNN's v7
            work = dataclasses.replace(work, model=work.model.half(), batch=work.batch.half())
        return work
    work = gpt2(device, small=small, dropout=0.1 if name == "gpt2-dropout" else 0.0)
    return Workload(
        model=Autocast(work.model) if name == "gpt2-autocast" else work.model,
        batch=work.batch,
        loss=work.loss,
        layers=work.layers,
        items=work.items,
        unit=work.unit,
    )


def measure(name: str, budget: str, *, small: bool) -> Row:
    """Returns predicted and measured bytes of one case under one budget."""
    device = DEVICES[torch.cuda.get_device_capability()]
    work = make(name, torch.device("meta"), small=small)
    ids = not torch.is_floating_point(work.batch)
    batch = torch.zeros(work.batch.shape, dtype=work.batch.dtype) if ids else work.batch
    plan = recoup.plan(work.model, batch, loss=work.loss, optimizer=torch.optim.AdamW, budget=budget, device=device)
    total = torch.cuda.get_device_properties(0).total_memory

    def run(limit_bytes: int, history: str = "") -> int | None:
        """Returns the peak of the second of three steps under a limit, in bytes allocated; None: out of memory.

        Args:
            history: "let go", "resumed", or nothing before the first step.
        """
        for _ in range(20):  # the thread of a backward that failed lets go a little later than it says so
            gc.collect()
            clear_cublas_workspaces()
            if torch.cuda.memory_allocated() <= _PRECISION_BYTES:
                break
            time.sleep(0.1)
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(limit_bytes / total)
        if torch.cuda.memory_allocated() > _PRECISION_BYTES:
            raise RuntimeError(f"{torch.cuda.memory_allocated()} bytes are left of the steps before")
        peaks = []
        try:
            work = make(name, torch.device("cuda"), small=small)
            optimizer = torch.optim.AdamW(work.model.parameters())
            if history == "let go":
                torch.empty(max(p.nbytes for p in work.model.parameters()), dtype=torch.uint8, device="cuda")
            elif history == "resumed":
                for p in work.model.parameters():
                    moments = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                    optimizer.state[p] = {"step": torch.tensor(0.0), **moments}
            with recoup.apply(work.model, plan):
                for _ in range(3):
                    torch.cuda.reset_peak_memory_stats()
                    loss = work.loss(work.model(work.batch), work.batch)
                    loss.backward()
                    del loss
                    optimizer.step()
                    work.model.zero_grad(set_to_none=True)
                    peaks.append(torch.cuda.max_memory_allocated())
        except torch.OutOfMemoryError:
            return None
        return peaks[1]

    allocated = run(total)
    assert allocated is not None, "the card is too small for this case"

    def smallest(low: int, history: str) -> int:
        high = 2 * plan.predicted.card_bytes
        while high - low > _PRECISION_BYTES:
            middle = (low + high) // 2
            low, high = (middle, high) if run(middle, history) is None else (low, middle)
        return high

    high = worst = smallest(allocated - 1, "")
    for history in ("let go", "resumed"):
        if run(worst, history) is None:
            worst = smallest(worst, history)
    found = plan.predicted
    return {
        "case": name,
        "budget": budget,
        "device": device,
        "decisions": len(plan.decisions),
        "predicted_bytes": found.peak_bytes,
        "allocated_bytes": allocated,
        "allocated_error": found.peak_bytes / allocated - 1,
        "predicted_card_bytes": found.card_bytes,
        "card_bytes": high,
        "card_error": found.card_bytes / high - 1,
        "worst_card_bytes": worst,
        "predicted_worst_card_bytes": found.resumed_card_bytes,
        "worst_card_error": found.resumed_card_bytes / worst - 1,
    }


def text(row: Row) -> str:
    """Returns a row of the table."""
    if "why_not" in row:
        return f"| {row['case']} | {row['budget']} | {row['why_not']} |"
    cells = [row["case"], row["budget"]]
    for names in (
        ("predicted", "allocated", "allocated_error"),
        ("predicted_card", "card", "card_error"),
        ("predicted_worst_card", "worst_card", "worst_card_error"),
    ):
        cells += [f"{row[f'{name}_bytes'] / 2**30:.3f}" for name in names[:2]] + [f"{100 * row[names[2]]:+.2f} %"]
    return f"| {' | '.join(cells)} |"


HEAD = (
    "| case | budget | predicted, GiB | allocated, GiB | off | predicted card, GiB | smallest card, GiB | off "
    "| predicted after any history, GiB | smallest card after the worst, GiB | off |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|"
)


def main(argv: list[str] | None = None) -> int:
    """Runs the cases; returns the number that failed to run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}")
    parser.add_argument("--small", action="store_true", help="tiny models")
    parser.add_argument("--budget", help="one case in this process, its row as JSON")
    parser.add_argument("--out", help="folder for the result file")
    given = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("skipped: no CUDA device and no stub GPU", file=sys.stderr)
        return 0
    if given.budget:
        print(json.dumps(measure(given.cases[0], given.budget, small=given.small)), flush=True)
        os._exit(0)  # a thread of autograd that outlives the interpreter ends a process in an error (pytorch#38228)
    rows: list[Row] = []
    print(HEAD, flush=True)
    for case in given.cases or CASES:
        for budget in BUDGETS:
            command = [sys.executable, "-m", "bench.cuda_predictions", case, "--budget", budget]
            done = subprocess.run(command + ["--small"] * given.small, capture_output=True, text=True, timeout=600)
            if done.returncode:
                rows.append({"case": case, "budget": budget, "why_not": done.stderr.strip().splitlines()[-1][:200]})
            else:
                rows.append(json.loads(done.stdout.strip().splitlines()[-1]))
            print(text(rows[-1]), flush=True)
    if given.out:
        card = torch.cuda.get_device_name().removesuffix(" (stub)")
        kind = "stub, no card" if "stub" in torch.cuda.get_device_name() else "card"
        today = datetime.date.today().isoformat()
        data = {"date": today, "hardware": f"{card} ({kind})", "torch": torch.__version__, "rows": rows}
        name = f"cuda-predictions-{'stub' if kind.startswith('stub') else 'card'}-{today}"
        folder = Path(given.out)
        (folder / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n")
        head = (
            f"# Predictions for {data['hardware']}, {today}\n\n"
            f"torch {torch.__version__}, AdamW, no cuDNN workspaces; on the stub the U-Net is in float16.\n"
        )
        (folder / f"{name}.md").write_text("\n".join([head, HEAD, *map(text, rows), ""]))
    return sum("why_not" in row for row in rows)


if __name__ == "__main__":
    sys.exit(main())
