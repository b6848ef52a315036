"""The workloads of `bench.peers`: small enough for a CPU, random weights, nothing downloaded."""

from __future__ import annotations

import dataclasses
import fnmatch

from torch import nn

from recoup.targets.resolve import Target, resolve_target

_TEXT = {"batch": 4, "seq": 256}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """A model with its batch, and what people would checkpoint in it.

    Attributes:
        target: as on recoup's command line. options: sizes of the batch.
        layers: patterns of dotted paths; a layer that is called several times counts each call.
    """

    target: str
    layers: tuple[str, ...]
    options: dict[str, int] = dataclasses.field(default_factory=dict)

    def resolve(self) -> Target:
        """Returns the model, the batch and the loss."""
        return resolve_target(self.target, **self.options)

    def find_layers(self, model: nn.Module) -> list[str]:
        """Returns the paths of the layers, in order of definition."""
        return [p for p, _ in model.named_modules() if any(fnmatch.fnmatchcase(p, x) for x in self.layers)]


_SMALL = "hidden_size=256,num_attention_heads=4"
WORKLOADS: dict[str, Workload] = {
    "gpt2": Workload(
        target="hf:gpt2?n_layer=6,n_embd=256,n_head=4,vocab_size=2000", options=_TEXT, layers=("transformer.h.?",)
    ),
    "llama": Workload(
        target=f"hf:llama?num_hidden_layers=6,{_SMALL},intermediate_size=688,vocab_size=2000",
        options=_TEXT,
        layers=("model.layers.?",),
    ),
    "bert": Workload(
        target=f"hf:bert?num_hidden_layers=6,{_SMALL},intermediate_size=1024,vocab_size=2000",
        options=_TEXT,
        layers=("bert.encoder.layer.?",),
    ),
    "t5": Workload(
        target="hf:t5?num_layers=3,d_model=256,d_kv=64,num_heads=4,d_ff=1024,vocab_size=2000",
        options={"batch": 4, "seq": 192},
        layers=("encoder.block.?", "decoder.block.?"),
    ),
    "vit": Workload(
        target=f"hf:vit?num_hidden_layers=8,{_SMALL},intermediate_size=1024",
        options={"batch": 5},
        layers=("vit.layers.?",),
    ),
    "resnet50": Workload(
        target="hf:resnet", options={"batch": 8, "image": 96}, layers=("resnet.encoder.stages.?.layers.?",)
    ),
    "unet": Workload(target="bench/targets.py:unet_small", layers=("down.?", "middle", "up.?")),
    "conv3d": Workload(target="bench/targets.py:conv3d_small", layers=("first", "middle.?", "last")),
    "mlp-chain": Workload(target="bench/targets.py:mlp_chain_small", layers=("?", "??")),
    "gru": Workload(target="bench/targets.py:gru", layers=("steps",)),
    "moe": Workload(target="bench/targets.py:moe", layers=("layers.?",)),
}
