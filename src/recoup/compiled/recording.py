"""The graphs of a compiled step: recorded while torch compiles, divided by a plan when it compiles again."""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import functools
import hashlib
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from recoup import _torch, progress
from recoup.compiled.frontier import Surroundings, choices
from recoup.compiled.joint import JointView, divided, view_joint_graph
from recoup.compiled.levels import CALL_MARK
from recoup.compiled.partition import partition
from recoup.compiled.planned import GraphCode, PlannedLevels, planned_levels
from recoup.compiled.schedule import Timeline, timeline
from recoup.cost.measured import MeasuredCost
from recoup.errors import OverBudgetWarning, UsageError
from recoup.ir.compiled_plan import CompiledGraph
from recoup.units import format_bytes

Calls = dict[nn.Module, Any]
"""What stands in place of the call of each module that is compiled; None: its own."""
BACKENDS = ("inductor", "aot_eager")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CompileOptions:
    """How to compile: `torch.compile`'s options.

    Attributes:
        backend: one of `BACKENDS`. dynamic, fullgraph, mode, options: as for `torch.compile`.
        modules: dotted paths of modules that are compiled one by one, `*` and `?` as in file names; none: those inside
            the model that are compiled in place already, else the model as a whole.
    """

    backend: str = "inductor"
    dynamic: bool | None = None
    fullgraph: bool = False
    mode: str | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    modules: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise UsageError(
                f"compiled={{'backend': {self.backend!r}}}: a plan divides the joint graphs of "
                f"{' or '.join(BACKENDS)}. Use one of these."
            )
        if self.backend != "inductor" and (self.mode is not None or self.options):
            raise UsageError(f"`mode` and `options` are inductor's; the backend is {self.backend!r}. Leave them out.")
        if self.mode in ("reduce-overhead", "max-autotune"):
            raise UsageError(
                f"mode={self.mode!r} records CUDA graphs, whose memory is one pool that no plan changes. Use "
                "mode='max-autotune-no-cudagraphs', or none."
            )

    @staticmethod
    def of(compiled: bool | Mapping[str, Any]) -> CompileOptions:
        """Returns what `compiled=` stands for: True, or a dict of `torch.compile`'s options.

        Raises:
            UsageError: for an option that is not known.
        """
        if not isinstance(compiled, bool | Mapping):
            raise UsageError(
                f"compiled must be True or a dict of torch.compile's options, such as {{'backend': 'inductor'}}; got "
                f"{compiled!r}."
            )
        given = dict(compiled) if isinstance(compiled, Mapping) else {}
        known = [field.name for field in dataclasses.fields(CompileOptions)]
        unknown = sorted(given.keys() - set(known))
        if unknown:
            raise UsageError(f"compiled={{{unknown[0]!r}: ...}} is no option of torch.compile. Known: {known}.")
        if isinstance(given.get("modules"), list):
            given["modules"] = tuple(given["modules"])
        return CompileOptions(**{k: v for k, v in given.items() if v is not None})

    def find_modules(self, model: nn.Module) -> list[nn.Module]:
        """Returns the modules to compile, in order of definition.

        Raises:
            UsageError: for a pattern that no module has.
        """
        inside = {path: module for path, module in model.named_modules() if path}
        for pattern in self.modules:
            if not fnmatch.filter(inside, pattern):
                raise UsageError(
                    f"compiled={{'modules': ...}}: no module of {type(model).__name__} is called {pattern!r}. Take "
                    "paths as `model.named_modules()` has them."
                )
        found = [m for path, m in inside.items() if any(fnmatch.fnmatchcase(path, p) for p in self.modules)]
        if not found and _torch.compiled_call(model) is None:
            found = [m for m in inside.values() if _torch.compiled_call(m) is not None]
        return found or [model]

    @property
    def fuses(self) -> bool:
        """Whether kernels are fused."""
        return self.backend == "inductor"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A joint graph. `torch_choice` is what torch's own partitioner holds, `torch_orders` its forward and backward."""

    view: JointView
    torch_choice: Timeline
    torch_orders: tuple[tuple[int, ...], tuple[int, ...]]


def metered(graph: Recorded, cost: MeasuredCost) -> Recorded:
    """Returns a graph whose kernels have the workspace that each has when it runs alone on this device.

    Those without FLOPs are priced by their seconds there, one beside the other: all of them together at what the bytes
    that they move are worth. On a CPU a random op takes twenty times as long as a sum of as many bytes.
    """
    step, signatures = graph.view.step, graph.view.signatures()
    known = [i for i, signature in enumerate(signatures) if signature is not None]
    ops, sizes = list(step.ops), list(step.value_bytes)
    measured = dict(zip(known, cost.measured([s for s in signatures if s is not None]), strict=True))
    seconds = {i: found.seconds for i, found in measured.items() if found is not None and not ops[i].flops}
    scale = sum(ops[i].seconds for i in seconds) / (sum(seconds.values()) or 1.0)
    for i, found in measured.items():
        if found is not None:
            price = seconds[i] * scale if i in seconds else ops[i].seconds
            ops[i] = dataclasses.replace(ops[i], workspace_bytes=found.workspace_bytes, seconds=price)
            if found.extra_output_bytes and ops[i].outputs:
                sizes[ops[i].outputs[0]] += found.extra_output_bytes
    step = dataclasses.replace(step, ops=tuple(ops), value_bytes=tuple(sizes))
    return dataclasses.replace(
        graph,
        view=dataclasses.replace(graph.view, step=step),
        torch_choice=timeline(step, graph.torch_choice.held, given=graph.torch_orders),
    )


class Recording:
    """Partitions joint graphs as torch does, and records them and the order in which a step calls them."""

    def __init__(self, options: CompileOptions) -> None:
        self.options = options
        self.graphs: dict[str, Recorded] = {}
        self.calls: list[str] = []
        self.planned: dict[str, PlannedLevels] = {}

    def compile(self, model: nn.Module) -> Calls:
        """Returns compiled calls; `calls` grows with each graph that is called."""
        return _compiled(
            model, self.options, self.divide, key="recoup recording", called=self._called, planned=self.planned
        )

    def _called(self, name: str) -> None:
        self.calls.append(name)

    def divide(self, module: Any, inputs: Any, *, num_fwd_outputs: int, **kwargs: Any) -> tuple[Any, Any, str]:
        """Returns forward and backward as torch divides them, and the graph's name."""
        own = _copy(module)
        forward, backward = _torch.torch_partition(module, inputs, num_fwd_outputs=num_fwd_outputs, **kwargs)
        _torch.tidy_joint_graph(own)
        static = kwargs.get("static_lifetime_input_indices")
        view = view_joint_graph(
            own, num_forward_results=num_fwd_outputs, fuses=self.options.fuses, static_inputs=static
        )
        name = view.fingerprint
        made = view.step.makers
        (result,) = forward.graph.find_nodes(op="output")
        saved = {
            view.values[n.name] for n in result.args[0][num_fwd_outputs:] if n is not None and n.name in view.values
        }
        places = {node.name: at for at, node in enumerate(view.nodes)}

        def order(of: Any) -> tuple[int, ...]:
            return tuple(places[n.name] for n in of.graph.nodes if n.name in places and n.op == "call_function")

        orders = order(forward), order(backward)
        choice = timeline(view.step, frozenset(saved & made.keys()), given=orders)
        self.graphs[name] = Recorded(view=view, torch_choice=choice, torch_orders=orders)
        return forward, backward, name


class Division:
    """Divides joint graphs by a plan.

    Args:
        chosen: what each graph holds. budget_bytes: what the step of a graph that is new (another shape) may take.
        above: the bytes that are there beside a graph's step and its inputs that are not the model's own.
        runs: whether compiled code is to run; if not, the compiler only plans it, and the step runs op by op.
    """

    def __init__(
        self, options: CompileOptions, chosen: dict[str, Timeline], budget_bytes: int, *, above: int, runs: bool = True
    ) -> None:
        self.options = options
        self.chosen = chosen
        self.budget_bytes = budget_bytes
        self.above = above
        self.runs = runs
        self.new: list[str] = []
        self.planned: dict[str, PlannedLevels] = {}

    def compile(self, model: nn.Module) -> Calls:
        """Returns compiled calls of the model, or of modules inside."""
        key = hashlib.sha256(
            repr([(n, sorted(t.held), sorted(t.dropped)) for n, t in self.chosen.items()]).encode()
        ).hexdigest()
        return _compiled(
            model, self.options, self.divide, key=f"recoup {key}", called=None, planned=self.planned, runs=self.runs
        )

    def divide(self, module: Any, inputs: Any, *, num_fwd_outputs: int, **kwargs: Any) -> tuple[Any, Any, str]:
        """Returns forward and backward with what the plan holds between them, and the graph's name."""
        progress.advance("dividing a compiled graph")
        _torch.tidy_joint_graph(module)
        view = view_joint_graph(module, num_forward_results=num_fwd_outputs, fuses=self.options.fuses)
        name = view.fingerprint
        made = self.chosen.get(name)
        if made is None:
            self.new.append(name)
            found = choices(view.step, enough_bytes=self.budget_bytes - self.above)
            fitting = [t for t in found if self.above + t.peak_bytes <= self.budget_bytes]
            made = self.chosen[name] = min(fitting, key=lambda t: t.seconds) if fitting else found[-1]
            if not fitting:
                warnings.warn(
                    f"A compiled graph of {view.step.num_forward} ops is estimated at "
                    f"{format_bytes(self.above + made.peak_bytes)}, more than the budget of "
                    f"{format_bytes(self.budget_bytes)}: it holds as little as it can. Use a larger budget, or "
                    "`recoup.fit(..., compiled=True)`, which measures.",
                    OverBudgetWarning,
                    stacklevel=2,
                )
        forward, backward = partition(
            module,
            **dataclasses.asdict(divided(view, made)),
            overwrites=not self.options.fuses,
            num_forward_results=num_fwd_outputs,
        )
        return forward, backward, name


def surroundings(graphs: Mapping[str, Recorded], calls: Sequence[str], name: str) -> Surroundings:
    """Returns what a step has around the calls of a graph, the other graphs divided as torch divides them."""
    step = graphs[name].view.step
    returned = sum(step.value_bytes[v] for v in step.results)
    others = [graphs[n].torch_choice.peak_bytes + returned for n in dict.fromkeys(calls) if n != name]
    return Surroundings(num_calls=calls.count(name), beside_bytes=max(others, default=0))


def planned_graphs(
    graphs: Mapping[str, Recorded], calls: Sequence[str], chosen: Mapping[str, Timeline], *, is_torch: bool
) -> tuple[CompiledGraph, ...]:
    """Returns what a plan says of each graph of a step.

    Args:
        is_torch: whether they are divided as torch divides them.
    """
    return tuple(
        CompiledGraph(
            fingerprint=name,
            num_calls=calls.count(name),
            num_ops=graphs[name].view.step.num_forward,
            choice=divided(graphs[name].view, chosen[name]),
            held_bytes=chosen[name].held_bytes,
            rerun_seconds=chosen[name].seconds,
            is_torch=is_torch,
        )
        for name in dict.fromkeys(calls)
        if name in chosen
    )


def _copy(module: Any) -> Any:
    """Returns a `GraphModule` with copied nodes, which share the metadata of their values."""
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    return torch.fx.GraphModule(module, graph)


def _compiled(
    model: nn.Module,
    options: CompileOptions,
    divide: Callable[..., tuple[Any, Any, str]],
    *,
    key: str,
    called: Callable[[str], None] | None,
    planned: dict[str, PlannedLevels],
    runs: bool = True,
) -> Calls:
    """Returns callables that run modules compiled, with their forward and hooks; each compiles separately.

    Args:
        called: told of each graph that is called. planned: gets the levels of each graph by the compiler's own plan.
    """
    last: list[str] = []
    forwards: dict[int, tuple[str, GraphCode]] = {}
    num_results: dict[str, int] = {}

    def partition_joint(module: Any, inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
        kwargs.pop("compiler", None)
        forward, backward, name = divide(module, inputs, **kwargs)
        last[:] = [name]
        num_results[name] = kwargs["num_fwd_outputs"]
        return forward, backward

    def wrote(number: int, *code: Any) -> None:
        """Takes the code of a forward, or of a backward, which may come after other graphs' or not at all."""
        if number not in forwards and last:
            forwards[number] = last[0], GraphCode(*code)
        elif number in forwards:
            name, forward = forwards.pop(number)
            with contextlib.suppress(Exception):  # code of another form: levels are simulated
                planned[name] = planned_levels(forward, GraphCode(*code), num_results[name])

    if options.backend == "aot_eager":
        inner = _torch.aot_eager_backend(partition_joint)
    else:
        modes = torch._inductor.list_mode_options(options.mode) if options.mode is not None else {}
        own = {**modes, **options.options}
        is_planned = called is None
        inner = _torch.inductor_backend(partition_joint, key, own, wrote, runs=runs, keeps_order=is_planned)

    def backend(module: Any, inputs: Any) -> Any:
        last.clear()
        run = inner(module, inputs)
        if called is None or not last:
            return run
        name = last[0]

        def counted(*args: Any) -> Any:
            called(name)
            with torch.profiler.record_function(CALL_MARK):
                return run(*args)

        return counted

    def compiled(function: Any) -> Any:
        return torch.compile(function, backend=backend, dynamic=options.dynamic, fullgraph=options.fullgraph)

    alike: dict[Any, Any] = {}
    calls: Calls = {}
    for module in options.find_modules(model):
        kind = (type(module), tuple((name, p.shape, p.dtype) for name, p in module.named_parameters()))
        if kind not in alike:
            # Dynamo counts what it compiles, and takes for dynamic what it saw change, by a code's name.
            name = f"compiled_{type(module).__name__}_{uuid.uuid4().hex[:12]}"
            forward = _torch.own_module_forward(module, f"{name}_forward")
            alike[kind] = compiled(_torch.own_module_call(name)), forward and compiled(forward)
        whole, forward = alike[kind]
        calls[module] = functools.partial(_call, module, whole, None if "forward" in vars(module) else forward)
    return calls


def _call(module: nn.Module, whole: Any, forward: Any | None, *args: Any, **kwargs: Any) -> Any:
    """Calls a module compiled: `forward` where it is all that a call runs, else `whole`, hooks included."""
    if forward is None or _torch.has_call_hooks(module):
        return whole(module, *args, **kwargs)
    return forward(module, *args, **kwargs)
