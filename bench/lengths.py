"""The longest sequence of 8B models on cards of 8 to 80 GB and on 1, 8 and 32 H100s, by planning alone.

python -m bench.lengths                 # all tables, minutes on one core, no GPU
python -m bench.lengths --models Llama-3.1-8B --methods QLoRA --out FILE.md
python -m bench.lengths --check Llama-3.1-8B full recoup 500000    # the law beside the whole model's simulation

Method. A recipe is a plan (which layers run again, what is tiled, what goes to the host). It is simulated by recoup's
own engine on the device table's H100 for models of four and five layers at three lengths. The step falls into segments:
what runs before, in and after layers, forward and backward, layers counted from both ends, and the optimizer. A
segment's highest level is a line in the number of layers, and in tokens from one length to the next (other ops are
highest in long steps than in short ones). A whole model's peak is that of its highest segment: segments in the middle
lie between those at the ends.
A card's longest sequence is where that meets its bytes less 0.6 GiB (context and cuBLAS).

Several GPUs shard parameters, gradients and optimizer state (FSDP2; `cost/sharding.py`), each with a sequence of its
own. Seconds are those of a roofline; the traffic of FSDP is not in them.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import recoup
from recoup.capture.step import make_objective
from recoup.cost.model import PricedTrace
from recoup.cost.sharding import ShardedCost
from recoup.ir.decision import Decision, Recompute, Rederive, TileLoss, TileModule
from recoup.ir.trace import Trace
from recoup.planner.driver import Planner
from recoup.planner.request import planner_for
from recoup.targets.huggingface import build
from recoup.targets.parse import HubTarget

GB, GIB = 10**9, 2**30
RESERVED_BYTES = int(0.6 * GIB)
LENGTHS = (32768, 131072, 524288)
CARDS_GB = (8, 12, 16, 24, 40, 48, 80)
NUM_GPUS = (1, 8, 32)
HOST_GB = 64  # of memory a GPU, in one of the columns
_SHAPES = {
    "Llama-3.1-8B": ("llama", 32, {"intermediate_size": 14336, "vocab_size": 128256}),
    "Qwen3-8B": ("qwen3", 36, {"intermediate_size": 12288, "vocab_size": 151936, "head_dim": 128}),
}
_COMMON = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": False}
METHODS = ("full", "LoRA", "QLoRA")
_RANK = 32
_DEPTHS = (4, 5)
_NUM_TILES = 16  # of the tokens, for MLPs and norms; tiles of a fixed length make long steps slow to simulate
_LOSS_TOKENS = 1024
OURS = "recoup"
# (model, method, GPUs, card in GB) -> tokens in all, as their authors publish them; shared/asks.md has the threads.
PUBLISHED = {
    **{("Llama-3.1-8B", "QLoRA", 1, gb): f"{tokens:,} (Unsloth)" for gb, tokens in zip(
        CARDS_GB, (2972, 21848, 40724, 78475, 153977, 191728, 342733), strict=True)},
    ("Llama-3.1-8B", "full", 1, 80): "500,000 (ALST; plain Hugging Face 32,000)",
    ("Llama-3.1-8B", "full", 8, 80): "3,700,000 in all, 462,500 a GPU (ALST)",
    ("Llama-3.1-8B", "full", 32, 80): "15,000,000 in all, 468,750 a GPU (ALST)",
    ("Qwen3-8B", "full", 8, 80): "1,048,576 in all, 131,072 a GPU at 56.2 GB (TRL)",
}  # fmt: skip


class _Lora(nn.Module):
    """A frozen linear layer with a trained product beside it; `quantized`: its weight is kept in 4 bits.

    The stand-in keeps what bitsandbytes keeps (half a byte a weight and a scale for every 64) and makes the weight in
    bfloat16 for each product. The numbers are not NF4's: only bytes are looked at.
    """

    def __init__(self, base: nn.Linear, *, quantized: bool) -> None:
        super().__init__()
        like = {"device": base.weight.device, "dtype": base.weight.dtype}
        self.shape = tuple(base.weight.shape)
        self.base = None if quantized else base
        if quantized:
            num = base.weight.numel()
            self.register_buffer("packed", torch.empty(num // 2, dtype=torch.uint8, device="meta"))
            self.register_buffer("scales", torch.empty(num // 64, dtype=torch.bfloat16, device="meta"))
        self.down = nn.Linear(base.in_features, _RANK, bias=False, **like)
        self.up = nn.Linear(_RANK, base.out_features, bias=False, **like)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.base is not None:
            made = self.base(x)
        else:
            blocks = self.packed.view(-1, 32).to(torch.bfloat16) * self.scales.unsqueeze(1)
            made = F.linear(x.to(torch.bfloat16), torch.cat([blocks, blocks], 1).view(self.shape))
        return made + self.up(self.down(x))


def make(model: str, method: str, *, layers: int, tokens: int) -> tuple[nn.Module, Any]:
    """Returns a model of so many layers on `meta`, and one example."""
    kind, _, shape = _SHAPES[model]
    overrides = {**_COMMON, **shape, "num_hidden_layers": layers, "max_position_embeddings": 1 << 23}
    target = HubTarget(model_type=kind, overrides=tuple(overrides.items()))
    made, batch = build(target, batch=1, seq=tokens, image=None, dtype=torch.bfloat16, device="meta")
    if method == "full":
        return made, batch
    made.requires_grad_(False)
    for layer in made.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name, child in list(part.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(part, name, _Lora(child, quantized=method == "QLoRA"))
    made.enable_input_require_grads()
    return made, batch


def recipes(layers: int, tokens: int) -> dict[str, tuple[Decision, ...]]:
    """Returns plans by name; the last one is ours."""
    paths = [f"model.layers.{i}" for i in range(layers)]
    tile_tokens = -(-tokens // _NUM_TILES)
    each = tuple(Recompute(path=path) for path in paths)
    offloaded = tuple(Recompute(path=path, offload=True) for path in paths)
    attention = tuple(Recompute(path=f"{path}.self_attn") for path in paths)
    head = (TileLoss(path="lm_head", tile_tokens=_LOSS_TOKENS),)
    mlps = tuple(TileModule(path=f"{path}.mlp", tile_tokens=tile_tokens) for path in paths)
    norm_paths = [f"{path}.{name}" for path in paths for name in ("input_layernorm", "post_attention_layernorm")]
    norms = tuple(TileModule(path=path, tile_tokens=tile_tokens) for path in (*norm_paths, "model.norm"))
    ours = tuple(dataclasses.replace(region, inside="rederive") for region in offloaded)
    return {
        "transformers": each,
        "Unsloth": (*offloaded, *head),
        "ALST": (*offloaded, *head, *mlps),
        OURS: (Rederive(path=""), *ours, *attention, *head, *mlps, *norms),
    }


STATE_OUT = ("ALST", OURS)  # recipes with the optimizer's state on the host between steps


def planner(model: str, method: str, *, layers: int, tokens: int, state_out: bool) -> Planner:
    """Returns the planner of one step on an H100, AdamW in the weights' precision."""
    made, batch = make(model, method, layers=layers, tokens=tokens)
    objective, given = make_objective(batch)
    optimizer = torch.optim.AdamW([p for p in made.parameters() if p.requires_grad])
    if state_out and method == "full":  # LoRA's state is small
        recoup.offload_optimizer(optimizer)
    found, _, _ = planner_for(
        made, given, objective=objective, optimizer=optimizer, device="h100-sxm", actions=("offload",), cost=None
    )
    return found


# -- one step in segments ---------------------------------------------------------------------------------------------

Segment = tuple[Any, ...]


def _layer(path: str) -> int | None:
    parts = path.split(".")
    return next((int(part) for part in parts if part.isdigit()), None)


def segments(trace: Trace, levels: Sequence[int], layers: int) -> dict[Segment, int]:
    """Returns the highest level of each segment of a step; layers are counted from the nearer end."""
    near = _DEPTHS[0] // 2
    found: dict[Segment, int] = {}
    seen: set[str] = set()  # phases in which a layer ran already
    for op, level in zip(trace.ops, levels, strict=True):
        layer = _layer(trace.calls[op.call].path) if op.call >= 0 else None
        phase = "forward" if op.phase == "loss" else op.phase
        if phase == "optimizer":
            key: Segment = (phase,)
        elif layer is None:
            key = (phase, "after" if phase in seen else "before")
        elif near <= layer < layers - near:
            seen.add(phase)
            continue
        else:
            seen.add(phase)
            key = (phase, layer if layer < near else layer - layers)
        found[key] = max(found.get(key, 0), level)
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """One simulated step.

    Attributes:
        levels: of its segments, by the number of GPUs. seconds, optimizer_seconds: of forward and backward, and after.
        input_bytes: of layers' inputs on the host. state_bytes: of optimizer state there.
    """

    levels: dict[int, dict[Segment, int]]
    seconds: float
    optimizer_seconds: float
    input_bytes: int
    state_bytes: int


def _sharded(trace: Trace, num_gpus: int) -> Trace:
    """Returns the trace of a plan's step with the optimizer's state, which was taken from one GPU's, sharded."""
    storages = tuple(
        dataclasses.replace(s, nbytes=-(-s.nbytes // num_gpus)) if s.category == "optimizer" else s
        for s in trace.storages
    )
    return dataclasses.replace(trace, storages=storages)


def simulate(one: Planner, decisions: tuple[Decision, ...], layers: int) -> Step:
    """Returns the simulated step of a planner's model with some decisions."""
    priced = one.simulate_priced(decisions)
    candidate = one.note(decisions, priced)
    levels: dict[int, dict[Segment, int]] = {}
    for num_gpus in NUM_GPUS:
        cost = ShardedCost(one.cost, world_size=num_gpus)

        def found(trace: Trace, price: Callable[[Trace], PricedTrace] = cost.price) -> Iterator[tuple[Segment, int]]:
            made = price(trace)
            raised = [level + one.fixed_bytes for level in made.trace.levels(made.op_workspace_bytes)]
            yield from segments(trace, raised, layers).items()

        plan = dict(found(_sharded(priced.trace, num_gpus)))
        optimizer = {key: level for key, level in found(one.trace) if key == ("optimizer",)}
        levels[num_gpus] = plan | optimizer
    state_bytes, at = one.trace.optimizer_host_bytes, zip(one.trace.ops, one.priced.op_seconds, strict=True)
    optimizer_seconds = sum(seconds for op, seconds in at if op.phase == "optimizer")
    if one.link is not None:
        optimizer_seconds += state_bytes * (1 / one.link.back_bytes + 1 / one.link.out_bytes)
    return Step(
        levels=levels,
        seconds=candidate.step_seconds - optimizer_seconds,
        optimizer_seconds=optimizer_seconds,
        input_bytes=candidate.host_bytes - state_bytes,
        state_bytes=state_bytes,
    )


# -- whole models ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Law:
    """What a recipe comes to for a whole model, from steps of few layers at two lengths: by (layers, tokens).

    Attributes:
        depth: layers of the whole model. input_bytes: of one layer's input, a token.
    """

    steps: dict[tuple[int, int], Step]
    depth: int
    input_bytes: int

    def _whole(self, tokens: int, of: Callable[[Step], float]) -> float:
        """Returns a quantity that is a line in layers, and in tokens from one length to the next."""
        few, more = _DEPTHS
        pairs = list(itertools.pairwise(LENGTHS))
        low, high = next((pair for pair in pairs if tokens <= pair[1]), pairs[-1])
        deep, long = (self.depth - few) / (more - few), (tokens - low) / (high - low)
        at = {point: of(step) for point, step in self.steps.items()}
        short = at[few, low] + (at[more, low] - at[few, low]) * deep
        wide = at[few, high] + (at[more, high] - at[few, high]) * deep
        return short + (wide - short) * long

    def peak_bytes(self, tokens: int, num_gpus: int = 1, host_bytes: float | None = None) -> float:
        """Returns the peak of the highest segment.

        Args:
            host_bytes: of memory a GPU; what does not go there, the inputs of the last layers, stays on the card.
        """
        kept = 0
        offloads = self._whole(tokens, lambda step: step.input_bytes) > 0
        if host_bytes is not None and offloads:
            left = host_bytes - self.state_bytes(num_gpus)
            kept = max(self.depth - max(int(left / (tokens * self.input_bytes)), 0), 0)
        first = self.depth - kept  # whose input stays

        def num_kept(segment: Segment) -> int:
            phase, where = (*segment, "after")[:2]
            if phase == "optimizer" or (phase, where) in (("forward", "before"), ("backward", "after")):
                return 0
            return kept if isinstance(where, str) else max(where % self.depth - first, 0)

        return max(
            self._whole(tokens, lambda step, key=key: step.levels[num_gpus][key])  # type: ignore[misc]
            + num_kept(key) * tokens * self.input_bytes
            for key in next(iter(self.steps.values())).levels[num_gpus]
        )

    def state_bytes(self, num_gpus: int) -> float:
        """Returns the bytes of optimizer state on the host, a GPU."""
        return self._whole(LENGTHS[0], lambda step: step.state_bytes) / num_gpus

    def host_bytes(self, tokens: int, num_gpus: int = 1) -> float:
        """Returns the bytes on the host, a GPU."""
        return self._whole(tokens, lambda step: step.input_bytes) + self.state_bytes(num_gpus)

    def seconds(self, tokens: int) -> float:
        """Returns a step's seconds: so many a token, so many a pair of tokens, and the optimizer's."""
        low, high = (self._whole(n, lambda step: step.seconds) / n for n in (LENGTHS[0], LENGTHS[-1]))
        pair = max((high - low) / (LENGTHS[-1] - LENGTHS[0]), 0.0)
        optimizer = self._whole(tokens, lambda step: step.optimizer_seconds)
        return tokens * (low + pair * (tokens - LENGTHS[0])) + optimizer

    def longest(self, card_bytes: float, num_gpus: int = 1, host_bytes: float | None = None) -> int:
        """Returns the most tokens whose peak is within a card, 0 if none."""
        low, high = 0, 1 << 26
        while high - low > 1:
            middle = (low + high) // 2
            fits = self.peak_bytes(middle, num_gpus, host_bytes) <= card_bytes - RESERVED_BYTES
            low, high = (middle, high) if fits else (low, middle)
        return low


def laws(model: str, method: str, names: Sequence[str]) -> dict[str, Law]:
    """Returns the law of each recipe, from simulated steps."""
    found: dict[str, dict[tuple[int, int], Step]] = {name: {} for name in names}
    for layers in _DEPTHS:
        for tokens in LENGTHS:
            planners: dict[bool, Planner] = {}
            for name in names:
                state_out = name in STATE_OUT and method == "full"
                if state_out not in planners:
                    planners[state_out] = planner(model, method, layers=layers, tokens=tokens, state_out=state_out)
                plan = recipes(layers, tokens)[name]
                found[name][layers, tokens] = simulate(planners[state_out], plan, layers)
    inputs = int(_COMMON["hidden_size"]) * 2
    return {name: Law(steps=steps, depth=_SHAPES[model][1], input_bytes=inputs) for name, steps in found.items()}


def table(model: str, method: str, found: dict[str, Law]) -> str:
    """Returns two Markdown tables: a line a card and a line a number of H100s, a column a recipe."""
    names = list(found)
    ours = found[names[-1]]

    def cell(law: Law, tokens: int) -> str:
        return f"{tokens:,} ({law.seconds(tokens):,.0f} s)" if tokens else "-"

    def row(first: str, gb: int, num_gpus: int) -> str:
        lengths = {name: law.longest(gb * GB, num_gpus) for name, law in found.items()}
        within = ours.longest(gb * GB, num_gpus, HOST_GB * GB)
        own = lengths[names[-1]]
        host = f"{ours.host_bytes(own, num_gpus) / GB:,.0f} GB" if own else "-"
        cells = [first, *(cell(found[name], n) for name, n in lengths.items()), host, cell(ours, within)]
        return f"| {' | '.join([*cells, PUBLISHED.get((model, method, num_gpus, gb), '')])} |"

    head = f"{' | '.join(names)} | host of {names[-1]} | {names[-1]}, {HOST_GB} GB of host | published"
    lines = [f"## {model}, {method}", "", f"| card | {head} |", "|---" * (len(names) + 4) + "|"]
    lines += [row(f"{gb} GB", gb, 1) for gb in CARDS_GB]
    lines += ["", f"| H100 80 GB, tokens a GPU | {head} |", "|---" * (len(names) + 4) + "|"]
    lines += [row(f"{num}", CARDS_GB[-1], num) for num in NUM_GPUS]
    return "\n".join(lines)


def check(model: str, method: str, name: str, tokens: int) -> str:
    """Returns what the law says of a length beside the simulation of the whole model."""
    law, depth = laws(model, method, [name])[name], _SHAPES[model][1]
    one = planner(model, method, layers=depth, tokens=tokens, state_out=name in STATE_OUT)
    found = one.simulate(recipes(depth, tokens)[name])
    peak, host = law.peak_bytes(tokens), law.host_bytes(tokens)
    return (
        f"{model}, {method}, {name}, {tokens:,} tokens, {depth} layers: peak {found.peak_bytes / GB:.2f} GB "
        f"(law {peak / GB:.2f}, {peak / found.peak_bytes - 1:+.2%}), host {found.host_bytes / GB:.1f} GB "
        f"(law {host / GB:.1f}), {found.step_seconds:,.1f} s (law {law.seconds(tokens):,.1f}), in the {found.phase}"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the tables, and writes them where `--out` says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(_SHAPES), choices=list(_SHAPES))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--recipes", nargs="+", default=list(recipes(1, 1)), choices=list(recipes(1, 1)))
    parser.add_argument("--check", nargs=4, metavar=("MODEL", "METHOD", "RECIPE", "TOKENS"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    began = time.process_time()
    if options.check:
        print(check(*options.check[:3], int(options.check[3])), flush=True)
    pages = []
    for model in options.models if not options.check else ():
        for method in options.methods:
            pages.append(table(model, method, laws(model, method, options.recipes)))
            print(pages[-1], "\n", flush=True)
    print(f"{time.process_time() - began:.0f} s of CPU, torch {torch.__version__}")
    if options.out is not None:
        options.out.write_text("# Longest sequences, by planning alone\n\n" + "\n\n".join(pages) + "\n")


if __name__ == "__main__":
    main()
