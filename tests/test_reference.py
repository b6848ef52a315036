"""`help()` of every public name is complete, and the examples in it run."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import recoup

_INTEGRATIONS = sorted(p for p in (Path(recoup.__file__).parent / "integrations").glob("*.py") if p.stem != "__init__")
_FUNCTIONS = [n for n in recoup.__all__ if inspect.isroutine(getattr(recoup, n))]


@pytest.mark.parametrize("name", [n for n in recoup.__all__ if not n.startswith("__") and n != "recurrent"])
def test_help_says_what_it_is(name: str) -> None:
    assert len(inspect.getdoc(getattr(recoup, name)) or "") > 20


@pytest.mark.parametrize("name", _FUNCTIONS)
def test_help_of_a_function_is_complete(name: str) -> None:
    function = getattr(recoup, name)
    words = inspect.getdoc(function) or ""
    parameters = [p for p in inspect.signature(function).parameters if p not in ("args", "kwargs")]
    assert [p for p in parameters if not re.search(rf"\b{p}\b", words)] == []
    assert "Raises" in words
    assert "Example" in words


@pytest.mark.parametrize("home", ["recurrent", "jax", *(f"integrations.{p.stem}" for p in _INTEGRATIONS)])
def test_help_of_a_subpackages_functions_is_complete(home: str) -> None:
    module = importlib.import_module(f"recoup.{home}")
    names = getattr(module, "__all__", None) or [n for n, v in vars(module).items() if _is_own(v, module.__name__)]
    for name in names:
        value = getattr(module, name)
        words = inspect.getdoc(value) or ""
        assert len(words) > 20, name
        if inspect.isfunction(value):
            parameters = [p for p in inspect.signature(value).parameters if p not in ("args", "kwargs")]
            assert [p for p in parameters if not re.search(rf"\b{p}\b", words)] == [], name
        if inspect.isfunction(value) and not home.startswith("integrations"):
            assert "Raises" in words, name
            _run_examples(value, name)


def _is_own(value: object, module: str) -> bool:
    name = getattr(value, "__name__", "_")
    return inspect.isroutine(value) and value.__module__ == module and not name.startswith("_")


def _run_examples(function: Any, name: str) -> None:
    names: dict[str, Any] = {"recoup": recoup, "torch": torch}
    if "jax" in function.__module__:
        import jax

        names |= {"jax": jax, "x": jax.numpy.ones((64, 8)), "loss": lambda x: jax.numpy.sin(jax.numpy.sin(x)).sum()}
    examples = doctest.DocTestParser().get_doctest(inspect.getdoc(function) or "", names, name, None, 0)
    assert examples.examples, name
    runner = doctest.DocTestRunner(verbose=False)
    runner.run(examples)
    assert runner.failures == 0, name


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", _FUNCTIONS)
def test_examples_run(name: str) -> None:
    torch.manual_seed(0)
    _run_examples(inspect.unwrap(getattr(recoup, name)), name)
