"""What each of two gloo ranks runs: a table of {wrapper} x {plan before, after} x {mode}, against one process."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import recoup
from recoup._pytree import iterate_tensors
from recoup.capture.fingerprint import fingerprint, structure_of
from recoup.capture.spec import StepSpec
from recoup.cost.model import FlopsCost
from recoup.cost.sharding import ShardedCost
from recoup.errors import ConflictError, PlanMismatch
from recoup.evidence.memory import measure_peak, storage_bytes
from recoup.integrations import distributed
from recoup.ir.decision import Decision, Rebuild, Recompute, Rederive, TileLoss
from recoup.ir.evidence import Evidence
from recoup.ir.plan import Plan, Prediction
from recoup.planner.simulator import Simulator
from recoup.runtime import execution_context
from recoup.runtime.apply import apply_decisions
from tests.thorough import IS_THOROUGH

WIDTH, DEPTH = 32, 3
WRAPPERS = ("ddp", "ddp static_graph", "ddp find_unused", "fsdp1", "fsdp2")
MODES = ("plain", "accumulation", "bf16")


class Block(nn.Module):
    """Norm before and after: the outer norm's output is saved by the next block, which is another FSDP unit."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.act, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(x + self.down(self.act(self.up(self.inner(x)))))


class Net(nn.Module):
    """Blocks and a head; `spare` is never used."""

    def __init__(self, *, spare: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, 3)
        if spare:
            self.spare = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


PLANS = {
    "regions": tuple(Recompute(path=f"layers.{i}") for i in range(DEPTH)),
    "span": (Recompute(path="layers.0", span=("layers.1",), inside="rederive"),),
    "rederive": (Rederive(path=""),),
    "rebuild": (Rebuild(path=""),),
}


def plan_of(model: nn.Module, decisions: tuple[Decision, ...]) -> Plan:
    prediction = Prediction(
        peak_bytes=0,
        plain_peak_bytes=0,
        step_seconds=0.0,
        plain_step_seconds=0.0,
        recomputed_flops=0,
        plain_flops=0,
        saved_bytes=0,
        plain_saved_bytes=0,
        phase="forward",
        tensors=(),
        cost_source="none",
    )
    structure = structure_of(model)
    return Plan(
        decisions=decisions,
        budget_bytes=1,
        budget_text="1",
        device="cpu",
        model_class=type(model).__name__,
        fingerprint=fingerprint(model),
        structure=tuple((d.path, structure[d.path]) for d in decisions if d.path),
        predicted=prediction,
    )


def wrap(kind: str, model: nn.Module, mode: str, *, reshard: bool = True) -> nn.Module:
    low = mode == "bf16"
    if kind == "fsdp1":
        policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if low else None
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            device_id=torch.device("cpu"),
            use_orig_params=True,
            mixed_precision=policy,
        )
    if kind == "fsdp2":
        options: dict[str, Any] = {"reshard_after_forward": reshard}
        if low:
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in model.layers:  # type: ignore[union-attr]
            fully_shard(layer, **options)
        return fully_shard(model, **{**options, "reshard_after_forward": None if reshard else False})
    return DistributedDataParallel(
        model, static_graph=kind == "ddp static_graph", find_unused_parameters=kind == "ddp find_unused"
    )


def train(wrapped: nn.Module, kind: str, mode: str, batches: list[torch.Tensor], rank: int) -> None:
    """Two steps; under accumulation the second is of two batches, the first of them without synchronising."""
    mine = [b.chunk(dist.get_world_size())[rank] for b in batches]
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=mode == "bf16" and kind.startswith("ddp"))

    def backward(batch: torch.Tensor) -> None:
        with autocast:
            loss = wrapped(batch)
        loss.backward()

    backward(mine[0])  # DDP's static graph is learnt in a synchronised step
    for parameter in wrapped.parameters():
        parameter.grad = None
    if mode == "accumulation":
        if kind == "fsdp2":
            wrapped.set_requires_gradient_sync(False)  # type: ignore[operator]
            backward(mine[1])
            wrapped.set_requires_gradient_sync(True)  # type: ignore[operator]
        else:
            with wrapped.no_sync():  # type: ignore[operator]
                backward(mine[1])
    backward(mine[2])


def gradients(wrapped: nn.Module, kind: str) -> list[torch.Tensor | None]:
    context: Any = contextlib.nullcontext()
    if kind == "fsdp1":
        context = FullyShardedDataParallel.summon_full_params(wrapped, with_grads=True)
    with context:
        found = []
        for parameter in wrapped.parameters():
            grad = parameter.grad
            found.append(grad.full_tensor() if grad is not None and kind == "fsdp2" else grad)  # type: ignore[operator]
        return [None if g is None else g.detach().clone() for g in found]


def error_of(found: list[torch.Tensor | None], expected: list[torch.Tensor | None]) -> float:
    assert [g is None for g in found] == [g is None for g in expected]
    pairs = [(a, b) for a, b in zip(found, expected, strict=True) if a is not None and b is not None]
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


def row(kind: str, mode: str, rank: int) -> dict[str, dict[str, float]]:
    """Returns the relative errors against one process, and against the same wrapper without a plan, by cell."""
    torch.manual_seed(0)
    base = Net(spare=kind == "ddp find_unused").to(torch.float32 if mode == "bf16" else torch.float64)
    batches = [torch.randn(128, WIDTH, dtype=base.head.weight.dtype) for _ in range(3)]

    def trained(order: str, plan: Plan | None) -> list[torch.Tensor | None]:
        model = copy.deepcopy(base)
        if plan is not None and order == "before":
            distributed.apply(model, plan)
        wrapped = wrap(kind, model, mode)
        if plan is not None and order == "after":
            distributed.apply(wrapped, plan)
        train(wrapped, kind, mode, batches, rank)
        return gradients(wrapped, kind)

    unplanned = trained("", None)
    single = copy.deepcopy(base)
    for batch in batches[1:] if mode == "accumulation" else batches[2:]:
        single(batch).backward()
    alone = [p.grad for p in single.parameters()]
    found = {}
    for order, name in cells(kind, mode):
        planned = trained(order, plan_of(base, PLANS[name]))
        errors = {"against one process": error_of(planned, alone), "against unplanned": error_of(planned, unplanned)}
        found[f"{kind} | {order} | {mode} | {name}"] = errors
    return found


def cells(kind: str, mode: str) -> list[tuple[str, str]]:
    """Returns the orders and plans that are tried: all in a thorough run, else a half of them, by turns."""
    tried = [(order, name) for order in ("before", "after") for name in PLANS]
    turn = WRAPPERS.index(kind) + MODES.index(mode)
    return [c for i, c in enumerate(tried) if IS_THOROUGH or (i + i // len(PLANS) + turn) % 2 == 0]


def count_all_gathers(rank: int) -> dict[str, list[int]]:
    """Returns [stated, counted, counted under torch's own checkpoint] for FSDP2 with resharding on and off."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    found = {}
    for reshard in (True, False):
        counts = []
        for variant in ("regions", "torch"):
            torch.manual_seed(0)
            model = Net(spare=False)
            if variant == "torch":
                for i, layer in enumerate(model.layers):
                    model.layers[i] = checkpoint_wrapper(layer)
            else:
                distributed.apply(model, plan_of(model, PLANS[variant]))
            wrapped = wrap("fsdp2", model, "plain", reshard=reshard)
            with CommDebugMode() as comm:
                wrapped(torch.randn(16, WIDTH)).backward()
            counts.append(sum(n for op, n in comm.get_comm_counts().items() if "allgather" in str(op)))
        stated = distributed.all_gathers(wrapped)
        found["reshard" if reshard else "keep"] = [stated, *counts]
    return found


def llama(vocab_size: int = 512) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=3, hidden_size=128, intermediate_size=384, num_attention_heads=4, vocab_size=vocab_size
    )
    model = LlamaForCausalLM(config).train()
    model.loss_type = "ForCausalLM"
    ids = torch.randint(0, 512, (2, 128))
    return model, {"input_ids": ids, "labels": ids}


def fsdp_peaks(rank: int) -> dict[str, dict[str, int]]:
    """Returns for the plain step and for planned ones what a rank's plan says and what is measured and counted.

    Every rank trains; what only needs a simulation is found by the rank whose results are looked at.
    """
    late, prompt = (ShardedCost(FlopsCost(), world_size=2, copies=c) for c in ("late", "prompt"))  # type: ignore[arg-type]
    actions = ("rederive", "recompute")
    unit_bytes = sum(p.numel() * p.element_size() for p in llama()[0].model.layers[0].parameters())  # type: ignore[index, operator, union-attr]
    found = {}
    for budget in ("90%", "75%"):
        model, batch = llama()
        plan = None
        if rank == 0:
            plan = recoup.plan(model, batch, budget=budget, optimizer=torch.optim.AdamW, cost=late, actions=actions)
        plan = distributed.broadcast_plan(plan)
        predicted = plan.predicted
        spec = StepSpec(model=model, batch=batch, optimizer=torch.optim.AdamW)
        simulator = Simulator(spec, cost=prompt) if rank == 0 else None
        for planned in (False, True) if "plain" not in found else (True,):
            model, _ = llama()
            if planned:
                assert plan.decisions
                distributed.apply(model, plan)
            for layer in model.model.layers:  # type: ignore[union-attr]
                fully_shard(layer)
            fully_shard(model)
            optimizer = torch.optim.AdamW(model.parameters())
            measured, counted = _sharded_step(model, batch, optimizer)
            found[budget if planned else "plain"] = {
                "budget": plan.budget_bytes if planned else predicted.plain_peak_bytes,
                "predicted": predicted.peak_bytes if planned else predicted.plain_peak_bytes,
                "prompt": simulator.simulate(plan.decisions if planned else ()).peak_bytes if simulator else 0,
                "measured": measured,
                "unit": unit_bytes,
                "stated": predicted.num_all_gathers,
                "counted": counted,
            }
    return found


def _sharded_step(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """Returns the peak of a rank's third step, everything counted, and the all-gathers of its fourth."""

    def step() -> None:
        loss = model(**batch).loss
        loss.backward()
        del loss
        optimizer.step()

    for _ in range(2):
        step()
        optimizer.zero_grad()
    state = [dict(s) for s in optimizer.state.values()]
    tensors = [*model.parameters(), *model.buffers(), *batch.values(), *iterate_tensors(state)]
    held = storage_bytes(t.to_local() if isinstance(t, DTensor) else t for t in tensors)
    measured = measure_peak(step, device=torch.device("cpu"), held_bytes=held)
    optimizer.zero_grad()
    with CommDebugMode() as comm:
        step()
    return measured, sum(n for op, n in comm.get_comm_counts().items() if "allgather" in str(op))


def tiled_head(rank: int) -> dict[str, dict[str, Any]]:
    """Returns what a tiled head does under FSDP2 beside none, and its peak beside what was said.

    "inside": the loss is the model's own. "outside": of its logits. "own unit": the head is not in the root.
    """
    late, prompt = (ShardedCost(FlopsCost(), world_size=2, copies=c) for c in ("late", "prompt"))  # type: ignore[arg-type]
    tile = [TileLoss(path="lm_head", tile_tokens=32)]
    found: dict[str, dict[str, Any]] = {}
    for name in ("inside", "outside", "own unit"):
        losses, gradients = [], []
        for decisions in ([], tile):
            model, batch = llama()
            with apply_decisions(model, decisions):
                for layer in model.model.layers:  # type: ignore[union-attr]
                    fully_shard(layer)
                if name == "own unit":
                    fully_shard(model.lm_head)  # type: ignore[arg-type]
                fully_shard(model)
                before = execution_context.tile_counters()
                if name == "outside":
                    logits = model(input_ids=batch["input_ids"]).logits
                    loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
                else:
                    loss = model(**batch).loss
                loss.backward()
                after = execution_context.tile_counters()
            losses.append(float(loss.detach()))
            gradients.append([p.grad.full_tensor() for p in model.parameters()])  # type: ignore[union-attr]
        norm = max(float(g.norm()) for g in gradients[0])
        found[name] = {
            "counted": [b - a for a, b in zip(before, after, strict=True)],
            "loss": abs(losses[1] - losses[0]),
            "gradients": max(float((a - b).norm()) for a, b in zip(*gradients, strict=True)) / norm,
        }
    model, batch = llama(4096)  # the logits are the peak
    spec = StepSpec(model=model, batch=batch, optimizer=torch.optim.AdamW)
    if rank == 0:
        simulators = [Simulator(spec, cost=c) for c in (prompt, late)]
        found["inside"]["plain"] = simulators[1].plain.peak_bytes
        found["inside"]["said"] = [s.simulate(tuple(tile)).peak_bytes for s in simulators]
    apply_decisions(model, tile)
    for layer in model.model.layers:  # type: ignore[union-attr]
        fully_shard(layer)
    fully_shard(model)
    found["inside"]["measured"] = _sharded_step(model, batch, torch.optim.AdamW(model.parameters()))[0]
    return found


def different_plans(rank: int) -> str:
    """Returns what is said when the ranks hold different plans; checks that broadcasting mends it."""
    model = Net(spare=False)
    plan = plan_of(model, PLANS["regions" if rank == 0 else "rederive"])
    try:
        distributed.apply(model, plan)
    except PlanMismatch as error:
        message = str(error)
    assert not any("forward" in m.__dict__ for m in model.modules())
    again = distributed.broadcast_plan(plan if rank == 0 else None)
    assert again == plan_of(model, PLANS["regions"])
    with distributed.apply(model, again):
        assert sum("forward" in m.__dict__ for m in model.modules()) == DEPTH
    return message


def table(rank: int) -> dict[str, dict[str, float]]:
    """Returns the errors of each cell."""
    return {name: errors for kind in WRAPPERS for mode in MODES for name, errors in row(kind, mode, rank).items()}


def collectives(rank: int) -> dict[str, Any]:
    """Returns the all-gathers that were counted, and what different plans are told."""
    return {"all_gathers": count_all_gathers(rank), "message": different_plans(rank)}


class Attention(nn.Module):
    """Attention and a perceptron over their norms, for tensor parallelism by columns and rows."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        q, k, v = (f(y).unflatten(-1, (-1, 16)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def lowest_verification(verify: Callable[[], Evidence], plan: Plan) -> Evidence:
    """Returns the verification of the lowest peak, of at most eight: until rank 0 measures what is predicted.

    A thread of gloo keeps the tensors of a call until it is scheduled again: on a busy machine some four calls'
    results, which come on top of what the plan holds and never below it.
    """
    found: list[Evidence] = []
    again = torch.ones(1)
    while again and len(found) < 8:
        found.append(verify())
        again.fill_(found[-1].peak_bytes > plan.predicted.peak_bytes)
        dist.broadcast(again, 0)
    return min(found, key=lambda evidence: evidence.peak_bytes)


def tensor_parallel(rank: int) -> dict[str, Any]:
    """A plan for a model of distributed tensors, made on rank 0: gradients, peak and collectives of each."""
    torch.manual_seed(0)
    alone = nn.Sequential(*(Attention() for _ in range(4)), nn.Linear(64, 8)).double()
    model = copy.deepcopy(alone)
    columns, rows = ColwiseParallel(), RowwiseParallel()
    for layer in model[:-1]:
        parallelize_module(
            layer,
            init_device_mesh("cpu", (2,)),
            {"q": columns, "k": columns, "v": columns, "o": rows, "up": columns, "down": rows},
        )
    x = torch.randn(4, 128, 64, dtype=torch.float64)
    alone(x).square().mean().backward()

    def loss(output: torch.Tensor, _: Any) -> torch.Tensor:
        return output.square().mean()

    found: dict[str, Any] = {}
    try:
        recoup.fit(model, x, loss=loss, budget="70%")
    except ConflictError as error:
        found["refused"] = str(error)
    for budget in ("70%", "50%"):
        plan = recoup.plan(model, x, loss=loss, budget=budget) if rank == 0 else None
        plan = distributed.broadcast_plan(plan)
        evidence = lowest_verification(functools.partial(recoup.verify, model, plan, x, loss=loss, timed=False), plan)
        with distributed.apply(model, plan), CommDebugMode() as counted:
            model.zero_grad()
            loss(model(x), x).backward()
        errors, largest = [0.0], max(float(p.grad.abs().max()) for p in alone.parameters() if p.grad is not None)
        for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            grad = mine.grad.full_tensor() if isinstance(mine.grad, DTensor) else mine.grad
            assert grad is not None and theirs.grad is not None
            errors.append(float((grad - theirs.grad).abs().max()) / largest)
        found[budget] = {
            "regions": sum(d.is_region for d in plan.decisions),
            "ok": evidence.ok,
            "equal": evidence.gradients_equal,
            "measured": evidence.peak_bytes,
            "predicted": plan.predicted.peak_bytes,
            "error": max(errors),
            "counted": sum(counted.get_comm_counts().values()),
            "stated": plan.predicted.num_collectives,
            "plain": plan.predicted.plain_num_collectives,
            "shown": str(plan),
        }
    return found


def main(rank: int, port: int, out: str) -> None:
    """Entry of each process; rank 0 writes the results of all jobs to `out`."""
    warnings.simplefilter("ignore")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    try:
        jobs = {
            "fsdp peaks": fsdp_peaks,
            "table": table,
            "tiled head": tiled_head,
            "collectives": collectives,
            "tensor parallel": tensor_parallel,
        }
        results = {name: job(rank) for name, job in jobs.items()}
        if rank == 0:
            torch.save(results, Path(out))
        dist.barrier()
    finally:
        dist.destroy_process_group()
