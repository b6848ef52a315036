"""Warns once when a training step passes the budget of the plan that is in place, with both numbers and likely causes.

On a GPU the allocator tracks the peak, and each forward reads that of the last step. On a CPU the peak is estimated:
the planned peak plus what the step has beyond the planned one: saved bytes, optimizer state, gradients when forward
begins, outputs that are held during backward, other forwards whose graphs are alive; at least so much, where parameters
train that were frozen. A smaller batch takes less. All this is counted in steps 1, 2, 4, 8 and so on, in each step that
looks larger from outside than those counted, where the graph of another forward is alive, and until those are counted
that have another number of nodes; others cost a glance.

Steps that recoup runs for evidence, and plain ones while the plan is suspended, are not looked at. Tensors saved by a
backward that is itself differentiated (`create_graph`) are not counted.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from recoup import _torch
from recoup._pytree import iterate_tensors
from recoup.errors import OtherStepWarning, OverBudgetWarning
from recoup.ir.plan import Plan
from recoup.runtime import execution_context
from recoup.runtime.offload.optimizer_state import state_on_device
from recoup.runtime.rebuild.kept import unpacked
from recoup.runtime.rebuild.lineage import current_recorder
from recoup.runtime.saved_counter import SavedCounter
from recoup.runtime.seen_step import Alive, Graph, Sight, longest_dim
from recoup.runtime.tile.loss.lazy_logits import where_backward_enters
from recoup.thresholds import MOST_REMEMBERED_ANSWERS, SAME_SHARE
from recoup.units import format_bytes


class StepWatch:
    """Watches the steps of one model under a plan; `remove` ends it.

    Attributes:
        peak_bytes: peak of the last step that was counted; 0 before the first.
        num_looked_at: number of steps that were counted.
    """

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self.plan = plan
        self.peak_bytes = 0
        self.num_looked_at = 0
        self._trains = model.training
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._parameters = {id(p) for p in model.parameters()}
        trained = [p for p in model.parameters() if p.requires_grad]
        signs = [trained[0], trained[len(trained) // 2], trained[-1]] if trained else []
        self._frozen = [weakref.ref(p) for p in model.parameters() if not p.requires_grad]
        self._trained = [weakref.ref(p) for p in trained]
        self._signs = [weakref.ref(p) for p in signs]
        self._glances: set[Any] = set()  # glances of steps that take no more than one that was counted
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        self._num_steps = 0
        self._seen: list[Sight] = []
        self._sight: Sight | None = None
        self._counting: contextlib.ExitStack | None = None
        self._is_step = False  # whether a forward runs that is looked at, if only at a glance
        self._longest_dim = 0
        self._batch_bytes = self._saved_bytes = 0  # of this forward, and of the last that was counted
        self._saved_of = 1  # bytes of that one's batch
        self._counter = SavedCounter(())
        self._graphs: list[Graph] = []
        self._outputs: list[weakref.ref[torch.Tensor]] = []
        self._said_differs = False
        # Numbers of nodes that forwards have made: of those that were counted, and of others, which are looked out for.
        self._kinds: set[int] = set()
        self._wanted: set[int] = set()
        self._patience = MOST_REMEMBERED_ANSWERS  # steps that are counted for that
        self._first_node = 0
        self._removers: list[Any] = []
        if self._device.type in ("cpu", "cuda"):
            self._removers.append(model.register_forward_pre_hook(self._begin, with_kwargs=True))
            self._removers.append(model.register_forward_hook(self._end, always_call=True))
            self._removers.append(register_optimizer_step_post_hook(self._after_optimizer))

    def __deepcopy__(self, memo: dict[int, Any]) -> StepWatch:
        return _unwatching()

    def __reduce__(self) -> Any:
        return _unwatching, ()

    def remove(self) -> None:
        """Removes all hooks."""
        self._stop_counting()
        while self._removers:
            self._removers[-1].remove()  # before it is forgotten: an interrupted call is made again
            self._removers.pop()

    def _begin(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Pre-forward hook of the model."""
        if torch.compiler.is_compiling() or not self._removers or not torch.is_grad_enabled():
            return
        if self._trains and not model.training:  # an evaluation, unless the plan is of a model in that mode
            return
        if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            return
        if execution_context.is_recomputing() or execution_context.observer() is not None or _torch.inside_transform():
            return
        if current_recorder() is not None:  # inside of a method that a plan enters by
            return
        if execution_context.is_unwatched():
            if self._device.type == "cuda":
                self._num_steps = 0  # the allocator's peak is no longer that of a training step
            return
        if self._device.type == "cuda":
            self._ask_allocator()
            return
        batch = list({id(t): t for t in iterate_tensors((args, kwargs))}.values())
        self._batch_bytes = sum(t.numel() * t.element_size() for t in batch)
        self._longest_dim = longest_dim(batch)
        number, self._num_steps = self._num_steps, self._num_steps + 1
        has_others = any(g.alive is not None and g.alive() is not None and g.saved_bytes for g in self._graphs)
        glance = self._glance()
        self._is_step, self._first_node = True, _torch.next_node_number()
        is_wanted = not number & (number - 1) or has_others or bool(self._wanted)
        if glance in self._glances and not is_wanted:
            return
        sight = Sight(
            batch=self._batch_bytes,
            longest=self._longest_dim,
            gradients=sum(g.nbytes for p in model.parameters() if p.is_leaf and (g := p.grad) is not None),
            state=self._state_bytes(),
            thawed=sum(p.nbytes for p in self._thawed()),
            precision=str(torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else "",
        )
        is_covered = any(s.covers(sight) for s in self._seen)
        is_new = len(self._seen) < MOST_REMEMBERED_ANSWERS and not is_covered
        if is_covered and len(self._glances) < MOST_REMEMBERED_ANSWERS:
            self._glances.add(glance)
        if not is_new and not is_wanted:
            return
        if not has_others:
            self._graphs.clear()
        self._sight = sight
        self._counter = SavedCounter([*model.parameters(), *model.buffers(), *batch])
        self._counting = contextlib.ExitStack()
        self._counting.enter_context(execution_context.observing(self._counter))
        hooks = _torch.saved_tensors_hooks(self._counter.pack, unpacked)
        self._counting.enter_context(hooks)
        self._counting.callback(register_module_forward_pre_hook(self._counter.note_precision).remove)

    def _glance(self) -> Any:
        """Returns a cheap key of a step, without a walk over the model; steps with equal keys count as alike."""
        signs = [p.is_leaf and p.grad is None if (p := ref()) is not None else object() for ref in self._signs]
        states = [len(o.state) for ref in self._optimizers if (o := ref()) is not None]
        autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        return self._batch_bytes, self._longest_dim, *signs, *states, autocast, len(self._thawed())

    def _thawed(self) -> list[torch.Tensor]:
        """Returns the parameters that train and were frozen when the plan was put in place."""
        return [p for ref in self._frozen if (p := ref()) is not None and p.requires_grad]

    def _stop_counting(self) -> None:
        if self._counting is not None:
            counting, self._counting = self._counting, None
            counting.close()

    def _end(self, model: nn.Module, args: Any, output: Any) -> None:
        """Forward hook of the model, also called if the forward failed."""
        is_step, self._is_step = self._is_step, False
        if not is_step:
            return
        counted = self._counting is not None
        self._stop_counting()
        entered = map(where_backward_enters, iterate_tensors(output)) if output is not None else ()
        tensors = [t for t in entered if t.grad_fn is not None]
        if not tensors or self._sight is None:
            return
        self._note_kind(_torch.next_node_number() - self._first_node, counted=counted)
        if counted:
            self._saved_bytes, self._saved_of = self._counter.total_bytes, max(self._batch_bytes, 1)
        graph, alive = Graph(self._saved_bytes * max(self._batch_bytes, 1) // self._saved_of), Alive()
        graph.alive = weakref.ref(alive)
        self._graphs = [g for g in self._graphs if g.alive is not None and g.alive() is not None and g.saved_bytes]
        self._graphs.append(graph)
        if counted:
            self._outputs = [weakref.ref(t) for t in tensors if t.numel() > 1]
            self._seen.append(self._sight)
            self.num_looked_at += 1

        def in_backward(gradients: Any) -> None:
            if torch.is_grad_enabled():  # gradients that the loss is made of: the backward of the step comes later
                return
            if counted:
                self._judge(self._estimate())
            if not _torch.backward_keeps_graph():
                graph.saved_bytes = 0

        for node in {id(t.grad_fn): t.grad_fn for t in tensors}.values():
            assert node is not None
            node.metadata["recoup"] = alive  # type: ignore[index]  # a property, which the hints take for a method
            node.register_prehook(in_backward)

    def _note_kind(self, num_nodes: int, *, counted: bool) -> None:
        """Takes note of how many nodes a forward has made: one that runs other calls mostly makes another number."""
        if counted:
            self._kinds.add(num_nodes)
            self._patience -= bool(self._wanted)
            self._wanted.discard(num_nodes)
        elif num_nodes not in self._kinds:
            self._wanted.add(num_nodes)
        if self._patience <= 0:
            self._wanted.clear()

    def _after_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if execution_context.is_unwatched():
            return
        first = next((p for group in optimizer.param_groups for p in group["params"]), None)
        if id(first) in self._parameters and all(ref() is not optimizer for ref in self._optimizers):
            self._optimizers.append(weakref.ref(optimizer))

    def _state_bytes(self) -> int:
        """Returns the bytes of state of all optimizers that stepped the model's parameters."""
        states = [s for ref in self._optimizers if (o := ref()) is not None for s in state_on_device(o)]
        return sum(t.numel() * t.element_size() for s in states for t in s.values() if isinstance(t, torch.Tensor))

    def _ask_allocator(self) -> None:
        if self._num_steps == 0:  # what ran before is not a step of this plan
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            self.num_looked_at += 1
            self._judge(_torch.cuda_peak_bytes(self._device))
        self._num_steps += 1

    # -- what it comes to ---------------------------------------------------------------------------------------

    def _beyond(self) -> Iterator[tuple[int, str]]:
        """Yields (bytes, words) of what this step has beyond the planned one."""
        planned, sight, thawed = self.plan.predicted, self._sight, self._thawed()
        saved = sum(g.saved_bytes for g in self._graphs if g.alive is not None and g.alive() is not None)
        more = saved - int(planned.forward_saved_bytes * (1 + SAME_SHARE))
        if thawed:
            new = [p for p in thawed if p.grad is None and planned.phase != "forward"]
            yield max(more, 0) + sum(p.nbytes for p in new), f"{_words(thawed)}: make a plan again"
        if sight is None:
            return
        if more > 0 and not thawed:
            yield more, f"{format_bytes(more)} more are saved for backward: {self._why_more(sight)}"
        if sight.state > planned.optimizer_bytes * (1 + SAME_SHARE):
            held, expected = format_bytes(sight.state), format_bytes(planned.optimizer_bytes)
            yield (
                sight.state - planned.optimizer_bytes,
                f"the optimizer holds {held} of state, {expected} planned (`optimizer=` of plan or fit)",
            )
        accumulated = sight.gradients - planned.gradient_bytes
        if accumulated > 0 and planned.phase != "optimizer":
            yield (
                accumulated,
                f"{format_bytes(accumulated)} of gradients are there when forward begins (`accumulate=`, or "
                "zero_grad after the forward)",
            )
        outputs = [t for ref in self._outputs if (t := ref()) is not None and not self._counter.has(t)]
        held_bytes = sum(t.untyped_storage().nbytes() for t in outputs) - planned.held_bytes
        if held_bytes > 0 and planned.phase != "forward":
            yield (
                held_bytes,
                f"{format_bytes(held_bytes)} of outputs are held during backward (the logits): let go of them first",
            )

    def _why_more(self, sight: Sight) -> str:
        """Returns the likely cause of more saved bytes than planned, in words."""
        planned = self.plan.predicted
        if len(self._graphs) > 1:
            return f"the model ran {len(self._graphs)} times before backward, which a plan counts once"
        if planned.batch_bytes and sight.batch > planned.batch_bytes:
            return f"its batch has {sight.batch / planned.batch_bytes:.3g} times the planned one's bytes"
        if 0 < planned.longest_dim < sight.longest:
            return f"its batch has a dimension of {sight.longest}, the planned one {planned.longest_dim} at most"
        if self._other_precision:
            return f"it ran in {self._other_precision}, and {planned.precision} was planned"
        frozen = sum((p := ref()) is not None and not p.requires_grad for ref in self._trained)
        if frozen:
            return f"{frozen} parameters that trained when the plan was put in place are frozen: make a plan again"
        return "it ran other calls than the planned step (layers drawn at random, another branch)"

    def _say_what_differs(self) -> None:
        """Warns once of a step that fits but is not the planned one: a better plan may exist for it."""
        planned, sight = self.plan.predicted, self._sight
        if self._said_differs or sight is None:
            return
        found, is_larger = [], False
        if self._other_precision:
            found.append(f"it computes in {self._other_precision}, planned was {planned.precision} (`autocast=`)")
        if planned.batch_bytes and sight.batch > planned.batch_bytes:
            found.append(f"its batch has {format_bytes(sight.batch)}, planned were {format_bytes(planned.batch_bytes)}")
            is_larger = True
        elif 0 < planned.longest_dim < sight.longest:
            found.append(f"its batch has a dimension of {sight.longest}, the planned one {planned.longest_dim} at most")
            is_larger = True
        if sight.state > planned.optimizer_bytes * (1 + SAME_SHARE):
            held, expected = format_bytes(sight.state), format_bytes(planned.optimizer_bytes)
            found.append(f"its optimizer holds {held}, planned were {expected} (`optimizer=`)")
        thawed = self._thawed()
        if thawed:
            found.append(_words(thawed))
            is_larger = True
        if found:
            self._said_differs = True
            fits = "seems to fit; a plan of this step may be faster"
            if is_larger:
                fits = "may take more than was planned; make a plan again"
            warnings.warn(
                f"This training step of {self.plan.model_class} is not the one that was planned: {'; '.join(found)}. "
                f"It is as exact, and {fits}. This is said once. [E303]",
                OtherStepWarning,
                stacklevel=2,
            )

    @property
    def _other_precision(self) -> str:
        """Returns the precision of the step if no module computes in the planned one; otherwise ""."""
        planned, seen = self.plan.predicted.precision, self._counter.precisions
        if not seen and self._sight is not None and self._sight.precision:  # no module that was called has weights
            seen = {self._sight.precision.removeprefix("torch."): None}
        return next(iter(seen)) if planned and seen and planned not in seen else ""

    def _estimate(self) -> int:
        return self.plan.predicted.peak_bytes - self._spared_bytes() + sum(nbytes for nbytes, _ in self._beyond())

    def _spared_bytes(self) -> int:
        """Returns what a smaller batch takes less at the peak: of all but weights, gradients and state its share."""
        planned = self.plan.predicted
        if planned.phase == "optimizer" or self._sight is None or not min(planned.batch_bytes, self._saved_bytes):
            return 0
        saved = sum(g.saved_bytes for g in self._graphs if g.alive is not None and g.alive() is not None)
        share = max(self._sight.batch / planned.batch_bytes, saved / max(planned.forward_saved_bytes, 1))
        weights = sum(p.nbytes for refs in (self._trained, self._frozen) for ref in refs if (p := ref()) is not None)
        fixed = 2 * weights + planned.optimizer_bytes
        return int(max(planned.peak_bytes - fixed, 0) * max(1 - share, 0))

    def _judge(self, peak_bytes: int) -> None:
        self.peak_bytes = peak_bytes
        if not self._removers:
            return
        if peak_bytes <= self.plan.budget_bytes:
            self._say_what_differs()
            return
        causes = sorted(self._beyond(), reverse=True)[:2]
        why = "; also ".join(text for _, text in causes)
        if not why:
            why = "a larger batch, another precision or optimizer, or tensors that your own code holds"
        about = ("no less than " if self._thawed() else "about ") if self._device.type == "cpu" else ""
        self.remove()
        warnings.warn(
            f"A training step of {self.plan.model_class} peaked at {about}{format_bytes(peak_bytes)}, over the plan's "
            f"budget of {format_bytes(self.plan.budget_bytes)} (planned peak "
            f"{format_bytes(self.plan.predicted.peak_bytes)}). Likely cause: {why}. Plan the step as it is trained: "
            "its largest batch, its precision, its optimizer. This is said once. [E302]",
            OverBudgetWarning,
            stacklevel=2,
        )


def _words(thawed: list[torch.Tensor]) -> str:
    num_bytes = format_bytes(sum(p.nbytes for p in thawed))
    return f"{len(thawed)} parameters ({num_bytes}) train that were frozen when the plan was put in place"


def find_watches(model: nn.Module) -> list[StepWatch]:
    """Returns the active watches of a model's steps."""
    owners = (getattr(hook, "__self__", None) for hook in model._forward_pre_hooks.values())
    return [owner for owner in owners if isinstance(owner, StepWatch)]


def _unwatching() -> StepWatch:
    """Returns the replacement of a watch in a deep copy of its model, whose training is not watched."""
    watch = object.__new__(StepWatch)
    watch._removers, watch._counting, watch._is_step = [], None, False
    return watch
