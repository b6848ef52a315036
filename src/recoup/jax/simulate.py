"""The memory of a jaxpr, run in its order by a compiler that fuses: which buffers are alive when.

Calls are inlined, dead code is left out. An elementwise result that only other elementwise ops and reductions read is
part of them and has no buffer; views share their operand's, and an update is made in place where its operand dies. A
loop's stacked results are there from its beginning on, what it carries stays where it is,
and its body's peak counts as long as it runs. Not seen: what a compiler's kernels take for themselves, how it packs
buffers, and another order than the jaxpr's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from recoup.jax._jax import DropVar, Literal, has_effects, open_jaxpr, scan_counts, source_line
from recoup.jax.flops import nbytes, result_bytes, sub_jaxprs, words

_INLINED = words(
    """jit pjit closed_call core_call core_closed_call eval_jaxpr checkpoint remat remat2 custom_jvp_call
    custom_vjp_call custom_vjp_call_jaxpr custom_lin"""
)
_RESHAPES = frozenset(("reshape", "squeeze", "expand_dims", "broadcast_in_dim"))
_VIEWS = frozenset(("reshape", "squeeze", "expand_dims", "name", "copy_p", "stop_gradient", "reduce_precision"))
_FUSED = words(
    """add sub mul div neg exp log tanh logistic max min integer_pow pow sqrt rsqrt abs sign select_n
    convert_element_type eq ne lt le gt ge and or not xor broadcast_in_dim iota square erf sin cos tan log1p expm1
    clamp is_finite add_any slice pad rev transpose concatenate dynamic_slice floor ceil round exp2 rem nextafter
    cbrt erf_inv erfc atan2 shift_left shift_right_logical shift_right_arithmetic population_count copy
    mul_add_any real imag"""
)
_ELEMENTWISE = _FUSED - words("broadcast_in_dim iota slice dynamic_slice pad rev transpose concatenate")
_UPDATES = words("dynamic_update_slice scatter scatter_add scatter_mul scatter_min scatter_max")
_BARRIER = "optimization_barrier"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """One buffer alive at the peak: its bytes, the primitive that made it, shape and the user's line."""

    nbytes: int
    primitive: str
    shape: str
    source: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What a simulated run takes.

    Attributes:
        argument_bytes, output_bytes: there all the time. temporary_bytes: the most that is alive besides.
        result_bytes: of each output.
        buffers: alive at that moment, largest first. timeline: temporary bytes alive at each op.
    """

    argument_bytes: int
    output_bytes: int
    temporary_bytes: int
    result_bytes: tuple[int, ...]
    buffers: tuple[Buffer, ...]
    timeline: tuple[int, ...]

    @property
    def peak_bytes(self) -> int:
        """Arguments, outputs and temporaries at their most."""
        return self.argument_bytes + self.output_bytes + self.temporary_bytes


class _Step:
    """One op after inlining: values by number, None for literals."""

    __slots__ = ("eqn", "inputs", "name", "operands", "outputs")

    def __init__(self, eqn: Any, operands: list[int | None], outputs: list[int], name: str = "") -> None:
        self.eqn, self.operands, self.outputs = eqn, operands, outputs
        self.inputs = [n for n in operands if n is not None]
        self.name: str = name or eqn.primitive.name

    def carried(self) -> list[tuple[int | None, int]]:
        """Returns, for a loop, each value that its carry begins with and the one that it ends with."""
        if self.name == "scan":
            num_consts, num_carry = scan_counts(self.eqn)
            return list(zip(self.operands[num_consts:], self.outputs[:num_carry], strict=False))
        if self.name == "while":
            num_consts = self.eqn.params["cond_nconsts"] + self.eqn.params["body_nconsts"]
            return list(zip(self.operands[num_consts:], self.outputs, strict=True))
        return []


class _Flat:
    """A jaxpr inlined: steps in order and the bytes of each value."""

    def __init__(self, jaxpr: Any, num_sliced: int = 0) -> None:
        inner, _ = open_jaxpr(jaxpr)
        self.sizes: list[int] = []
        self.steps: list[_Step] = []
        numbers: dict[Any, int | None] = {}
        self.arguments = [self._new(v, numbers) for v in (*inner.constvars, *inner.invars)]
        self._known: dict[Any, list[int]] = {}
        self._base: dict[int, int] = {}
        self._inline(inner, numbers)
        self.results = [n for v in inner.outvars if (n := self._read(v, numbers)) is not None]
        self._drop_dead_code()
        if num_sliced:
            self._slice(self.arguments[-num_sliced:])

    def _new(self, var: Any, numbers: dict[Any, int | None]) -> int:
        self.sizes.append(nbytes(var.aval))
        if not isinstance(var, DropVar):
            numbers[var] = len(self.sizes) - 1
        return len(self.sizes) - 1

    @staticmethod
    def _read(var: Any, numbers: dict[Any, int | None]) -> int | None:
        return None if isinstance(var, Literal) else numbers[var]

    def _inline(self, jaxpr: Any, numbers: dict[Any, int | None]) -> None:
        for eqn in jaxpr.eqns:
            inner = next(sub_jaxprs(eqn), None) if eqn.primitive.name in _INLINED else None
            operands = [self._read(v, numbers) for v in eqn.invars]
            if inner is None:
                self._step(eqn, operands, numbers)
                continue
            if eqn.params.get("differentiated") and eqn.params.get("prevent_cse"):
                operands = self._behind_barrier(eqn, operands)
            opened, _ = open_jaxpr(inner)
            inside: dict[Any, int | None] = {v: self._new(v, {}) for v in opened.constvars}
            inside.update(zip(opened.invars, operands, strict=True))
            self._inline(opened, inside)
            for var, result in zip(eqn.outvars, opened.outvars, strict=True):
                if not isinstance(var, DropVar):
                    numbers[var] = self._read(result, inside)

    def _slice(self, arguments: list[int]) -> None:
        """Lets arguments be slices of something larger, taken where they are first read."""
        waiting = set(arguments)
        steps: list[_Step] = []
        for step in self.steps:
            first = [v for v in step.inputs if v in waiting]
            waiting.difference_update(first)
            steps += [_Step(step.eqn, [], [value], name="dynamic_slice") for value in first]
            steps.append(step)
        self.steps = steps

    def _step(self, eqn: Any, operands: list[int | None], numbers: dict[Any, int | None]) -> None:
        """Adds an op, or takes the results of an equal one before it."""
        key = self._key(eqn, operands)
        known = self._known.get(key) if key is not None else None
        if known is None:
            known = [self._new(v, numbers) for v in eqn.outvars]
            self.sizes[len(self.sizes) - len(known) :] = result_bytes(eqn)
            self.steps.append(_Step(eqn, operands, known))
            if key is not None:
                self._known[key] = known
        else:
            numbers.update((v, n) for v, n in zip(eqn.outvars, known, strict=True) if not isinstance(v, DropVar))

    def _key(self, eqn: Any, operands: list[int | None]) -> Any:
        """Returns a key that equal ops on equal operands share; None for what is never merged."""
        (out, *_), value = eqn.outvars or [None], operands[0] if operands else None
        if value is not None and out is not None and eqn.primitive.name in _RESHAPES:
            is_view = nbytes(out.aval) == self.sizes[value] and out.aval.dtype == eqn.invars[0].aval.dtype
            if is_view:
                base = self._base[len(self.sizes)] = self._base.get(value, value)
                return "reshape", base, out.aval.shape
        return _same(eqn, operands)

    def _behind_barrier(self, eqn: Any, operands: list[int | None]) -> list[int | None]:
        """Returns other numbers for what enters a checkpoint's second run: nothing merges with the first one."""
        which = eqn.params["prevent_cse"]
        is_behind = [which] * len(operands) if isinstance(which, bool) else which
        found = list(operands)
        for i, (value, behind) in enumerate(zip(operands, is_behind, strict=True)):
            if value is not None and behind:
                self.sizes.append(self.sizes[value])
                found[i] = len(self.sizes) - 1
                self.steps.append(_Step(eqn, [value], [len(self.sizes) - 1], name=_BARRIER))
        return found

    def _drop_dead_code(self) -> None:
        needed = set(self.results)
        kept = []
        for step in reversed(self.steps):
            if has_effects(step.eqn) or any(v in needed for v in step.outputs):
                needed.update(step.inputs)
                kept.append(step)
        self.steps = kept[::-1]


def _same(eqn: Any, operands: list[int | None]) -> Any:
    """Returns a key that equal ops on equal operands share; None for what is never merged."""
    if has_effects(eqn) or next(sub_jaxprs(eqn), None) is not None or eqn.primitive.name.startswith("random"):
        return None
    values = tuple(
        (v.val.item() if getattr(v.val, "ndim", 0) == 0 and hasattr(v.val, "item") else id(v.val), str(v.aval))
        if isinstance(v, Literal)
        else n
        for v, n in zip(eqn.invars, operands, strict=True)
    )
    key = (eqn.primitive.name, values, tuple(eqn.params.items()))
    try:
        hash(key)
    except TypeError:
        return None
    return key


def live_eqns(jaxpr: Any) -> list[Any]:
    """Returns the equations that run: calls inlined, dead code left out."""
    return [step.eqn for step in _Flat(jaxpr).steps if step.name != _BARRIER]


def simulate(jaxpr: Any, *, count_outputs: bool = False) -> Memory:
    """Returns the memory of one run of `jaxpr`.

    Args:
        jaxpr: what `jax.make_jaxpr` returns.
        count_outputs: whether outputs are temporaries, from when they are made.
    """
    return _simulate(_Flat(jaxpr), count_outputs=count_outputs)


def _simulate(flat: _Flat, *, count_outputs: bool, num_stacked: int = 0, first_carry: int | None = None) -> Memory:
    """Returns the memory of one run.

    Args:
        flat: what runs. count_outputs: whether outputs are temporaries.
        num_stacked: how many of the last outputs are written into something larger as soon as they are made.
        first_carry: which argument, and those behind it, the other outputs take the place of; None: they do not.
    """
    roots = _buffers_behind(flat, num_stacked)
    staying = flat.results[: len(flat.results) - num_stacked]
    outputs = frozenset().union(*(roots[v] for v in staying)) if staying else frozenset()
    last: dict[int, int] = {}
    for i, step in enumerate(flat.steps):
        for value in step.inputs:
            for root in roots[value]:
                last[root] = i
    if count_outputs:
        last.update(dict.fromkeys(outputs, len(flat.steps)))
    kept = set() if count_outputs else _with_carries(flat, roots, last, outputs)
    places = {}
    if first_carry is not None:
        places = dict(zip(staying, flat.arguments[first_carry:], strict=False))
    dying: dict[int, list[int]] = {}
    alive = peak = 0
    at_peak, timeline = -1, []
    made_at: dict[int, int] = {}
    for i, step in enumerate(flat.steps):
        freed = dying.setdefault(i, [])
        for value in step.outputs:
            if roots[value] != {value} or value in kept:
                continue
            if value in places and last.get(places[value], -1) < i + (step.name in _ELEMENTWISE):
                continue
            source = _taken_over(flat, step, value, roots, freed)
            if source is None:
                alive += flat.sizes[value]
            else:
                freed.remove(source)
            made_at[value] = i
            dying.setdefault(last.get(value, i), []).append(value)
        inside = _inside(step)
        timeline.append(alive + inside)
        if alive + inside > peak:
            peak, at_peak = alive + inside, i
        for value in freed:
            alive -= flat.sizes[value]
    return Memory(
        argument_bytes=sum(flat.sizes[v] for v in flat.arguments),
        output_bytes=sum(flat.sizes[v] for v in outputs),
        temporary_bytes=peak,
        result_bytes=tuple(flat.sizes[v] for v in flat.results),
        buffers=_alive(flat, made_at, last, at_peak),
        timeline=tuple(timeline),
    )


def _with_carries(flat: _Flat, roots: list[frozenset[int]], last: dict[int, int], outputs: frozenset[int]) -> set[int]:
    """Returns the outputs and what becomes one of them in place: what a loop's carry begins with."""
    kept = set(outputs)
    for i in range(len(flat.steps) - 1, -1, -1):
        for begin, end in flat.steps[i].carried():
            if end in kept and begin is not None:
                kept.update(r for r in roots[begin] if last[r] == i and flat.sizes[r] == flat.sizes[end])
    return kept


def _taken_over(flat: _Flat, step: _Step, value: int, roots: list[frozenset[int]], freed: list[int]) -> int | None:
    """Returns the buffer that dies with a step and that a result of it is written into; None: it has its own."""
    if step.name in _UPDATES:
        read = roots[step.operands[0]] if step.operands[0] is not None else frozenset()
    else:
        begin = next((b for b, e in step.carried() if e == value), None)
        read = roots[begin] if begin is not None else frozenset()
    return next((r for r in freed if r in read and r != value and flat.sizes[r] == flat.sizes[value]), None)


def _alive(flat: _Flat, made_at: dict[int, int], last: dict[int, int], at: int) -> tuple[Buffer, ...]:
    makers = {v: step for step in flat.steps for v in step.outputs}
    alive = [v for v, i in made_at.items() if i <= at <= last.get(v, i)]
    alive.sort(key=lambda v: (-flat.sizes[v], v))
    found = []
    for value in alive[:12]:
        eqn = makers[value].eqn
        aval = eqn.outvars[makers[value].outputs.index(value)].aval
        shape = aval.str_short() if hasattr(aval, "str_short") else str(aval)
        found.append(
            Buffer(nbytes=flat.sizes[value], primitive=eqn.primitive.name, shape=shape, source=source_line(eqn))
        )
    return tuple(found)


def _buffers_behind(flat: _Flat, num_stacked: int) -> list[frozenset[int]]:
    """Returns for each value the buffers that reading it reads: itself, or those of the ops fused into it."""
    readers: dict[int, list[_Step]] = {}
    for step in flat.steps:
        for value in dict.fromkeys(step.inputs):
            readers.setdefault(value, []).append(step)
    results = set(flat.results[: len(flat.results) - num_stacked])
    nothing: frozenset[int] = frozenset()
    behind = [nothing] * len(flat.sizes)

    def through_views(value: int) -> Iterable[_Step | None]:
        """Yields who reads a value, None for the outside."""
        if value in results:
            yield None
        for step in readers.get(value, ()):
            if step.name in _VIEWS:
                yield from through_views(step.outputs[0])
            else:
                yield step

    for step in flat.steps:
        if step.name == _BARRIER and len(step.inputs) == len(step.outputs):
            for value, source in zip(step.outputs, step.inputs, strict=True):
                behind[value] = behind[source]
            continue
        if step.name in _VIEWS and step.inputs:
            behind[step.outputs[0]] = behind[step.inputs[0]]
            continue
        read = nothing.union(*(behind[v] for v in step.inputs))
        if step.name in _FUSED:
            who = list(through_views(step.outputs[0]))
            is_inner = all(r is not None and r.name in _FUSED for r in who)
            small = sum(flat.sizes[r] for r in read) * 2 <= flat.sizes[step.outputs[0]]
            if is_inner and (len(who) < 2 or small):
                behind[step.outputs[0]] = read
                continue
        for value in step.outputs:
            behind[value] = frozenset((value,))
    return behind


def _inside(step: _Step) -> int:
    """Returns the bytes that a loop or a branch takes inside."""
    if step.name not in ("scan", "while", "cond", "shard_map"):
        return 0
    if step.name == "scan":
        num_consts, num_carry = scan_counts(step.eqn)
        (body,) = sub_jaxprs(step.eqn)
        inner, _ = open_jaxpr(body)
        flat = _Flat(body, num_sliced=len(inner.invars) - num_consts - num_carry)
        num_stacked = len(inner.outvars) - num_carry
        first_carry = len(inner.constvars) + num_consts
        return _simulate(flat, count_outputs=True, num_stacked=num_stacked, first_carry=first_carry).temporary_bytes
    return max((simulate(j).temporary_bytes for j in sub_jaxprs(step.eqn)), default=0)
