"""The graphs of a compiled step: recorded while torch compiles, divided by a plan when it compiles again."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import fnmatch
import functools
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from recoup import _torch
from recoup.compiled.frontier import Surroundings
from recoup.compiled.joint import JointView, divided, view_joint_graph
from recoup.compiled.joint_step import JointStep
from recoup.compiled.levels import CALL_MARK
from recoup.compiled.planned import GraphCode, PlannedLevels, planned_levels
from recoup.compiled.schedule import Timeline, timeline
from recoup.cost.measured import MeasuredCost
from recoup.errors import UsageError
from recoup.ir.compiled_plan import CompiledGraph

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
    """Partitions joint graphs as torch does, and records them and the order in which a step calls them.

    Attributes:
        calls: the graphs that were called, in order.
    """

    def __init__(self, options: CompileOptions) -> None:
        self.options = options
        self.graphs: dict[str, Recorded] = {}
        self.calls: list[str] = []
        self._callers: list[weakref.ref[nn.Module]] = []  # torch keeps backends, and with them this, for ever
        self.planned: dict[str, PlannedLevels] = {}
        self._running: list[nn.Module] = []

    def compile(self, model: nn.Module) -> Calls:
        """Returns compiled calls; `calls` grows with each graph that is called."""
        backend = planning_backend(
            self.options, self.divide, key="recoup recording", called=self._called, planned=self.planned
        )
        alike: dict[Any, CompiledCall] = {}
        calls: Calls = {}
        for module in self.options.find_modules(model):
            if (kind := kind_of(module)) not in alike:
                alike[kind] = compiled_call(module, self.options, backend)
            calls[module] = functools.partial(self._call, module, alike[kind].of(module))
        return calls

    def _call(self, module: nn.Module, call: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls a module, and knows of it meanwhile."""
        if torch.compiler.is_compiling():  # inside of another module that is compiled, whose call this is a part of
            return call(*args, **kwargs)
        self._running.append(module)
        try:
            return call(*args, **kwargs)
        finally:
            self._running.pop()

    @property
    def steps(self) -> dict[str, JointStep]:
        """The graphs as plain data."""
        return {name: graph.view.step for name, graph in self.graphs.items()}

    @property
    def callers(self) -> list[nn.Module]:
        """Of which module's call each call of a graph is a part."""
        return [module for ref in self._callers if (module := ref()) is not None]

    def forget_calls(self) -> None:
        """Begins with another step."""
        self.calls.clear()
        self._callers.clear()

    def _called(self, name: str) -> None:
        self.calls.append(name)
        self._callers.append(weakref.ref(self._running[-1]))

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


def surroundings(graphs: Mapping[str, Recorded], calls: Sequence[str], name: str) -> Surroundings:
    """Returns what a step has around the calls of a graph, the other graphs divided as torch divides them."""
    step = graphs[name].view.step
    returned = sum(step.value_bytes[v] for v in step.results)
    others = [graphs[n].torch_choice.peak_bytes + returned for n in dict.fromkeys(calls) if n != name]
    return Surroundings(num_calls=calls.count(name), beside_bytes=max(others, default=0))


def divisible_graphs(calls: Sequence[str], callers: Sequence[nn.Module]) -> frozenset[str]:
    """Returns graphs whose calls may get different choices: each call is all that a module of its own compiles.

    A module that is called again, or whose call runs several graphs (graph breaks), makes one choice for each graph.
    """
    num_calls = collections.Counter(callers)
    shared = {name for name, module in zip(calls, callers, strict=True) if num_calls[module] > 1}
    return frozenset(calls) - shared


def paths_of(model: nn.Module, modules: Sequence[nn.Module]) -> list[str]:
    """Returns the dotted paths of modules of a model."""
    paths = {module: path for path, module in model.named_modules()}
    return [paths[module] for module in modules]


def planned_graphs(
    graphs: Mapping[str, Recorded],
    calls: Sequence[str],
    paths: Sequence[str],
    chosen: Sequence[Timeline],
    *,
    is_torch: bool,
) -> tuple[CompiledGraph, ...]:
    """Returns what a plan says of each graph of a step: once for each choice.

    Args:
        paths: of the module that makes each call. is_torch: whether graphs are divided as torch divides them.
    """
    made: dict[tuple[str, Timeline], list[str]] = {}
    for name, path, choice in zip(calls, paths, chosen, strict=True):
        made.setdefault((name, choice), []).append(path)
    return tuple(
        CompiledGraph(
            fingerprint=name,
            modules=tuple(dict.fromkeys(where)),
            num_calls=len(where),
            num_ops=graphs[name].view.step.num_forward,
            choice=divided(graphs[name].view, choice),
            held_bytes=choice.held_bytes,
            rerun_seconds=choice.seconds,
            is_torch=is_torch,
        )
        for (name, choice), where in made.items()
    )


def _copy(module: Any) -> Any:
    """Returns a `GraphModule` with copied nodes, which share the metadata of their values."""
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    return torch.fx.GraphModule(module, graph)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CompiledCall:
    """What modules of one kind share: `whole` runs a call of one with its hooks, `forward` that alone, if it can."""

    whole: Any
    forward: Any | None

    def of(self, module: nn.Module) -> Any:
        """Returns what calls a module so."""
        forward = None if "forward" in vars(module) else self.forward
        return functools.partial(_call, module, self.whole, forward)


def kind_of(module: nn.Module) -> Any:
    """Returns what modules have in common that are compiled once."""
    return type(module), tuple((name, p.shape, p.dtype) for name, p in module.named_parameters())


def compiled_call(module: nn.Module, options: CompileOptions, backend: Any) -> CompiledCall:
    """Returns the call of a module, and of others of its kind, by code of its own: compiled separately."""

    def compiled(function: Any) -> Any:
        return torch.compile(function, backend=backend, dynamic=options.dynamic, fullgraph=options.fullgraph)

    # Dynamo counts what it compiles, and takes for dynamic what it saw change, by a code's name.
    name = f"compiled_{type(module).__name__}_{uuid.uuid4().hex[:12]}"
    forward = _torch.own_module_forward(module, f"{name}_forward")
    return CompiledCall(whole=compiled(_torch.own_module_call(name)), forward=forward and compiled(forward))


def planning_backend(
    options: CompileOptions,
    divide: Callable[..., tuple[Any, Any, str]],
    *,
    key: str,
    called: Callable[[str], None] | None,
    planned: dict[str, PlannedLevels],
    runs: bool = True,
) -> Any:
    """Returns a backend for `torch.compile` that divides joint graphs.

    Args:
        key: names what `divide` does. called: told of each graph that is called. planned: gets the levels of each graph
            by the compiler's own plan. runs: whether compiled code is to run.
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

    return backend


def _call(module: nn.Module, whole: Any, forward: Any | None, *args: Any, **kwargs: Any) -> Any:
    """Calls a module compiled: `forward` where it is all that a call runs, else `whole`, hooks included."""
    if forward is None or _torch.has_call_hooks(module):
        return whole(module, *args, **kwargs)
    return forward(module, *args, **kwargs)
