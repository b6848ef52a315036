"""Does recoup hold on this GPU? Ten checks in under ten minutes, the first three minutes decide; no network.

    python -m bench.gpu_accept [A0 A4 ...] [--minutes 9] [--out bench/results]
    python -m bench.gpu_accept --reduced    # tiny models and no times: what can be seen on the stub GPU

Needs one CUDA GPU and torch 2.11 to 2.13. Each check prints PASS or FAIL with its numbers; a JSON lies beside, written
after each. What had not begun when the time was up is named, and its check says SKIP. Bits are compared under
`torch.use_deterministic_algorithms(True)` alone: by default the backward of flash and cuDNN attention, and of
embeddings, adds with atomics, and two plain steps differ (A0 says by how much).
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import recoup
from bench.cuda_predictions import DEVICES, make
from bench.gpu_accept_kit import (
    Block,
    Failed,
    by_hand,
    equal,
    furthest,
    gradients,
    limited,
    require,
    segments,
    step,
    table_of,
)
from bench.gpu_models import Workload, gpt2
from recoup.evidence.noise import deterministic_kernels
from recoup.ir.decision import Offload, Recompute
from recoup.runtime.execution_context import thread_log

Numbers = dict[str, Any]
MIB = 1 << 20
SKIPPED = "skipped: the time given to this run was used up"
FIVE = ("llama-1b", "vit-l", "resnet50", "unet", "gpt2-dropout")


class Acceptance:
    """The checks; `reduced` for tiny models, `has_values` where kernels compute.

    Args:
        until: by `time.perf_counter`, when no more models are begun.
    """

    def __init__(self, *, reduced: bool, has_values: bool, until: float = math.inf) -> None:
        self.reduced, self.has_values, self.until = reduced, has_values, until
        self.device = torch.device("cuda")
        self.card = DEVICES.get(torch.cuda.get_device_capability(), "")

    def work(self, name: str) -> Workload:
        """Returns a workload on the card."""
        return self._made(name, self.device)

    def _made(self, name: str, device: torch.device) -> Workload:
        return gpt2(device, small=False, layers=3, batch=2) if self.reduced else make(name, device, small=False)

    def _models(self, found: Numbers) -> Iterator[str]:
        """Yields the names of models while there is time; the others are named in `found`."""
        for name in FIVE if self.has_values else FIVE[-1:]:
            if time.perf_counter() > self.until:
                found[name] = SKIPPED
            else:
                yield name

    def a0(self) -> Numbers:
        """Plain steps against plain steps: by default, and equal bits with deterministic kernels."""
        work = self.work("gpt2-dropout")
        default = furthest(gradients(work), gradients(work)) if self.has_values else 0.0
        with deterministic_kernels():
            same = equal(gradients(work), gradients(work))
        require(same or not self.has_values, "two plain steps differ although kernels are deterministic")
        return {"default_furthest": default, "deterministic_equal": same}

    def a1(self) -> Numbers:
        """Planning a Llama twice as large as the limit allocates next to nothing."""
        work = self.work("llama-1b")
        weights = torch.cuda.memory_allocated()
        plain = recoup.plan(
            work.model, work.batch, loss=work.loss, budget="100%", device="cuda", cost=table_of(self.card), actions=()
        ).predicted.peak_bytes
        with limited(max(plain // 2, weights + 64 * MIB)):
            torch.cuda.reset_peak_memory_stats()
            made = recoup.plan(
                work.model, work.batch, loss=work.loss, budget="60%", device="cuda", cost=table_of(self.card)
            )
            took = torch.cuda.max_memory_allocated() - weights
        require(took < 256 * MIB, f"planning took {took / MIB:.0f} MiB of the card")
        return {"plain_bytes": plain, "planning_bytes": took, "decisions": len(made.decisions)}

    def a2(self) -> Numbers:
        """Twenty steps with every block recomputed: float32, masked bfloat16, flash, cuDNN, dropout."""
        found: Numbers = {}
        kinds: dict[str, tuple[torch.dtype, bool, float, Any]] = {
            "float32": (torch.float32, False, 0.0, None),
            "masked bfloat16": (torch.bfloat16, True, 0.0, None),
            "flash": (torch.bfloat16, False, 0.0, torch.nn.attention.SDPBackend.FLASH_ATTENTION),
            "cudnn": (torch.bfloat16, False, 0.0, torch.nn.attention.SDPBackend.CUDNN_ATTENTION),
            "dropout": (torch.bfloat16, False, 0.1, None),
        }
        for name, (dtype, masked, dropout, backend) in kinds.items():
            if name == "cudnn" and (not self.has_values or torch.cuda.get_device_capability() < (8, 0)):
                found[name] = "left out: no cuDNN attention here"
                continue
            if name == "flash" and torch.cuda.get_device_capability() < (8, 0):
                found[name] = "left out: no flash attention here"
                continue
            model = nn.Sequential(*(Block(256, 4, masked, dropout) for _ in range(4))).to(self.device, dtype)
            x = torch.randn(4, 256, 256, device=self.device, dtype=dtype)
            plan = [Recompute(path=str(i)) for i in range(4)]
            chosen = contextlib.nullcontext() if backend is None else torch.nn.attention.sdpa_kernel(backend)
            with chosen, recoup.apply(model, by_hand(model, x, plan)):
                for _ in range(3 if self.reduced else 20):
                    model(x).float().square().mean().backward()
                    model.zero_grad(set_to_none=True)
            found[name] = "ok"
        return found

    def a3(self) -> Numbers:
        """Prices are measured for GPT-2 with dropout and for an LSTM."""
        work = self.work("gpt2-dropout")
        first = recoup.plan(work.model, work.batch, loss=work.loss, budget="80%", device="cuda")
        found: Numbers = {"gpt2": first.predicted.cost_source}
        if self.has_values:
            lstm = nn.LSTM(256, 256, 2, batch_first=True).to(self.device)
            x = torch.randn(16, 128, 256, device=self.device)
            second = recoup.plan(
                lstm, x, loss=lambda o, b: o[0].square().mean(), budget="100%", device="cuda", actions=()
            )
            found["lstm"] = second.predicted.cost_source
        return found

    def a4(self) -> Numbers:
        """`fit` at 60 % with AdamW: measured within the budget and 1 % of predicted, counted, bit-equal."""
        found: Numbers = {}
        for name in self._models(found):
            work = self.work(name)
            optimizer = torch.optim.AdamW(work.model.parameters())
            options = {"loss": work.loss, "optimizer": optimizer}
            if self.has_values:
                with deterministic_kernels():
                    fitted = recoup.fit(work.model, work.batch, budget="60%", device="cuda", timed=False, **options)
                seen, plan, applied = fitted.evidence, fitted.plan, fitted.applied
                del fitted
            else:  # nothing is equal there, and `fit` would take the plan off again
                plan = recoup.plan(work.model, work.batch, budget="60%", device="cuda", **options)
                seen = recoup.verify(work.model, plan, work.batch, timed=False, **options)
                applied = recoup.apply(work.model, plan)
            before = thread_log()
            step(work)
            log = thread_log() - before
            applied.remove()
            off = seen.peak_bytes / plan.predicted.peak_bytes - 1
            found[name] = {
                "budget": plan.budget_bytes,
                "measured": seen.peak_bytes,
                "off": off,
                "regions": log.num_replays,
                "rederived": log.num_rederived,
                "tiled": log.num_tiled,
            }
            require(seen.peak_bytes <= plan.budget_bytes, f"{name} measured above its budget: {found[name]}")
            require(log.num_replays + log.num_rederived + log.num_tiled > 0, f"{name}: nothing was counted")
            if not self.reduced:
                require(abs(off) <= 0.01, f"{name} measured {100 * off:+.1f} % of predicted")
            if self.has_values:
                require(seen.exact, f"{name}: {seen.differences[:1]}")
            del work, optimizer, options, applied
        return found

    def a5(self) -> Numbers:
        """Plans made without this card, for this card, against it: +0, -5 %."""
        require(bool(self.card), f"no entry in the device table for {torch.cuda.get_device_name()}")
        found: Numbers = {}
        for name in self._models(found):
            plan, work = self._planned(name)
            with recoup.apply(work.model, plan):
                found[name] = self._peak(work) / plan.predicted.peak_bytes - 1
            require(found[name] <= 0 and found[name] >= -0.05, f"{name} takes {100 * found[name]:+.1f} % of predicted")
            del work
        return found

    def a6(self) -> Numbers:
        """Offload: twenty steps, no synchronisation, equal bits."""
        work = self.work("gpt2-dropout")
        plan = by_hand(work.model, work.batch, [Offload(path=p) for p in work.layers], work.loss)
        with deterministic_kernels() if self.has_values else contextlib.nullcontext():
            plain = gradients(work)
            with recoup.apply(work.model, plan):
                moved = gradients(work)
                torch.cuda.set_sync_debug_mode("error")
                try:
                    for _ in range(3 if self.reduced else 20):
                        step(work)
                        work.model.zero_grad(set_to_none=True)
                finally:
                    torch.cuda.set_sync_debug_mode("default")
        require(equal(plain, moved) or not self.has_values, "gradients differ")
        return {"synchronisations": 0, "equal": self.has_values}

    def a7(self) -> Numbers:
        """The limit at the predicted card size, by default and with expandable segments: no out of memory."""
        found: Numbers = {}
        for expandable in (False, True):
            with segments(expandable=expandable):
                plan, work = self._planned("gpt2-dropout")
                room = plan.predicted.expandable_card_bytes if expandable else plan.predicted.card_bytes
                optimizer = torch.optim.AdamW(work.model.parameters())
                torch.cuda.reset_peak_memory_stats()
                with limited(room), recoup.apply(work.model, plan):
                    for _ in range(5):
                        step(work, optimizer)
                        work.model.zero_grad(set_to_none=True)
                reserved = torch.cuda.max_memory_reserved()
                found["expandable" if expandable else "default"] = {"card_bytes": room, "reserved_bytes": reserved}
                del work, optimizer
        return found

    def a8(self) -> Numbers:
        """Planned over plain time within ten points of predicted."""
        if not self.has_values:
            return {"left out": "times mean nothing here"}
        work = self.work("llama-1b")
        plan = recoup.plan(work.model, work.batch, loss=work.loss, budget="60%", device="cuda")
        plain = self._seconds(work)
        with recoup.apply(work.model, plan):
            ratio = self._seconds(work) / plain
        predicted = 1 + plan.predicted.extra_time_ratio
        require(abs(ratio - predicted) <= 0.1, f"{ratio:.3f} of plain, predicted {predicted:.3f}")
        return {"ratio": ratio, "predicted_ratio": predicted}

    def a9(self) -> Numbers:
        """Measured op costs, added up, against the plain step: 10 %."""
        if not self.has_values:
            return {"left out": "times mean nothing here"}
        work = self.work("vit-l")
        plan = recoup.plan(work.model, work.batch, loss=work.loss, budget="100%", device="cuda", actions=())
        off = plan.predicted.plain_step_seconds / self._seconds(work) - 1
        require(abs(off) <= 0.1, f"op costs add up to {100 * off:+.1f} % of the step")
        return {"off": off}

    def _planned(self, name: str) -> tuple[Any, Workload]:
        there = self._made(name, torch.device("meta"))
        batch = there.batch if there.batch.is_floating_point() else torch.zeros(there.batch.shape, dtype=torch.long)
        plan = recoup.plan(
            there.model, batch, loss=there.loss, optimizer=torch.optim.AdamW, budget="60%", device=self.card
        )
        return plan, self.work(name)

    def _peak(self, work: Workload) -> int:
        optimizer = torch.optim.AdamW(work.model.parameters())
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            step(work, optimizer)
            work.model.zero_grad(set_to_none=True)
        return int(torch.cuda.max_memory_allocated())

    def _seconds(self, work: Workload) -> float:
        least = float("inf")
        for _ in range(6):
            torch.cuda.synchronize()
            began = time.perf_counter()
            step(work)
            work.model.zero_grad(set_to_none=True)
            torch.cuda.synchronize()
            least = min(least, time.perf_counter() - began)
        return least


def main(argv: list[str] | None = None) -> int:
    """Runs the checks; returns how many failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checks", nargs="*", help="A0 to A9; all if left out")
    parser.add_argument("--reduced", action="store_true", help="tiny models, no times and no bits: for the stub GPU")
    parser.add_argument("--minutes", type=float, default=9.0, help="begin nothing after these")
    parser.add_argument("--out", default="bench/results")
    given = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print(f"skipped: torch {torch.__version__} sees no CUDA GPU on this machine", file=sys.stderr)
        return 0
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic with it alone
    name = torch.cuda.get_device_name()
    until = time.perf_counter() + 60 * given.minutes
    checks = Acceptance(reduced=given.reduced, has_values="stub" not in name, until=until)
    wanted = [c.upper() for c in given.checks] or [f"A{i}" for i in range(10)]
    today = datetime.date.today().isoformat()
    data: Numbers = {
        "date": today,
        "hardware": name,
        "reduced": given.reduced,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "results": {},
    }
    folder = Path(given.out)
    folder.mkdir(parents=True, exist_ok=True)
    kind = name.replace(" ", "-").replace("(", "").replace(")", "").lower()
    failed = 0
    for check in wanted:
        run: Callable[[], Numbers] = getattr(checks, check.lower())
        began = time.perf_counter()
        numbers, passed = _result(run) if began <= until else ({"why": SKIPPED}, True)
        gc.collect()
        torch.cuda.empty_cache()
        seconds = time.perf_counter() - began
        data["results"][check] = {"passed": passed and SKIPPED not in numbers.values(), "seconds": seconds, **numbers}
        what = (run.__doc__ or "").strip().splitlines()[0]
        failed += not passed
        verdict = "FAIL" if not passed else "SKIP" if SKIPPED in numbers.values() else "PASS"
        print(f"{verdict} {check} ({seconds:.0f} s) {what} {json.dumps(numbers, default=str)}", flush=True)
        (folder / f"gpu-accept-{kind}-{today}.json").write_text(json.dumps(data, indent=1, default=str) + "\n")
    return failed


def _result(run: Callable[[], Numbers]) -> tuple[Numbers, bool]:
    """Returns a check's numbers and whether it passed."""
    try:
        return run(), True
    except Failed as error:
        return {"why": str(error)}, False
    except Exception as error:  # whatever a check meets is its result
        where = traceback.extract_tb(error.__traceback__)[-1]
        return {
            "why": f"{type(error).__name__}: {str(error)[:300]}",
            "where": f"{where.filename}:{where.lineno}",
        }, False


if __name__ == "__main__":
    sys.exit(main())
