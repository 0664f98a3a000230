"""The pages: their links, their place in the navigation, the formulas, the notebook, the site itself."""

import os
import re
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path

import nbformat
import pytest
import yaml
from links import broken_links, site
from markdown import Markdown

from nalanda.compare.study import Study
from nalanda.model import FEATURE_MAPS, MIXERS, minimal
from nalanda.report.tables import map_rows

ROOT = Path(__file__).parents[2]
NAVIGATION = site.pages_of(tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"])
FORMULAS = (ROOT / "docs" / "formulas.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", NAVIGATION)
def test_links_and_anchors(page):
    assert broken_links(ROOT / page) == []


def test_a_broken_link_is_found(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "README.md").write_text("# A `title`, here\n\n```\n# no heading\n```\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](folder#a-title-here) [b](folder#no-heading) [c](no.md) [d](https://x.y) `[e](no.md)`"
    )
    assert broken_links(page) == ["folder#no-heading", "no.md"]
    with pytest.raises(ValueError, match=r"page\.md: nothing is at no\.md"):
        site.stage(tmp_path, ["page.md"], tmp_path / "to")
    page.write_text("[a](folder#a-title-here) [b](code.py#L3)")
    (tmp_path / "code.py").write_text("x = 1")
    site.stage(tmp_path, ["page.md"], tmp_path / "to")
    assert (
        tmp_path / "to/page.md"
    ).read_text() == "[a](folder/README.md#a-title-here) [b](code.py.md#L3)"
    assert "````py\nx = 1\n" in (tmp_path / "to" / "code.py.md").read_text()


def test_every_page_is_in_the_navigation():
    folders = (ROOT / "docs", ROOT / "lab" / "pages")
    pages = {str(page.relative_to(ROOT)) for folder in folders for page in folder.rglob("*.md")}
    assert pages - set(NAVIGATION) == set(), "zensical.toml: add them to nav"
    assert len(NAVIGATION) == len(set(NAVIGATION))


SECTIONS = re.findall(r"^(mixers? .*|maps? .*) · (arXiv .*)$", FORMULAS, re.MULTILINE)
ROWS = [("mixer", name, row.source) for name, row in MIXERS.items()]
ROWS += [("map", row["feature_map"], row["source"]) for row in map_rows()]


@pytest.mark.parametrize(("kind", "name", "source"), [row for row in ROWS if row[2] != "–"])
def test_a_source_has_its_formula(kind, name, source):
    for names, papers in SECTIONS:
        mixers, _, maps = names.partition("map")
        if f"`{name}`" in (mixers if kind == "mixer" else maps):
            papers = set(re.findall(r"\d{4}\.\d{5}", papers))
            if set(re.findall(r"\d{4}\.\d{5}", source)) <= papers:
                return
    pytest.fail(f"docs/formulas.md: no section has the {kind} `{name}` and {source}")


def test_the_reference_has_every_mixer_and_map():
    page = (ROOT / "docs" / "api" / "mixers.md").read_text(encoding="utf-8")
    shown = {name for names in re.findall(r"members: \[(.*)\]", page) for name in names.split(", ")}
    rows = [*MIXERS.values(), *FEATURE_MAPS.values()]
    assert {getattr(row, "func", row).__name__ for row in rows} - shown == set()


def test_the_page_of_studies_has_every_key_of_their_files():
    page = (ROOT / "docs" / "compare.md").read_text(encoding="utf-8")
    keys = [key.name for key in fields(Study)]
    assert [key for key in keys if not re.search(f"^{key}:|`{key}`", page, re.MULTILINE)] == []


def test_the_code_beside_the_formulas_is_that_of_the_model():
    (shown,) = re.findall(r"^```py\n(.*?)^```", FORMULAS, re.MULTILINE | re.DOTALL)
    lines = (ROOT / "src/nalanda/model/minimal.py").read_text(encoding="utf-8").splitlines()
    assert shown in "".join(f"{line.removeprefix(' ' * 12)}\n" for line in lines)


def test_the_table_of_rules_has_those_of_the_code():
    table = minimal.__doc__.partition("    rule ")[2]
    rows = re.findall(r"^    (\S.*?) {2,}\S", table, re.MULTILINE)
    assert len(rows) == 9
    assert [name for name in rows if f"\n| {name} |" not in FORMULAS] == []


def test_formulas_render():
    assert {name for kind, name, _ in ROWS if kind == "map"} == FEATURE_MAPS.keys()
    html = Markdown(extensions=["tables", site.MathML()]).convert(FORMULAS)
    shown = re.sub("<code>.*?</code>", "", html)
    assert shown.count("<math") == len(re.findall(r"\$\$[^$]+\$\$|\$[^$]+\$", FORMULAS)) > 90
    assert "$" not in shown
    assert "\\" not in shown, "a command that latex2mathml does not know"
    # GitHub's Markdown reads lists, and a backslash before a sign as an escape, in formulas too.
    assert not [
        text for text in re.findall(r"\$\$([^$]+)\$\$", FORMULAS) if re.search(r"\n[-+*] ", text)
    ]
    assert not re.search(r"\\[^a-zA-Z]", FORMULAS)


def test_the_notebook_is_the_page():
    page = site.NOTEBOOK.with_suffix(".md").read_text(encoding="utf-8")
    assert site.NOTEBOOK.read_text(encoding="utf-8") == site.notebook(page), "run `make docs`"


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    site.build(tmp_path / "site")
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > len(NAVIGATION)
    for page in pages:
        html = page.read_text(encoding="utf-8")
        # Nothing is fetched from elsewhere.
        assert not re.search(
            r"<(?:link|script|img|iframe)[^>]+(?:href|src)=[\"']?(?:https?:)?//", html
        ), page
    math = (tmp_path / "site" / "docs" / "formulas.html").read_text(encoding="utf-8")
    assert math.count("<math") > 90
    home = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"Nalanda {version}" in home
    models = (tmp_path / "site" / "docs" / "api" / "models.html").read_text(encoding="utf-8")
    assert 'id="nalanda.NalandaForCausalLM.read"' in models


@pytest.mark.slow
def test_the_notebook_runs(recipe, tmp_path):
    """As it is, but `demo` is a recipe of seconds. IPython does not stop at a command that fails."""
    settings = yaml.safe_load(recipe.read_text()) | {"output_dir": "runs/demo"}
    for section in ("validation", "checkpoint", "log"):
        settings[section]["every"] = 24
    (tmp_path / "demo").write_text(yaml.safe_dump(settings))
    book = nbformat.read(site.NOTEBOOK, as_version=4)
    for cell in book.cells:
        if cell.cell_type == "code":
            cell.source = re.sub(
                "^!.*", r"\g<0>\nassert _exit_code == 0", cell.source, flags=re.MULTILINE
            )
    nbformat.write(book, tmp_path / "page.ipynb")
    # IPython is what a notebook's kernel runs; alone, it needs no sockets.
    done = subprocess.run(
        [sys.executable, "-m", "IPython", "--colors=nocolor", "page.ipynb"],
        cwd=tmp_path,
        env=os.environ | {"IPYTHONDIR": str(tmp_path / "ipython"), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert (tmp_path / "runs/compared.png").is_file()
    assert (tmp_path / "runs/demo/report.html").is_file()
    assert (tmp_path / "runs/imports.safetensors").is_file()
