"""Types what the README and the manual tell a reader to type, in a fresh clone, and compares exit statuses.

    python tools/type_pages.py [PAGE ...] [--long] [--network] [--gpu] [--list]

What is typed:

- each line of a fenced block without a language (or `bash`) that begins with a program (`recoup`, `make`, `python`,
  `git`, `pip`), after a `$ ` or not; and each `inline code` of prose that does;
- each `python` block: a block that needs nothing from outside runs as it stands. Any other is a fragment and runs after
  `tools/given/PAGE.py`, which makes the names that the page takes from the reader (a model, a batch), and after the
  imports and functions of the fragments before it.

What a page says of a command stands in the comment behind it, or for inline code in the brackets behind it:

- `exit 3`: it ends with that status; without a word, 0;
- `GPU`: it needs one, and is typed with `--gpu` only;
- `minutes` or `hours`: it is typed with `--long` only.

`pip` is typed with `--network` only, and installs nothing (`--dry-run`). What has `...` in it or a word in capitals
(`TARGET`, `OLD.json`) leaves something to the reader and is no command. The clone is of the last commit; it uses the
packages of the Python that runs this script.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parents[1]
TIMEOUT_SECONDS = 900
_PROGRAMS = r"(?:recoup|make|python|git|pip)"
_FENCE = re.compile(r"^( *)```([^\n]*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(rf"`((?!recoup [\w-]+`){_PROGRAMS} [^`]+)`(?:\)? \(([^)]*)\)|, (minutes|hours|GPU)\b)?")
_LEFT_OPEN = re.compile(r"\.\.\.|(?<![\w/.])[A-Z]{3,}(?![\w=])")
_NEEDS = {"gpu": re.compile(r"(?<!no )\bGPU\b"), "long": re.compile(r"\b(?:minutes|hours)\b")}


class Typed(NamedTuple):
    """One thing to type: where it stands, its text, the status the page promises, what it needs ("" for nothing)."""

    place: str
    text: str
    status: int
    needs: str
    is_python: bool = False


def read_page(page: Path) -> Iterator[Typed]:
    """Yields what a page tells the reader to type, in the order of the page."""
    text, name = page.read_text(), page.relative_to(HERE).as_posix()
    given = HERE / "tools" / "given" / f"{page.stem}.py"
    before = given.read_text() if given.exists() else ""
    seen: set[str] = set()
    for match in re.finditer(f"{_FENCE.pattern}|{_INLINE.pattern}", text, re.MULTILINE | re.DOTALL):
        place = f"{name}:{text.count(chr(10), 0, match.start()) + 1}"
        _, language, block, inline, *remarks = match.groups()
        if inline is not None:
            if not _LEFT_OPEN.search(inline) and inline not in seen:
                seen.add(inline)
                yield _command(place, " ".join(inline.split()), "".join(filter(None, remarks)))
        elif language.strip() in ("", "bash", "console", "sh"):
            for line in block.replace("\\\n", "").splitlines():
                if re.match(rf"(?:\$ )?{_PROGRAMS} ", line):
                    command, _, remark = line.removeprefix("$ ").partition(" #")
                    seen.add(command.strip())
                    if not _LEFT_OPEN.search(command):
                        yield _command(place, command.strip(), remark)
        elif language.strip() == "python":
            block = textwrap.dedent(block)
            if missing_names(block):
                yield Typed(place, f"{before}\n{block}", 0, _needs(" ".join(re.findall("#.*", block))), is_python=True)
                lasting = (ast.Import, ast.ImportFrom, ast.FunctionDef)
                defined = [ast.unparse(node) for node in ast.parse(block).body if isinstance(node, lasting)]
                before = "\n".join([before, *defined])
            else:
                yield Typed(place, block, 0, "", is_python=True)


def _command(place: str, command: str, remark: str) -> Typed:
    found = re.search(r"\bexit (\d)", remark)
    needs = _needs(remark)
    if command.startswith("pip "):
        command, needs = command.replace("pip install", "python -m pip install --dry-run --quiet"), "network"
    return Typed(place, command, int(found[1]) if found else 0, needs)


def _needs(remark: str) -> str:
    return next((need for need, words in _NEEDS.items() if words.search(remark)), "")


def missing_names(source: str) -> set[str]:
    """Returns the names that a block reads and neither makes nor imports."""
    tree = ast.parse(source)
    made = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            made |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            made.add(node.name)
        elif isinstance(node, ast.arg):
            made.add(node.arg)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            made.add(node.name)
    read = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    return read - made - set(dir(builtins)) - {"__file__"}


def make_clone(folder: Path) -> dict[str, str]:
    """Clones the last commit into `folder`, lends it this Python's packages, and returns the environment to type in."""
    subprocess.run(["git", "clone", "--quiet", "--depth", "1", HERE.as_uri(), str(folder)], check=True)
    lent, venv = Path(sys.prefix), folder / ".venv"
    venv.mkdir()
    for entry in lent.iterdir():
        if not entry.name.startswith("."):
            (venv / entry.name).symlink_to(entry)
    for stamp in (".ready", ".peers", ".manual"):  # newer than the clone's files, so that make installs nothing
        if stamp == ".ready" or (lent / stamp).exists():
            (venv / stamp).touch()
    return {
        **os.environ,
        "PATH": f"{venv / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{folder / 'src'}{os.pathsep}{folder}",
        "GIT_PAGER": "cat",
        "RECOUP_CACHE_DIR": str(folder / ".venv" / "recoup-cache"),
    }


def type_it(typed: Typed, folder: Path, environment: dict[str, str]) -> tuple[int, str]:
    """Returns the exit status and what was said last."""
    command = typed.text
    if typed.is_python:
        (folder / "build").mkdir(exist_ok=True)  # which git and ruff leave aside
        (folder / "build" / "typed_block.py").write_text(typed.text)
        command = "python build/typed_block.py"
    try:
        done = subprocess.run(
            ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True,
            timeout=TIMEOUT_SECONDS, stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return 124, f"still running after {TIMEOUT_SECONDS} s: a page says `minutes` of such a command"
    return done.returncode, (done.stderr.strip() or done.stdout.strip())[-1500:]


def pages() -> list[Path]:
    """Returns the README and the manual's pages."""
    return [HERE / "README.md", HERE / "CONTRIBUTING.md", *sorted((HERE / "docs").rglob("*.md"))]


def main() -> int:
    """Returns 0 if all ended as said, else 1."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("page", nargs="*", type=Path)
    for option in ("long", "network", "gpu", "list"):
        parser.add_argument(f"--{option}", action="store_true")
    asked = parser.parse_args()
    chosen = [p.resolve() for p in asked.page] or [p for p in pages() if "_build" not in p.parts and p.exists()]
    allowed = {"", *(need for need in ("long", "network", "gpu") if getattr(asked, need))}
    worst, started, counts = 0, time.monotonic(), {"as said": 0, "not as said": 0, "not typed": 0}
    root = Path(tempfile.mkdtemp(prefix="recoup-pages-"))
    try:
        environment = {} if asked.list else make_clone(root / "recoup")
        done: set[tuple[object, ...]] = set()  # what two pages say alike is typed once
        for typed in (t for page in chosen for t in read_page(page)):
            if typed[1:] in done:
                continue
            done.add(typed[1:])
            shown = typed.text.strip().splitlines()[-1][:110] if typed.is_python else typed.text
            if asked.list or typed.needs not in allowed:
                counts["not typed"] += 1
                print(f"{typed.needs or 'here':>11}          {typed.place:<34} {shown}", flush=True)
                continue
            begin = time.monotonic()
            status, said = type_it(typed, root / "recoup", environment)
            verdict = "as said" if status == typed.status else "not as said"
            counts[verdict] += 1
            print(f"{verdict:>11} {status} {time.monotonic() - begin:5.1f} s {typed.place:<34} {shown}", flush=True)
            if status != typed.status:
                worst = 1
                print(f"            the page says {typed.status}; it said: {said}", flush=True)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    print(", ".join(f"{count} {what}" for what, count in counts.items()), f"in {time.monotonic() - started:.0f} s")
    return worst


if __name__ == "__main__":
    sys.exit(main())
