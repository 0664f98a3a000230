"""Questions about a long text, to a server that keeps the state behind it.

nalanda serve runs/demo -- --max-model-len 65536
python examples/document.py book.txt "Who is she?" "Where does she go?"

The first request is the text alone: vLLM with Nalanda's plugin then keeps the state behind it. A question
comes with the whole text, of which vLLM finds the state. The server of transformers reads the text again. In
Python `model.read` returns such a state, and `nalanda generate --save-state` writes one (docs/generation.md).
"""

import argparse
import sys
from pathlib import Path
from statistics import median
from time import perf_counter

import openai

LEAST_READING = 1.0
"""Seconds that a text must take before the times of its questions say anything."""


def ask(client: openai.OpenAI, model: str, prompt: str, tokens: int) -> tuple[float, str]:
    """The seconds until the first token of an answer, and its text."""
    began, seconds, text = perf_counter(), 0.0, ""
    asked = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    for chunk in client.completions.create(**asked, stream=True):
        seconds = seconds or perf_counter() - began
        text += "".join(choice.text for choice in chunk.choices)
    return seconds, text


def main(arguments: list[str]) -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    add = parser.add_argument
    add("file", type=Path, help="the text")
    add("questions", nargs="+", help="each continues the text, behind a blank line")
    add("--url", default="http://127.0.0.1:8000/v1", help="address of the server")
    add("--max-tokens", type=int, default=32, help="length limit of an answer")
    options = parser.parse_args(arguments)

    text = options.file.read_text(encoding="utf-8").rstrip()
    client = openai.OpenAI(base_url=options.url, api_key="none")
    model = client.models.list().data[0].id
    ask(client, model, "a", 2)  # a server's first answer is slow

    reading, _ = ask(client, model, text, 1)
    print(f"{reading:7.2f} s  the text, {len(text):,} characters")
    waits = []
    for question in options.questions:
        seconds, answer = ask(client, model, f"{text}\n\n{question}", options.max_tokens)
        waits.append(seconds)
        print(f"{seconds:7.2f} s  {question} → {answer!r}")

    wait = median(waits)
    if reading < LEAST_READING:
        print("the text is too short to tell whether the server kept its state")
    elif wait < reading / 2:
        print(f"the server kept the state: {reading - wait:.2f} s less for a question")
    else:
        print("the server kept no state: it read the text for each question")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (OSError, UnicodeError, openai.OpenAIError) as error:
        sys.exit(f"document.py: {error}")
