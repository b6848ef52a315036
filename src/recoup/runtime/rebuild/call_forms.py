"""Forms: the recorded ops of a call of a torch function, reusable for every later call with equal metadata.

The ops that `F.layer_norm` or `x + 1` dispatches follow from the function, its scalars, and the metadata of its
tensors. A `CallForm` holds all of these, the ops that ran, the data flow between them, and the values that autograd
saved. A call that fits a form runs past the dispatch mode.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from recoup import _torch
from recoup.runtime.rebuild.call_log import CallLog, is_mask
from recoup.runtime.rebuild.op_forms import OpForm
from recoup.runtime.rebuild.shortcuts import shown_mask
from recoup.runtime.rebuild.values import PLAIN, Geometry, Value, geometry_of

SEQUENCES = frozenset([list, tuple, torch.Size])
_NESTS = SEQUENCES | {slice}
SCALARS = PLAIN | {type(Ellipsis)}


class CallForm:
    """One call of a torch function.

    Attributes:
        state, attention_flags: what else decided about its ops; the latter of an attention alone, of which
            attention_choice tells the kernel.
        geometries: of its tensors. is_kind: whether others have their metadata, sizes and strides apart.
        kinds: classes of its arguments, those in lists, tuples and slices after these. names: of its keyword arguments.
        ops: the recorded ones, each with the numbers of the values that it reads: first those of the call's tensors,
            then what earlier ops made.
        aliases: pairs of the call's tensors that lie over one storage.
        saves: for each tensor that autograd saves in it the number of the value and the geometry, None if an op of an
            earlier call made it.
        results: position, number of the value and storage offset of each result that an op of the call made; position
            -1: the result.
        draws: geometries of the random masks that it draws; their numbers come after those of its tensors.
        left: the same of statistics that it leaves for its backward; their numbers come after those.
        casts: places of saved tensors that autocast made of a parameter, which it keeps for later calls.
        shows: by its place, the number of the mask that a saved tensor tells by being zero or not.
        written: position of each tensor that it writes to, number of the value that is there then, None if unknown.
        passing: numbers of values that it writes over itself, or over parts of whose storages it writes.
        counted: label of each counted op, how many tensors autograd has saved before it, numbers of the values made;
            None instead of these if one of them is neither saved nor a result.
        then: the form of the call that followed it in the last step, the first guess for the next one.
        picked: returns the tensors among a call's arguments.
    """

    __slots__ = (
        "_exact",
        "_is_nested",
        "_matches",
        "_offsets",
        "_rest",
        "_same",
        "_scalars",
        "_types",
        "aliases",
        "attention_choice",
        "attention_flags",
        "casts",
        "counted",
        "draws",
        "dtypes",
        "geometries",
        "gives",
        "is_kind",
        "kinds",
        "left",
        "names",
        "num_ops",
        "ops",
        "passing",
        "picked",
        "results",
        "saves",
        "shows",
        "state",
        "then",
        "written",
    )

    def __init__(
        self,
        flat: Sequence[Any],
        names: tuple[str, ...],
        first: list[int],
        same: list[tuple[int, int]],
        matches: Callable[..., bool],
        *,
        is_nested: bool,
        state: tuple[Any, ...],
        attention_flags: tuple[Any, ...] | None,
    ) -> None:
        self.kinds = tuple(map(type, flat))
        self.names = names
        self._is_nested = is_nested
        self.picked = picker(first)
        self._same = tuple(same)
        self._matches = matches
        tensors = [flat[i] for i in first]
        self._types = [*map(type, tensors)]
        self._offsets = [t.storage_offset() for t in tensors]
        self.dtypes = [t.dtype for t in tensors]
        self.geometries = [*map(geometry_of, tensors)]
        self.is_kind = _torch.tensor_guard(tensors, any_size=True) if tensors else _is_alike
        scalars = [i for i, item in enumerate(flat) if type(item) in SCALARS]
        self._rest = picker(scalars)
        self._scalars = self._rest(flat)
        self._exact = repr(self._scalars) if any(type(s) is float and s == 0 for s in self._scalars) else ""
        self.state = state
        self.attention_flags = attention_flags
        self.attention_choice: int | None = None
        self.ops: tuple[tuple[OpForm, tuple[int, ...]], ...] = ()
        self.aliases: tuple[tuple[int, int], ...] = ()
        self.saves: tuple[tuple[int | None, Geometry], ...] = ()
        self.results: tuple[tuple[int, int, int], ...] = ()
        self.gives: Callable[..., bool] = _is_alike
        self.counted: tuple[tuple[str, int, tuple[int, ...] | None], ...] = ()
        self.num_ops = 0
        self.draws: tuple[Geometry, ...] = ()
        self.left: tuple[Geometry, ...] = ()
        self.casts: tuple[int, ...] = ()
        self.shows: dict[int, int] = {}
        self.written: tuple[tuple[int, int | None], ...] = ()
        self.passing: frozenset[int] = frozenset()
        self.then: Any = None

    def tensors(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Sequence[torch.Tensor] | None:
        """Returns the tensors of a call that is like this one, each once; None if it is not."""
        tensors = self.alike(args, kwargs)
        return tensors if tensors is not None and self.fits(tensors) else None

    def fits(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these, each once, have the metadata that its tensors have."""
        if [*map(type, tensors)] != self._types or not self._matches(*tensors):
            return False
        return [t.storage_offset() for t in tensors] == self._offsets

    def alike(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Sequence[torch.Tensor] | None:
        """Returns the tensors of a call that is like this one, their metadata apart, each once; None if it is not."""
        flat: Sequence[Any] = args
        if kwargs:
            if tuple(kwargs) != self.names:
                return None
            flat = (*args, *kwargs.values())
        elif self.names:
            return None
        if self._is_nested:
            flat = flattened(flat)
        if tuple(map(type, flat)) != self.kinds:
            return None
        scalars = self._rest(flat)
        if scalars != self._scalars or (self._exact and repr(scalars) != self._exact):  # zero has two signs
            return None
        if _torch.call_state() != self.state:
            return None
        if self.attention_flags is not None and _torch.attention_flags() != self.attention_flags:
            return None
        for one, other in self._same:
            if flat[one] is not flat[other]:
                return None
        found: Sequence[torch.Tensor] = self.picked(flat)
        return found


def flattened(items: Sequence[Any]) -> Sequence[Any]:
    """Returns a call's arguments with the items of lists, tuples and slices among them after it."""
    flat = list(items)
    for item in flat:  # grows while it is walked
        kind = type(item)
        if kind in SEQUENCES:
            flat += item
            flat.append(len(item))
        elif kind is slice:
            flat += (item.start, item.stop, item.step)
    return flat


def scalars_of(items: Sequence[Any]) -> tuple[Any, ...]:
    """Returns the arguments of a call that are no tensors, those in lists, tuples and slices included."""
    return tuple([item for item in flattened(items) if type(item) in SCALARS])


def form_before(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, state: tuple[Any, ...]
) -> tuple[CallForm, list[torch.Tensor]] | None:
    """Returns what tells a call that is about to run, with its tensors, each once; None if nothing does.

    Before: what is added to has a gradient afterwards, if what is added has one.
    """
    items = (*args, *kwargs.values()) if kwargs else args
    is_nested = any(type(item) in _NESTS for item in items)
    flat = flattened(items) if is_nested else items
    first: list[int] = []
    same: list[tuple[int, int]] = []
    for i, item in enumerate(flat):
        if type(item) is torch.Tensor or type(item) is nn.Parameter:
            twin = next((j for j in first if flat[j] is item), None)
            if twin is None:
                first.append(i)
            else:
                same.append((twin, i))
        elif type(item) not in SCALARS and type(item) not in _NESTS:
            return None
    tensors = [flat[i] for i in first]
    if any([t.layout is not torch.strided for t in tensors]):
        return None
    matches = _torch.tensor_guard(tensors) if tensors else _is_alike
    if matches is None or not matches(*tensors):
        return None
    flags = _torch.attention_flags() if func is F.scaled_dot_product_attention else None
    settings: dict[str, Any] = {"state": state, "attention_flags": flags}
    form = CallForm(flat, tuple(kwargs or ()), first, same, matches, is_nested=is_nested, **settings)
    if flags is not None:
        with _torch.past_dispatch_modes():
            form.attention_choice = _torch.attention_choice(args, kwargs)
    return form, tensors


def _is_alike() -> bool:
    """Whether a call without tensors is as it was, its scalars apart."""
    return True


def form_after(
    before: tuple[CallForm, list[torch.Tensor]] | None,
    out: Any,
    log: CallLog,
    value_of: Callable[[torch.Tensor], Value | None],
) -> CallForm | None:
    """Returns the form of a call that has run, None if it cannot be known beforehand.

    Args:
        before: what `form_before` returned. value_of: returns the value of a tensor's storage, None if it has none.
    """
    return before[0] if before is not None and log.ops is not None and _knows(*before, out, log, value_of) else None


def _knows(
    form: CallForm,
    tensors: list[torch.Tensor],
    out: Any,
    log: CallLog,
    value_of: Callable[[torch.Tensor], Value | None],
) -> bool:
    """Fills the form from the log of a call; returns whether all of it follows from the call's arguments."""
    assert log.ops is not None
    numbers: dict[int, int] = {}
    aliases = []
    last = {address: value for address, _, value in log.writes}
    addresses = [tensor.untyped_storage()._cdata for tensor in tensors]
    first = {address: value for address, value, _ in reversed(log.writes)}
    if any(addresses.count(address) > 1 for address in last):
        return False  # it reads through another tensor what it writes
    for i, tensor in enumerate(tensors):
        value = first.get(addresses[i], value_of(tensor))
        if value is None:
            continue
        if id(value) in numbers:
            aliases.append((numbers[id(value)], i))
        numbers.setdefault(id(value), i)
    num, handed = len(tensors), set(numbers)
    drawn = [*log.drawn, *[value for _, _, value in log.writes if value.random_mask]]
    for value in drawn:
        numbers[id(value)] = num
        num += 1
    for value in log.left:
        numbers[id(value)] = num
        num += 1
    ops, made = [], set(map(id, log.left))
    if not made <= {id(value) for value, _ in log.saved}:
        return False  # nobody would keep them
    cast: set[int] = set()
    for op, read, values in log.ops:
        if log.state[2] is not None and op.is_cast and any(value.constant is not None for value in read):
            cast.update(map(id, values))
        picks = [numbers.get(id(value), -1) for value in read]
        if -1 in picks:
            return False
        ops.append((op, tuple(picks)))
        for value in values:
            numbers[id(value)] = num
            made.add(id(value))
            num += 1
    for position, (value, geometry) in enumerate(log.saved):
        mask = None if value is None else shown_mask(value, geometry) or value
        if value is not None and id(value) in cast:
            form.casts += (position,)
        if mask is not None and any(mask is each for each in drawn):
            if not is_mask(mask):
                return False  # it is kept as it is, where it is saved
            form.shows.setdefault(position, numbers[id(mask)])
    shown = set(form.shows.values())
    hidden = {id(value) for value in drawn if numbers[id(value)] not in shown}
    own = [value for value in log.leaves if id(value) not in handed]
    log.hidden = {place: value for place, value in enumerate(own) if id(value) in hidden}
    if len(log.hidden) < len(hidden):
        return False  # nobody would see what is in it
    form.draws = tuple([value.base for value in drawn if value.base is not None])
    form.left = tuple([value.base for value in log.left if value.base is not None])
    form.written = tuple(
        [
            (i, numbers.get(id(last[address])) if last[address].made is not None else None)
            for i, address in enumerate(addresses)
            if address in last
        ]
    )
    form.ops, form.num_ops = tuple(ops), len(log.counted)
    if any(id(old) in made for _, old, _ in log.writes) and any(address in last for address in addresses):
        return False  # which part of what it was handed it wrote to would not be seen
    form.passing = frozenset([numbers[id(old)] for _, old, _ in log.writes if id(old) in made])
    form.aliases = tuple(aliases)
    found = [(numbers[id(v)] if v is not None and id(v) in made else None, geometry) for v, geometry in log.saved]
    form.saves = tuple(found) if form.shows or any(number is not None for number, _ in found) else ()
    outs = [(-1, out)] if type(out) is torch.Tensor else list(enumerate(out)) if isinstance(out, (tuple, list)) else []
    results: list[tuple[int, int, int]] = []
    given = []
    for position, item in outs:
        value = value_of(item) if type(item) is torch.Tensor else None
        if value is not None and id(value) in made:
            results.append((position, numbers[id(value)], int(item.storage_offset())))
            given.append(item)
    seen = {number for number, _ in form.saves} | {number for _, number, _ in results} | set(form.shows.values())
    form.counted = tuple(
        [
            (
                label,
                num_saved,
                tuple(numbers[id(v)] for v in values) if {numbers[id(v)] for v in values} <= seen else None,
            )
            for label, num_saved, values in log.counted
        ]
    )
    if results:
        gives = _torch.tensor_guard(given)
        if gives is None or not gives(*given):
            return False
        form.results, form.gives = tuple(results), gives
    return True


def picker(positions: list[int]) -> Callable[[Any], Any]:
    """Returns what returns the items at some positions."""
    if not positions:
        return lambda flat: ()
    end = positions[0] + len(positions)
    if positions == list(range(positions[0], end)):
        return operator.itemgetter(slice(positions[0], end))
    return operator.itemgetter(*positions)
