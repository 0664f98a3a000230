"""Every key of a recipe with its type, default and meaning, read from the text of the dataclasses."""

import ast
import re
from pathlib import Path

from rich.padding import Padding
from rich.text import Text

from nalanda.common.errors import InputError
from nalanda.common.fields import Field, read_fields
from nalanda.common.terminal import plain_console

_PACKAGE = Path(__file__).parents[1]
_FACTORIES = {"list": "[]", "dict": "{}"}


def key_rows(pattern: str = "") -> list[dict[str, str]]:
    """A row for each key whose name or meaning has the regular expression `pattern`, in the recipe's order.

    Raises `InputError` for an expression that is none.
    """
    try:
        expression = re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise InputError(f"{pattern!r} is not a regular expression: {error}") from None
    schema = read_fields(_PACKAGE / "config" / "schema.py")
    model = read_fields(_PACKAGE / "model" / "configuration.py")["NalandaConfig"]
    rows = [row for row in _list_keys(schema, "RunConfig") if row["key"] != "model"]

    # The model's keys stand before those of the tokenizer.
    at = next(i for i, row in enumerate(rows) if row["key"].startswith("tokenizer"))
    rows[at:at] = [_row(f"model.{name}", field, text) for name, (field, text) in model.items()]
    return [x for x in rows if expression.search(x["key"]) or expression.search(x["meaning"])]


def print_keys(pattern: str = "") -> None:
    """Prints the rows of `key_rows`. Raises `InputError` if there is none."""
    rows = key_rows(pattern)
    if not rows:
        raise InputError(
            f"no key's name or meaning has {pattern!r}; without a pattern all are listed"
        )
    console = plain_console()
    for row in rows:
        value = "required" if row["default"] == "required" else f"= {row['default']}"
        console.print(Text(row["key"], "bold"), f"{row['type']} {value}", sep=": ")
        if row["meaning"]:
            console.print(Padding(row["meaning"], (0, 0, 0, 4)))


def _type_of(field: ast.AnnAssign) -> str:
    """The type of a field, without the bounds of `Annotated`."""
    kind = field.annotation
    if isinstance(kind, ast.Subscript) and ast.unparse(kind.value) == "Annotated":
        assert isinstance(kind.slice, ast.Tuple)
        kind = kind.slice.elts[0]
    return ast.unparse(kind)


def _list_keys(
    classes: dict[str, dict[str, Field]], name: str, where: str = ""
) -> list[dict[str, str]]:
    rows = []
    for field_name, (field, text) in classes[name].items():
        kind = _type_of(field)
        key = f"{where}{field_name}"
        # A section's class, or that of a list or of named ones.
        inner = re.search(r"\w+$", kind.removesuffix("]"))
        if inner and inner[0] in classes:
            if kind.startswith(("list", "dict")):
                rows.append(_row(key, field, text))
                key += "[]" if kind.startswith("list") else ".NAME"
            rows += _list_keys(classes, inner[0], f"{key}.")
        else:
            rows.append(_row(key, field, text))
    return rows


def _row(key: str, field: ast.AnnAssign, text: str) -> dict[str, str]:
    kind, value = _type_of(field), field.value
    if value is None:
        default = "required"
    elif isinstance(value, ast.Call):  # field(default_factory=…)
        factory = next(k.value for k in value.keywords if k.arg == "default_factory")
        default = _FACTORIES[ast.unparse(factory)]
    else:
        default = ast.unparse(value).strip("'\"") or '""'
    names = {"None": "null", "True": "true", "False": "false", "MAX_DOCUMENT": "67108864"}
    kind = re.sub(r"Literal\[(.*)\]", lambda m: m[1].replace("'", ""), kind).replace("None", "null")
    return {"key": key, "type": kind, "default": names.get(default, default), "meaning": text}
