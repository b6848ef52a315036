"""`CheckpointWrapper`: same keys, same numbers, one forward more."""

from __future__ import annotations

import copy
import io
import pickle
import queue

import pytest
import torch
from torch import nn

import recoup
from recoup.selective import CheckpointWrapper
from tests.models import Block, Stack, make, same, step


def _wrapped(kind: str = "stack") -> tuple[nn.Module, nn.Module, torch.Tensor]:
    model, batch, _ = make(kind)
    twin = copy.deepcopy(model)
    for i, layer in enumerate(model.layers):
        model.layers[i] = CheckpointWrapper(layer)
    return model, twin, batch


@pytest.mark.parametrize("kind", ["stack", "batch-norm"])
def test_names_and_values_are_those_of_the_module(kind: str) -> None:
    model, twin, batch = _wrapped(kind)
    assert list(model.state_dict()) == list(twin.state_dict())
    for named in ("named_parameters", "named_buffers", "named_modules"):
        assert [n for n, _ in getattr(model, named)()] == [n for n, _ in getattr(twin, named)()]
    model.load_state_dict(twin.state_dict())
    assert same(step(twin, batch), step(model, batch))
    assert same(step(twin, batch, seed=2), step(model, batch, seed=2))


def test_load_strict_reports_missing_keys_without_a_prefix() -> None:
    wrapper = CheckpointWrapper(Block(8))
    state = wrapper.state_dict()
    del state["up.weight"]
    assert wrapper.load_state_dict(state, strict=False).missing_keys == ["up.weight"]


def test_it_runs_its_forward_twice_in_training_only() -> None:
    calls: queue.SimpleQueue[int] = queue.SimpleQueue()  # a list would be put back after the second run
    block = Block(8)
    block.norm.register_forward_pre_hook(lambda m, a: calls.put(1))
    wrapper = CheckpointWrapper(block)
    wrapper(torch.randn(2, 8), scale=2.0).sum().backward()
    assert calls.qsize() == 2
    with torch.no_grad():
        wrapper(torch.randn(2, 8))
    assert calls.qsize() == 3
    wrapper.unwrap()(torch.randn(2, 8)).sum().backward()
    assert calls.qsize() == 4


def test_copies_and_files_are_independent() -> None:
    wrapper = CheckpointWrapper(Block(8))
    loaded = pickle.loads(pickle.dumps(wrapper))
    saved = io.BytesIO()
    torch.save(wrapper, saved)
    saved.seek(0)
    for other in (copy.deepcopy(wrapper), loaded, torch.load(saved, weights_only=False)):
        other(torch.randn(2, 8)).sum().backward()
        assert all(p.grad is None for p in wrapper.parameters())
        assert all(p.grad is not None for p in other.parameters())


def test_modes_devices_and_attributes_reach_the_module() -> None:
    wrapper = CheckpointWrapper(Block(8))
    assert not wrapper.eval().module.training and wrapper.train().module.drop.training
    wrapper.double()
    assert wrapper.module.up.weight.dtype == torch.float64
    assert wrapper.up is wrapper.module.up
    with pytest.raises(AttributeError):
        _ = wrapper.nothing


def test_planning_around_it_is_refused() -> None:
    model = Stack()
    model.layers[0] = CheckpointWrapper(model.layers[0])
    with pytest.raises(recoup.ConflictError, match=r"layers\.0"):
        recoup.plan(model, torch.randn(4, 32), budget="60%")


def test_dropout_is_the_same_in_the_replay() -> None:
    wrapper = CheckpointWrapper(nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 16)))
    plain = copy.deepcopy(wrapper).unwrap()
    assert same(step(plain, torch.ones(4, 16)), step(wrapper, torch.ones(4, 16)))
