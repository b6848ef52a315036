"""Results of ops under fake tensors, made once for each distinct op and copied after that.

A loop over time, or a deep model, runs the same op on tensors of the same metadata over and over. What a fake tensor
answers depends on that metadata and the other arguments alone, so the second answer is a copy of the first: fresh
memory of the same shape, a view at the same place of its base, or the argument that was changed in place. torch keeps
such a cache as well; its key and its copies take most of an op's time.

Real tensors among fake ones count by their metadata alone, as they do for a fake mode. Not kept: ops whose result
depends on values, real scalars among the arguments, tensors that carry a constant, results that share memory in a way
that is not known of the op. What is kept was compared with the answer it stands for. It belongs to no fake mode, and
holds for all captures under the same settings of torch.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from recoup import _torch
from recoup._pytree import collect_tensors
from recoup.cost.kernel_flags import KernelFlags
from recoup.cost.signature import make_signature, signature_key
from recoup.ir.trace import Signature

_PLAIN_TYPES = frozenset({bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format})
_NEVER = object()
# They say they return something new and return the old.
_UNDECLARED = frozenset({"aten::lift", "aten::lift_fresh", "aten::lift_fresh_copy"})
_UNDECLARED_VIEWS = frozenset(
    {
        torch.ops.aten._unsafe_view.default,
        torch.ops.aten.unsafe_split.Tensor,
        torch.ops.aten.unsafe_split_with_sizes.default,
    }
)
# They change the memory behind a tensor, or ask how large it is, which is no part of the key.
_READ_STORAGE = frozenset({"aten::as_strided_", "aten::resize_", "aten::set_", "aten::resize_as_"})
_AS_STRIDED = torch.ops.aten.as_strided.default  # asks, too: for it, that is part of the key


# Ops that take one step of many, and the position of its number.
_STEPS = {torch.ops.aten.select.int: 2, torch.ops.aten.select_backward.default: 3}


_MOST_OPS = 50_000  # under one setting of torch: an answer is about a kilobyte, so 50 MB


@dataclasses.dataclass(frozen=True, slots=True)
class Answers:
    """Cached results and signatures of ops, by key.

    Attributes:
        recipes: how to make their results again.
        signatures: of ops with a recipe, by key and the step's device type: the key that `signature_key` gives them,
            and the signature.
        alike: whether an op that depends on the kind of device is answered on the meta device as on the model's own,
            by its form: all but the sizes.
    """

    recipes: dict[Any, Any] = dataclasses.field(default_factory=dict)
    signatures: dict[Any, tuple[Any, Signature]] = dataclasses.field(default_factory=dict)
    alike: dict[Any, bool] = dataclasses.field(default_factory=dict)


def answers_for(capability: tuple[int, int] | None) -> Answers:
    """Returns the answers to ops that hold in this process as torch is set now.

    Args:
        capability: of the card whose kernels answer for the model's device; None: the device's own.
    """
    threads, mkldnn = torch.get_num_threads(), torch.backends.mkldnn.enabled  # they choose the layout of a convolution
    found = _answers(capability, KernelFlags.current(), _torch.enabled_attention(), threads, mkldnn)
    if len(found.recipes) > _MOST_OPS:
        found.recipes.clear()
        found.signatures.clear()
        found.alike.clear()
    return found


@functools.lru_cache(maxsize=8)
def _answers(*settings: Any) -> Answers:
    return Answers()


class _NotKept(Exception):
    """The op's arguments cannot be described by a key."""


class FakeResults:
    """Runs ops under fake tensors, each distinct one once.

    Attributes:
        key: of the op that ran last; None if it has none. Ops of one key have one signature.

    Args:
        mode: that the fake tensors belong to; None for a real step.
        kernels: what to run for an op in place of its own fake kernel.
        kept: answers of other modes with the same kernels, which this one adds to; left out: none.
    """

    __slots__ = ("_alike", "_kept", "_kernels", "_mode", "_signatures", "key")

    def __init__(
        self,
        mode: Any,
        kernels: Mapping[Any, Callable[..., Any]] | None = None,
        kept: Answers | None = None,
    ) -> None:
        self._mode = weakref.ref(mode) if mode is not None else None  # that it is gone tells that no fake is left
        kept = Answers() if kept is None else kept
        self._kept = kept.recipes
        self._signatures = kept.signatures
        self._alike = kept.alike
        self._kernels = kernels or {}
        self.key: Any = None

    @property
    def mode(self) -> Any:
        """The mode that the fake tensors belong to."""
        return None if self._mode is None else self._mode()

    def signature(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, home: str
    ) -> tuple[Any, Signature]:
        """Returns the signature of the op that ran last and what it is known by, made once for each kept answer."""
        place = home, self.key
        found = self._signatures.get(place)
        if found is None:
            found = signature_key(func, args, kwargs, home=home), make_signature(func, args, kwargs, out, home=home)
            if self.key is not None and self._kept.get(self.key, _NEVER) is not _NEVER:
                self._signatures[place] = found
        return found

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the result of `func(*args, **kwargs)` under fake tensors."""
        try:
            key = _op_key(func, args, kwargs)
        except _NotKept:
            key = None
        self.key = key
        kernel = self._kernels.get(func, func)
        if key is None:
            return kernel(*args, **kwargs)
        step = _STEPS.get(func)
        if step is not None and not kwargs and len(args) > step:
            return self._run_step(func, args, step)
        kept = self._kept.get(key)
        if kept is None:
            out = None if _only_writes_lists(func) else self._first(func, kernel, args, kwargs)
            self._kept[key] = _recipe(func, args, kwargs, out, key, self.mode)
            return out
        if kept is _NEVER:
            return kernel(*args, **kwargs)
        return _make(kept, args, self.mode)

    def _first(self, func: Any, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the first answer of its kind."""
        if kernel is not func or func._schema.is_mutable or not _is_keepable(func, args, kwargs):
            return kernel(*args, **kwargs)
        form = _form(func, args, kwargs) if _torch.depends_on_device(func) else None
        is_alike = form is None or self._alike.get(form)
        is_view = func.is_view or func in _UNDECLARED_VIEWS
        on_meta = (
            _torch.answered_on_meta(func, args, kwargs, self.mode, is_view=is_view) if is_alike is not False else None
        )
        if on_meta is not None and is_alike:
            return on_meta
        out = kernel(*args, **kwargs)
        if form is not None and is_alike is None:
            self._alike[form] = on_meta is not None and _is_same(on_meta, out)
        return out

    def _run_step(self, func: Any, args: tuple[Any, ...], step: int) -> Any:
        """Runs an op that selects one of many steps by its index, which only changes the offset of a view."""
        number = args[step]
        source, dim = args[0], args[step - 1]
        rest = (*args[:step], *args[step + 1 :])
        key = func, torch.get_default_dtype(), _key(rest)
        kept = self._kept.get(key)
        size = source.shape[dim] if func is torch.ops.aten.select.int else args[1][dim]
        if kept is None or kept is _NEVER or not -size <= number < size:
            out = func(*args)
            if kept is None:
                recipe = _recipe(func, args, {}, out, key, self.mode)
                self._kept[key] = (recipe, number % size, False) if recipe is not _NEVER else _NEVER
            return out
        recipe, first, is_sure = kept
        away = (number % size - first) * source.stride()[dim] if func.is_view else 0
        mode = self.mode
        made = recipe[1].new(mode) if recipe[0] == "new" else recipe[2].view_of(mode, source, away)
        if not is_sure and number % size != first:  # the second number shows whether that is so
            out = func(*args)
            self._kept[key] = (recipe, first, True) if _is_same(made, out) else _NEVER
            return out
        return made


def _op_key(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Returns everything that the metadata of an op's result depends on.

    Raises:
        _NotKept: as `_key` does.
    """
    key = func, torch.get_default_dtype(), _key(args), _key(kwargs.items()) if kwargs else None
    return (*key, args[0].storage_offset(), args[0].untyped_storage().nbytes()) if func is _AS_STRIDED else key


def _key(items: Any) -> tuple[Any, ...]:
    """Returns everything about arguments that a result's metadata can depend on.

    Raises:
        _NotKept: for anything but our own fake tensors and plain values.
    """
    found: list[Any] = []
    add = found.append
    for item in items:
        if item is None:
            add(None)
        elif isinstance(item, torch.Tensor):
            traits = _torch.fake_traits(item)
            if traits is None:
                traits = _real_traits(item)
            add(traits)
        elif type(item) in _PLAIN_TYPES:
            add(type(item))
            add(item)
        elif isinstance(item, (list, tuple)):
            add(_key(item))
        else:
            raise _NotKept
    return tuple(found)


def _form(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Returns what an op's arguments are but for the sizes of its tensors."""

    def of(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return item.dtype, item.dim(), item.is_contiguous(), item.device
        return tuple(map(of, item)) if isinstance(item, (list, tuple)) else (type(item), item)

    return func, torch.get_default_dtype(), of(args), of(tuple(kwargs.items()))


def _only_writes_lists(func: Any) -> bool:
    """Whether an op writes numbers into lists of tensors and returns nothing, as steps of optimizers do.

    Its fake kernel would work its way through every tensor of a model and change none of them.
    """
    return func._schema.name.startswith("aten::_foreach_") and not func._schema.returns


def _real_traits(item: torch.Tensor) -> tuple[Any, ...]:
    """Returns what an op's result takes of a real tensor among fake ones.

    Raises:
        _NotKept: for one that a fake mode may look into, or that is more than its metadata.
    """
    if type(item) is not torch.Tensor or not item.dim() or item.layout is not torch.strided or item.requires_grad:
        raise _NotKept
    return "real", item.shape, item.stride(), item.dtype, item.device


def _recipe(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, key: Any, mode: Any) -> Any:
    """Returns how to make `out` again, or `_NEVER`."""
    if not _is_keepable(func, args, kwargs):
        return _NEVER
    if func._schema.is_mutable and _op_key(func, args, kwargs) != key:
        return _NEVER
    recipe = _of(func, args, out, _storages_of(args))
    if recipe is _NEVER:
        return _NEVER
    return recipe if _is_same(_make(recipe, args, mode), out) else _NEVER


def _is_keepable(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the op's answer depends on metadata alone."""
    if getattr(func, "namespace", "") != "aten" or func._schema.name in _UNDECLARED | _READ_STORAGE:
        return False
    tags = func.tags
    if torch.Tag.data_dependent_output in tags or torch.Tag.inplace_view in tags:
        return False
    if torch.Tag.dynamic_output_shape in tags:
        return False
    return not any(argument.is_out for argument in func._schema.arguments) and not _torch.may_alias(func)


def _of(func: Any, args: tuple[Any, ...], out: Any, seen: set[int]) -> Any:
    """Returns the recipe of one result: ("plain", value), ("argument", i), ("new", ...), ("view", i, ...) or a nest.

    Args:
        seen: addresses of storages that no new result lies in: of arguments, and of results before it.
    """
    if out is None or type(out) is int:  # longest sequences of attention, by the shapes
        return ("plain", out)
    if isinstance(out, (tuple, list)):
        parts = [_of(func, args, item, seen) for item in out]
        return _NEVER if any(p is _NEVER for p in parts) else ("nest", type(out), parts)
    if not isinstance(out, torch.Tensor) or _torch.fake_traits(out) is None:
        return _NEVER
    for i, argument in enumerate(args):
        if argument is out:
            return ("argument", i) if func._schema.is_mutable else _NEVER
    storage = out.untyped_storage()
    if func.is_view or func in _UNDECLARED_VIEWS:
        first = args[0]
        is_of_first = isinstance(first, torch.Tensor) and first.untyped_storage() is storage
        # In another dtype it would begin at another multiple.
        is_relative = is_of_first and first.dtype == out.dtype
        return ("view", 0, _torch.FakeTemplate(out, first)) if is_relative else _NEVER
    if func._schema.is_mutable or out.storage_offset() or storage._cdata in seen:
        return _NEVER
    seen.add(storage._cdata)
    return ("new", _torch.FakeTemplate(out))


def _storages_of(items: Any) -> set[int]:
    tensors: list[torch.Tensor] = []
    collect_tensors(items, tensors)
    return {t.untyped_storage()._cdata for t in tensors}


def _make(recipe: Any, args: tuple[Any, ...], mode: Any) -> Any:
    kind = recipe[0]
    if kind == "new":
        return recipe[1].new(mode)
    if kind == "view":
        return recipe[2].view_of(mode, args[recipe[1]])
    if kind == "argument":
        return args[recipe[1]]
    if kind == "plain":
        return recipe[1]
    return recipe[1](_make(part, args, mode) for part in recipe[2])


def _is_same(made: Any, out: Any) -> bool:
    """Whether a copy equals the result that it was made from: metadata, dispatch keys, storage bytes, device."""
    if isinstance(out, (tuple, list)):
        return len(made) == len(out) and all(_is_same(a, b) for a, b in zip(made, out, strict=True))
    if out is None or type(out) is int:
        return type(made) is type(out) and made == out
    return (
        made.storage_offset() == out.storage_offset()
        and _torch.fake_traits(made) == _torch.fake_traits(out)
        and made.untyped_storage().nbytes() == out.untyped_storage().nbytes()
        and _torch.has_same_dispatch(made, out)
    )


class KeptAnswers(_torch.dispatch_mode_class()):  # type: ignore[misc]
    """Answers ops on fake tensors with what is kept, in front of their mode."""

    def __init__(self, results: FakeResults) -> None:
        super().__init__()
        self._results = results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default and _torch.is_fake(args[0]):
            return _torch.fake_device(args[0])
        if not _torch.is_higher_order(func) and _has_fake((*args, *(kwargs or {}).values())):
            return self._results.run(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def _has_fake(items: Any) -> bool:
    return any(_torch.is_fake(i) or (isinstance(i, (list, tuple)) and _has_fake(i)) for i in items)
