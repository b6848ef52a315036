"""`CheckpointWrapper`: one module as a region, for code that builds models out of wrappers.

The wrapper shares the registries of the module it wraps (parameters, buffers, children, state-dict hooks), so keys,
names and optimizer groups are those of the module itself, without a prefix to strip.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from recoup.errors import UsageError
from recoup.ir.decision import Recompute
from recoup.runtime.apply import apply_decisions
from recoup.runtime.conflicts import refuse_conflicts

_SHARED = (
    "_parameters",
    "_buffers",
    "_non_persistent_buffers_set",
    "_modules",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def warn_of_settings(*, use_reentrant: bool, preserve_rng_state: bool) -> None:
    """Warns once, by Python's filter, of settings that have no effect."""
    if use_reentrant:
        warnings.warn(
            "use_reentrant=True has no effect: recoup's regions are never reentrant (same gradients, and none lost "
            "for inputs that need none).",
            stacklevel=3,
        )
    if not preserve_rng_state:
        warnings.warn(
            "preserve_rng_state=False has no effect: recoup always replays random numbers exactly, and keeps no "
            "random state where none was drawn.",
            stacklevel=3,
        )


class CheckpointWrapper(nn.Module):
    """A module whose forward keeps its inputs and runs again in backward; same keys, same numbers.

    Memory: what the module saves inside goes, its inputs stay. Time: one more forward of it.

    Args:
        module: any module; it is changed in place (`unwrap()` undoes it).
        use_reentrant: accepted for compatibility, see `CheckpointConfig`.
        preserve_rng_state: accepted for compatibility, see `CheckpointConfig`.

    Raises:
        UsageError: if it is not a module.
        ConflictError: if activation checkpointing is on in it already.
    """

    def __init__(self, module: nn.Module, use_reentrant: bool = False, preserve_rng_state: bool = True) -> None:
        if not isinstance(module, nn.Module):
            raise UsageError(f"CheckpointWrapper wraps a torch.nn.Module; got {type(module).__name__}.")
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            raise UsageError(f"{type(module).__name__} has no forward to run again. Wrap its members one by one.")
        if not isinstance(use_reentrant, bool) or not isinstance(preserve_rng_state, bool):
            raise UsageError(
                f"use_reentrant and preserve_rng_state must be True or False; got {use_reentrant!r}, "
                f"{preserve_rng_state!r}."
            )
        refuse_conflicts(module)
        super().__init__()
        warn_of_settings(use_reentrant=use_reentrant, preserve_rng_state=preserve_rng_state)
        for name in _SHARED:
            self.__dict__[name] = module.__dict__[name]
        self.__dict__["_wrapped"] = module  # past nn.Module's registration: it is no child
        self.__dict__["_applied"] = apply_decisions(module, (Recompute(path=""),))
        self.training = module.training

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        wrapped: nn.Module = self.__dict__["_wrapped"]
        return wrapped

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the wrapped module."""
        return self.module(*args, **kwargs)

    def unwrap(self) -> nn.Module:
        """Returns the module itself, as it was before."""
        self.__dict__["_applied"].remove()
        return self.module

    def train(self, mode: bool = True) -> CheckpointWrapper:
        """Sets training mode here and in the wrapped module."""
        super().train(mode)
        self.module.train(mode)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        self.module._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.module._load_from_state_dict(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            wrapped = self.__dict__.get("_wrapped")
            if wrapped is None:
                raise
            return getattr(wrapped, name)
