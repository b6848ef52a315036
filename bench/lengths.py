"""The longest sequence of 8B models on cards of 8 to 80 GB, by planning alone: recoup's plans and published recipes.

python -m bench.lengths                 # the table, minutes on one core, no GPU
python -m bench.lengths --out FILE.md

Method. A recipe is a plan (which layers run again, what is tiled, what goes to the host). Each is simulated by
recoup's own engine on the device table's H100 for models of six and eight layers at three lengths. Peak bytes are `a +
b * tokens + layers * (c + d * tokens)`: four numbers from four points, and the third length is the check of it (the
largest error is printed). A card's longest sequence is where that meets its bytes less 0.6 GiB (context and cuBLAS).
Seconds are quadratic in tokens (attention) and linear in layers.

Full fine-tuning is not in it: with gradients of all weights the peak moves from the first layers' backward to the last
ones' as models get deeper, so no law from few layers holds for many.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from recoup.capture.step import make_objective
from recoup.ir.decision import Decision, Recompute, Rederive, TileLoss, TileModule
from recoup.planner.request import planner_for
from recoup.targets.huggingface import build
from recoup.targets.parse import HubTarget

GB, GIB = 10**9, 2**30
RESERVED_BYTES = int(0.6 * GIB)
LENGTHS = (16384, 32768, 65536)
CARDS_GB = (8, 12, 16, 24, 40, 48, 80)
_SHAPES = {
    "Llama-3.1-8B": ("llama", 32, {"intermediate_size": 14336, "vocab_size": 128256}),
    "Qwen3-8B": ("qwen3", 36, {"intermediate_size": 12288, "vocab_size": 151936, "head_dim": 128}),
}
_COMMON = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": False}
METHODS = ("LoRA", "QLoRA")
_RANK = 32
_DEPTHS = (6, 8)  # below, fewer copies from the host are under way at a time
_TILE_TOKENS = 4096
# (model, method, card in GB) -> tokens, as their authors publish them; shared/asks.md has the threads.
PUBLISHED = {
    **{("Llama-3.1-8B", "QLoRA", gb): (tokens, "Unsloth") for gb, tokens in zip(
        CARDS_GB, (2972, 21848, 40724, 78475, 153977, 191728, 342733), strict=True)},
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
    made.requires_grad_(False)
    for layer in made.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name, child in list(part.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(part, name, _Lora(child, quantized=method == "QLoRA"))
    made.enable_input_require_grads()
    return made, batch


def recipes(layers: int) -> dict[str, tuple[Decision, ...]]:
    """Returns plans by name; the last one is ours."""
    paths = [f"model.layers.{i}" for i in range(layers)]
    each = tuple(Recompute(path=path) for path in paths)
    offloaded = tuple(Recompute(path=path, offload=True) for path in paths)
    attention = tuple(Recompute(path=f"{path}.self_attn") for path in paths)
    head = (TileLoss(path="lm_head", tile_tokens=1024),)
    mlps = tuple(TileModule(path=f"{path}.mlp", tile_tokens=_TILE_TOKENS) for path in paths)
    norm_paths = [f"{path}.{name}" for path in paths for name in ("input_layernorm", "post_attention_layernorm")]
    norms = tuple(TileModule(path=path, tile_tokens=_TILE_TOKENS) for path in (*norm_paths, "model.norm"))
    ours = tuple(dataclasses.replace(region, inside="rederive") for region in offloaded)
    return {
        "plain": (),
        "every layer recomputed": each,
        "+ inputs on the host": offloaded,
        "+ tiled loss": (*offloaded, *head),
        "+ tiled MLPs": (*offloaded, *head, *mlps),
        "recoup": (Rederive(path=""), *ours, *attention, *head, *mlps, *norms),
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Law:
    """Peak and seconds of a recipe as a function of tokens, for a whole model.

    Attributes:
        fixed_bytes, token_bytes: of the peak. seconds: coefficients of tokens ** 0, 1, 2. error: of the check.
    """

    fixed_bytes: float
    token_bytes: float
    seconds: tuple[float, ...]
    error: float

    def longest(self, card_bytes: float) -> int:
        """Returns the most tokens whose peak is within a card, 0 if none."""
        return max(int((card_bytes - RESERVED_BYTES - self.fixed_bytes) / self.token_bytes), 0)

    def step_seconds(self, tokens: int) -> float:
        """Returns the predicted seconds of a step on an H100."""
        return sum(c * tokens**i for i, c in enumerate(self.seconds))


def laws(model: str, method: str, names: Sequence[str]) -> dict[str, Law]:
    """Returns the law of each recipe, from simulated steps of six and eight layers."""
    found: dict[tuple[str, int, int], tuple[int, float]] = {}
    for layers in _DEPTHS:
        for tokens in LENGTHS:
            made, batch = make(model, method, layers=layers, tokens=tokens)
            objective, given = make_objective(batch)
            optimizer = None if method == "full" else torch.optim.AdamW  # full: its state on the host, as ALST has it
            planner, _, _ = planner_for(
                made,
                given,
                objective=objective,
                optimizer=optimizer,
                device="h100-sxm",
                actions=("offload",),
                cost=None,
            )
            for name in names:
                candidate = planner.simulate(recipes(layers)[name])
                found[name, layers, tokens] = (candidate.peak_bytes, candidate.step_seconds)
    depth = _SHAPES[model][1]
    result = {}
    for name in names:

        def whole(tokens: int, which: int, name: str = name) -> float:
            one, two = (found[name, layers, tokens][which] for layers in _DEPTHS)
            return one + (two - one) * (depth - _DEPTHS[0]) / (_DEPTHS[1] - _DEPTHS[0])

        low, middle, high = LENGTHS
        slope = (whole(high, 0) - whole(middle, 0)) / (high - middle)
        fixed = whole(high, 0) - slope * high
        error = abs(fixed + slope * low - whole(low, 0)) / whole(low, 0)
        points = torch.tensor([[1.0, n, n * n] for n in LENGTHS], dtype=torch.float64)
        seconds = torch.linalg.solve(points, torch.tensor([whole(n, 1) for n in LENGTHS], dtype=torch.float64))
        result[name] = Law(fixed_bytes=fixed, token_bytes=slope, seconds=tuple(seconds.tolist()), error=error)
    return result


def table(model: str, method: str, names: Sequence[str]) -> str:
    """Returns a Markdown table: a line a card, a column a recipe, the published figure beside them."""
    found = laws(model, method, names)
    depth = _SHAPES[model][1]
    lines = [f"## {model}, {method}", "", f"| card | {' | '.join(names)} | s/step | host | published |"]
    lines.append("|---" * (len(names) + 4) + "|")
    for gb in CARDS_GB:
        lengths = [found[name].longest(gb * GB) for name in names]
        ours = lengths[-1]
        host_bytes = ours * int(_COMMON["hidden_size"]) * 2 * depth
        published = PUBLISHED.get((model, method, gb))
        beside = f"{published[0]:,} ({published[1]})" if published else ""
        shown = " | ".join(f"{n:,}" if n else "-" for n in lengths)
        seconds = f"{found[names[-1]].step_seconds(ours):,.0f} | {host_bytes / GB:,.0f} GB" if ours else "- | -"
        lines.append(f"| {gb} GB | {shown} | {seconds} | {beside} |")
    worst = max(law.error for law in found.values())
    return "\n".join([*lines, "", f"Largest error of the law at its third length: {worst:.2%}."])


def main() -> None:
    """Prints the tables, and writes them where `--out` says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(_SHAPES), choices=list(_SHAPES))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--recipes", nargs="+", default=list(recipes(1)), choices=list(recipes(1)))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    began = time.perf_counter()
    pages = []
    for model in options.models:
        for method in options.methods:
            pages.append(table(model, method, options.recipes))
            print(pages[-1], "\n", flush=True)
    print(f"{time.perf_counter() - began:.0f} s, torch {torch.__version__}")
    if options.out is not None:
        options.out.write_text("# Longest sequences, by planning alone\n\n" + "\n\n".join(pages) + "\n")


if __name__ == "__main__":
    main()
