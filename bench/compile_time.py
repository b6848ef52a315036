"""What planning adds to compiling: CPU seconds of torch's own compile and of `recoup.compile`'s, first step included.

    python -m bench.compile_time [--backend aot_eager|inductor] [--rounds N] [--json FILE] [--profile] [MODEL ...]

Ways to compile take turns in each of some rounds, each from a fresh compiler; what a process imports once is paid in a
round before. Inductor keeps nothing on disk. Budgets are shares of the measured peak of the step as torch compiles it.
`fit` is timed once, with the seconds of it that are planning alone. Writes a table beside the JSON file.
"""

from __future__ import annotations

import argparse
import cProfile
import datetime
import json
import platform
import pstats
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config

import recoup
from bench.compiled import MODELS
from recoup.capture.snapshot import untouched
from recoup.compiled.fitting import CompiledFitting
from recoup.compiled.recording import CompileOptions

SHARES = (80, 50, 35)  # budgets, in % of the plain peak
WHOLE = ("gpt2", "bert", "llama", "vit", "resnet", "unet")
Row = dict[str, Any]


def row(name: str, backend: str, rounds: int) -> Row:
    """Returns what one model's compiles took, in CPU seconds: by way, one a round."""
    torch.manual_seed(0)
    target = MODELS[name].resolve()
    model = target.model
    objective, batch = target.objective()
    options = {"backend": backend}
    with untouched(model, batch, objective.functions):
        plain = CompiledFitting(model, batch, objective, None, CompileOptions.of(options)).compile_plain().peak_bytes

    def step() -> None:
        objective.run(model, batch).backward()  # type: ignore[no-untyped-call]
        model.zero_grad()

    def own() -> None:
        model.compile(backend=backend)
        step()
        model._compiled_call_impl = None

    def ours(share: int) -> None:
        handle = recoup.compile(model, budget=plain * share // 100, compiled=options)
        step()
        handle.remove()

    ways: dict[str, Callable[[], None]] = {"torch": own}
    ways |= {f"{share} %": lambda share=share: ours(share) for share in SHARES}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds + 1):
        for way, work in ways.items():
            took = _seconds(work)
            if number:
                seconds[way].append(took)
    return {"plain_bytes": plain, "seconds": seconds, "fit": _fit_seconds(name, backend, plain)}


def _fit_seconds(name: str, backend: str, plain: int) -> Row:
    """Returns the CPU seconds of a `fit` within half of the plain peak, or the least, and of its planning."""
    target = MODELS[name].resolve()
    objective, batch = target.objective()
    torch.compiler.reset()
    fitting = CompiledFitting(target.model, batch, objective, None, CompileOptions.of({"backend": backend}))
    with untouched(target.model, batch, objective.functions):
        took = {"record": _seconds(fitting.record), "plan": _seconds(fitting.combinations, is_fresh=False)}
        budget = max(plain // 2, min(c.peak_bytes for c in fitting.combinations()))

        def fit() -> None:
            try:
                fitting.fit(budget, free_bytes=None, timed=False)
            except recoup.InfeasibleBudget:
                fitting.fit("min", free_bytes=None, timed=False)

        took["compile and prove"] = _seconds(fit, is_fresh=False)
        fitting.bench.restore()
    return took


def _seconds(work: Callable[[], Any], *, is_fresh: bool = True) -> float:
    """Returns the CPU seconds that something takes; `is_fresh`: with nothing compiled before."""
    if is_fresh:
        torch.compiler.reset()
    begun = time.process_time()
    work()
    return round(time.process_time() - begun, 3)


def table(found: Row) -> str:
    """Returns the rows as Markdown."""
    lines = [
        f"Compile time, {found['date']}, torch {found['torch']}, {found['machine']}, one thread: `{found['command']}`.",
        "",
        "CPU seconds of compiling and the first step: torch's own, the least of the rounds; ours in torch's, least by "
        "least, in brackets median by median; then `fit` within half of the plain peak: compiling the plain step, "
        "planning, the rest.",
        "",
        "| model | backend | rounds | torch | " + " | ".join(f"{share} %" for share in SHARES) + " | fit |",
        "|---|---|---|---|" + "---|" * len(SHARES) + "---|",
    ]
    for key, of in found["rows"].items():
        own = of["seconds"]["torch"]
        cells = [
            f"{min(took) / min(own):.2f} ({statistics.median(took) / statistics.median(own):.2f})"
            for way, took in of["seconds"].items()
            if way != "torch"
        ]
        fit = " + ".join(f"{seconds:.2f}" for seconds in of["fit"].values())
        lines.append(
            f"| {' | '.join(key.split('/'))} | {len(own)} | {min(own):.2f} s | {' | '.join(cells)} | {fit} s |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--backend", default="aot_eager")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", action="store_true", help="where the time goes, by function")
    given = parser.parse_args()
    torch.set_num_threads(1)
    command = f"python -m bench.compile_time --backend {given.backend} --rounds {given.rounds}"
    found: Row = json.loads(given.json.read_text()) if given.json and given.json.exists() else {"rows": {}}
    found |= {"date": datetime.datetime.now(datetime.UTC).date().isoformat(), "torch": torch.__version__}
    found |= {"machine": f"{platform.machine()} ({_processor()})", "command": command}
    for name in given.models or WHOLE:
        profile = cProfile.Profile(time.process_time) if given.profile else None
        nothing_kept = inductor_config.patch(force_disable_caches=True)
        with warnings.catch_warnings(), nothing_kept, functorch_config.patch(enable_autograd_cache=False):
            warnings.simplefilter("ignore")
            if profile is not None:
                profile.enable()
            found["rows"][f"{name}/{given.backend}"] = row(name, given.backend, given.rounds)
        if profile is not None:
            profile.disable()
            pstats.Stats(profile).sort_stats("cumulative").print_stats("recoup", 40)
        if given.json:
            given.json.write_text(json.dumps(found, indent=1) + "\n")
            given.json.with_suffix(".md").write_text(table(found))
        print(table(found | {"rows": {k: of for k, of in found["rows"].items() if k.startswith(name)}}), flush=True)


def _processor() -> str:
    """Returns the processor's name, where Linux tells it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


if __name__ == "__main__":
    main()
