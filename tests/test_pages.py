"""What the pages tell a reader to type can be typed; `make docs-commands` types it."""

from __future__ import annotations

import ast
import importlib.util
import shlex
from pathlib import Path

import typer.main

from recoup.cli.main import app

HERE = Path(__file__).parents[1]
_SPEC = importlib.util.spec_from_file_location("type_pages", HERE / "tools" / "type_pages.py")
assert _SPEC is not None and _SPEC.loader is not None
type_pages = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(type_pages)
TYPED = [typed for page in type_pages.pages() if page.exists() for typed in type_pages.read_page(page)]


def test_commands_name_commands_options_and_files_that_are_there() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    makefile = (HERE / "Makefile").read_text()
    seen = 0
    for typed in TYPED:
        words = shlex.split(typed.text) if not typed.is_python else []
        if words[:1] == ["recoup"]:
            command = commands[words[1]]
            command.make_context(words[1], words[2:])
            seen += 1
            for word in words[2:]:
                if word.startswith(("examples/", "jax:examples/")):
                    assert (HERE / word.removeprefix("jax:").partition(":")[0]).exists(), typed
        elif words[:1] == ["make"]:
            assert f"\n{words[1]}:" in makefile, typed
        elif words[:3:2] == ["python", "bench"]:
            assert (HERE / f"{words[2].replace('.', '/')}.py").exists(), typed
    assert seen >= 20


def test_blocks_of_python_take_no_name_that_nobody_makes() -> None:
    blocks = [typed for typed in TYPED if typed.is_python]
    assert len(blocks) >= 15
    for typed in blocks:
        ast.parse(typed.text)
        assert type_pages.missing_names(typed.text) == set(), typed.place


def test_a_page_says_status_and_needs(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "`recoup plan x.py` (exit 2), `make bench` (hours), `python -m bench.gpu` (GPU); `recoup fit` is a name.\n"
        "```\nrecoup profile a.py   # exit 3\n$ make gpu   # on a GPU\nout put\npip install b\n```\n"
        "```python\nprint(1)\n```\n```python\nprint(model)\n```\n"
    )
    type_pages.HERE, kept = tmp_path, type_pages.HERE
    try:
        found = [(t.text.strip(), t.status, t.needs) for t in type_pages.read_page(page)]
    finally:
        type_pages.HERE = kept
    assert found == [
        ("recoup plan x.py", 2, ""),
        ("make bench", 0, "long"),
        ("python -m bench.gpu", 0, "gpu"),
        ("recoup profile a.py", 3, ""),
        ("make gpu", 0, "gpu"),
        ("python -m pip install --dry-run --quiet b", 0, "network"),
        ("print(1)", 0, ""),
        ("print(model)", 0, ""),
    ]


def test_the_readme_is_one_screen_and_a_half() -> None:
    assert len((HERE / "README.md").read_text().split()) < 700


def test_what_a_citation_says_is_what_the_package_says() -> None:
    from recoup import __version__

    assert f"version: {__version__}\n" in (HERE / "CITATION.cff").read_text()
