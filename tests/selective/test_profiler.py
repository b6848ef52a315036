"""`MemoryProfiler`: two independent counts agree, the model stays as it was."""

from __future__ import annotations

import json

import pytest
import torch

from recoup.selective import CheckpointConfig, MemoryProfiler, SelectiveCheckpointer
from tests.models import Stack, make, same, step


@pytest.mark.parametrize("kind", ["stack", "conv", "llama"])
def test_captured_bytes_agree_with_measured_ones(kind: str) -> None:
    model, batch, loss = make(kind)
    before = step(model, batch, loss)
    report = MemoryProfiler(model, "cpu", loss=loss).profile(batch, num_runs=3)
    if kind != "conv":  # its statistics move with each step of this test
        assert same(before, step(model, batch, loss))
    measured = report.measured_activation_bytes
    assert measured is not None
    assert abs(report.total_activation_bytes - measured) <= 0.02 * measured
    assert report.activation_spread == 0
    assert sum(r.activation_bytes for r in report.layers) == report.total_activation_bytes
    assert all(r.activation_bytes >= 0 and r.forward_seconds > 0 for r in report.layers if r.activation_bytes)
    assert abs(sum(r.share for r in report.layers) - 1) < 1e-9
    sizes = [r.activation_bytes for r in report.layers]
    assert sizes == sorted(sizes, reverse=True)


def test_a_linear_chain_keeps_its_inputs_to_the_byte() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    report = MemoryProfiler(model).profile(torch.zeros(32, 8), 2)
    by_path = {r.path: r.activation_bytes for r in report.layers}
    assert by_path["1"] == 32 * 16 * 4  # tanh keeps its output, the next layer's input: counted once
    assert by_path["2"] == 0
    assert report.parameter_bytes == report.gradient_bytes == (8 * 16 + 16 + 16 * 4 + 4) * 4


def test_recommended_layers_are_over_the_line() -> None:
    model, batch, _ = make("stack")
    profiler = MemoryProfiler(model)
    report = profiler.profile(batch, 1)
    sizes = {r.path: r.activation_mb for r in report.layers}
    for line in (0.0, 0.05, 0.105, 1e3):
        assert all(sizes[path] > line for path in profiler.recommend_layers(line))
    assert profiler.recommend_layers(0.0) == [r.path for r in report.layers if r.path != "head"]
    assert profiler.recommend_layers(1e3) == []


def test_peaks_snapshots_table_and_json() -> None:
    model, batch, _ = make("stack")
    report = MemoryProfiler(model).profile(batch, 2)
    assert report.peak_bytes is not None
    assert report.peak_bytes >= max(report.forward_peak_bytes, report.total_activation_bytes)
    labels = [label for label, _ in report.snapshots]
    assert labels == [*(f"after layers.{i}" for i in range(4)), "after head", "after forward", "after backward"]
    assert report.backward_ratio > 0
    assert all(len(line) <= 100 for line in report.table().splitlines())
    assert json.loads(json.dumps(report.to_json()))["num_runs"] == 2


def test_recomputed_ops_are_seen_twice() -> None:
    model, batch, _ = make("stack")
    assert MemoryProfiler(model).profile(batch, 1).num_recomputed_ops == 0
    checkpointer = SelectiveCheckpointer(CheckpointConfig(enabled=True, strategy="full"))
    checkpointer.apply(model)
    assert MemoryProfiler(model).profile(batch, 1).num_recomputed_ops >= 4 * 5


def test_a_model_on_meta_is_captured_and_not_run() -> None:
    with torch.device("meta"):
        model = Stack()
    report = MemoryProfiler(model).profile(torch.zeros(64, 32, device="meta"))
    assert report.peak_bytes is None and report.num_runs == 0
    twin = Stack()
    assert report.total_activation_bytes == MemoryProfiler(twin).profile(torch.zeros(64, 32), 1).total_activation_bytes


def test_memory_breakdown_grows_with_the_batch() -> None:
    model = Stack()
    small, large = (MemoryProfiler(model).profile(torch.zeros(n, 32), 1) for n in (32, 128))
    assert large.total_activation_bytes == 4 * small.total_activation_bytes
    assert large.parameter_bytes == small.parameter_bytes
