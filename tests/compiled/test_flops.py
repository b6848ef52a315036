"""FLOPs of what runs again: no more than torch's own partitioner takes within the same bytes."""

from __future__ import annotations

import pytest
import torch
from bench.targets import resnet_tiny
from torch import nn
from torch._functorch import config as functorch_config

from recoup.compiled.frontier import choices
from recoup.compiled.recording import CompileOptions, Recorded, Recording
from recoup.compiled.schedule import Timeline, timeline


class Attending(nn.Module):
    """Blocks of attention and a wide GELU, as narrow as elementwise ops move many bytes for their products' FLOPs."""

    def __init__(self, num_blocks: int = 2, width: int = 16) -> None:
        super().__init__()
        self.ins = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(num_blocks))
        self.wide = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(num_blocks))
        self.narrow = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(num_blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the mean square of the stream's end; `x` is (batch, length, width)."""
        for ins, wide, narrow in zip(self.ins, self.wide, self.narrow, strict=True):
            q, k, v = (part.unsqueeze(1) for part in ins(nn.functional.layer_norm(x, x.shape[-1:])).chunk(3, -1))
            x = x + nn.functional.scaled_dot_product_attention(q, k, v).squeeze(1)
            h = wide(nn.functional.layer_norm(x, x.shape[-1:]))
            x = x + narrow(0.5 * h * (1 + torch.tanh(0.8 * (h + 0.04 * h.pow(3)))))
        return x.square().mean()


def recorded(model: nn.Module, batch: torch.Tensor, setting: float) -> Recorded:
    with functorch_config.patch(activation_memory_budget=setting):
        recording = Recording(CompileOptions.of({"backend": "aot_eager"}))
        (call,) = recording.compile(model).values()
        call(batch).backward()
    (graph,) = recording.graphs.values()
    return graph


def _compare(model: nn.Module, batch: torch.Tensor, settings: tuple[float, ...]) -> None:
    theirs = {setting: recorded(model, batch, setting) for setting in settings}
    step = theirs[settings[-1]].view.step
    found = choices(step)

    def flops(made: Timeline) -> int:
        return sum(step.ops[at].flops for at in made.order if at < step.num_forward)

    for setting, graph in theirs.items():
        # Theirs in our order, the later one, which peaks no higher.
        its = timeline(step, graph.torch_choice.held)
        ours = min((t for t in found if t.peak_bytes <= its.peak_bytes), key=lambda t: t.seconds)
        assert flops(ours) <= flops(its), setting
        assert ours.seconds <= its.seconds, setting


@pytest.mark.slow
def test_within_the_peaks_of_torchs_ratios_no_more_flops_run_again() -> None:
    torch.manual_seed(0)
    model, batch = Attending(), torch.randn(2, 64, 16)
    _compare(model, batch, (0.25, 0.5))


class Classifying(nn.Module):
    """A ResNet of three stages of bottlenecks; the loss of its labels."""

    def __init__(self) -> None:
        super().__init__()
        target = resnet_tiny()
        self.net, self.labels = target["model"], target["batch"]["labels"]
        self.images = target["batch"]["pixel_values"]

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Returns the loss."""
        loss: torch.Tensor = self.net(pixel_values=images, labels=self.labels).loss
        return loss


@pytest.mark.slow
def test_convolutions_run_again_no_more_than_at_torchs_peak() -> None:
    torch.manual_seed(0)
    model = Classifying()
    _compare(model, model.images, (0.5,))


def test_attention_on_a_cpu_has_flops() -> None:
    step = recorded(Attending(num_blocks=1), torch.randn(2, 64, 16), 1.0).view.step
    products = [16 * 48, 16 * 64, 64 * 16]  # for each of 128 positions
    attention = 2 * 2 * (2 * 64 * 64 * 16)
    assert sum(op.flops for op in step.ops[: step.num_forward]) == 2 * 128 * sum(products) + attention
