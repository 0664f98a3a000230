"""Counts how the product reads, and holds it to the budgets in CONTRIBUTING.md.

    python tools/house.py          # prints every figure with its limit
    python tools/house.py --check  # fails if one is over its limit

Tokens leave out comments and docstrings: an explanation or a blank line costs nothing.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

PRODUCT = ("src/", "kernels/nalanda_kernels/", "eval/nalanda_eval/")
PAGES_APART = ("lab/", "tools/", "tests/", "docs/decisions/", "CHANGELOG.md")

LIMITS = {
    "tokens": 308_330,
    "tokens a code line": 9.45,
    "comments, %": 8.2,
    "functions with 25 lines on end, per 1,000": 0.05,
    "longest function": 70,
    "most parameters": 17,
    "most comparisons with None": 6,
    "vague names": 4,
    "words of pages": 25_600,
}
"""The most that `make check` allows; `comments, %` is the least. A change may lower a limit.

Only a commit of its own raises one, and says for which feature.
"""

VAGUE = set(Path(__file__).with_name("vague.txt").read_text().split())
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
COMPILED = ("jit", "register_fake", "custom_op")  # their signatures belong to Triton and torch
FREE_SIGNATURES = ("forward", "generate")  # transformers' own


@dataclass
class Counts:
    """Sums over files, and the extreme functions as (size, where)."""

    tokens: int = 0
    code_lines: int = 0
    comment_lines: int = 0
    walls: int = 0
    vague: Counter = field(default_factory=Counter)
    lengths: list[tuple[int, str]] = field(default_factory=list)
    widths: list[tuple[int, str]] = field(default_factory=list)
    none_checks: list[tuple[int, str]] = field(default_factory=list)


def main(arguments: list[str]) -> int:
    counts = count([name for name in tracked("*.py") if name.startswith(PRODUCT)])
    figures = {
        "tokens": counts.tokens,
        "tokens a code line": round(counts.tokens / counts.code_lines, 2),
        "comments, %": round(100 * counts.comment_lines / counts.code_lines, 1),
        "functions with 25 lines on end, per 1,000": round(
            1000 * counts.walls / counts.code_lines, 2
        ),
        "longest function": max(counts.lengths)[0],
        "most parameters": max(counts.widths)[0],
        "most comparisons with None": max(counts.none_checks)[0],
        "vague names": sum(counts.vague.values()),
        "words of pages": words_of_pages(),
    }

    over = [name for name, value in figures.items() if is_over(name, value)]
    if "--check" in arguments:
        for name in over:
            print(f"{name}: {figures[name]:,}, the limit is {LIMITS[name]:,}: tools/house.py")
        return int(bool(over))

    for name, value in figures.items():
        print(f"{name:42s} {value:>10,} {LIMITS[name]:>10,}")
    for name, rows in (
        ("longest", counts.lengths),
        ("widest", counts.widths),
        ("None", counts.none_checks),
    ):
        print(f"{name}:", ", ".join(f"{size} {where}" for size, where in sorted(rows)[:-9:-1]))
    print("vague:", ", ".join(f"{name} {times}" for name, times in counts.vague.most_common()))
    return 0


def is_over(name: str, value: float) -> bool:
    if name == "comments, %":  # the least
        return value < LIMITS[name]
    return value > LIMITS[name]


def tracked(pattern: str) -> list[str]:
    """The files of the checkout; without git, all files outside of hidden folders."""
    listed = subprocess.run(["git", "ls-files", pattern], capture_output=True, text=True)
    names = listed.stdout.split()
    if listed.returncode:
        names = [
            str(file) for file in Path().rglob(pattern) if not re.search(r"(^|/)\.", str(file))
        ]
    return sorted(name for name in names if Path(name).is_file())


def words_of_pages() -> int:
    pages = [name for name in tracked("*.md") if not name.startswith(PAGES_APART)]
    return sum(len(Path(name).read_text(encoding="utf-8").split()) for name in pages)


def count(names: list[str]) -> Counts:
    counts = Counts()

    for name in names:
        text = Path(name).read_text(encoding="utf-8")
        tree = ast.parse(text)
        count_lines(counts, text, docstring_lines(tree))

        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in VAGUE:
                counts.vague[node.id] += 1
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                count_function(counts, node, f"{name}:{node.lineno} {node.name}", text.splitlines())

    return counts


def docstring_lines(tree: ast.AST) -> set[int]:
    return {
        line
        for node in ast.walk(tree)
        if is_docstring(node)
        for line in range(node.lineno, node.end_lineno + 1)
    }


def is_docstring(node: ast.AST) -> bool:
    value = node.value if isinstance(node, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def count_lines(counts: Counts, text: str, docstrings: set[int]) -> None:
    code_lines, comment_lines = set(), set()

    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        first, last = token.start[0], token.end[0]
        if token.type == tokenize.COMMENT:
            comment_lines.add(first)
        if token.type in LAYOUT or first in docstrings:
            continue
        counts.tokens += 1
        code_lines.update(range(first, last + 1))

    counts.code_lines += len(code_lines)
    counts.comment_lines += len(comment_lines)


def count_function(counts: Counts, node: ast.FunctionDef, where: str, lines: list[str]) -> None:
    start = node.body[0].end_lineno + 1 if is_docstring(node.body[0]) else node.body[0].lineno
    body = lines[start - 1 : node.end_lineno]
    counts.walls += longest_run(body) > 25

    decorators = " ".join(map(ast.unparse, node.decorator_list))
    if any(word in decorators for word in COMPILED):
        return

    signature = lines[node.lineno - 1 : node.body[0].lineno - 1]
    explained = sum(line.strip().startswith("#") for line in body)  # a comment costs nothing
    counts.lengths.append((len(signature) + len(body) - explained, where))

    names = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    if node.name not in FREE_SIGNATURES:
        counts.widths.append((sum(name.arg not in ("self", "cls") for name in names), where))
    counts.none_checks.append((sum(map(compares_with_none, ast.walk(node))), where))


def longest_run(lines: list[str]) -> int:
    """The most lines on end without a blank line or a comment."""
    run = longest = 0
    for line in lines:
        run = 0 if not line.strip() or line.strip().startswith("#") else run + 1
        longest = max(longest, run)
    return longest


def compares_with_none(node: ast.AST) -> bool:
    if not isinstance(node, ast.Compare):
        return False
    sides = [side for side in node.comparators if isinstance(side, ast.Constant)]
    return any(side.value is None for side in sides) and any(
        isinstance(operator, (ast.Is, ast.IsNot)) for operator in node.ops
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
