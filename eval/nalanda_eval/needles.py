"""RULER's single- and multi-key needles in a haystack (arXiv 2404.06654), made from local text.

A needle gives a key its value. The haystack around it is a repeated remark (`single_1`), a text (`single_2`,
`single_3`, `multikey_1`), or other needles (`multikey_2`, `multikey_3`). The model then continues a sentence
that names a key. Prompts, and the types and numbers of keys and values, are RULER's. The text is any file,
and a prompt fills its length up to the last sentence that fits. All depends only on the kind, the length, the
text and the tokenizer.
"""

import functools
import itertools
import random
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from nalanda.common.errors import InputError
from nalanda.data.python_docs import python_documents

ANSWER = 128
"""Tokens of the answer, which count as part of the length."""
SAMPLES = 500
"""Prompts of each kind and length."""
HAYSTACK = "haystack.txt"
"""The text in a data directory; without it, the language reference of the running Python."""

PROMPT = (
    "A special magic {what} is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {what} afterwards.\n{hay}\n"
    "What is the special magic {what} for {key} mentioned in the provided text?"
)
PREFIX = "The special magic {what} for {key} mentioned in the provided text is"
NEEDLE = "One of the special magic {what}s for {key} is: {value}."
REMARK = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


@dataclass(frozen=True)
class NeedleTask:
    """A kind of needle at a length in tokens."""

    kind: str
    length: int
    hay: str
    """remark, text or needles"""
    key: str
    """words or uuid"""
    value: str
    """number or uuid"""
    keys: int
    """Needles, of which one is asked for; of hay that is needles, beside the hay."""


KINDS: dict[str, tuple[str, str, str, int]] = {
    "niah_single_1": ("remark", "words", "number", 1),
    "niah_single_2": ("text", "words", "number", 1),
    "niah_single_3": ("text", "words", "uuid", 1),
    "niah_multikey_1": ("text", "words", "number", 4),
    "niah_multikey_2": ("needles", "words", "number", 1),
    "niah_multikey_3": ("needles", "uuid", "uuid", 1),
}
LENGTHS = tuple(1024 << i for i in range(7))


def short_length(length: int) -> str:
    return f"{length // 1024}k"


NEEDLES = {
    f"{kind}_{short_length(length)}": NeedleTask(kind, length, *rest)
    for kind, rest in KINDS.items()
    for length in LENGTHS
}
NEEDLE_GROUPS = {
    "needles": list(NEEDLES),
    **{kind: [name for name, needle in NEEDLES.items() if needle.kind == kind] for kind in KINDS},
}


@functools.cache
def haystack(directory: Path | None) -> tuple[str, ...]:
    """The sentences of the text, long ones in parts. Raises `InputError` for an empty or unreadable file."""
    file = None if directory is None else directory / HAYSTACK
    if file is None or not file.is_file():
        text = " ".join(python_documents(only={"reference"}).values())
    else:
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{file}: {error}") from error
    sentences = re.split(r"(?<=[.!?])\s+", text)
    words = (sentence.split() for sentence in sentences)
    found = tuple(" ".join(part[i : i + 40]) for part in words for i in range(0, len(part), 40))
    if not found:
        raise InputError(f"{file}: is empty")
    return found


@functools.cache
def needle_words() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """RULER's adjectives and nouns, of which a key has one each."""
    from wonderwords import RandomWord  # pyrefly: ignore[missing-import]

    words = RandomWord()
    adjectives, nouns = (
        words.filter(include_categories=[kind]) for kind in ("adjectives", "nouns")
    )
    return tuple(adjectives), tuple(nouns)


def needle_rows(
    task: NeedleTask, count: int, tokens: Callable[[str], int], sentences: Sequence[str]
) -> list[dict]:
    """`count` prompts as the harness's rows: `input`, `gen_prefix`, and the answers `outputs`.

    tokens: gives the number of tokens of a text.
    Raises `InputError` if not even the needles fit into the length.
    """
    draw = random.Random(f"{task.kind} {task.length}")
    size = tokens if task.hay == "needles" else functools.cache(tokens)
    room = task.length - ANSWER - 1  # a bos token

    def made(kind: str) -> str:
        if kind == "words":
            return "-".join(map(draw.choice, needle_words()))
        return str(draw.randrange(10**6, 10**7)) if kind == "number" else _uuid(draw)

    def needles() -> Iterator[tuple[str, str, str]]:
        known = set()
        while True:
            key, value = made(task.key), made(task.value)
            if key not in known:
                known.add(key)
                yield key, value, NEEDLE.format(what=task.value, key=key, value=value)

    def hay() -> Iterator[str]:
        if task.hay == "remark":
            return itertools.repeat(REMARK)
        if task.hay == "needles":
            return (sentence for _, _, sentence in told)
        start = draw.randrange(len(sentences))
        return itertools.cycle((*sentences[start:], *sentences[:start]))

    rows = []
    for _ in range(count):
        told = needles()
        asked = list(itertools.islice(told, task.keys))
        key, value, _ = draw.choice(asked)
        depths = [draw.random() for _ in asked]
        prefix = PREFIX.format(what=task.value, key=key)
        frame = PROMPT.format(
            what=task.value, key=key, hay=" ".join(sentence for *_, sentence in asked)
        )
        left, body = room - tokens(f"{frame} {prefix}"), []
        for sentence in hay():
            # Sentences joined have about as many tokens as alone; a blank each makes them rather too many.
            left -= size(sentence)
            body.append(sentence)
            if left < 0:
                break
        while True:
            text = list(body)
            for depth, (*_, sentence) in sorted(zip(depths, asked, strict=True), reverse=True):
                text.insert(round(depth * len(body)), sentence)
            prompt = PROMPT.format(
                what=task.value, key=key, hay=(" " if task.hay == "text" else "\n").join(text)
            )
            excess = tokens(f"{prompt} {prefix}") - room
            if excess <= 0:
                break
            if not body:
                raise InputError(
                    f"{task.kind}: its needles alone need more than {task.length} tokens"
                )
            del body[-max(1, excess // max(map(size, body))) :]
        rows.append(
            {"input": prompt, "gen_prefix": prefix, "outputs": [value], "max_length": task.length}
        )
    return rows


def _uuid(draw: random.Random) -> str:
    return str(uuid.UUID(int=draw.getrandbits(128), version=4))
