"""What ops and the host take is measured once a run, not by every test; and no test leaves one of torch's modes on.

Full garbage collections look at the objects of the test module that runs, not at those of a million that were imported.
A worker that ends without a word is told of at the end of the run: how it ended, and where each of its threads was.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_ENDINGS = pytest.StashKey[list[str]]()
_TRACE = pytest.StashKey[Any]()
_TRACES = "RECOUP_TEST_TRACES"  # the directory that workers leave them in


@pytest.fixture(scope="session", autouse=True)
def _measurements(tmp_path_factory: pytest.TempPathFactory) -> None:
    root = tmp_path_factory.getbasetemp()
    shared = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root  # those of all workers lie in one directory
    os.environ.setdefault("RECOUP_CACHE_DIR", str(shared / "measurements"))  # for the processes that tests start, too


def _freeze() -> None:
    gc.collect()
    gc.freeze()


def pytest_collection_finish() -> None:
    _freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    yield
    if nextitem is None or nextitem.path != item.path:
        _freeze()


@pytest.hookimpl(trylast=True)  # after pytest's own handler, which writes where nobody looks
def pytest_configure(config: pytest.Config) -> None:
    if worker := os.environ.get("PYTEST_XDIST_WORKER"):
        config.stash[_TRACE] = Path(os.environ[_TRACES], worker).open("w")  # noqa: SIM115
        faulthandler.enable(config.stash[_TRACE])
    else:
        traces = tempfile.TemporaryDirectory()
        config.add_cleanup(traces.cleanup)
        os.environ[_TRACES] = traces.name
        config.stash[_ENDINGS] = []


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    if error:
        process = node.gateway._io.popen
        trace = Path(os.environ[_TRACES], node.gateway.id)
        words = trace.read_text() if trace.exists() else "before it began"
        node.config.stash[_ENDINGS].append(f"{node.gateway.id} ended with {process.wait(10)}\n{words}")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    for ending in config.stash.get(_ENDINGS, []):
        terminalreporter.section("a worker crashed")
        terminalreporter.write_line(ending)


def _modes() -> list[str]:
    if "torch" not in sys.modules:
        return []
    import torch

    dispatch = [torch._C._get_dispatch_stack_at(i) for i in range(torch._C._len_torch_dispatch_stack())]
    function = [torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())]
    return [type(mode).__name__ for mode in (*dispatch, *function)]


@pytest.fixture(autouse=True)
def _modes_as_before() -> Iterator[None]:
    before = _modes()
    yield
    assert _modes() == before, "the test left a torch mode on or took one off, which changes every test after it"
