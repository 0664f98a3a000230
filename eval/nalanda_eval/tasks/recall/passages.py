"""Questions as sentences to complete, after the passage that has the answer (Based, arXiv 2402.18668)."""

import re


def prompt(row: dict) -> str:
    """The passage, without the marks of its parts and the sentence itself at its end; then the sentence."""
    passage, question = (
        re.sub(r"\[(PAR|DOC|TLE)\]", "", row["context"]).strip(),
        row["question"].strip(),
    )
    while question and passage.lower().endswith(question.lower()):
        passage = passage[: -len(question)].strip()
    return f"{passage.strip('.')}. {question}"


def contains(row: dict, answers: list[str]) -> dict[str, float]:
    """Whether the continuation has one of the right answers in it, in any case."""
    return {"contains": float(any(right.lower() in answers[0].lower() for right in row["answers"]))}
