"""A joint graph as plain data: forward's ops followed by backward's, with the values that they read and make.

Views are no ops here: a view is the value that it looks at.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JointOp:
    """One op of a joint graph.

    Attributes:
        inputs, outputs: values. Every value has at most one maker; those without one are inputs of the graph.
        seconds: what running it again takes. can_rerun: whether backward may run it again. is_fusible: whether a
            compiler makes its result inside of the kernel that reads it; reads_fusible: whether its kernel can do that
            with what it reads. is_random: whether it draws random numbers.
        keeps_place: whether it may not be moved past others: it draws numbers, or changes what it is given.
        overwritable: inputs in whose place the result may be written, if nothing reads them afterwards.
        state_bytes: of the generator, kept for an op that draws the same numbers again. workspace_bytes: that its
            kernel has while it runs, beside what it reads and makes. flops: of matrix products and convolutions.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    seconds: float = 0.0
    can_rerun: bool = True
    is_fusible: bool = False
    reads_fusible: bool = False
    is_random: bool = False
    keeps_place: bool = False
    overwritable: tuple[int, ...] = ()
    state_bytes: int = 0
    workspace_bytes: int = 0
    flops: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class JointStep:
    """A joint graph.

    Attributes:
        value_bytes: of each value. ops: forward's in order, then backward's. num_forward: how many are forward's.
        results: values that forward returns. gradients: values that backward returns. tangents: values that backward is
            given. keeps_tangents: whether those stay until backward ends, whoever reads them.
        activations: values that the graph is given by what ran before it, and nobody else may hold.
        fused_reads: stored values from which a compiler makes a value again for each of several readers, at most; with
            more it stores the value. 0: kernels are not fused.
    """

    value_bytes: tuple[int, ...]
    ops: tuple[JointOp, ...]
    num_forward: int
    results: frozenset[int]
    gradients: frozenset[int]
    tangents: frozenset[int] = frozenset()
    keeps_tangents: bool = False
    activations: frozenset[int] = frozenset()
    fused_reads: int = 0

    def flops(self, order: Sequence[int]) -> int:
        """Returns the FLOPs of forward, and of a backward that runs ops in this order."""
        return sum(op.flops for op in self.ops[: self.num_forward]) + sum(self.ops[at].flops for at in order)

    @functools.cached_property
    def makers(self) -> dict[int, int]:
        """The op that makes each value that an op makes."""
        return {v: i for i, op in enumerate(self.ops) for v in op.outputs}

    @functools.cached_property
    def given(self) -> frozenset[int]:
        """Values that no op makes: they are always there."""
        return frozenset(v for v in range(len(self.value_bytes)) if v not in self.makers)

    @functools.cached_property
    def inputs(self) -> tuple[tuple[int, ...], ...]:
        """What each op reads; a list of its own, since simulations read little else."""
        return tuple(op.inputs for op in self.ops)

    @functools.cached_property
    def outputs(self) -> tuple[tuple[int, ...], ...]:
        """What each op makes."""
        return tuple(op.outputs for op in self.ops)

    @functools.cached_property
    def workspace_bytes(self) -> tuple[int, ...]:
        """What each op's kernel has while it runs."""
        return tuple(op.workspace_bytes for op in self.ops)

    @functools.cached_property
    def writes_over(self) -> dict[int, tuple[int, ...]]:
        """Ops whose result may be written in the place of an input, with such inputs."""
        return {at: op.overwritable for at, op in enumerate(self.ops) if op.overwritable}

    @functools.cached_property
    def written_over(self) -> frozenset[int]:
        """Such inputs of any op."""
        return frozenset(v for over in self.writes_over.values() for v in over)

    @functools.cached_property
    def last_in_forward(self) -> dict[int, int]:
        """The last of forward's ops that makes or reads each value that forward makes."""
        made = {v for outputs in self.outputs[: self.num_forward] for v in outputs}
        uses = zip(self.inputs[: self.num_forward], self.outputs, strict=False)
        return {v: at for at, (read, made_here) in enumerate(uses) for v in (*read, *made_here) if v in made}

    @functools.cached_property
    def over_dying(self) -> dict[int, tuple[int, ...]]:
        """Forward's ops that may write over inputs which forward made and reads there for the last time, with those."""
        last, some = self.last_in_forward, self.writes_over.items()
        found = {at: tuple(v for v in over if last.get(v) == at) for at, over in some if at < self.num_forward}
        return {at: dying for at, dying in found.items() if dying}

    @functools.cached_property
    def changes_in_forward(self) -> tuple[int, ...]:
        """By how many bytes more are there at each of forward's ops, and after the last, if each value goes at once."""
        change = [sum(self.value_bytes[v] for v in made) for made in self.outputs[: self.num_forward]]
        change.append(0)
        for value, at in self.last_in_forward.items():
            change[at + 1] -= self.value_bytes[value]
        return tuple(change)

    @functools.cached_property
    def lean_order(self) -> tuple[int, ...]:
        """Backward's own ops in the graph's order, but two kinds as early as their inputs are there.

        An op that leads to nothing but gradients of parameters: what it reads of forward's is let go before the next
        gradient is made. And an op that reads only what backward made and lets go of more than it makes.
        """
        ops, begin, sizes = self.ops, self.num_forward, self.value_bytes
        behind = range(begin, len(ops))
        if any(ops[at].keeps_place for at in behind):
            return tuple(behind)
        goes_on: set[int] = set()  # ops that lead to other ops than casts of what they make
        own = {at: [v for v in ops[at].inputs if self.makers.get(v, -1) >= begin] for at in behind}
        readers: dict[int, set[int]] = {}
        for at in reversed(behind):
            for value in own[at]:
                readers.setdefault(value, set()).add(at)
            if len(ops[at].inputs) > 1 or at in goes_on:
                goes_on.update(self.makers[v] for v in own[at])
        made: set[int] = set()
        order: list[int] = []

        def comes_now(at: int) -> bool:
            if at in order_set or not own[at] or not made.issuperset(own[at]):
                return False
            if at not in goes_on:
                return True
            if any(0 <= self.makers.get(v, -1) < begin for v in ops[at].inputs):
                return False
            freed = sum(sizes[v] for v in own[at] if v not in self.gradients and readers[v] <= order_set | {at})
            return freed > sum(sizes[v] for v in ops[at].outputs)

        order_set: set[int] = set()
        for first in behind:
            left = [first] if first not in order_set else []
            while left:
                at = left.pop(0)
                if at in order_set:
                    continue
                order.append(at)
                order_set.add(at)
                made.update(ops[at].outputs)
                near = set().union(*[readers.get(v, set()) for v in (*ops[at].outputs, *own[at])])
                left += [n for n in sorted(near) if comes_now(n)]
        return tuple(order)

    @functools.cached_property
    def shrinking(self) -> dict[int, tuple[int, ...]]:
        """Ops of forward that could come earlier, and read made values of more bytes than they make, with those."""
        readers: dict[int, list[int]] = {}
        for at, op in enumerate(self.ops[: self.num_forward]):
            for value in op.inputs:
                readers.setdefault(value, []).append(at)
        found: dict[int, tuple[int, ...]] = {}
        for at, op in enumerate(self.ops[: self.num_forward]):
            read = tuple(v for v in op.inputs if v in self.makers)
            after = max((n for v in read for n in (self.makers[v], *readers[v]) if n != at), default=at)
            more = sum(self.value_bytes[v] for v in read) > sum(self.value_bytes[v] for v in op.outputs)
            if more and after < at - 1 and not op.keeps_place:
                found[at] = read
        return found

    @functools.cached_property
    def droppable(self) -> frozenset[int]:
        """Values that an op made as it would again: by `dropped` each of backward's own ops that needs one makes it.

        Of backward's own those that it does not return.
        """
        found: set[int] = set()
        for at, op in enumerate(self.ops):
            returned = at >= self.num_forward and not self.gradients.isdisjoint(op.outputs)
            if op.can_rerun and not op.is_random and not op.keeps_place and not returned:
                found.update(op.outputs)
        return frozenset(found)

    @functools.cached_property
    def reads(self) -> dict[int, int]:
        """Forward's values that backward reads, with the first of backward's ops that reads each."""
        made = {v for op in self.ops[: self.num_forward] for v in op.outputs}
        found: dict[int, int] = {}
        for at in range(self.num_forward, len(self.ops)):
            for value in self.ops[at].inputs:
                if value in made:
                    found.setdefault(value, at)
        for value in sorted(self.gradients & made):
            found.setdefault(value, len(self.ops))
        return found
