"""Bad input is refused with its message, and the model stays as it was."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import recoup
from recoup.errors import UsageError
from recoup.selective import CheckpointConfig, MemoryProfiler, SelectiveCheckpointer
from recoup.selective.ops import checkpoint_ops
from tests.models import Stack, make, same, step

CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"strategy": "foo"}, "Unknown strategy 'foo'"),
    ({"strategy": None}, "Unknown strategy None"),
    ({"enabled": "yes"}, "enabled must be True or False"),
    ({"use_reentrant": 1}, "use_reentrant must be True or False"),
    ({"preserve_rng_state": None}, "preserve_rng_state must be True or False"),
    ({"memory_threshold_mb": -1.0}, "must not be negative"),
    ({"memory_threshold_mb": math.nan}, "must be a number of MiB"),
    ({"memory_threshold_mb": "50"}, "must be a number of MiB"),
    ({"snn_chunk_size": 0}, "snn_chunk_size must be at least 1; got 0"),
    ({"snn_chunk_size": 1.5}, "snn_chunk_size must be a whole number"),
    ({"profile_num_runs": 0}, "profile_num_runs must be at least 1"),
    ({"sequential_segments": 0}, "sequential_segments must be at least 1"),
    ({"sequential_segments": "two"}, "sequential_segments must be a whole number"),
    ({"exclude_patterns": "head"}, r"Write \['head'\]"),
    ({"include_patterns": 3}, "must be a sequence of patterns"),
    ({"include_patterns": [""]}, "must be a pattern"),
    ({"strategy": "full", "every": 0}, "every must be at least 1"),
    ({"strategy": "sequential", "every": 2}, "every=2 has no meaning"),
    ({"strategy": "budget"}, "needs budget"),
    ({"strategy": "full", "budget": "60%"}, "has no meaning with strategy='full'"),
    ({"strategy": "budget", "budget": "8 bananas"}, "8 bananas"),
    ({"strategy": "budget", "budget": "60%", "op_policy": "save-matmuls"}, "op_policy has no meaning"),
    ({"op_policy": 3}, "op_policy must be a name or a function"),
]


@pytest.mark.parametrize(("fields", "message"), CONFIGS, ids=lambda v: str(v)[:50])
def test_bad_fields_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        CheckpointConfig(**fields)


def _on(**fields: Any) -> Callable[[nn.Module], Any]:
    return lambda model: SelectiveCheckpointer(CheckpointConfig(enabled=True, **fields)).apply(model)


def _changed_later(model: nn.Module) -> Any:
    config = CheckpointConfig(enabled=True, strategy="full")
    config.strategy = "everything"
    return SelectiveCheckpointer(config).apply(model)


MODELS: list[tuple[Callable[[nn.Module], Any], str]] = [
    (_on(), "has no profile"),
    (_on(strategy="budget", budget="60%"), "plans for a batch"),
    (_on(strategy="sequential", sequential_segments=9), "more than the 4 layers"),
    (_on(strategy="full", op_policy="save-everything"), "Unknown op_policy"),
    (_on(strategy="full", op_policy=lambda *a: 3), None),
    (_changed_later, "Unknown strategy 'everything'"),
    (lambda m: SelectiveCheckpointer(CheckpointConfig(enabled=True)).apply("model"), "needs a torch.nn.Module"),  # type: ignore[arg-type]
    (lambda m: SelectiveCheckpointer(CheckpointConfig(enabled=True)).apply(m, "report"), "must be a ProfileReport"),  # type: ignore[arg-type]
    (lambda m: SelectiveCheckpointer("full"), "needs a CheckpointConfig"),  # type: ignore[arg-type]
    (lambda m: SelectiveCheckpointer(CheckpointConfig(), m), "must be a MemoryProfiler"),  # type: ignore[arg-type]
    (lambda m: checkpoint_ops(m, [torch.mm], paths=["layers.0"]), "would match nothing"),
    (lambda m: checkpoint_ops(m, "save-matmuls", paths=["layers.9"]), "has no module `layers.9`"),
    (lambda m: checkpoint_ops(m, "save-matmuls", paths=["layers.0", "layers.0.up"]), "inside another region"),
    (lambda m: recoup.CheckpointWrapper("block"), "wraps a torch.nn.Module"),  # type: ignore[arg-type]
    (lambda m: recoup.CheckpointWrapper(m.layers), "no forward to run again"),
    (lambda m: MemoryProfiler(m).recommend_layers(1.0), "call profile"),
    (lambda m: MemoryProfiler(m).profile(torch.zeros(2, 32), num_runs=0), "num_runs must be"),
    (lambda m: MemoryProfiler(m, "gpu"), "Unknown device"),
    (lambda m: MemoryProfiler(m, "cuda"), "Move one to the other"),
    (lambda m: MemoryProfiler(nn.ReLU()), "has no parameters"),
    (lambda m: SelectiveCheckpointer(CheckpointConfig(enabled=True, strategy="full")).apply(nn.Linear(2, 2)), "none"),
]


@pytest.mark.parametrize(("act", "message"), [m for m in MODELS if m[1]], ids=[m[1] for m in MODELS if m[1]])
def test_a_refused_request_leaves_the_model_as_it_was(act: Callable[[nn.Module], Any], message: str) -> None:
    model, batch, _ = make("stack")
    before = step(model, batch)
    forwards = {path: dict(m.__dict__).get("forward") for path, m in model.named_modules()}
    with pytest.raises(UsageError, match=message):
        act(model)
    assert {path: m.__dict__.get("forward") for path, m in model.named_modules()} == forwards
    assert same(before, step(model, batch))


def test_a_model_that_has_a_plan_already_is_refused() -> None:
    model = Stack()
    first = SelectiveCheckpointer(CheckpointConfig(enabled=True, strategy="full"))
    first.apply(model)
    for act in (_on(strategy="full"), recoup.CheckpointWrapper):
        with pytest.raises(recoup.ConflictError, match="already applied"):
            act(model)
    first.remove()
    _on(strategy="full", op_policy="save-matmuls")(model)
    with pytest.raises(recoup.ConflictError, match="already a region"):
        recoup.plan(model, torch.randn(4, 32), budget="60%")


def test_a_policy_that_answers_nonsense_raises_with_the_path() -> None:
    model, batch, _ = make("stack")
    _on(strategy="full", op_policy=lambda *a, **k: "keep")(model)
    with pytest.raises(UsageError, match=r"`layers.0` returned 'keep'"):
        step(model, batch)


def test_patterns_that_match_nothing_are_one_warning() -> None:
    model = Stack()
    checkpointer = SelectiveCheckpointer(
        CheckpointConfig(enabled=True, strategy="full", exclude_patterns=["nope", "layers.7"])
    )
    with pytest.warns(UserWarning, match=r"'nope', 'layers.7' match no module") as told:
        checkpointer.apply(model)
    assert len(told) == 1
    assert checkpointer.get_checkpointed_layers() == [f"layers.{i}" for i in range(4)]


def test_a_warning_that_is_an_error_leaves_the_model_as_it_was() -> None:
    model = Stack()  # the suite turns warnings into errors
    with pytest.raises(UserWarning):
        _on(strategy="full", exclude_patterns=["nope"])(model)
    assert not any("forward" in m.__dict__ for m in model.modules())


def test_exclude_wins_over_include_and_says_so() -> None:
    model = Stack()
    checkpointer = SelectiveCheckpointer(
        CheckpointConfig(
            enabled=True, strategy="none", include_patterns=["layers.*"], exclude_patterns=["layers.1", "layers.2.*"]
        )
    )
    with pytest.warns(UserWarning, match="exclude wins"):
        checkpointer.apply(model)
    assert checkpointer.get_checkpointed_layers() == ["layers.0", "layers.3"]


@pytest.mark.parametrize("field", [{"use_reentrant": True}, {"preserve_rng_state": False}])
def test_settings_without_effect_are_one_warning(field: dict[str, bool]) -> None:
    with pytest.warns(UserWarning, match="has no effect") as told:
        _on(strategy="full", **field)(Stack())
    assert len(told) == 1


class Leaky(nn.Module):
    """A neuron that keeps its potential as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.v: torch.Tensor | float = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.v = 0.9 * self.v + self.linear(x)
        return torch.sigmoid(self.v)


class Unrolled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.neuron, self.head = Leaky(), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.neuron.v = 0.0
        return self.head(sum(self.neuron(x[t]) for t in range(len(x))))


@pytest.mark.parametrize("chunk_size", [1, 4])
def test_unrolled_time_by_chunks_of_steps(chunk_size: int) -> None:
    torch.manual_seed(0)
    model, x = Unrolled(), torch.randn(10, 3, 6)

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        model(x).square().sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    plain = gradients()
    config = CheckpointConfig(enabled=True, snn_timestep_checkpoint=True, snn_chunk_size=chunk_size)
    checkpointer = SelectiveCheckpointer(config)
    checkpointer.apply(model)
    assert any("forward" in vars(m) for m in model.modules())
    assert all(torch.equal(a, b) for a, b in zip(plain, gradients(), strict=True))
    checkpointer.remove()
    assert not any("forward" in vars(m) for m in model.modules())


def test_defaults_are_those_of_the_contract() -> None:
    config = CheckpointConfig()
    assert (config.enabled, config.strategy, config.memory_threshold_mb) == (False, "selective", 50.0)
    assert (config.use_reentrant, config.preserve_rng_state, config.snn_timestep_checkpoint) == (False, True, False)
    assert (config.snn_chunk_size, config.sequential_segments, config.profile_before_apply) == (1, None, True)
    assert (config.profile_num_runs, config.exclude_patterns, config.include_patterns) == (3, (), ())


def test_a_configuration_that_is_not_enabled_changes_nothing() -> None:
    model = Stack()
    assert SelectiveCheckpointer(CheckpointConfig(strategy="full")).apply(model) is model
    assert not any("forward" in m.__dict__ for m in model.modules())
