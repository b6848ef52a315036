"""Offload over streams: memory that does not depend on how far behind the GPU is."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import recoup
from recoup.runtime.offload.cuda import CudaTransport, piece_sizes
from tests.cuda_stub.kit import stub

ROOT = Path(__file__).parents[2]
_STEPS = """
import torch
from recoup.ir.decision import Offload
from recoup.runtime.apply import apply_decisions
from tests.cuda_stub.kit import stub
from tests.cuda_stub.models import perceptron
model, x = perceptron(), torch.zeros(2048, 512, device="cuda")
with apply_decisions(model, [Offload(path=str(i)) for i in range(4)]):
    for _ in range(6):
        model(x).mean().backward()
print(torch.cuda.max_memory_reserved(), stub.counts()["host_bytes_used"])
"""


@pytest.mark.slow
def test_a_gpu_that_is_behind_takes_no_more_memory() -> None:
    found = []
    for busy in ("0", "1"):
        done = subprocess.run(
            [sys.executable, "-c", _STEPS],
            env={**os.environ, "STUB_GPU_BUSY": busy},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        found.append(done.stdout.split())
    assert found[0] == found[1]


@pytest.mark.parametrize("mebibytes", [1, 3, 270, 511, 513])
def test_pinned_memory_is_about_as_large_as_what_is_moved(mebibytes: int) -> None:
    nbytes = (mebibytes << 20) + 4
    sizes = piece_sizes(nbytes)
    assert nbytes <= sum(sizes) <= nbytes * 17 // 16
    assert all(size & (size - 1) == 0 for size in sizes) and len(sizes) <= 7


def test_a_block_comes_back_as_it_was_and_its_buffers_are_used_again() -> None:
    transport = CudaTransport("cuda")
    flat = torch.arange(40_000, dtype=torch.int32).view(torch.uint8)[:60_000].cuda()
    before = stub.counts()["host_allocs"]
    for _ in range(3):
        handle = transport.put(flat)
        back = transport.get(handle)
        assert back.data_ptr() != flat.data_ptr() and back.numel() == flat.numel()
        del handle
    assert stub.counts()["host_allocs"] - before <= len(piece_sizes(flat.numel()))
    transport.close()


def test_blocks_that_are_dropped_on_their_way_leave_nothing_behind() -> None:
    transport = CudaTransport("cuda")
    flat = torch.zeros(1 << 22, dtype=torch.uint8, device="cuda")
    gc.collect()  # what tests before this one left in cycles
    level = torch.cuda.memory_allocated()
    handles = [transport.put(flat.clone()) for _ in range(6)]
    transport.prefetch(handles[0])
    with stub.counting() as seen:
        handles.clear()
        transport.close()
    assert seen["syncs"] == seen["event_syncs"] == 0
    assert torch.cuda.memory_allocated() == level


def test_by_hand_nothing_is_waited_for() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4))).cuda()
    x = torch.zeros(512, 1024, device="cuda")
    for _ in range(2):
        with stub.counting() as seen:
            with recoup.offload(model, min_bytes=1 << 16) as moved:
                loss = model(x).tanh().sum()
            loss.backward()
        assert 0 < moved.bytes_out == moved.bytes_back
        assert seen["syncs"] == seen["event_syncs"] == 0


def test_the_state_of_an_optimizer_is_on_the_host_between_its_steps() -> None:
    layers = [torch.nn.Linear(512, 512, device="cuda") for _ in range(4)]
    model, x = torch.nn.Sequential(*layers), torch.zeros(8, 512, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    state_bytes = 4 * 2 * 512 * 512 * 4

    def step() -> int:
        optimizer.zero_grad()
        model(x).mean().backward()
        before = torch.cuda.memory_allocated()
        optimizer.step()
        return before

    step()
    with_state = step()
    with recoup.offload_optimizer(optimizer) as offload:
        assert offload.host_bytes == state_bytes
        step()
        assert abs(with_state - step() - state_bytes) < 64 << 10
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        optimizer.step()
        assert torch.cuda.max_memory_allocated() - before < state_bytes
        assert all(s["exp_avg"].is_pinned() for p, s in optimizer.state.items() if p.dim() == 2)
        plan = recoup.plan(model, (x,), budget="100%", optimizer=optimizer, loss=lambda out, _: out.mean())
        assert plan.predicted.host_bytes == state_bytes
    assert all(s["exp_avg"].is_cuda for s in optimizer.state.values())
    step()
