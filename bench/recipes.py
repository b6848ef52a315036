"""What recoup's planner says of published training recipes, beside the memory that their authors measured.

python -m bench.recipes                 # all rows, minutes on one core, no GPU
python -m bench.recipes --only diffusers --out FILE.md

Each recipe is rebuilt from its source (model, batch, precision, what is checkpointed) on `meta` and its step is
simulated for a device; nothing is allocated. What a recipe holds beside the simulated step (optimizer states in another
precision, for example) is a named term with its arithmetic. Where a source gives two lengths or two settings of one
job, their difference is compared too: in it what the source does not say (the optimizer) cancels.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
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
from recoup.ir.decision import Decision, Recompute, TileLoss
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
    autocast: torch.dtype | None = None,
) -> Candidate:
    """Returns the simulated step of a model with some decisions."""
    objective, given = make_objective(batch, loss=loss, accumulate=accumulate, autocast=autocast)
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


def attention_of_2023(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **_: Any
) -> tuple[torch.Tensor, None]:
    """Attention as transformers 4.28 ran LLaMA's: in parts, masked scores bounded from below, softmax in float32."""
    scores = query @ key.transpose(2, 3) / query.shape[-1] ** 0.5
    least = torch.finfo(scores.dtype).min
    hidden = torch.full(scores.shape[-2:], least, dtype=scores.dtype, device=scores.device).triu(1)
    scores = torch.max(scores + hidden, torch.tensor(least, dtype=scores.dtype, device=scores.device))
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return (weights @ value).transpose(1, 2).contiguous(), None


def lomo() -> list[Row]:
    """LLaMA-7B in float16, 8 x 512 tokens: what is there beside weights, gradients and states."""
    model, batch = language_model("llama", tokens=512, batch=8, dtype=torch.float16, **LLAMA_7B)
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register("recoup_2023", attention_of_2023)
    model.set_attn_implementation("recoup_2023")
    weights = sum(p.nbytes for p in model.parameters())
    found = simulated(model, batch, device="rtx-4090")
    return [
        Row(
            source="LOMO, arXiv 2306.09782, table 1",
            setting="LLaMA-7B fp16, 8 x 512: activations, nothing recomputed",
            published_bytes=45.61 * GIB,
            predicted_bytes=found.peak_bytes - weights,
            unit=GIB,
            terms="weights taken off; attention as transformers 4.28 had it, its other layers as they are today",
        )
    ]


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


def diffusers_ltx(settings: Sequence[int] = (0, 1, 2, 4)) -> list[Row]:
    """LTX-Video's transformer in bfloat16, the benchmark of diffusers' pull request.

    Args:
        settings: one block of so many is checkpointed; 0: none.
    """
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
    published_gb = {0: 26.664, 1: 9.316, 2: 17.658, 4: 22.188}
    for every in settings:
        decisions = layers("transformer_blocks", 28, every=every) if every else ()
        found = simulated(model, batch, *decisions, device="h100-sxm", loss=lambda out, _: out[0].mean(), accumulate=2)
        which = f"1 of {every} blocks checkpointed" if every else "nothing checkpointed"
        rows.append(
            Row(
                source="huggingface/diffusers#10611",
                setting=f"LTX-Video, bf16, 512 x 768 x 81: {which}",
                published_bytes=published_gb[every] * GB,
                predicted_bytes=found.peak_bytes,
                unit=GB,
                terms="gradients of the runs before are there; RMSNorm in parts, as in torch 2.5",
            )
        )
    return rows


def axolotl() -> list[Row]:
    """Qwen3-8B, all weights, one card, bfloat16: layer inputs kept or on the host."""
    found: dict[tuple[int, bool], int] = {}
    head = TileLoss(path="lm_head", tile_tokens=1024)
    for tokens in (16384, 32768):
        model, batch = language_model("qwen3", tokens=tokens, batch=1, dtype=torch.bfloat16, **QWEN3_8B)
        for offload in (False, True):
            found[tokens, offload] = simulated(
                model, batch, *layers("model.layers", 36, offload=offload), head, device="h100-sxm", accumulate=2
            ).peak_bytes
    source = "axolotl-ai-cloud/axolotl#3733"
    rows = []
    for tokens, published in ((16384, 63.3 - 58.9), (32768, 73.1 - 64.3)):
        rows.append(
            Row(
                source=source,
                setting=f"Qwen3-8B full, bf16, {tokens:,} tokens: layer inputs kept, less on the host",
                published_bytes=published * GB,
                predicted_bytes=found[tokens, False] - found[tokens, True],
                unit=GB,
                terms="a difference: optimizer and loss, which the source does not name, cancel",
            )
        )
    return rows


class Gemma2Loss(nn.Module):
    """Gemma 2's head and loss: logits of 256,000 words, kept within 30 by a tanh, cross-entropy in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2304, 256000, bias=False, device="meta", dtype=torch.bfloat16)

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Returns the mean loss of hidden states of shape (tokens, 2304) and labels of shape (tokens,)."""
        logits = 30 * torch.tanh(self.head(hidden) / 30)
        return F.cross_entropy(logits.float(), labels)


def cut_cross_entropy() -> list[Row]:
    """Gemma-2-2B's loss over 8,192 tokens and its gradients, as PyTorch runs it: the baseline of Cut Cross-Entropy."""
    model = Gemma2Loss()
    hidden = torch.empty(8192, 2304, dtype=torch.bfloat16, device="meta", requires_grad=True)
    found = simulated(model, (hidden, torch.zeros(8192, dtype=torch.int64)), device="h100-sxm")
    inputs = model.head.weight.nbytes + hidden.nbytes + 8192 * 8 + get_device("h100-sxm").fixed_bytes
    return [
        Row(
            source="Cut Cross-Entropy, arXiv 2411.09009, table 1",
            setting="Gemma-2-2B, 8,192 tokens, bf16: loss and gradient in PyTorch",
            published_bytes=28000 * 2**20,
            predicted_bytes=found.peak_bytes - inputs,
            unit=GIB,
            terms="weights, hidden states and cuBLAS's workspace taken off",
        )
    ]


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


def torchtitan() -> list[Row]:
    """Llama-3-8B on 8 cards by FSDP2, two examples of 8,192 tokens each, op-level selective checkpointing."""
    model, batch = language_model("llama", tokens=8192, batch=2, dtype=torch.bfloat16, **LLAMA_8B)
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = OpSac(layer)
    cost = ShardedCost(RooflineCost(get_device("h100-sxm")), world_size=8)
    found = simulated(model, batch, device="h100-sxm", optimizer=torch.optim.AdamW, cost=cost)
    weights = sum(p.numel() for p in model.parameters())
    wide = (4 + 4 + 8 - 2 - 2 - 4) * weights // 8
    return [
        Row(
            source="torchtitan, benchmarks/llama3_h100",
            setting="Llama-3-8B, FSDP 8, 2 x 8,192 tokens, op-level selective checkpointing",
            published_bytes=82.4 * GIB,
            predicted_bytes=found.peak_bytes + wide,
            unit=GIB,
            terms=f"{wide / GIB:.2f} GiB added: weights, gradients, states are float32, simulated in bfloat16; the "
            "source says reserved bytes, blocks that cannot be filled included",
        )
    ]


def transformers_longest() -> list[Row]:
    """Llama-3.1-8B, QLoRA rank 32, each layer recomputed, the loss of transformers 4.46: 28,454 tokens at 80 GB."""
    from bench import lengths

    tokens = 28454
    model, batch = lengths.make("Llama-3.1-8B", "QLoRA", layers=32, tokens=tokens)

    # peft's prepare_model_for_kbit_training: what is not quantised is float32, and so is the residual stream.
    for module in model.modules():
        if isinstance(module, (nn.Embedding, nn.Linear)) or type(module).__name__ == "LlamaRMSNorm":
            module.float()

    def loss(output: Any, given: Any) -> torch.Tensor:
        logits = output.logits.float()
        shifted = logits[..., :-1, :].contiguous().view(-1, logits.shape[-1])
        return F.cross_entropy(shifted, given["input_ids"][..., 1:].contiguous().view(-1))

    given = {k: v for k, v in batch.items() if k != "labels"}
    found = simulated(
        model,
        given,
        *layers("model.layers", 32),
        device="h100-sxm",
        loss=loss,
        optimizer=torch.optim.AdamW,
        autocast=torch.bfloat16,
    )
    return [
        Row(
            source="Unsloth's blog on long context (transformers with FlashAttention-2)",
            setting="Llama-3.1-8B, QLoRA rank 32, 28,454 tokens: the longest on 80 GB",
            published_bytes=80 * GB,
            predicted_bytes=found.peak_bytes + lengths.RESERVED_BYTES,
            unit=GB,
            terms="loss of transformers 4.46 (logits in float32, a shifted copy), peft's float32 for what is not "
            "quantised, 0.6 GiB of context; blocks that cannot be filled are not in it",
        )
    ]


GROUPS: dict[str, Callable[[], list[Row]]] = {
    "diffusers": diffusers_ltx,
    "monet": resnet,
    "axolotl": axolotl,
    "cut-cross-entropy": cut_cross_entropy,
    "torchtitan": torchtitan,
    "lomo": lomo,
    "transformers": transformers_longest,
}
HEAD = "| source | setting | published | predicted | off | terms |\n|---|---|---|---|---|---|"


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the rows, and writes them where `--out` says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=list(GROUPS), choices=list(GROUPS))
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(argv)
    rows: list[Row] = []
    print(HEAD, flush=True)
    for name in given.only:
        found = GROUPS[name]()
        rows += found
        print("\n".join(map(str, found)), flush=True)
    if given.out is not None:
        title = f"# Published recipes, as the planner sees them\n\nPlanning alone, torch {torch.__version__}.\n\n"
        given.out.write_text(title + "\n".join([HEAD, *map(str, rows)]) + "\n")


if __name__ == "__main__":
    main()
