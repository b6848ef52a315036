"""From a TARGET to the objects that `fit`, `plan` and the others take."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import inspect
import itertools
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from recoup.capture.step import Loss, Objective, make_objective
from recoup.errors import RecoupError, TargetError, UsageError
from recoup.targets.parse import FileTarget, parse_target

_STEP_KEYS = ("loss", "step", "inputs", "targets", "autocast", "scaler", "accumulate")
_KEYS = ("model", "batch", "optimizer", *_STEP_KEYS)
_counter = itertools.count()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A model, a batch, what a step computes of it, and perhaps an optimizer.

    Attributes:
        text: the TARGET as it was written.
        step: arguments of `recoup.fit` that say what a step is (`loss`, `step`, `autocast` and so on), as far as the
            target gave them.
    """

    text: str
    model: nn.Module
    batch: Any = None
    optimizer: Any = None
    step: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def loss(self) -> Loss | None:
        """The loss, if one was given."""
        return self.step.get("loss")

    def objective(self) -> tuple[Objective, Any]:
        """Returns what a step computes, and the batch that it computes it of."""
        return make_objective(self.batch, **self.step)

    def unpaired(self) -> Target:
        """Returns the target with its inputs and targets as one batch, for what makes batches of several sizes."""
        objective, batch = self.objective()
        if not objective.is_paired:
            return self

        def step(model: nn.Module, pair: Any) -> torch.Tensor:
            return objective.loss_of(objective.forward(model, pair), pair)[0]

        rest = {key: value for key, value in self.step.items() if key not in ("inputs", "targets", "loss", "scaler")}
        return dataclasses.replace(self, batch=batch, step={**rest, "step": step})


def resolve_target(
    text: str,
    *,
    batch: int | None = None,
    seq: int | None = None,
    image: int | None = None,
    dtype: str | None = None,
    device: str = "cpu",
) -> Target:
    """Returns the TARGET's model and batch, ready for a training step.

    Args:
        text: `FILE.py[:FUNCTION]` or `hf:MODEL_TYPE?key=value&key=value`.
        batch, seq, image: examples in the batch, tokens of each, pixels along an edge; None: the target's own choice.
            A FILE's function must have parameters of these names to be given them.
        dtype: of the parameters ("float32", "bfloat16", "float16"); None: the target's own choice.
        device: where `hf:` models are built; "meta" takes no memory and is enough to plan. A FILE's model is moved
            there only if that is a CUDA device.

    Raises:
        TargetError: if the target cannot be built; says what was found instead.
        UsageError: if the device is not here.
    """
    if device.split(":")[0] == "cuda" and not torch.cuda.is_available():
        raise UsageError(
            f"device={device!r} runs steps on the GPU of this machine, and there is none. Leave it out, or use `recoup "
            "plan` with the name of a device: --device a100-80gb."
        )
    parsed = parse_target(text)
    sizes = {"batch": batch, "seq": seq, "image": image}
    if isinstance(parsed, FileTarget):
        given: dict[str, Any] = {name: size for name, size in sizes.items() if size is not None}
        if dtype is not None:
            given["dtype"] = getattr(torch, dtype)
        return _from_file(parsed, text, given, device)
    from recoup.targets.huggingface import build  # transformers is optional, and slow to import

    model, inputs = build(parsed, **sizes, dtype=getattr(torch, dtype) if dtype else None, device=device)
    return Target(text=text, model=model, batch=inputs)


def _from_file(parsed: FileTarget, text: str, given: Mapping[str, Any], device: str) -> Target:
    module = _guarded(parsed, lambda: _load(parsed.path))
    function = getattr(module, parsed.function, None)
    if isinstance(function, nn.Module):
        raise TargetError(
            f"{parsed.function} in {parsed.path} is a {type(function).__name__}, not a function that makes one. Write "
            "a function that returns a dict with 'model' and 'batch', and name that."
        )
    if not callable(function):
        raise TargetError(_no_function(module, parsed))
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    for name in given:
        if name not in parameters and not takes_all:
            takes = ", ".join(parameters) or "nothing"
            raise TargetError(
                f"{parsed.function}() in {parsed.path} has no parameter {name!r} (it takes {takes}), so it "
                f"cannot be chosen, by --{name} or by a command that looks for the largest. Add the parameter."
            )
    return _checked(_guarded(parsed, lambda: function(**given)), parsed, text, device)


def _load(path: Path) -> ModuleType:
    """Returns the file as a module of a name of its own; its folder is on the path, as if it were run as a script."""
    name = f"recoup_target_{next(_counter)}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # the name ends in .py
    module = importlib.util.module_from_spec(spec)
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    sys.modules[name] = module  # dataclasses and pickle look classes up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _guarded(parsed: FileTarget, run: Callable[[], Any]) -> Any:
    try:
        return run()
    except RecoupError:
        raise
    except (Exception, SystemExit) as error:  # the user's file runs here and may raise anything, or end the process
        where = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).name == parsed.path.name]
        line = f", line {where[-1].lineno}" if where else ""
        if isinstance(error, SyntaxError):
            line = f", line {error.lineno}"
        what = " ".join(str(error).split())
        if isinstance(error, SystemExit):
            what += ". What a script runs belongs behind `if __name__ == '__main__':`"
        raise TargetError(f"{parsed.path}{line} failed: {type(error).__name__}: {what}") from error


def _no_function(module: ModuleType, parsed: FileTarget) -> str:
    functions = [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    ]
    found = f"it has {', '.join(functions)}" if functions else "it has no functions"
    close = difflib.get_close_matches(parsed.function, functions, n=1)
    advice = f"Did you mean {parsed.path}:{close[0]}?" if close else f"Name one: {parsed.path}:FUNCTION."
    return f"No function {parsed.function!r} in {parsed.path}; {found}. {advice}"


def _checked(made: Any, parsed: FileTarget, text: str, device: str) -> Target:
    who = f"{parsed.function}() in {parsed.path}"
    if not isinstance(made, Mapping):
        raise TargetError(f"{who} returned {type(made).__name__}; it must return a dict with 'model' and 'batch'.")
    for key in ("model", "inputs" if "inputs" in made else "batch"):
        if key not in made:
            raise TargetError(f"{who} returned a dict without {key!r} (it has {', '.join(map(repr, made))}). Add it.")
    unknown = [key for key in made if key not in _KEYS]
    if unknown:
        raise TargetError(f"{who} returned a dict with {unknown[0]!r}; only {', '.join(_KEYS)} are read. Remove it.")
    model, batch = made["model"], made.get("batch")
    step = {key: made[key] for key in _STEP_KEYS if key in made}
    if not isinstance(model, nn.Module):
        raise TargetError(f"'model' of {who} is a {type(model).__name__}; it must be a torch.nn.Module.")
    if device.startswith("cuda"):
        model, batch = model.to(device), _moved(batch, device)
        step = {key: _moved(value, device) if key in ("inputs", "targets") else value for key, value in step.items()}
    return Target(text=text, model=model, batch=batch, optimizer=made.get("optimizer"), step=step)


def _moved(value: Any, device: str) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: _moved(item, device) for key, item in value.items()}
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        return type(value)(_moved(item, device) for item in value)
    return value
