"""Reads the fields of classes from their source: each as it is written, with the text below it."""

import ast
from pathlib import Path

Field = tuple[ast.AnnAssign, str]
"""A field's line, and the string that stands below it."""


def read_fields(path: Path) -> dict[str, dict[str, Field]]:
    """The annotated fields of every class of a file, by the names of class and field."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name: _fields_of(node) for node in tree.body if isinstance(node, ast.ClassDef)}


def _fields_of(node: ast.ClassDef) -> dict[str, Field]:
    fields = {}
    for line, after in zip(node.body, [*node.body[1:], None], strict=True):
        if not isinstance(line, ast.AnnAssign) or "ClassVar" in ast.unparse(line.annotation):
            continue
        text = ""
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            text = str(after.value.value)
        fields[ast.unparse(line.target)] = (line, " ".join(text.split()))
    return fields
