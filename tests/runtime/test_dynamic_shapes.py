"""Steps whose sizes vary follow the program of two that did the same; whatever differs is recorded."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recoup.evidence.gradients import equal_values
from recoup.evidence.memory import measure_peak
from recoup.ir.decision import Rebuild, Rederive
from recoup.runtime.apply import apply_decisions
from recoup.runtime.rebuild import held_recorder, saved_tensor
from recoup.runtime.rebuild.dynamic_shapes import Varied, common, grouping, merged
from recoup.runtime.rebuild.step_run import StepRun
from recoup.runtime.rebuild.varied_ops import VariedOps
from tests.runtime.random_programs import WIDTH, Program
from tests.runtime.test_held_fuzz import backward, ops_of, random_marks

ROWS, HEADS, MOST = 3, 4, 48
LENGTHS = [7, 12, 9, 5, 16, 12]
Step = Callable[["_Model", Tensor], Tensor]


class _Model(nn.Module):
    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step = step
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.places = nn.Parameter(torch.randn(MOST, WIDTH))
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("causal", torch.ones(MOST, MOST).tril().bool())
        self.causal: Tensor
        self.i = 0

    def forward(self, x: Tensor) -> Tensor:
        self.i += 1
        return self.step(self, x).square().mean()


def _act(x: Tensor) -> Tensor:
    return torch.tanh(torch.exp(x * 0.3))


def _layers(model: _Model, x: Tensor) -> Tensor:
    return _act(model.second(_act(model.first(x))) + x)


def _attention(model: _Model, x: Tensor) -> Tensor:
    rows, length, _ = x.shape
    x = _act(model.first(x) + model.places[:length])
    heads = x.view(rows, length, HEADS, WIDTH // HEADS).transpose(1, 2)
    scores = (heads @ heads.transpose(-2, -1)).masked_fill(~model.causal[:length, :length], float("-inf"))
    out = F.dropout(scores.softmax(-1), 0.2) @ heads
    return _act(model.second(F.layer_norm(out.transpose(1, 2).reshape(rows, length, WIDTH) + x, (WIDTH,))))


def _fused_attention(model: _Model, x: Tensor) -> Tensor:
    heads = _act(model.first(x)).view(ROWS, -1, HEADS, WIDTH // HEADS).transpose(1, 2)
    out = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    return _act(model.second(out.transpose(1, 2).flatten(2)))


def _convolutions(model: _Model, x: Tensor) -> Tensor:
    y = F.conv1d(x.transpose(1, 2), model.first.weight.unsqueeze(-1))
    return _act(F.max_pool1d(F.relu(model.norm(_act(y))), 3, stride=1, padding=1))


def _experts(model: _Model, x: Tensor) -> Tensor:  # one may get no row, or one, and its step is left
    rows = x.flatten(0, 1)
    weights, chosen = _act(rows[:, : len(model.experts)]).topk(2, dim=-1)
    out = torch.zeros_like(rows)
    for i, expert in enumerate(model.experts):
        at, place = (chosen == i).nonzero(as_tuple=True)
        out.index_add_(0, at, _act(expert(rows[at])) * weights[at, place, None])
    return _act(out)


def _rolled(model: _Model, x: Tensor) -> Tensor:
    y = _act(model.first(x))
    order = torch.arange(x.shape[1]).roll(2)
    return _act(y[:, order] * torch.cat([y[:, 2:], y[:, :2].flip(1)], dim=1))


def _masked(model: _Model, x: Tensor) -> Tensor:
    y = _act(model.first(x))
    places = torch.arange(x.shape[1])
    scores = (y @ y.transpose(1, 2)).masked_fill(places[None] > places[:, None], float("-inf"))
    return _act(scores.softmax(-1) @ y)


def _drawn_before_gradients(model: _Model, x: Tensor) -> Tensor:
    return _act(model.second(_act(model.first(F.dropout(_act(x.detach()), 0.2)))) + x)


def _attention_with_dropout(model: _Model, x: Tensor) -> Tensor:  # written out inside of torch, on a CPU
    heads = _act(model.first(x)).view(ROWS, -1, HEADS, WIDTH // HEADS).transpose(1, 2)
    mask = x.detach().sum(-1)[:, None, None] > -WIDTH
    out = F.scaled_dot_product_attention(heads, heads * 2, heads, attn_mask=mask, dropout_p=0.2)
    return _act(model.second(out.transpose(1, 2).flatten(2)))


def _gumbel(model: _Model, x: Tensor) -> Tensor:
    return _act(F.gumbel_softmax(_act(model.first(x)), tau=0.5) * 2)


def _divided_by_its_length(model: _Model, x: Tensor) -> Tensor:
    return _act(_act(model.first(x)) / x.shape[1] * _act(x))


def _padded(model: _Model, x: Tensor) -> Tensor:
    y = F.pad(_act(model.first(x)), (0, 0, 1, MOST - x.shape[1]))
    return _act(y * _act(y))


def _mixed(model: _Model, x: Tensor) -> Tensor:
    weight = 1 / (1 + model.i)
    y = _act(model.first(x * weight + (1 - weight) * x.flip(0)))
    return _act(torch.add(_act(y) ** weight, y, alpha=1 + model.i))


def _padded_on_both_sides(model: _Model, x: Tensor) -> Tensor:
    left = MOST - x.shape[1]  # the same on both sides, until it is not
    y = F.pad(_act(model.first(x)), (0, 0, left, left if model.i < 4 else left + model.i % 3))
    return _act(y.clamp(min=-0.5 * left, max=0.5 * left)) * _act(y)


def _written(model: _Model, x: Tensor) -> Tensor:
    y = _act(model.first(x)).clone()
    y[:, : x.shape[1] // 2] *= 2
    y[:, -1].zero_()
    return _act(y.add_(x))


def _autocast(model: _Model, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return _layers(model, x)


FOLLOWED = [_layers, _masked, _attention, _fused_attention, _convolutions, _experts, _rolled, _autocast]
FOLLOWED += [
    _attention_with_dropout,
    _drawn_before_gradients,
    _gumbel,
    _divided_by_its_length,
    _padded,
    _padded_on_both_sides,
    _mixed,
]


def _cut_off(model: _Model, x: Tensor) -> Tensor:
    y = _act(model.first(x))  # the first six of each, which some have not
    return _act(y[:, :6]).sum(1) + _act(y[:, :6] * 2)[:, 0]


def _other_for_long_ones(model: _Model, x: Tensor) -> Tensor:
    y = _act(model.first(x))
    return _act(y * y if x.shape[1] > 10 else y + y)


def _pooled(model: _Model, x: Tensor) -> Tensor:
    return _act(F.adaptive_avg_pool1d(_act(model.first(x)).transpose(1, 2), 4) * 2)


def _interpolated(model: _Model, x: Tensor) -> Tensor:
    return _act(F.interpolate(_act(model.first(x)).transpose(1, 2), size=8, mode="linear") * 2)


def _with_positions(model: _Model, x: Tensor) -> Tensor:
    angles = torch.arange(x.shape[1], dtype=torch.float32)[:, None] / torch.linspace(1, 9, WIDTH)
    return _act(_act(model.first(x)) * angles.cos() + _act(x) * angles.sin())


def _last_ones(model: _Model, x: Tensor) -> Tensor:
    y = _act(model.first(x))
    return _act(y[:, -3:] * y[:, x.shape[1] // 2].unsqueeze(1))


def _both_vary(model: _Model, x: Tensor) -> Tensor:
    y = _act(model.first(x[: 1 + model.i % 3]))
    return _act(y @ y.transpose(1, 2))


def _distances(model: _Model, x: Tensor) -> Tensor:
    y = _act(model.first(x))
    return _act(torch.cdist(y, y * 2) @ y)  # by a product where there are many rows


def _ordered_products(model: _Model, x: Tensor) -> Tensor:
    y = _act(model.first(x)).flatten(0, 1)
    return _act(
        torch.linalg.multi_dot([y, y.t(), _act(y)]) + torch.linalg.multi_dot([y, model.second.weight, y.t()]) @ y
    )


OTHERS = [_distances, _ordered_products, _cut_off, _other_for_long_ones, _pooled]
OTHERS += [_interpolated, _with_positions, _last_ones, _both_vary, _written]
PLANS = [Rebuild(path=""), Rederive(path="")]
MIXED = ([*LENGTHS, *LENGTHS], [12, 14, 5, 3, 16, 6, 1, 9] * 2, [12, 14, 16, 2, 1, 4, 5], [40, 30, 20, 24, 33, 26])


@pytest.fixture(autouse=True)
def varied(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[bool, bool]]]:
    """Whether each followed program was one for all sizes, and followed to its end."""
    monkeypatch.setattr(held_recorder, "MIN_BYTES", 0)
    monkeypatch.setattr(saved_tensor, "MIN_BYTES", 0)
    found: list[tuple[bool, bool]] = []
    real = StepRun.close

    def close(self: StepRun) -> None:
        found.append((self._program.is_varied, self.is_done))
        real(self)

    monkeypatch.setattr(StepRun, "close", close)
    yield found


def _train(step: Step, decisions: list[Any], lengths: list[int]) -> list[Tensor]:
    torch.manual_seed(0)
    model = _Model(step)
    found = []
    with apply_decisions(model, decisions):
        for length in lengths:
            x = torch.randn(ROWS, length, WIDTH, requires_grad=True)
            loss = model(x)
            loss.backward()
            parameters = [p for p in model.parameters() if p.grad is not None]
            found += [
                loss.detach(),
                x.grad,
                *[p.grad.clone() for p in parameters],
                *[b.clone() for b in model.buffers()],
            ]
            with torch.no_grad():
                for p in parameters:
                    p -= 1e-2 * p.grad
                    p.grad = None
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("step", FOLLOWED)
@pytest.mark.parametrize("plan", PLANS)
def test_steps_of_other_sizes_follow_one_program(step: Step, plan: Any, varied: list[tuple[bool, bool]]) -> None:
    lengths = LENGTHS * 2
    plain, planned = _train(step, [], lengths), _train(step, [plan], lengths)
    assert len(plain) == len(planned) and all(map(equal_values, plain, planned))
    if (plan, step) != (PLANS[1], _attention_with_dropout):  # which starts from what is saved as another view
        assert varied.count((True, True)) >= len(lengths) // 3
    left_early = [is_varied for is_varied, is_done in varied if not is_done]
    may_be_left = step is _experts or (step in (_mixed, _padded_on_both_sides) and not any(left_early))
    assert not left_early or may_be_left


@pytest.mark.parametrize("step", OTHERS)
@pytest.mark.parametrize("lengths", MIXED)
@pytest.mark.parametrize("plan", PLANS)
def test_steps_that_do_other_things_by_their_size(step: Step, lengths: list[int], plan: Any) -> None:
    lengths = [max(length, 3) for length in lengths] if step is _last_ones else lengths
    plain, planned = _train(step, [], lengths), _train(step, [plan], lengths)
    assert len(plain) == len(planned) and all(map(equal_values, plain, planned))


@pytest.mark.parametrize("step", FOLLOWED)
@pytest.mark.parametrize("lengths", [[12, 14, 1, 2, 1, 16], [1, 2, 1, 7, 9, 8], [7, 9, 0, 8, 0, 3]])
@pytest.mark.parametrize("plan", PLANS)
def test_steps_with_one_element_or_none(step: Step, lengths: list[int], plan: Any) -> None:
    if 0 in lengths and step in (_convolutions, _rolled):
        pytest.skip("plain training has no step of no element here")
    plain, planned = _train(step, [], lengths), _train(step, [plan], lengths)
    assert len(plain) == len(planned) and all(map(equal_values, plain, planned))


def _of_any_size(seed: int, length: int) -> Program:
    """Returns a random program without steps that follow from the number of rows, or run a cell."""
    torch.manual_seed(seed)
    model = Program(seed, length=length)
    model.varies = False
    model.steps = [step for step in model.steps if step[0] not in (19, 21, 23, 24)] or [(1, 2)]
    return model


def _train_random(seed: int, length: int, decisions: list[Any], sizes: list[int]) -> list[Tensor]:
    model, found = _of_any_size(seed, length), []
    with apply_decisions(model, decisions):
        for size in sizes:
            x = torch.randn(size, WIDTH, requires_grad=True)
            with torch.autocast("cpu", torch.bfloat16, enabled=seed % 5 == 1):
                loss = model(x)
            backward(loss, model, x, seed % 5)
            found += [x.grad, *[p.grad.clone() for p in model.parameters() if p.grad is not None]]
    return found  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("seed", "length"), [*[(seed, 4) for seed in range(12)], (1, 14), (2, 14), (69, 14), (242, 14)]
)
def test_random_programs_of_varied_sizes(
    seed: int, length: int, monkeypatch: pytest.MonkeyPatch, varied: list[tuple[bool, bool]]
) -> None:
    rng = random.Random(seed)
    sizes = [rng.randrange(40, 90) for _ in range(7)]
    plain = _train_random(seed, length, [], sizes)
    x = torch.randn(48, WIDTH, requires_grad=True)
    addresses = ops_of(_of_any_size(seed, length), x, monkeypatch)
    planned = _train_random(seed, length, [Rederive(path="")], sizes)
    assert len(plain) == len(planned) and all(map(equal_values, plain, planned))
    for share in (0.0, 0.1, 0.4):
        starts, pieces = rng.choice([0.0, 0.03, 0.2]), rng.choice([0.0, 0.1, 0.3])
        marks = random_marks(addresses, rng, share=share, starts=starts, pieces=pieces)
        planned = _train_random(seed, length, [Rebuild(path="", marks=marks)], sizes)
        assert len(plain) == len(planned) and all(map(equal_values, plain, planned))


@pytest.mark.parametrize("step", [_layers, _attention])
@pytest.mark.parametrize("plan", PLANS)
def test_it_needs_no_more_memory_than_the_record(step: Step, plan: Any, varied: list[tuple[bool, bool]]) -> None:
    model, peaks = _Model(step), {}
    with apply_decisions(model, [plan]):
        for length in (12, 16, 9, 12, 16, 9, 12):
            x = torch.randn(64 * ROWS, length, WIDTH)
            step_of_x = functools.partial(lambda x: model(x).backward(), x)
            peak = measure_peak(step_of_x, device=torch.device("cpu"), held_bytes=0)
            model.zero_grad()
            assert peaks.setdefault(length, peak) == peak
    assert varied.count((True, True)) >= 3


@pytest.mark.parametrize("plan", PLANS)
def test_an_interrupted_comparison_changes_nothing(plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = VariedOps.vary, []

    def vary(self: VariedOps, *args: Any) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt
        real(self, *args)

    monkeypatch.setattr(VariedOps, "vary", vary)
    found = []
    for decisions in ([], [plan]):
        torch.manual_seed(0)
        model, gradients = _Model(_layers), []
        with apply_decisions(model, decisions):
            for length in LENGTHS * 2:
                x = torch.randn(ROWS, length, WIDTH, requires_grad=True)
                try:
                    model(x).backward()
                except KeyboardInterrupt:
                    model(x).backward()
                gradients.append(x.grad)
        found.append(gradients)
    assert len(calls) > 1 and all(map(equal_values, *found))


def test_what_two_geometries_have_in_common() -> None:
    def lie(*sizes: int) -> Any:
        x = torch.empty(sizes)
        return x.size(), x.stride(), 0, x.dtype

    assert common(lie(2, 5, 3), lie(2, 5, 3)) == lie(2, 5, 3)
    kind = common(lie(2, 5, 3), lie(2, 7, 3))
    assert isinstance(kind, Varied)
    assert lie(2, 9, 3) == kind
    assert lie(2, 1, 3) != kind and lie(3, 9, 3) != kind and lie(2, 9) != kind
    turned = torch.empty(2, 9, 3).transpose(1, 2)
    assert (turned.size(), turned.stride(), 0, turned.dtype) != common(lie(2, 3, 5), lie(2, 3, 7))
    wider = kind.with_sizes_of(lie(4, 9, 3))
    assert wider is not None and lie(8, 8, 3) == wider and lie(8, 8, 4) != wider
    with pytest.raises(ValueError):
        common(lie(2, 5), lie(2, 5, 1))


@pytest.mark.parametrize(
    "view", [lambda x: x, lambda x: x.flatten(0, 1), lambda x: x.unsqueeze(1), lambda x: x[..., None]]
)
def test_how_an_op_reads_what_its_call_was_handed(view: Callable[[Tensor], Tensor]) -> None:
    def lie(x: Tensor) -> Any:
        return x.size(), x.stride(), x.storage_offset(), x.dtype

    tensors = [torch.empty(2, length, 3).transpose(0, 1).contiguous().transpose(0, 1) for length in (5, 7)]
    tensors = [t.contiguous() for t in tensors]
    groups = grouping([(lie(t), lie(view(t))) for t in tensors])
    assert groups is not None
    other = torch.empty(4, 9, 3)
    assert merged(lie(other), groups) == lie(view(other))
    assert grouping([(lie(t), lie(t.flip(0).transpose(0, 1))) for t in tensors]) is None
