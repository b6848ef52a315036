"""Offload: bit-equal gradients by every transport, no parameter moved, no file left, missing waits seen."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import recoup
from recoup import _allocation
from recoup.capture.capture import capture
from recoup.capture.spec import StepSpec
from recoup.capture.step import Objective
from recoup.errors import InternalError, UsageError
from recoup.ir.decision import Recompute
from recoup.runtime.apply import apply_decisions
from recoup.runtime.offload.transport import DelayedTransport, DiskTransport, InlineTransport


class Net(nn.Module):
    """Dropout, an in-place op, a transposed product, a slice of a larger buffer, an expanded tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(24, 48), nn.Linear(24, 24)
        self.norm = nn.LayerNorm(48)
        self.dropout = nn.Dropout(0.3)
        self.scale = nn.Parameter(torch.rand(1, 24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(self.dropout(self.norm(self.first(x))), inplace=True)
        part = hidden[:, 12:20].contiguous() * hidden[:, :8]
        mixed = self.second(hidden[:, 24:]) * self.scale.expand(len(x), 24)
        return (mixed.t() @ part).tanh().sum() + hidden.exp().mean()


def convolution() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GELU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(288, 4)
    )


WORKLOADS: dict[str, Any] = {
    "net": (Net, (32, 24)),
    "convolution": (convolution, (4, 3, 14, 14)),
    "recurrent": (lambda: nn.GRU(12, 16, batch_first=True), (3, 9, 12)),
    "transformer": (lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), (3, 7, 16)),
}


def step(name: str, transport: Any = None, **options: Any) -> tuple[list[torch.Tensor], Any]:
    make, shape = WORKLOADS[name]
    torch.manual_seed(0)
    model = make()
    x = torch.randn(*shape, requires_grad=True)
    moved = None
    if transport is None:
        output = model(x)
    else:
        with recoup.offload(model, transport=transport, min_bytes=options.pop("min_bytes", 64), **options) as moved:
            output = model(x)
    output = output[0] if isinstance(output, tuple) else output
    output.square().sum().backward()
    return [x.grad, *(p.grad for p in model.parameters())], moved


@pytest.mark.parametrize("keep_last", [0, 2])
@pytest.mark.parametrize("make", [InlineTransport, DiskTransport, DelayedTransport])
@pytest.mark.parametrize("name", WORKLOADS)
def test_gradients_bit_equal(name: str, make: Any, keep_last: int) -> None:
    wanted, _ = step(name)
    found, moved = step(name, make(), keep_last=keep_last)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert moved.num_blocks > (1 if name != "recurrent" else 0)
    assert (moved.bytes_back == moved.bytes_out) if not keep_last else (moved.bytes_back < moved.bytes_out)


def test_host_memory_that_is_not_there_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_allocation, "_of_the_machine", lambda: 1 << 20)
    transport = InlineTransport()
    assert transport.get(transport.put(torch.ones(1 << 19, dtype=torch.uint8))).sum() == 1 << 19
    with pytest.raises(MemoryError, match=r"needs 1\.0 MiB of host memory, and 1\.0 MiB are available"):
        transport.put(torch.ones(1 << 20, dtype=torch.uint8))  # the machine keeps a margin


def test_bytes_moved_are_the_saved_bytes_of_the_captured_step() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)
    )
    x = torch.randn(50, 32)
    trace = capture(StepSpec(model=model, batch=(x,), objective=Objective(loss=lambda out, _: out.sum())))
    planned = sum(
        s.nbytes for s in trace.storages if s.category in ("saved", "batch") and s.saved_by and s.nbytes >= 1024
    )
    with recoup.offload(model, transport="inline", min_bytes=1024) as moved:
        output = model(x)
    output.sum().backward()
    assert moved.bytes_out == moved.bytes_back == planned


def test_parameters_and_their_views_stay() -> None:
    model = nn.Linear(64, 64, bias=False)
    x = torch.randn(8, 64, requires_grad=True)
    with recoup.offload(model, transport="inline", min_bytes=4096) as moved:
        (x @ model.weight.t()).sum().backward()
    assert moved.num_blocks == 0


def test_one_storage_is_moved_once_and_views_keep_their_layout() -> None:
    model = nn.Identity()
    x = torch.randn(20, 30, requires_grad=True)
    with recoup.offload(model, transport="inline", min_bytes=64) as moved:
        y = x.exp()
        views = [y.t().sin(), y[:, ::2].cos(), y[None].expand(3, 20, 30) * 2.0, y.view(600).tanh()]
        loss = sum((v.square().sum() for v in views[:2]), views[2].sum() + views[3].sum())
    found = torch.autograd.grad(loss, x)
    y = x.exp()
    views = [y.t().sin(), y[:, ::2].cos(), y[None].expand(3, 20, 30) * 2.0, y.view(600).tanh()]
    wanted = torch.autograd.grad(sum((v.square().sum() for v in views[:2]), views[2].sum() + views[3].sum()), x)
    assert torch.equal(found[0], wanted[0])
    assert moved.bytes_out < 6 * 600 * 4


def test_a_slice_of_a_large_buffer_does_not_drag_it_along() -> None:
    big = torch.randn(1000, 16)
    weight = torch.randn(16, requires_grad=True)
    with recoup.offload(nn.Identity(), transport="inline", min_bytes=64) as moved:
        loss = (big[3:9] * weight).sum()
    loss.backward()
    assert moved.bytes_out == 6 * 16 * 4
    assert torch.equal(weight.grad, big[3:9].sum(0))


@pytest.mark.parametrize("make", [InlineTransport, DiskTransport, DelayedTransport])
def test_backward_twice(make: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    x = torch.randn(30, 8)
    with recoup.offload(model, transport=make(), min_bytes=64):
        loss = model(x).square().sum()
    first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    second = torch.autograd.grad(loss, list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("min_bytes", [64, 1 << 20], ids=["moved", "stays"])
def test_change_in_place_after_saving_raises(min_bytes: int) -> None:
    x = torch.randn(64, requires_grad=True)
    with recoup.offload(nn.Identity(), transport="inline", min_bytes=min_bytes):
        y = x.exp()
        loss = y.sum()
    y.detach().mul_(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_every_missing_wait_is_seen() -> None:
    wanted, _ = step("net")
    clean = DelayedTransport()
    found, _ = step("net", clean)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert clean.num_waits >= 6
    for wait in range(clean.num_waits):
        found, _ = step("net", DelayedTransport(skip_waits=frozenset({wait})))
        assert not all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), f"wait {wait} was not missed"


def test_around_regions_only_their_inputs_move() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3)))
    x = torch.randn(40, 16)
    wanted = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    decisions = [Recompute(path=str(i)) for i in range(3)]
    with apply_decisions(model, decisions):
        with recoup.offload(model, transport="inline", min_bytes=64) as moved:
            output = model(x)
        found = torch.autograd.grad(output.square().sum(), list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert moved.num_blocks == 3
    assert moved.bytes_out == 3 * x.numel() * 4


def test_no_file_is_left(tmp_path: Path) -> None:
    step("net", DiskTransport(tmp_path))
    assert os.listdir(tmp_path) == []
    model = nn.Linear(8, 8)
    with pytest.raises(ZeroDivisionError), recoup.offload(model, transport=DiskTransport(tmp_path), min_bytes=1):
        model(torch.randn(4, 8)).exp()
        raise ZeroDivisionError
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_no_file_is_left_by_a_kill(tmp_path: Path) -> None:
    code = (
        "import sys, time, torch\nfrom recoup.runtime.offload.transport import DiskTransport\n"
        f"t = DiskTransport({str(tmp_path)!r})\nh = t.put(torch.zeros(10000, dtype=torch.uint8))\n"
        "print('ready', flush=True)\ntime.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline() == b"ready\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    time.sleep(0.05)
    assert os.listdir(tmp_path) == []


def test_disk_sees_changed_bytes() -> None:
    transport = DiskTransport()
    handle = transport.put(torch.arange(100, dtype=torch.uint8))
    assert torch.equal(transport.get(handle), torch.arange(100, dtype=torch.uint8))
    transport._file.seek(50)
    transport._file.write(b"\xff")
    with pytest.raises(InternalError, match="checksum"):
        transport.get(handle)
    transport.close()


def test_dropped_blocks_are_used_again() -> None:
    transport = DiskTransport()
    for _ in range(5):
        transport.put(torch.zeros(1000, dtype=torch.uint8))
    assert transport._end == 1000
    transport.close()


def test_unknown_transport_is_refused() -> None:
    with pytest.raises(UsageError, match="inline or disk"), recoup.offload(nn.Linear(2, 2), transport="tape"):
        pass
