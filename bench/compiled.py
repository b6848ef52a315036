"""Compiled steps within byte budgets, and beside torch's `activation_memory_budget`, on one meter.

    python -m bench.compiled [--backend aot_eager|inductor] [--form whole|blocks] [--settings N] [--descents N]
        [--layers N] [MODEL ...]

Budgets are shares of the measured peak of the step as torch compiles it. FLOPs are those of the graphs that run, by
torch's formulas, and our own for attention on a CPU, which torch has none for. Rows are kept in
`bench/results/compiled-cpu.json` as they are measured; what is there by the same torch is not measured again. Writes
the tables to `bench/results/compiled-cpu.md`.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch._functorch import config as functorch_config

from bench.workloads import Workload
from recoup.capture.snapshot import untouched
from recoup.compiled.fitting import CompiledFitting
from recoup.compiled.in_place import calling
from recoup.compiled.recording import Calls, CompileOptions
from recoup.errors import InfeasibleBudget

RESULTS = Path(__file__).parent / "results"
BUDGETS = (80, 60, 45, 35)
_LAYERS = 4
_ROUNDS = 7  # of steps whose CPU time is taken
_WIDTH = "hidden_size=64,num_attention_heads=2"
_TEXT = {"batch": 4, "seq": 128}
MODELS = {
    "gpt2": Workload(
        target="hf:gpt2?n_layer=4,n_embd=64,n_head=2,vocab_size=256", options=_TEXT, layers=("transformer.h.?",)
    ),
    "llama": Workload(
        target=f"hf:llama?num_hidden_layers=4,{_WIDTH},intermediate_size=172,vocab_size=256",
        options=_TEXT,
        layers=("model.layers.?",),
    ),
    "bert": Workload(
        target=f"hf:bert?num_hidden_layers=4,{_WIDTH},intermediate_size=256,vocab_size=256",
        options=_TEXT,
        layers=("bert.encoder.layer.?",),
    ),
    "vit": Workload(
        target=f"hf:vit?num_hidden_layers=4,{_WIDTH},intermediate_size=256,image_size=64,patch_size=8",
        options={"batch": 8, "image": 64},
        layers=("vit.layers.?",),
    ),
    "resnet": Workload(target="bench/targets.py:resnet_tiny", layers=("resnet.encoder.stages.?.layers.?",)),
    "unet": Workload(target="bench/targets.py:unet_tiny", layers=("down.?", "middle", "up.?")),
    # Named nowhere else:
    "mlp": Workload(target="bench/targets.py:mlp_tiny", layers=("layers.?",)),
    "mixer": Workload(target="bench/targets.py:mixer_tiny", layers=("layers.?",)),
    "conv-attention": Workload(target="bench/targets.py:conv_attention_tiny", layers=("layers.?",)),
    "state-space": Workload(target="bench/targets.py:state_space_tiny", layers=("layers.?",)),
}


def rows(
    name: str,
    backend: str,
    form: str,
    *,
    layers: int,
    budgets: list[int],
    settings: list[float],
    descents: list[float],
    floor: bool,
) -> Any:
    """Yields a model's rows: budgets, torch's settings with ours at the peak of each, falling budgets, the floor."""
    torch.manual_seed(0)
    torch.compiler.reset()
    workload = MODELS[name]
    workload = dataclasses.replace(workload, target=workload.target.replace(f"layer={_LAYERS}", f"layer={layers}"))
    workload = dataclasses.replace(workload, target=workload.target.replace(f"layers={_LAYERS}", f"layers={layers}"))
    target = workload.resolve()
    model = target.model
    objective, batch = target.objective()
    modules = tuple(workload.find_layers(model)) if form == "blocks" else ()
    options = CompileOptions.of({"backend": backend, "modules": modules})
    with untouched(model, batch, objective.functions):
        fitting = CompiledFitting(model, batch, objective, None, options)
        try:
            plain = fitting.record()
            flops = fitting.flops(fitting.torch_choice)
            for share in budgets:
                found = _fitted(fitting, plain * share // 100, flops)
                found.pop("calls", None)
                yield {"budget": share, "plain_bytes": plain} | found
            for setting in settings:
                with functorch_config.patch(activation_memory_budget=setting):
                    theirs = CompiledFitting(model, batch, objective, None, options)
                    its = theirs.compile_plain()
                row = {"setting": setting, "plain_bytes": plain, "peak_bytes": its.peak_bytes}
                row["flops"] = theirs.flops(theirs.torch_choice) / flops
                row["is_equal"] = fitting.compare_plain(its.calls).gradients_equal
                ours = _fitted(fitting, its.peak_bytes, flops)
                if (call := ours.pop("calls", None)) is not None:
                    row["its_cpu_seconds"], ours["cpu_seconds"] = _cpu_seconds(fitting, its.calls, call)
                yield row | {f"our_{k}": v for k, v in ours.items()}
            for share in descents:
                found = _fitted(fitting, int(plain * share / 100), flops)
                found.pop("calls", None)
                yield {"descent": share, "plain_bytes": plain} | found
                if "least_bytes" in found:
                    break
            if floor:
                found = _fitted(fitting, "min", flops)
                found.pop("calls", None)
                yield {"floor": "min", "plain_bytes": plain} | found
        finally:
            fitting.bench.restore()


def _fitted(fitting: CompiledFitting, budget: int | str, plain_flops: int) -> dict[str, Any]:
    """Returns what a fit within a budget measured; of one below the floor, the floor."""
    try:
        done = fitting.fit(budget, free_bytes=None, timed=False)
    except InfeasibleBudget as error:
        return {"least_bytes": error.minimum_bytes}
    done.applied.remove()
    evidence = done.evidence
    return {
        "calls": done.applied.calls,
        "peak_bytes": evidence.peak_bytes,
        "predicted_bytes": evidence.predicted_peak_bytes,
        "is_equal": evidence.gradients_equal,
        "gradient_error": evidence.max_gradient_error,
        "is_ok": evidence.ok,
        "flops": fitting.flops(fitting.last_choice) / plain_flops,
    }


def _cpu_seconds(fitting: CompiledFitting, *ways: Calls) -> list[float]:
    """Returns the least CPU seconds of a step by each way, one after the other in each of several rounds."""
    found: list[list[float]] = [[] for _ in ways]
    with fitting.bench.optimizing():
        for _ in range(_ROUNDS):
            for calls, seconds in zip(ways, found, strict=True):
                fitting.bench.restore()
                with calling(calls):
                    begun = time.process_time()
                    fitting.bench.step()
                    seconds.append(time.process_time() - begun)
    return [min(seconds) for seconds in found]


def table(results: dict[str, Any]) -> str:
    """Returns the rows as Markdown."""
    measured = " and ".join(sorted({f"{of['date']}, torch {of['torch']}" for of in results.values()}))
    lines = [
        f"Compiled steps, measured {measured}, on a CPU with one thread, a machine in use. Peaks in % of "
        "the compiled plain step's, in brackets how far the predicted one was off.",
        "",
        "| model | backend | graphs | plain | " + " | ".join(f"{b} %" for b in BUDGETS) + " | gradients |",
        "|---|---|---|---|" + "---|" * len(BUDGETS) + "---|",
    ]
    for key, of in results.items():
        name, backend, form = key.split("/")
        budgets = {r["budget"]: r for r in of["rows"] if "budget" in r}
        if not budgets:
            continue
        cells = [_cell(budgets[b]) if b in budgets else "" for b in BUDGETS]
        made = [r for r in budgets.values() if "peak_bytes" in r]
        worst = max((r["gradient_error"] for r in made), default=0.0)
        bits = "" if not made else "bit-equal" if all(r["is_equal"] for r in made) else f"to {worst:.0e}"
        plain = next(iter(budgets.values()))["plain_bytes"]
        lines.append(f"| {name} | {backend} | {form} | {plain / 2**20:.2f} MiB | {' | '.join(cells)} | {bits} |")
    lines += [
        "",
        "Beside `activation_memory_budget`: its peak and FLOPs at each setting, ours within its peak, in % of the "
        "step as torch compiles it; time is the least CPU time of a step, ours in % of its; `least`: our floor "
        "where its peak is below it.",
        "",
        "| model | backend | graphs | setting | its peak | its FLOPs | its gradients "
        "| our peak | our FLOPs | our time |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for key, of in results.items():
        for r in sorted((r for r in of["rows"] if "setting" in r), key=lambda r: r["setting"]):
            plain = r["plain_bytes"]
            ours = f"least {r['our_least_bytes'] / plain:.1%} | | " if "our_least_bytes" in r else ""
            ours = ours or f"{r['our_peak_bytes'] / plain:.1%} | {r['our_flops']:.1%} | {_time(r)}"
            its = f"{r['peak_bytes'] / plain:.1%} | {r['flops']:.1%} | {_bits(r)}"
            lines.append(f"| {' | '.join(key.split('/'))} | {r['setting']} | {its} | {ours} |")
    lines += [
        "",
        'Floors (`budget="min"`), in % of the compiled plain step\'s peak and of the lowest that '
        "`activation_memory_budget` reaches at any setting measured.",
        "",
        "| model | backend | graphs | floor | FLOPs | gradients | its lowest | floor, of that |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for key, of in results.items():
        its = min((r["peak_bytes"] for r in of["rows"] if "setting" in r), default=None)
        for r in (r for r in of["rows"] if "floor" in r):
            plain, peak = r["plain_bytes"], r["peak_bytes"]
            beside = "| " if its is None else f"{its / plain:.1%} | {peak / its:.3f}"
            lines.append(f"| {' | '.join(key.split('/'))} | {_cell(r)} | {r['flops']:.1%} | {_bits(r)} | {beside} |")
    lines += [
        "",
        "Falling budgets: budget and peak, in % of the compiled plain step's.",
        "",
    ]
    for key, of in results.items():
        falling = [r for r in of["rows"] if "descent" in r and "peak_bytes" in r]
        if falling:
            pairs = [f"{r['descent']:.1f}: {100 * r['peak_bytes'] / r['plain_bytes']:.1f}" for r in falling]
            lines.append(f"- {', '.join(key.split('/'))}: {'; '.join(pairs)}.")
    return "\n".join(lines) + "\n"


def _time(row: dict[str, Any]) -> str:
    return f"{row['our_cpu_seconds'] / row['its_cpu_seconds']:.1%}" if "our_cpu_seconds" in row else ""


def _bits(row: dict[str, Any]) -> str:
    return {None: "", True: "bit-equal", False: "differ"}[row.get("is_equal")]


def _cell(row: dict[str, Any]) -> str:
    plain = row["plain_bytes"]
    if "least_bytes" in row:
        return f"least {row['least_bytes'] / plain:.1%}"
    error = row["predicted_bytes"] / row["peak_bytes"] - 1
    return f"{row['peak_bytes'] / plain:.1%} ({error:+.1%})" + ("" if row["is_ok"] else " NOT OK")


def main() -> None:
    """Measures what is missing, and writes rows and tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--backend", default="aot_eager")
    parser.add_argument("--form", default="whole", choices=("whole", "blocks"))
    parser.add_argument("--settings", type=int, default=21, help="of activation_memory_budget, from 0 to 1")
    parser.add_argument("--descents", type=int, default=20, help="falling budgets, from 100 %% to the floor")
    parser.add_argument("--layers", type=int, default=_LAYERS, help="of the transformers: inductor takes minutes for 4")
    given = parser.parse_args()
    torch.set_num_threads(1)
    path = RESULTS / "compiled-cpu.json"
    settings = [round(i / max(1, given.settings - 1), 3) for i in range(given.settings)]
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    for name in given.models or MODELS:
        layers = f" of {given.layers}" if given.layers != _LAYERS and "layer" in MODELS[name].target else ""
        key = f"{name}{layers}/{given.backend}/{given.form}"
        results = _kept(path)
        of = results.get(key, {})
        found: list[Any] = of.get("rows", []) if of.get("torch") == torch.__version__ else []
        budgets = [b for b in BUDGETS if b not in [r.get("budget") for r in found]]
        left = [s for s in settings if s not in [r.get("setting") for r in found]]
        fallen = {r["descent"]: "least_bytes" in r for r in found if "descent" in r}
        descents = [100 - 70 * i / given.descents for i in range(given.descents)]
        descents = [] if any(fallen.values()) else [share for share in descents if share not in fallen]
        floor = not any("floor" in r for r in found)
        if not budgets and not left and not descents and not floor:
            continue
        began = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for row in rows(
                name,
                given.backend,
                given.form,
                layers=given.layers,
                budgets=budgets,
                settings=left,
                descents=descents,
                floor=floor,
            ):
                found.append(row)
                print(key, f"{time.perf_counter() - began:.0f} s", json.dumps(row), flush=True)
                results[key] = {"date": today, "torch": torch.__version__, "rows": found}
                path.write_text(json.dumps(results, indent=1) + "\n")
    (RESULTS / "compiled-cpu.md").write_text(table(_kept(path)))


def _kept(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


if __name__ == "__main__":
    main()
