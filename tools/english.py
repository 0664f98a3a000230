"""Checks the English of docstrings, messages and pages, by the rules in CONTRIBUTING.md.

    python tools/english.py           # fails for an offending sentence that tools/english.json does not list
    python tools/english.py --list    # prints every offender with its file and rule
    python tools/english.py --record  # drops the listed sentences that are gone; refuses to add any

english.json holds a digest of each old offender, so that moving a file changes nothing. Their number only falls.
"""

import ast
import hashlib
import inspect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from house import tracked

RECORD = Path(__file__).with_suffix(".json")
LONGEST = 25  # words of a sentence

RULES = {
    "a clause as subject or object": re.compile(r"(,| to| of) (what|which) (\w+ )*?(is|are)\b"),
    "whoever": re.compile(r"\bwhoever\b", re.IGNORECASE),
    "such": re.compile(r"\b(?<!\bno )such (?!as\b)"),  # "no such file" is plain
}
PRONOUN = re.compile(r"(It|They|This|These|Those|He|She|We|You|What|Who)\b")


def main(arguments: list[str]) -> int:
    offenders = {digest(sentence): (where, rule, sentence) for where, rule, sentence in offences()}
    listed = set(json.loads(RECORD.read_text())) if RECORD.exists() else None

    if "--record" in arguments:
        kept = sorted(offenders if listed is None else listed & offenders.keys())
        RECORD.write_text(json.dumps(kept, indent=0) + "\n")
        print(f"{len(kept)} sentences are listed")
        return 0

    new = [
        offenders[key] for key in offenders if "--list" in arguments or key not in (listed or ())
    ]
    for where, rule, sentence in new:
        print(f"{where}: {rule}: {sentence}")
    return int(bool(new) and "--list" not in arguments)


def digest(sentence: str) -> str:
    return hashlib.sha256(sentence.encode()).hexdigest()[:10]


def offences() -> Iterator[tuple[str, str, str]]:
    """Yields (file, rule, sentence) for every sentence that breaks a rule."""
    for name in [*tracked("*.py"), *tracked("*.md")]:
        file = Path(name)
        if not is_checked(name):
            continue
        texts = python_texts(file) if file.suffix == ".py" else page_texts(file)

        for text, is_docstring in texts:
            if is_docstring and PRONOUN.match(text):
                yield name, "a docstring begins with a pronoun", text.splitlines()[0]

            for sentence in sentences(text):
                if rule := broken_rule(sentence):
                    yield name, rule, sentence


def is_checked(name: str) -> bool:
    """The product, its tests' helpers and pages; not the lab's pages, records and the history."""
    unchecked = (
        "lab/pages",
        "lab/records",
        "lab/log",
        "docs/zoo/",
        "tests/TORTURE.md",
        "CHANGELOG.md",
    )
    return not name.startswith(unchecked)


def broken_rule(sentence: str) -> str | None:
    words = [word for word in sentence.split() if re.search("[A-Za-z]", word)]
    if len(words) > LONGEST:
        return f"{len(words)} words"
    return next((rule for rule, pattern in RULES.items() if pattern.search(sentence)), None)


def sentences(text: str) -> Iterator[str]:
    """Splits text into sentences; code in backticks counts as one word."""
    for paragraph in re.split(r"\n\s*\n|\n\s*(?=[-*+] |\d+\. )", text):
        flat = re.sub(r"`[^`]*`", "`x`", " ".join(paragraph.split()))
        yield from re.split(r"(?<=[.!?])\s+", flat)


def python_texts(file: Path) -> Iterator[tuple[str, bool]]:
    """Yields docstrings (without indented lines: code, formulas) and the messages of exceptions."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        for statement in statements_of(node):
            if is_text(statement):
                prose = re.sub(r"(?m)^ {4,}.*$", "", inspect.cleandoc(statement.value.value))
                opens_definition = statement is node.body[0] and not isinstance(node, ast.Module)
                yield prose, opens_definition

        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            for argument in node.exc.args:
                yield message(argument), False


def statements_of(node: ast.AST) -> list[ast.stmt]:
    body = getattr(node, "body", [])
    return body if isinstance(body, list) else []  # a lambda's is an expression


def is_text(statement: ast.stmt) -> bool:
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def message(node: ast.expr) -> str:
    """The text of a string or f-string, its values written as `x`."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(
            message(part) if isinstance(part, ast.Constant) else "`x`" for part in node.values
        )
    return ""


def page_texts(file: Path) -> Iterator[tuple[str, bool]]:
    """Yields a page's prose: no fences, tables, headings, formulas and link targets."""
    text = file.read_text(encoding="utf-8")
    text = re.sub(r"(?ms)^(`{3,}|~~~).*?^\1", "", text)
    text = re.sub(r"(?m)^(\||#| {4}|<!--).*$", "", text)
    text = re.sub(r"\$\$?[^$]+\$\$?", "`x`", text)
    yield re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text), False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
