"""The links of the Markdown pages, and the headings that they may name."""

import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("docs_build", ROOT / "docs" / "build.py")
site = importlib.util.module_from_spec(spec)
spec.loader.exec_module(site)


def anchors(page: Path) -> set[str]:
    """The anchors of a page: its own, and those that GitHub gives to its headings."""
    text = page.read_text(encoding="utf-8")
    text = site.CODE_OR_LINK.sub(lambda match: "" if match["fence"] else match[0], text)
    named = set(re.findall(r'<a id="(.*?)"', text))
    for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        title = re.sub(r"\]\(.*?\)", "]", title).lower()
        named.add(re.sub(r"[^\w\- ]", "", title).strip().replace(" ", "-"))
    return named


def broken_links(page: Path) -> list[str]:
    """The links of a page that point at no file, or at no heading of a page."""
    broken = []

    def check(link: str) -> str:
        target, anchor = site.reached(page, link), link.partition("#")[2]
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
        return link

    site.relinked(page.read_text(encoding="utf-8"), check)
    return broken
