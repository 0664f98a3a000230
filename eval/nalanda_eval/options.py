"""How models are evaluated."""

from dataclasses import dataclass
from typing import Any

from nalanda.common.errors import InputError
from nalanda.common.text import option_of


@dataclass(frozen=True)
class EvalOptions:
    """How tasks are scored; see `nalanda_eval.harness.evaluate`."""

    data: str | None = None
    """Directory of the tasks' data; default: the hub."""
    limit: float | None = None
    """Documents per task; below 1: share of them."""
    num_fewshot: int | None = None
    """Examples before each question; by default as the task's file says, or 0."""
    apply_chat_template: bool = False
    """Prompts as turns of a chat, examples too."""
    system_instruction: str | None = None
    """Text before all of a prompt."""
    batch_size: int = 8
    """Texts read together; does not change results."""
    max_length: int | None = None
    """Context in tokens; by default as in training."""
    long: str = "window"
    """How to read longer texts: window (in windows) or whole (in one pass)."""
    no_share: bool = False
    """Read a shared context for each ending: slower."""
    output: str | None = None
    """Directory for results.json, .md, .csv, and for answers, to resume from."""
    log_samples: bool = False
    """Also write each prompt, answer and score there."""


@dataclass(frozen=True)
class PerplexityOptions:
    """How texts are cut and scored; see `nalanda_eval.perplexity.perplexity`."""

    overrides: list[str] | None = None
    """A setting of that recipe, such as data.validation_split=test."""
    joined: bool = False
    """Join documents with eos between them."""
    length: int | None = None
    """Tokens read in one pass; by default 16 windows."""
    window: int | None = None
    """Tokens per window; by default as in training."""
    tokens: int = 2**18
    """Tokens to score; the last document is cut there."""
    output: str = "runs/perplexity"
    """Directory for the results and picture."""


def check_least(options: Any, **least: int) -> None:
    """Raises `InputError` for an option below its least value."""
    for name, minimum in least.items():
        value = getattr(options, name)
        if value is not None and value < minimum:
            raise InputError(f"{option_of(name)} {value}: must be at least {minimum}")
