"""Offload in the planner: what it gives, never worse with it than without, and what the link's arithmetic says."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

import recoup
from recoup.capture.capture import capture
from recoup.capture.spec import StepSpec
from recoup.cost.host_link import MAX_BLOCKS_ON_THEIR_WAY, Link, with_copies
from recoup.cost.model import FlopsCost
from recoup.errors import InfeasibleBudget, UsageError
from recoup.ir.decision import Offload
from recoup.planner.driver import Planner
from recoup.planner.strategies.registry import DEFAULT_ACTIONS, OPT_IN_ACTIONS
from recoup.runtime.apply import apply_decisions
from recoup.runtime.offload.transport import InlineTransport
from recoup.solver.frontier import Solver
from recoup.solver.offload import with_offload
from tests.thorough import cases

SHARES = (0.75, 0.5, 0.3)
SAME_TIME = 0.01  # the planner takes plans this close as equally fast


def mlp() -> tuple[nn.Module, Any]:
    def block() -> nn.Module:
        return nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    return nn.Sequential(*(block() for _ in range(6))), torch.randn(2048, 64)


def llama() -> tuple[nn.Module, Any]:
    sizes = {"vocab_size": 2000, "hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 2}
    model = hf.LlamaForCausalLM(hf.LlamaConfig(num_hidden_layers=3, **sizes))
    ids = torch.randint(0, 2000, (8, 256))
    return model, {"input_ids": ids, "labels": ids.clone()}


def gpt2() -> tuple[nn.Module, Any]:
    ids = torch.randint(0, 2000, (8, 256))
    config = hf.GPT2Config(vocab_size=2000, n_embd=64, n_layer=3, n_head=2, bos_token_id=1, eos_token_id=2)
    return hf.GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids.clone()}


def bert() -> tuple[nn.Module, Any]:
    ids = torch.randint(0, 2000, (4, 256))
    sizes = {"vocab_size": 2000, "hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 2}
    config = hf.BertConfig(num_hidden_layers=3, **sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return hf.BertForMaskedLM(config), {"input_ids": ids, "labels": ids.clone()}


def convolutions() -> tuple[nn.Module, Any]:
    def block() -> nn.Module:
        return nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True))

    return nn.Sequential(nn.Conv2d(3, 16, 1), *(block() for _ in range(5))), torch.randn(4, 3, 32, 32)


MODELS = {"mlp": mlp, "llama": llama, "gpt2": gpt2, "bert": bert, "convolutions": convolutions}


class FastLink(FlopsCost):
    """FLOPs for prices, and a link about as fast as compute asks for."""

    link = Link(out_bytes=5e10, back_bytes=5e10, overlaps=True, source="test")


def planner_for(
    name: str, actions: tuple[str, ...], dialect: str = "cuda", cost: type[FlopsCost] = FastLink
) -> Planner:
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    return Planner(StepSpec(model=model, batch=batch, dialect=dialect), cost=cost(), actions=actions)


def seconds(planner: Planner, budget_bytes: int) -> float:
    candidate = planner.fit(budget_bytes)
    assert candidate is None or candidate.peak_bytes <= budget_bytes
    return float("inf") if candidate is None else candidate.step_seconds


@pytest.mark.slow
@pytest.mark.parametrize("name", cases(MODELS, ("mlp",)))
def test_with_all_actions_the_frontier_lies_on_or_below_the_one_without(name: str) -> None:
    without = planner_for(name, ("rederive", "recompute"))
    with_all = planner_for(name, (*DEFAULT_ACTIONS, *OPT_IN_ACTIONS))
    plain = without.plain.peak_bytes
    assert with_all.plain.peak_bytes == plain
    gained = 0
    for share in SHARES:
        slower, faster = seconds(without, int(plain * share)), seconds(with_all, int(plain * share))
        assert faster <= slower * (1 + SAME_TIME), f"at {share} of plain"
        gained += faster < slower * (1 - SAME_TIME)
    assert with_all.smallest().peak_bytes <= without.smallest().peak_bytes
    assert gained >= 1


def test_offload_is_chosen_where_copies_hide() -> None:
    planner = planner_for("mlp", ("recompute", "offload"))
    budget = int(0.5 * planner.plain.peak_bytes)
    candidate = planner.fit(budget)
    assert candidate is not None and any(d.offloads for d in candidate.decisions)
    without = planner_for("mlp", ("recompute",)).fit(budget)
    assert without is not None and candidate.step_seconds < without.step_seconds
    plan = planner.plan(candidate, budget_bytes=budget, budget_text="50%", device="a100-80gb")
    assert plan.predicted.offloaded_bytes == candidate.offloaded_bytes > 0
    assert recoup.Plan.from_json(plan.to_json()) == plan
    assert "to the host" in str(plan) and "offload" in str(plan)


def test_a_slow_link_is_left_alone() -> None:
    planner = planner_for("mlp", ("rederive", "recompute", "offload"), dialect="cpu", cost=FlopsCost)
    candidate = planner.fit(int(0.8 * planner.plain.peak_bytes))
    assert candidate is not None and not any(d.offloads for d in candidate.decisions)


def test_it_is_not_a_default_and_has_a_name() -> None:
    assert "offload" not in DEFAULT_ACTIONS
    with pytest.raises(UsageError, match="offload"):
        recoup.plan(nn.Linear(2, 2), torch.randn(2, 2), budget="1GiB", actions=("upload",))


def captured(dialect: str) -> Any:
    torch.manual_seed(0)
    model, x = mlp()
    spec = StepSpec(model=model, batch=x, dialect=dialect)
    with apply_decisions(model, [Offload(path="1"), Offload(path="3")]):
        return FlopsCost().price(capture(spec))


def link(speed: float, *, overlaps: bool = True) -> Link:
    return Link(out_bytes=speed, back_bytes=speed, overlaps=overlaps, source="test")


def test_copies_cost_what_does_not_hide() -> None:
    priced = captured("cuda")
    out = sum(c.nbytes for c in priced.trace.copies if c.kind == "out")
    back = sum(c.nbytes for c in priced.trace.copies if c.kind == "back")
    waits = sum(c.nbytes for c in priced.trace.copies if c.kind == "wait")
    assert out == back == waits > 0
    step = sum(priced.op_seconds)
    fast, slow = with_copies(priced, link(1e18)), with_copies(priced, link(2 * out / step / 10))
    assert fast.copy_seconds < 1e-6 * step
    assert 8 * step < slow.copy_seconds < 11 * step  # both ways take ten steps and hide behind one at most
    assert slow.trace == priced.trace  # a late copy holds the step up, not the memory
    speeds = [with_copies(priced, link(1e9 * 4**i)).copy_seconds for i in range(6)]
    assert speeds == sorted(speeds, reverse=True)


def test_so_many_storages_are_on_their_way_out_at_a_time() -> None:
    trace = captured("cuda").trace
    out = [c for c in trace.copies if c.kind == "out" and c.storage >= 0]
    first_back = min(c.op for c in trace.copies if c.kind == "back")
    assert len(out) > MAX_BLOCKS_ON_THEIR_WAY
    for position, copy in enumerate(out):
        later = position + MAX_BLOCKS_ON_THEIR_WAY
        until = out[later].op if later < len(out) else first_back
        assert trace.storages[copy.storage].free_op >= until - 1
    held = [s for s in (trace.storages[c.storage] for c in out) if s.free_op >= first_back]
    assert len(held) <= MAX_BLOCKS_ON_THEIR_WAY


def test_without_copy_engines_every_byte_is_waited_for() -> None:
    priced = captured("cpu")
    moved = sum(c.nbytes for c in priced.trace.copies if c.kind == "out")
    assert with_copies(priced, link(1e9, overlaps=False)).copy_seconds == pytest.approx(2 * moved / 1e9)


def test_labels_with_a_window_leave_out_what_the_link_cannot_take() -> None:
    planner = planner_for("mlp", ("recompute",))
    region = _blocks(planner)[0].region
    moved = sum(o.saved_bytes for leaf in _blocks(planner)[0].parts for o in leaf_options(leaf))
    for times, wanted in ((0.9, 6), (1.9, 3), (2.9, 2)):
        seconds_each = (region.seconds + region.tail_seconds) * times / moved
        problem = with_offload(
            planner.step.views.plain.problem,
            out_seconds=seconds_each,
            back_seconds=seconds_each,
            overlaps=True,
            assumption="window",
            min_bytes=1,
            depth=1,
        )
        offered = [b for b in problem.parts[0].parts if getattr(b, "offloads", ())]  # type: ignore[union-attr]
        assert len(offered) == wanted, times
        Solver(problem, actions=("recompute", "offload")).leanest()


def _blocks(planner: Planner) -> list[Any]:
    return [part for part in planner.step.views.plain.problem.parts[0].parts if hasattr(part, "region")]  # type: ignore[union-attr]


def leaf_options(part: Any) -> list[Any]:
    if hasattr(part, "options"):
        return [part.options[0]]
    return [option for inner in part.parts for option in leaf_options(inner)]


def within(host_bytes: int | None) -> tuple[Planner, Any]:
    torch.manual_seed(0)
    model, batch = mlp()
    spec = StepSpec(model=model, batch=batch, dialect="cuda")
    planner = Planner(spec, cost=FastLink(), actions=("recompute", "offload"), host_budget_bytes=host_bytes)
    return planner, planner.fit(int(0.5 * planner.plain.peak_bytes))


class Counting(InlineTransport):
    """Counts the bytes that are there: what it hands out lives as long as they do."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0

    def put(self, flat: torch.Tensor) -> Any:
        handle = Handle(super().put(flat))
        self.now += flat.numel()
        self.most = max(self.most, self.now)
        weakref.finalize(handle, self._gone, flat.numel())
        return handle

    def _gone(self, nbytes: int) -> None:
        self.now -= nbytes


class Handle(list[Any]):
    """A list that can be watched."""


@pytest.mark.slow
def test_a_plan_keeps_to_the_hosts_memory_and_is_slower_for_it() -> None:
    planner, free = within(None)
    assert free is not None and free.host_bytes > 0
    model, batch = planner.spec.model, planner.spec.batch
    before = 0.0
    for host_share in (1.0, 0.75, 0.5, 0.0):
        _, found = within(int(host_share * free.host_bytes))
        assert found is not None and found.host_bytes <= host_share * free.host_bytes
        assert found.host_bytes >= 0.9 * host_share * free.host_bytes, "of these layers each that fits there is moved"
        assert found.step_seconds >= before * (1 - SAME_TIME), "less of the host's memory is never faster"
        before = found.step_seconds
        transport = Counting()
        with apply_decisions(model, found.decisions, transport=transport):
            model(batch).mean().backward()
        assert transport.most == found.host_bytes


@pytest.mark.slow
def test_hosts_bytes_are_asked_for_by_themselves_and_checked() -> None:
    model, x = mlp()
    plan = recoup.plan(model, x, budget="60%", host_budget="1MiB", cost=FastLink(), device="a100-80gb")
    assert plan.predicted.host_bytes <= 1 << 20
    for keywords, message in (
        ({"host_budget": "1MiB", "actions": ("recompute",)}, "offload"),
        ({"host_budget": "60%"}, "number of bytes"),
    ):
        with pytest.raises(UsageError, match=message):
            recoup.plan(model, x, budget="60%", device="a100-80gb", **keywords)
    with pytest.raises(InfeasibleBudget, match="on the host"):
        recoup.plan(model, x, budget="1%", host_budget="1MiB", device="a100-80gb")


class Residual(nn.Module):
    """A norm whose output only a call inside of a sibling reads: where it rederives, both do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.mlp = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


def test_a_unit_that_begins_inside_of_a_call_that_may_move_its_tensors() -> None:
    keywords = {"loss": lambda output, _: output.mean(), "device": "cpu-generic"}
    plan = recoup.plan(Residual(), torch.randn(512, 64), budget="90%", host_budget="1MiB", **keywords)
    assert plan.predicted.peak_bytes <= plan.budget_bytes and plan.predicted.host_bytes <= 1 << 20
