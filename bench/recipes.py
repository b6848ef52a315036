"""What recoup's planner says of published training recipes, beside the memory that their authors measured.

python -m bench.recipes                 # all rows, minutes on one core, no GPU
python -m bench.recipes --only diffusers --out FILE.md

Each recipe is rebuilt from its source (model, batch, precision, what is checkpointed) on `meta` and its step is simulated
for the device named; nothing is allocated. What a recipe holds beside the simulated step (optimizer states in another
precision, for example) is a named term with its arithmetic. Where a source gives two lengths or two settings of one
job, their difference is compared too: in it what the source does not say (the optimizer) cancels.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from recoup.capture.step import make_objective
from recoup.cost.devices import get_device
from recoup.cost.model import CostModel
from recoup.cost.roofline import RooflineCost
from recoup.cost.sharding import ShardedCost
from recoup.ir.decision import Decision, Recompute
from recoup.planner.incumbents import Candidate
from recoup.planner.request import planner_for
from recoup.targets.huggingface import build
from recoup.targets.parse import HubTarget

GB, GIB = 10**9, 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One published figure and ours.

    Attributes:
        source: where it was published. setting: what was run. published_bytes: as measured by its authors.
        predicted_bytes: simulated, terms included. terms: what was added to the simulation, and why; or what explains a
            difference.
    """

    source: str
    setting: str
    published_bytes: float
    predicted_bytes: float
    unit: int
    terms: str = ""

    @property
    def error(self) -> float:
        """By how much the prediction is above the published figure, as a share of it."""
        return self.predicted_bytes / self.published_bytes - 1

    def __str__(self) -> str:
        name = "GiB" if self.unit == GIB else "GB"
        published, predicted = self.published_bytes / self.unit, self.predicted_bytes / self.unit
        return (
            f"| {self.source} | {self.setting} | {published:.2f} {name} | {predicted:.2f} {name} | {self.error:+.1%} | "
            f"{self.terms} |"
        )


def simulated(
    model: nn.Module,
    batch: Any,
    *decisions: Decision,
    device: str,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    optimizer: type[torch.optim.Optimizer] | None = None,
    cost: CostModel | None = None,
    accumulate: int = 1,
) -> Candidate:
    """Returns the simulated step of a model with some decisions."""
    objective, given = make_objective(batch, loss=loss, accumulate=accumulate)
    offloads = any(d.offloads for d in decisions)
    planner, _, _ = planner_for(
        model,
        given,
        objective=objective,
        optimizer=optimizer,
        device=device,
        actions=("recompute", "offload") if offloads else ("recompute",),
        cost=cost,
    )
    return planner.simulate(tuple(decisions))


def language_model(kind: str, *, tokens: int, batch: int, dtype: torch.dtype, **shape: Any) -> tuple[nn.Module, Any]:
    """Returns a causal language model of transformers on `meta`, and a batch."""
    target = HubTarget(model_type=kind, overrides=tuple(shape.items()))
    return build(target, batch=batch, seq=tokens, image=None, dtype=dtype, device="meta")


LLAMA_7B = {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "vocab_size": 32000}
LLAMA_8B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    "num_hidden_layers": 32, "vocab_size": 128256, "max_position_embeddings": 131072,
}  # fmt: skip
QWEN3_8B = {
    "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8,
    "num_hidden_layers": 36, "vocab_size": 151936, "head_dim": 128, "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}  # fmt: skip


def layers(prefix: str, num: int, *, offload: bool = False, every: int = 1) -> tuple[Decision, ...]:
    """Returns the decisions that recompute layers, each one or every n-th."""
    return tuple(Recompute(path=f"{prefix}.{i}", offload=offload) for i in range(num) if i % every == 0)


def lomo() -> list[Row]:
    """LLaMA-7B in float16, 8 x 512 tokens: what is there beside weights, gradients and states."""
    model, batch = language_model("llama", tokens=512, batch=8, dtype=torch.float16, **LLAMA_7B)
    model.set_attn_implementation("eager")
    weights = sum(p.nbytes for p in model.parameters())
    source = "LOMO, arXiv 2306.09782, table 1"
    rows = []
    for name, published, decisions in (
        ("activations, nothing recomputed", 45.61, ()),
        ("activations, each layer recomputed", 1.79, layers("model.layers", 32)),
    ):
        found = simulated(model, batch, *decisions, device="rtx-4090")
        rows.append(Row(source=source, setting=f"LLaMA-7B fp16, 8 x 512: {name}", published_bytes=published * GIB,
                        predicted_bytes=found.peak_bytes - 2 * weights, unit=GIB, terms="gradients of all weights taken off"))  # fmt: skip
    return rows


class RmsNormInParts(nn.Module):
    """`torch.nn.RMSNorm` as torch 2.5 ran it: no kernel of its own, in float32."""

    def __init__(self, norm: nn.RMSNorm) -> None:
        super().__init__()
        self.weight = norm.weight
        self.eps = norm.eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the normalised tensor, of the same shape and dtype."""
        wide = x.float()
        made = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)
        return made if self.weight is None else made * self.weight


def diffusers_ltx() -> list[Row]:
    """LTX-Video's transformer in bfloat16, the benchmark of diffusers' pull request."""
    from diffusers import LTXVideoTransformer3DModel

    with torch.device("meta"):
        model = LTXVideoTransformer3DModel().to(torch.bfloat16).train()
    for block in model.transformer_blocks:
        for attention in (block.attn1, block.attn2):
            attention.norm_q, attention.norm_k = RmsNormInParts(attention.norm_q), RmsNormInParts(attention.norm_k)
    frames, height, width, text = 11, 16, 24, 128
    like = {"dtype": torch.bfloat16, "device": "meta"}
    batch = {
        "hidden_states": torch.empty(1, frames * height * width, 128, **like),
        "encoder_hidden_states": torch.empty(1, text, 4096, **like),
        "timestep": torch.zeros(1, dtype=torch.int64),
        "encoder_attention_mask": torch.ones(1, text, dtype=torch.int64),
        "num_frames": frames, "height": height, "width": width, "return_dict": False,
    }  # fmt: skip
    rows = []
    for name, published, every in (("none", 26.664, 0), ("all", 9.316, 1), ("every 2nd", 17.658, 2), ("every 4th", 22.188, 4)):
        decisions = layers("transformer_blocks", 28, every=every) if every else ()
        found = simulated(model, batch, *decisions, device="h100-sxm", loss=lambda out, _: out[0].mean(), accumulate=2)
        rows.append(Row(source="huggingface/diffusers#10611", setting=f"LTX-Video, bf16, 512 x 768 x 81, blocks checkpointed: {name}",
                        published_bytes=published * GB, predicted_bytes=found.peak_bytes, unit=GB))  # fmt: skip
    return rows


def axolotl() -> list[Row]:
    """Qwen3-8B, all weights, one card, bfloat16: layer inputs kept or on the host."""
    found: dict[tuple[int, bool], int] = {}
    for tokens in (16384, 32768):
        model, batch = language_model("qwen3", tokens=tokens, batch=1, dtype=torch.bfloat16, **QWEN3_8B)
        for offload in (False, True):
            found[tokens, offload] = simulated(
                model, batch, *layers("model.layers", 36, offload=offload), device="h100-sxm"
            ).peak_bytes
    source = "axolotl-ai-cloud/axolotl#3733"
    rows = []
    for name, published, predicted in (
        ("16k, kept less on the host", 63.3 - 58.9, found[16384, False] - found[16384, True]),
        ("32k, kept less on the host", 73.1 - 64.3, found[32768, False] - found[32768, True]),
        ("kept, 32k less 16k", 73.1 - 63.3, found[32768, False] - found[16384, False]),
        ("16k, kept", 63.3, found[16384, False]),
        ("16k, on the host", 58.9, found[16384, True]),
    ):
        rows.append(Row(source=source, setting=f"Qwen3-8B full, bf16: {name}", published_bytes=published * GB,
                        predicted_bytes=predicted, unit=GB))  # fmt: skip
    return rows


class OpSac(nn.Module):
    """A layer under torchtitan's op-level selective checkpointing: attention and every second product are saved."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the layer under torch's own selective checkpointing."""
        num_products = 0

        def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            nonlocal num_products
            if op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
                num_products += not ctx.is_recompute
                at = num_products if not ctx.is_recompute else 0
                saved = at % 2 == 1
            else:
                saved = "scaled_dot_product" in str(op)
            return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(self.layer, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def resnet() -> list[Row]:
    """ResNet-50 in float32, 184 images: MONeT's plain step."""
    from bench.gpu_models import WORKLOADS

    work = WORKLOADS["resnet50"](torch.device("meta"), small=False)
    found = simulated(work.model, work.batch, device="h100-sxm", loss=work.loss, optimizer=torch.optim.SGD)
    return [Row(source="MONeT, arXiv 2010.14501, table 1", setting="ResNet-50 fp32, 184 images, nothing recomputed",
                published_bytes=15.06 * GIB, predicted_bytes=found.peak_bytes, unit=GIB)]  # fmt: skip


GROUPS: dict[str, Callable[[], list[Row]]] = {"diffusers": diffusers_ltx, "lomo": lomo, "monet": resnet, "axolotl": axolotl}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=list(GROUPS), choices=list(GROUPS))
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(argv)
    for name in given.only:
        began = time.process_time()
        for row in GROUPS[name]():
            print(row, flush=True)
        print(f"{name}: {time.process_time() - began:.0f} s of CPU", file=sys.stderr)


if __name__ == "__main__":
    main()
