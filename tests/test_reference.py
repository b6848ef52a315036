"""`help()` of every public name is complete, and the examples in it run."""

from __future__ import annotations

import doctest
import inspect
import re

import pytest
import torch

import recoup

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


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", _FUNCTIONS)
def test_examples_run(name: str, tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECOUP_CACHE_DIR", str(tmp_path))
    torch.manual_seed(0)
    function = inspect.unwrap(getattr(recoup, name))
    names = {"recoup": recoup, "torch": torch}
    examples = doctest.DocTestParser().get_doctest(inspect.getdoc(function) or "", names, name, None, 0)
    assert examples.examples
    runner = doctest.DocTestRunner(verbose=False)
    runner.run(examples)
    assert runner.failures == 0
