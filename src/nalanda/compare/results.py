"""The records of a study's runs, on this machine or in a store."""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nalanda.common.errors import InputError
from nalanda.common.files import write_atomically
from nalanda.report.runs import read_run, validated_of
from nalanda.storage.remote import is_store, read_bytes, staging
from nalanda.train.log import read_facts, with_hours

ENDED = ("finished", "failed")
"""States of run.json that no other machine changes."""

RETRIES = 3
"""Tries to read a record from a store."""


@dataclass(frozen=True)
class Result:
    """A run as its records show it."""

    state: str
    """As `RunSummary.state`."""
    step: int = 0
    loss: float = math.inf
    """Last validation loss in nats a token; infinite unless the run is finished."""
    bits: float | None = None
    """The same in bits a byte."""
    tokens: int = 0
    seconds: float = 0.0
    """Of training, without validation and saving."""
    diverged: bool = False
    """Whether bad steps ended it, or its loss is not finite."""
    reason: str = ""
    """Why it failed."""
    setup: tuple[tuple[str, str], ...] = ()
    """What computed it: versions, device and precision, by name."""
    curve: tuple[tuple[int, float], ...] = ()
    """Validations, as (tokens, nats a token)."""
    validated: tuple[tuple[str, float], ...] = ()
    """`validated_of` the last validation."""

    @property
    def finished(self) -> bool:
        """Whether there is a model with a finite loss."""
        return self.state == "finished" and math.isfinite(self.loss)

    @property
    def ended(self) -> bool:
        """Whether the run has nothing left to train: it is finished, or has diverged."""
        return self.state == "finished" or self.diverged


def read_result(folder: str) -> Result | None:
    """The result of the run in a folder, or None if it has no records. Raises `InputError`."""
    local = staging(folder)
    # A record that has not ended here may have ended on another machine.
    if is_store(folder) and read_facts(local).get("state") not in ENDED:
        fetch_records(folder, local)
    if not (local / "run.json").is_file():
        return None

    summary, facts = read_run(local), read_facts(local)
    state = summary.state
    try:
        lines = list(with_hours(local))
        validations = [line for line, _ in lines if "val_loss" in line]
        curve = tuple((line["tokens"], float(line["val_loss"])) for line in validations)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{local / 'metrics.jsonl'}: damaged: {error!r}; restore it, or remove {local} to train the run again"
        ) from None
    # A run that diverged has its loss there, as nan.
    if state == "finished" and not validations:
        raise InputError(
            f"{local / 'metrics.jsonl'}: the finished run has no validation loss there; restore the file, or "
            f"remove {local} to train the run again"
        )
    last = validations[-1] if validations else {}
    loss = curve[-1][1] if state == "finished" else math.inf
    lost = state == "finished" and not math.isfinite(loss)
    return Result(
        state=state,
        step=summary.step or 0,
        loss=loss,
        bits=last.get("val_bpb"),
        validated=validated_of(last),
        diverged=lost or (state == "failed" and facts.get("diverged", False)),
        tokens=max((line.get("tokens", 0) for line, _ in lines), default=0),
        seconds=3600 * lines[-1][1] if lines else 0.0,
        reason=summary.problem or "",
        setup=setup_of(facts),
        curve=curve,
    )


def setup_of(facts: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    """Versions, device and precision of run.json, but those of Python."""
    named = {
        **facts.get("versions", {}),
        **{key: facts.get(key) for key in ("device", "precision")},
    }
    return tuple((key, str(x)) for key, x in named.items() if x is not None and key != "python")


def other_setups(results: Iterable[Result]) -> list[str]:
    """A sentence if runs were computed in more than one way."""
    seen: dict[str, set[str]] = {}
    for result in results:
        for key, value in result.setup:
            seen.setdefault(key, set()).add(value)
    mixed = [
        f"{key} {' and '.join(sorted(values))}" for key, values in seen.items() if len(values) > 1
    ]
    return [f"The runs were not all computed alike: {'; '.join(mixed)}."] if mixed else []


def fetch_records(folder: str, local: Path) -> None:
    """Copies the records of a finished run from a store: another machine may have trained it."""
    facts = read_bytes(f"{folder}/run.json", RETRIES, missing=b"")
    if not facts or read_state(facts) not in ENDED:
        return
    local.mkdir(parents=True, exist_ok=True)
    for name in ("config.yaml", "metrics.jsonl"):
        (local / name).write_bytes(read_bytes(f"{folder}/{name}", RETRIES))
    write_atomically(local / "run.json", facts)


def read_state(facts: bytes) -> Any:
    try:
        return json.loads(facts).get("state")
    except ValueError:
        return None
