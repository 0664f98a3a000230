"""RULER's single- and multi-key needles in a haystack (arXiv 2404.06654), made from local text.

A needle gives a key its value. The haystack around it is a repeated remark (`single_1`), a text (`single_2`,
`single_3`, `multikey_1`), or other needles (`multikey_2`, `multikey_3`). The model then continues a sentence
that names a key. Prompts, and the types and numbers of keys and values, are RULER's. The text is any file. A
prompt fills its length up to the last sentence that fits. It depends only on the kind, the length, the text
and the tokenizer.
"""

import functools
import itertools
import random
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

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
    """Number of needles; the prompt asks for one. Hay of needles does not count."""


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
    """The sentences of the text, long ones cut at 40 words. Raises `InputError` for an empty or unreadable file."""
    file = None if directory is None else directory / HAYSTACK
    if file is None or not file.is_file():
        text = " ".join(python_documents(only={"reference"}).values())
    else:
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{file}: {error}") from error
    sentences = []
    for sentence in re.split(r"(?<=[.!?])\s+", text):
        words = sentence.split()
        for start in range(0, len(words), 40):
            sentences.append(" ".join(words[start : start + 40]))
    if not sentences:
        raise InputError(f"{file}: is empty")
    return tuple(sentences)


@functools.cache
def needle_words() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """RULER's adjectives and nouns, of which a key has one each."""
    from wonderwords import RandomWord  # pyrefly: ignore[missing-import]

    words = RandomWord()
    adjectives, nouns = (
        words.filter(include_categories=[kind]) for kind in ("adjectives", "nouns")
    )
    return tuple(adjectives), tuple(nouns)


class Needle(NamedTuple):
    key: str
    value: str
    sentence: str


def needle_rows(
    task: NeedleTask, count: int, count_tokens: Callable[[str], int], sentences: Sequence[str]
) -> list[dict]:
    """`count` prompts as the harness's rows: `input`, `gen_prefix`, and the answers `outputs`.

    count_tokens: gives the number of tokens of a text.
    Raises `InputError` if not even the needles fit into the length.
    """
    # Each kind and length has its own sequence, so results do not depend on other tasks.
    draw = random.Random(f"{task.kind} {task.length}")
    # Sentences of a text return, needles do not.
    sentence_size = count_tokens if task.hay == "needles" else functools.cache(count_tokens)
    room = task.length - ANSWER - 1  # a bos token
    joint = " " if task.hay == "text" else "\n"

    rows = []
    for _ in range(count):
        more_needles = _draw_needles(task, draw)
        needles = list(itertools.islice(more_needles, task.keys))
        wanted = draw.choice(needles)
        depths = [draw.random() for _ in needles]
        prefix = PREFIX.format(what=task.value, key=wanted.key)

        # Hay, rather too much: sentences alone have about as many tokens as joined, a blank each aside.
        hay: list[str] = []
        frame = _write_prompt(task, wanted, " ".join(needle.sentence for needle in needles))
        left = room - count_tokens(f"{frame} {prefix}")
        for sentence in _hay_sentences(task, draw, sentences, more_needles):
            left -= sentence_size(sentence)
            hay.append(sentence)
            if left < 0:
                break

        while True:
            prompt = _write_prompt(task, wanted, joint.join(_insert_needles(needles, depths, hay)))
            excess = count_tokens(f"{prompt} {prefix}") - room
            if excess <= 0:
                break
            if not hay:
                raise InputError(
                    f"{task.kind}: its needles alone need more than {task.length} tokens"
                )
            longest = max(map(sentence_size, hay))
            # At least so many sentences must go, because none is longer than the longest.
            del hay[-max(1, excess // longest) :]
        rows.append(
            {
                "input": prompt,
                "gen_prefix": prefix,
                "outputs": [wanted.value],
                "max_length": task.length,
            }
        )
    return rows


def _draw_needles(task: NeedleTask, draw: random.Random) -> Iterator[Needle]:
    """Needles without end, no key twice."""
    keys = set()
    while True:
        key = _draw_word(task.key, draw)
        value = _draw_word(task.value, draw)
        if key not in keys:
            keys.add(key)
            yield Needle(key, value, NEEDLE.format(what=task.value, key=key, value=value))


def _draw_word(kind: str, draw: random.Random) -> str:
    if kind == "words":
        return "-".join(map(draw.choice, needle_words()))
    if kind == "number":
        return str(draw.randrange(10**6, 10**7))
    return str(uuid.UUID(int=draw.getrandbits(128), version=4))


def _hay_sentences(
    task: NeedleTask, draw: random.Random, sentences: Sequence[str], needles: Iterator[Needle]
) -> Iterator[str]:
    """The sentences around the needles, without end."""
    if task.hay == "remark":
        return itertools.repeat(REMARK)
    if task.hay == "needles":
        return (needle.sentence for needle in needles)
    # Each prompt begins at a drawn sentence of the text.
    start = draw.randrange(len(sentences))
    return itertools.cycle((*sentences[start:], *sentences[:start]))


def _insert_needles(needles: list[Needle], depths: list[float], hay: list[str]) -> list[str]:
    """The hay with each needle at its depth, a share of the hay."""
    text = list(hay)
    # From the deepest on: an insertion moves only what follows it.
    for depth, needle in sorted(zip(depths, needles, strict=True), reverse=True):
        text.insert(round(depth * len(hay)), needle.sentence)
    return text


def _write_prompt(task: NeedleTask, wanted: Needle, hay: str) -> str:
    return PROMPT.format(what=task.value, key=wanted.key, hay=hay)
