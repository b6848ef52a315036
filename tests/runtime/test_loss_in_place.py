"""The loss in place: every bit of the plain cross entropy, one copy of the logits, and nobody else's memory written."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import recoup
from recoup.errors import PlanMismatch, ReplayError, UsageError
from recoup.evidence.memory import measure_peak
from recoup.ir.decision import Decision, LossInPlace, OpMark, Rebuild, Recompute, Rederive, Save, TileModule
from recoup.runtime.apply import apply_decisions
from recoup.runtime.loss_in_place import LossInPlaceMode
from tests.models import plain_step, same, step

ROWS, CLASSES = 512, 300
IN_PLACE = LossInPlace(path="", rows=64)
HELD = OpMark(path="act", call=0, ordinal=0, op="aten.gelu.default", holds=True)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
MEGABYTE = ROWS * CLASSES * 4  # of logits


class Labelled(nn.Module):
    """A head and its loss, as transformers' models have it."""

    def __init__(self, loss: Callable[..., Tensor] = F.cross_entropy) -> None:
        super().__init__()
        self.body, self.act, self.head = nn.Linear(32, 32), nn.GELU(), nn.Linear(32, CLASSES)
        self.loss = loss

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.act(self.body(x)))
        return {"loss": self.loss(logits.view(-1, CLASSES), labels.view(-1)), "logits": logits}


def make(loss: Callable[..., Tensor] = F.cross_entropy) -> tuple[Labelled, dict[str, Tensor]]:
    torch.manual_seed(0)
    labels = torch.randint(0, CLASSES, (4, ROWS // 4))
    labels[:, ::5] = -100
    return Labelled(loss), {"x": torch.randn(4, ROWS // 4, 32), "labels": labels}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("autocast", [False, True])
def test_loss_and_gradients_are_those_of_the_plain_loss_to_the_bit(
    dtype: torch.dtype, reduction: str, autocast: bool
) -> None:
    for num, classes, ignored, rows in itertools.product((3, 130), (2, 50, 1001), (-100, 1), (1, 64)):
        if num <= rows:
            continue
        torch.manual_seed(num)
        hidden, weight = torch.randn(num, 8, dtype=dtype), torch.randn(classes, 8, dtype=dtype) * 3
        labels = torch.randint(0, classes, (num,)).masked_fill(torch.rand(num) < 0.2, ignored)
        found = []
        for decision in (None, LossInPlace(path="", rows=rows)):
            leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
            with torch.autocast("cpu", enabled=autocast):
                logits = F.linear(*leaves)
                if decision is None:
                    loss = F.cross_entropy(logits, labels, ignore_index=ignored, reduction=reduction)
                else:
                    with LossInPlaceMode(decision):
                        loss = F.cross_entropy(logits, labels, ignore_index=ignored, reduction=reduction)
                    assert type(loss.grad_fn).__name__ == "_LossBackward"
                del logits
            above = torch.linspace(0.5, 2, num) if reduction == "none" else torch.tensor(0.7)
            loss.backward(above.to(loss.dtype))
            found.append([loss.detach(), *(leaf.grad for leaf in leaves)])
        for plain, ours in zip(*found, strict=True):
            assert ours.dtype == plain.dtype
            assert torch.equal(ours.nan_to_num(), plain.nan_to_num()) and torch.equal(ours.isnan(), plain.isnan())


def test_where_all_labels_are_ignored_the_loss_is_nan_and_gradients_are_the_plain_ones() -> None:
    model, batch = make()
    batch["labels"].fill_(-100)
    expected = plain_step(model, batch)
    with apply_decisions(model, [IN_PLACE]):
        found = step(model, batch)
    assert found[0].isnan() and expected[0].isnan() and same(found[1:], expected[1:])


@pytest.mark.parametrize(
    "decisions",
    [
        (IN_PLACE,),
        (Rederive(path=""), IN_PLACE),
        (Save(path=""), Recompute(path="body"), IN_PLACE),
        (IN_PLACE, Rebuild(path="", marks=(HELD,))),
        (IN_PLACE, Rebuild(path="")),
    ],
    ids=lambda d: "+".join(one.action for one in d),
)
def test_beside_every_plan_a_step_is_the_plain_one(decisions: tuple[Decision, ...]) -> None:
    model, batch = make()
    expected = plain_step(model, batch)
    with apply_decisions(model, decisions):
        for _ in range(4):  # recorded, learnt, followed
            assert same(step(model, batch), expected)
    assert same(step(model, batch), expected)


def peak_of(model: nn.Module, batch: dict[str, Tensor], hold: Callable[[Tensor], Any] = lambda logits: None) -> int:
    """Returns the most that a step allocates at a time above what it begins with."""

    def run() -> None:
        out = model(**batch)
        loss, held = out["loss"], hold(out["logits"])
        del out
        loss.backward()
        del held

    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    run()
    return measure_peak(run, device=torch.device("cpu"), held_bytes=0)


def test_one_copy_of_the_logits_is_there_at_a_time() -> None:
    model, batch = make()
    plain = peak_of(model, batch)
    with apply_decisions(model, [IN_PLACE]):
        ours = peak_of(model, batch)
        held = peak_of(model, batch, lambda logits: logits)
        viewed = peak_of(model, batch, lambda logits: logits.detach().numpy())
    assert plain >= 3 * MEGABYTE
    assert ours < 1.7 * MEGABYTE
    assert held > ours + 0.9 * MEGABYTE and viewed > ours + 0.9 * MEGABYTE


def held_after(hold: Callable[[Tensor], Any]) -> tuple[Any, Any]:
    model, batch = make()
    with apply_decisions(model, [IN_PLACE]):
        out = model(**batch)
        held = hold(out["logits"])
        before = torch.as_tensor(held).clone()
        loss = out.pop("loss")
        del out
        loss.backward()
    return before, torch.as_tensor(held)


@pytest.mark.parametrize(
    "hold",
    [
        lambda logits: logits,
        lambda logits: logits.detach(),
        lambda logits: logits[0, :3],
        lambda logits: logits.detach().numpy(),
        lambda logits: logits.data.view(-1)[5:],
    ],
    ids=["logits", "detached", "slice", "numpy", "data"],
)
def test_logits_that_somebody_holds_are_not_written_over(hold: Callable[[Tensor], Any]) -> None:
    before, after = held_after(hold)
    assert torch.equal(before, after)


def test_a_second_loss_of_the_same_logits_finds_them_as_they_were() -> None:
    def both(logits: Tensor, labels: Tensor) -> Tensor:
        z_loss = 1e-3 * logits.logsumexp(1).square().mean()
        return F.cross_entropy(logits, labels) + z_loss + F.cross_entropy(logits, labels)

    model, batch = make(both)
    expected = plain_step(model, batch)
    for decisions in ((IN_PLACE,), (Rederive(path=""), IN_PLACE), (IN_PLACE, Rebuild(path=""))):
        with apply_decisions(model, decisions):
            assert all(same(step(model, batch), expected) for _ in range(4))


def test_gradient_of_the_logits_is_there_for_who_retains_it() -> None:
    model, batch = make()
    found = []
    for decisions in ((), (IN_PLACE,)):
        with apply_decisions(model, decisions):
            out = model(**batch)
            out["logits"].retain_grad()
            out["loss"].backward()
            found.append((out["logits"].detach().clone(), out["logits"].grad))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


def test_a_graph_that_is_kept_gives_the_same_gradients_twice() -> None:
    model, batch = make()
    with apply_decisions(model, [IN_PLACE]):
        loss = model(**batch)["loss"]
        loss.backward(retain_graph=True)
        first = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        loss.backward()
        assert same(first, [p.grad for p in model.parameters() if p.grad is not None])
        with pytest.raises((UsageError, RuntimeError), match="second time"):
            loss.backward()


def test_logits_that_were_written_to_are_refused() -> None:
    model, batch = make()
    with apply_decisions(model, [IN_PLACE]):
        out = model(**batch)
        out["logits"].data.zero_()  # not seen: `.data` has no version
        out["logits"].detach().zero_()
        with pytest.raises(ReplayError, match="changed in place") as raised:
            out["loss"].backward()
    assert raised.value.code == "E203"


def test_a_second_derivative_is_refused() -> None:
    model, batch = make()
    with apply_decisions(model, [IN_PLACE]), pytest.raises(UsageError, match="create_graph"):
        torch.autograd.grad(model(**batch)["loss"], list(model.parameters()), create_graph=True)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_of_the_users_own_runs_plainly(reentrant: bool) -> None:
    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        found = checkpoint(F.cross_entropy, logits, labels, use_reentrant=reentrant)
        assert isinstance(found, Tensor)
        return found

    model, batch = make(loss)
    expected = plain_step(model, batch)
    for decisions in ((IN_PLACE,), (IN_PLACE, Rebuild(path="")), (Rederive(path=""), IN_PLACE)):
        with apply_decisions(model, decisions):
            assert all(same(step(model, batch), expected) for _ in range(3))


@pytest.mark.parametrize(
    "loss",
    [
        lambda logits, labels: F.cross_entropy(logits, labels, weight=torch.linspace(0.5, 1, CLASSES)),
        lambda logits, labels: F.cross_entropy(logits, labels, label_smoothing=0.1),
        lambda logits, labels: F.cross_entropy(logits, F.one_hot(labels.clamp(0), CLASSES).float()),
        lambda logits, labels: F.cross_entropy(logits.view(4, -1, CLASSES).transpose(1, 2), labels.view(4, -1)),
        lambda logits, labels: F.cross_entropy(logits.t().contiguous().t(), labels),
        lambda logits, labels: F.nll_loss(F.log_softmax(logits, 1), labels),
        lambda logits, labels: F.cross_entropy(logits.detach(), labels) + logits.sum() * 0,
        lambda logits, labels: nn.CrossEntropyLoss(reduction="sum")(logits.float(), labels),
    ],
    ids=["weights", "smoothing", "probabilities", "3-d", "transposed", "nll", "detached", "module"],
)
def test_what_is_not_of_the_common_form_is_left_to_torch(loss: Callable[..., Tensor]) -> None:
    model, batch = make(loss)
    expected = plain_step(model, batch)
    for decisions in ((IN_PLACE,), (IN_PLACE, Rebuild(path=""))):
        with apply_decisions(model, decisions):
            assert all(same(step(model, batch), expected) for _ in range(3))


def test_labels_out_of_range_are_refused_as_ever() -> None:
    model, batch = make()
    batch["labels"][0, 1] = CLASSES
    with apply_decisions(model, [IN_PLACE]), pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        model(**batch)


def test_no_grad_and_inference_run_plainly() -> None:
    model, batch = make()
    expected = plain_step(model, batch)[0]
    with apply_decisions(model, [IN_PLACE]), torch.no_grad():
        assert torch.equal(model(**batch)["loss"], expected)


def test_rebuild_takes_nothing_else_beside_it() -> None:
    model, _ = make()
    with pytest.raises(PlanMismatch, match="but for `loss-in-place`"):
        apply_decisions(model, (IN_PLACE, Rebuild(path=""), TileModule(path="body", tile_tokens=4)))


def test_in_ones_own_loop_it_is_a_function() -> None:
    torch.manual_seed(0)
    hidden, head, labels = torch.randn(ROWS, 32), nn.Linear(32, CLASSES), torch.randint(0, CLASSES, (ROWS,))
    found = []
    for function in (F.cross_entropy, recoup.cross_entropy):
        head.zero_grad()
        for options in ({}, {"reduction": "sum"}, {"label_smoothing": 0.1}, {"ignore_index": 3}):
            loss = function(head(hidden), labels, **options)
            loss.backward()
            found.append((function, loss.detach(), *(p.grad.clone() for p in head.parameters() if p.grad is not None)))
    for plain, ours in zip(found[:4], found[4:], strict=True):
        assert same(list(plain[1:]), list(ours[1:]))


def test_a_region_and_a_checkpoint_run_the_function_as_it_is() -> None:
    model, batch = make(lambda logits, labels: recoup.cross_entropy(logits, labels))
    expected = plain_step(model, batch)
    for decisions in ((Recompute(path=""),), (Save(path=""), Recompute(path="")), (Rebuild(path=""),)):
        with apply_decisions(model, decisions):
            assert all(same(step(model, batch), expected) for _ in range(3))


def test_a_plan_by_default_has_it_and_its_peak_is_the_predicted_one() -> None:
    model, batch = make()
    found = recoup.fit(model, batch, budget="60%")
    assert any(isinstance(d, LossInPlace) for d in found.plan.decisions), str(found.plan)
    assert found.evidence.ok
    assert found.evidence.peak_bytes == found.evidence.predicted_peak_bytes
    found.applied.remove()
    without = recoup.plan(model, batch, budget="96%", actions=("rederive", "recompute"))
    assert not any(isinstance(d, LossInPlace) for d in without.decisions)


def test_a_model_that_writes_over_its_logits_is_planned_without() -> None:
    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        found = F.cross_entropy(logits, labels)
        logits.detach().mul_(2)
        return found

    model, batch = make(loss)
    plan = recoup.plan(model, batch, budget="96%")
    assert not any(isinstance(d, LossInPlace) for d in plan.decisions)
