"""A corpus of the text that comes with every Python: reference, library sources and docstrings."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import re
import sys
import sysconfig
from collections.abc import Container
from importlib.machinery import BuiltinImporter, ExtensionFileLoader
from pathlib import Path
from typing import Any

from nalanda.common.errors import InputError
from nalanda.data.documents import hash_text

# Tests, tables, generated files, and the topics, which are read as text.
NOT_PROSE = {
    "__phello__",
    "__pycache__",
    "_bundled",
    "dist-packages",
    "encodings",
    "idle_test",
    "lib-dynload",
    "lib2to3",
    "pydoc_data",
    "site-packages",
    "test",
    "tests",
}


SHORTEST_DOCUMENT = 256
"""Least characters of a document."""

LETTERS = 0.7
"""Least share of letters and spaces in a document; tables of numbers have less."""

PASSAGE = 60
"""Characters of a shared passage from which on two documents belong to one family."""


@functools.cache
def python_splits(share: float) -> dict[str, dict[str, str]]:
    """The running Python's documents by name: those of "train" and those of "validation"."""
    train, validation = split_families(without_copies(python_documents()), share)
    return {"train": train, "validation": validation}


def python_documents(only: Container[str] | None = None) -> dict[str, str]:
    """The running Python's documents by name: language reference, library sources, docstrings of C modules.

    Args:
        only: names of top-level modules (and "reference") to restrict them to.
    Raises:
        InputError: this Python lacks its library's sources or its language reference.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise InputError(
            f"{sys.executable}: no pydoc_data.topics; install its full standard library"
        ) from None

    texts = {}
    if only is None or "reference" in only:
        texts = {f"reference/{name}": text for name, text in topics.items()}
    library = Path(sysconfig.get_path("stdlib"))
    for name in sorted(sys.stdlib_module_names):
        if only is not None and name not in only:
            continue
        # A module is a file or a package; one in C has docstrings alone.
        for path in [library / f"{name}.py", *(library / name).rglob("*.py")]:
            parts = path.relative_to(library).parts
            if path.is_file() and not NOT_PROSE.intersection(parts):
                texts["/".join(parts)] = path.read_text(encoding="utf-8", errors="replace")
        texts[f"{name} (C)"] = _c_docstrings(name)

    # Short texts and tables are left out.
    documents = {}
    for name in sorted(texts):
        text = _tidy_text(texts[name])
        if len(text) >= SHORTEST_DOCUMENT and _is_prose(text):
            documents[name] = text
    if not documents:
        raise InputError(f"{library}: no sources of the standard library; install all of it")
    return documents


def _c_docstrings(name: str) -> str:
    """The docstrings of a module without a Python source as one document; "" for other modules."""
    if name.startswith(("_test", "_xx", "xx")) or name == "readline":  # whose import may print
        return ""
    try:
        spec = importlib.util.find_spec(name)
        loader = spec.loader if spec else None
        if loader is not BuiltinImporter and not isinstance(loader, ExtensionFileLoader):
            return ""
        module = importlib.import_module(name)
    except (ImportError, ValueError):  # built for another system, or __main__
        return ""
    parts = [f'"""{inspect.getdoc(module) or ""}"""']
    for key, value in sorted(vars(module).items()):
        if key.startswith("_") or not (inspect.isclass(value) or inspect.isroutine(value)):
            continue
        if key.endswith("hook"):  # sys.excepthook and its like: a program may have replaced it
            continue
        parts.append(_find_definition(key, value, ""))
        if inspect.isclass(value) and value.__module__ == name:
            members = sorted((k, v) for k, v in vars(value).items() if not k.startswith("_"))
            parts += [_find_definition(k, v, "    ") for k, v in members if inspect.isroutine(v)]
    return "\n\n".join(filter(None, parts)) if len(parts) > 1 else ""


def _find_definition(name: str, value: Any, indent: str) -> str:
    text = inspect.getdoc(value)
    if not text:
        return ""
    signature = re.sub(r"\$\w+(, )?", "", getattr(value, "__text_signature__", None) or "")
    head = f"class {name}:" if inspect.isclass(value) else f"def {name}{signature or '(...)'}:"
    body = f'"""{text}"""'.replace("\n", f"\n{indent}    ")
    return f"{indent}{head}\n{indent}    {body}"


def _tidy_text(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.expandtabs().splitlines()).strip() + "\n"


def _is_prose(text: str) -> bool:
    return sum(c.isalpha() or c.isspace() for c in text) >= LETTERS * len(text)


def _find_passages(text: str) -> dict[str, int]:
    """Paragraphs and docstrings of `PASSAGE` characters or more, spaces normalised, with their lengths."""
    blocks = (" ".join(block.split()) for block in re.split(r'\n\s*\n|"""|' + "'''", text))
    return {block: len(block) for block in blocks if len(block) >= PASSAGE}


def without_copies(documents: dict[str, str]) -> dict[str, str]:
    """Leaves out a document if more than half of it is in longer ones."""
    seen: set[str] = set()
    copies = set()
    for name in sorted(documents, key=lambda n: (-len(documents[n]), n)):  # the longest first
        passages = _find_passages(documents[name])
        repeated = sum(size for block, size in passages.items() if block in seen)
        if 2 * repeated > sum(passages.values()):
            copies.add(name)
        else:
            seen.update(passages)
    return {name: text for name, text in documents.items() if name not in copies}


def split_families(
    documents: dict[str, str], share: float
) -> tuple[dict[str, str], dict[str, str]]:
    """Training and validation documents, with about `share` of the characters held out.

    Documents that share a passage are a family: a C module and its Python twin, two classes with one
    docstring. A family stays together, so training sees no held-out passage.
    """
    head = {name: name for name in documents}  # union-find

    def find(name: str) -> str:
        while head[name] != name:
            name = head[name]
        return name

    first_with: dict[str, str] = {}  # each passage → the first document that has it
    for name, text in documents.items():
        for block in _find_passages(text):
            head[find(name)] = find(first_with.setdefault(block, name))
    families: dict[str, list[str]] = {}
    for name in documents:
        families.setdefault(find(name), []).append(name)

    room = share * sum(map(len, documents.values()))
    validation = set()
    # In the order of a hash, each family that still fits.
    for members in sorted(families.values(), key=lambda members: hash_text(members[0])):
        size = sum(len(documents[name]) for name in members)
        if size <= room:
            room -= size
            validation.update(members)
    training = {name: text for name, text in documents.items() if name not in validation}
    return training, {name: documents[name] for name in documents if name in validation}
