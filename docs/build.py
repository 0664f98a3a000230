"""Builds the pages into `site/`: `make docs`. A broken link or anchor, or any warning, fails the build.

The site is a copy of the repository's pages in their places, so that a link holds on GitHub and in the site
alike. What is copied: the pages of `zensical.toml`, and all that links of copied pages point at.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import griffe
import nbformat
from latex2mathml.converter import convert
from markdown import Markdown
from markdown.extensions import Extension
from markdown.inlinepatterns import InlineProcessor

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "docs" / "first_model.ipynb"
COPIED = {".png", ".svg", ".ipynb"}
FENCE = re.compile(r"^```(bash|python)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
NOTEBOOK_BEGINS = """\
import os
import sys

if os.path.basename(os.getcwd()) == "docs":
    os.chdir("..")  # the page's commands run in the repository's root
os.environ["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]
"""
CODE_OR_LINK = re.compile(
    r"^(?P<fence>`{3,}).*?^(?P=fence)[ \t]*$|`[^`\n]*`|\]\((?![a-z]+:)(?P<link>[^)\s]+)\)",
    re.MULTILINE | re.DOTALL,
)


class MathML(Extension):
    """`$…$` and `$$…$$` as MathML, which browsers show without a script."""

    def extendMarkdown(self, md: Markdown) -> None:
        pattern = r"(\$\$)([^$]+)\$\$|\$(?!\s)([^$]+)(?<!\s)\$(?!\d)"
        # After code (190) and before escapes (180), emphasis and links.
        md.inlinePatterns.register(_Formula(pattern, md), "formula", 185)


class _Formula(InlineProcessor):
    def handleMatch(self, m: re.Match[str], data: str) -> tuple[str, int, int]:  # type: ignore[override]
        html = convert(m[2] or m[3], display="block" if m[1] else "inline")
        return self.md.htmlStash.store(html), m.start(), m.end()


class Lists(griffe.Extension):
    """Makes lists of our docstrings' lines `name: meaning`, which Markdown would run together."""

    ITEM = re.compile(r"^([a-z][a-z0-9_]*(?:, [a-z0-9_]+)*): ", re.MULTILINE)

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            paragraphs = obj.docstring.value.split("\n\n")
            listed = (
                self.ITEM.sub(r"- `\1`: ", p) if self.ITEM.match(p) else p for p in paragraphs
            )
            obj.docstring.value = "\n\n".join(listed)


def relinked(text: str, change: Callable[[str], str]) -> str:
    """A page with `change` applied to its links to other files and to anchors; links in code stay."""
    return CODE_OR_LINK.sub(lambda m: f"]({change(m['link'])})" if m["link"] else m[0], text)


def reached(page: Path, link: str) -> Path:
    """The file that a link of a page points at; the README of a folder."""
    found = page.parent / link.partition("#")[0] if link[0] != "#" else page
    return Path(os.path.normpath(found / "README.md" if found.is_dir() else found))


def pages_of(nav: Any) -> list[str]:
    """The pages of a navigation, in order."""
    if isinstance(nav, str):
        return [nav]
    return [page for part in nav for page in pages_of(part if isinstance(nav, list) else nav[part])]


def stage(root: Path, pages: list[str], to: Path) -> None:
    """Copies pages, and all that their links reach, from `root` into `to`. A file of code becomes a page.

    Raises ValueError for a link to a file that is not there.
    """
    waiting, seen = [root / page for page in pages], set()

    def follow(page: Path, link: str) -> str:
        """The link in the copy of a page, after the file that it points at was put on the list."""
        target = reached(page, link)
        if not target.is_file():
            raise ValueError(f"{page.relative_to(root)}: nothing is at {link}")
        waiting.append(target)
        end = "" if target.suffix in {".md", *COPIED} else ".md"
        return os.path.relpath(target, page.parent) + end + "".join(link.partition("#")[1:])

    while waiting:
        file = waiting.pop()
        if file in seen:
            continue
        seen.add(file)
        copy = to / file.relative_to(root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix in COPIED:
            shutil.copyfile(file, copy)
            continue
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".md":
            text = relinked(text, partial(follow, file)).replace("<details>", "<details markdown>")
            copy.write_text(text, encoding="utf-8")
        else:
            page = f"# `{file.relative_to(root)}`\n\n````{file.suffix[1:]}\n{text}\n````\n"
            copy.with_name(f"{file.name}.md").write_text(page, encoding="utf-8")


def notebook(page: str) -> str:
    """A page as a notebook: fences of bash become `!` commands, those of python code, all else stays text."""
    cells = [nbformat.v4.new_code_cell(NOTEBOOK_BEGINS.strip())]
    for i, part in enumerate(FENCE.split(page)):  # text, language, code, text, …
        if i % 3 == 0:
            cells.append(nbformat.v4.new_markdown_cell(part.strip()))
        elif i % 3 == 1:
            prompt = "!" if part == "bash" else ""
        else:
            cells.append(
                nbformat.v4.new_code_cell(re.sub("^", prompt, part.strip(), flags=re.MULTILINE))
            )
    for i, cell in enumerate(cells):
        cell.id = f"cell-{i}"
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return (
        nbformat.writes(nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel}))
        + "\n"
    )


def build(site: Path) -> None:
    """Builds the site into a folder. Raises ValueError with the messages of a build that is not clean."""
    config = ROOT / "zensical.toml"
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        stage(ROOT, pages_of(tomllib.loads(config.read_text())["project"]["nav"]), work / "pages")
        shutil.copyfile(ROOT / "docs" / "site.css", work / "pages" / "docs" / "site.css")
        version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
        (work / config.name).write_text(config.read_text().replace("VERSION", version))
        for code in ("src", "kernels", "eval"):
            (work / code).symlink_to(ROOT / code)
        done = subprocess.run(
            [sys.executable, "-m", "zensical", "build", "--strict"],
            cwd=work,
            env=os.environ | {"PYTHONPATH": str(ROOT / "docs")},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        # A clean build says no more than this; mkdocstrings' warnings alone do not fail it.
        if done.returncode or not re.fullmatch(
            r"Build started\nNo issues found\nBuild .*\s*", done.stdout
        ):
            raise ValueError(re.sub(r"\x1b\[[\d;]*m", "", done.stdout.partition("Traceback")[0]))
        shutil.rmtree(site, ignore_errors=True)
        shutil.move(work / "site", site)


if __name__ == "__main__":
    NOTEBOOK.write_text(
        notebook(NOTEBOOK.with_suffix(".md").read_text(encoding="utf-8")), encoding="utf-8"
    )
    try:
        build(ROOT / "site")
    except ValueError as error:
        sys.exit(str(error))
    print("site/index.html")
