"""A tiny corpus, a tiny recipe, trainers as child processes, and what a finished run is compared by."""

import contextlib
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
import zstandard
from training import WORDS, environment, hash_bits, repeatable, tiny_recipe, torchrun, write_recipe

PAUSED = Path(__file__).with_name("paused.py")
SHARDS = {"web": (4, 300), "code": (3, 30)}  # shards, documents in each
LENGTHS = {"web": (1, 1, 1, 2, 3), "code": (2, 4, 40)}  # so that a row of one has far fewer labels
PATIENCE = 300.0  # seconds that anything may take


class Torn(AssertionError):
    """An invariant does not hold."""


def need(holds: object, *what: object) -> None:
    if not holds:
        raise Torn(" ".join(map(str, what)))


# ------------------------------ the corpus


def marker(source: str, number: int) -> str:
    return f"{source}{number:04d}"


def documents(source: str) -> list[list[str]]:
    """Document k says its own word, which no other has, n times among others: to count that word in what was
    trained on is to count the document, however it was cut into rows."""
    shards, each = SHARDS[source]
    draw = random.Random(source)
    texts = []
    for number in range(shards * each):
        words = []
        for _ in range(draw.choice(LENGTHS[source])):
            words += [
                marker(source, number),
                *draw.choices(WORDS, k=(source == "code") * draw.randint(0, 2)),
            ]
        texts.append(" ".join(words))
    return [texts[i * each : (i + 1) * each] for i in range(shards)]


def make_corpus(folder: Path) -> None:
    compress = zstandard.ZstdCompressor().compress
    for source in SHARDS:
        for number, texts in enumerate(documents(source)):
            lines = [
                json.dumps({"text": text, "meta": {"redpajama_set_name": source}}) + "\n"
                for text in texts
            ]
            file = folder / source / f"example_train_{number}.jsonl.zst"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(compress("".join(lines).encode()))


def make_recipe(folder: Path) -> Path:
    """A run of 80 steps, some three epochs of each of two sources, a checkpoint every seventh."""
    corpus = folder / "corpus"
    make_corpus(corpus)
    weights = {"web": 2, "code": 1}
    mixture = [
        {"name": name, "source": str(corpus / name), "weight": weights[name]} for name in SHARDS
    ]
    recipe = tiny_recipe(
        folder,
        model={"mixer": ["gated_deltanet", "nala"]},
        train={"steps": 80, "tokens_per_step": 256, "micro_batch_size": 2},
        seed=5,
        tokenizer={"train": "words"},
        data={"mixture": mixture, "seq_len": 64, "shuffle_buffer": 24, "validation_share": 0.05},
        schedule={"warmup_steps": 5},
        validation={"every": 15},
        # Not in a thread: the loop stands still where a case pauses a save.
        checkpoint={"every": 7, "keep_last": 2, "keep_every": 35, "asynchronous": False},
    )
    return write_recipe(folder / "recipe.yaml", recipe)


# ------------------------------ child processes


class Trainer:
    """One start of the trainer, with its own folder for what paused.py sees; killed when the block ends."""

    def __init__(
        self,
        recipe: Path,
        run: Path,
        *overrides: str,
        processes: int = 1,
        restarts: int = 0,
        env: dict[str, str] | None = None,
        before: tuple[str, ...] = (),
        **orders: object,
    ):
        self.run, self.notes = run, run.with_name(f"{run.name}.notes")
        self.notes.mkdir(parents=True, exist_ok=True)
        for name in ("paused", "go"):
            (self.notes / name).unlink(missing_ok=True)
        orders = {"folder": str(self.notes), "group": 3000, **orders}
        launcher = torchrun(processes, restarts) if processes > 1 else [sys.executable]
        variables = {"NALANDA_TORTURE": json.dumps(orders), **(env or {})}
        self.output = (self.notes / "output.txt").open("a+")
        self.printed = self.output.tell()
        self.process = subprocess.Popen(
            [*before, *launcher, str(PAUSED), str(recipe), f"output_dir={run}", *overrides],
            env=environment(processes, **variables),
            stdin=subprocess.DEVNULL,
            stdout=self.output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # what is typed at the terminal is for the suite
        )

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.output.close()

    def members(self) -> list[int]:
        """Every living process of this start: torchrun gives its workers sessions of their own."""
        return living(str(self.notes))

    def kill(self) -> None:
        """SIGKILL to all of them, as a machine dies."""
        kill_all(str(self.notes))
        self.process.wait()

    @property
    def text(self) -> str:
        """What this start has printed so far."""
        # By bytes, as `tell` counts: a progress line has a character of three.
        return (self.notes / "output.txt").read_bytes()[self.printed :].decode(errors="replace")

    def end(self, code: int | None = 0, within: float = PATIENCE) -> str:
        """Waits for the end; returns what was printed."""
        try:
            found = self.process.wait(within)
        except subprocess.TimeoutExpired:
            raise Torn(f"still running after {within:.0f} s: {self.tail()}") from None
        need(code is None or found == code, f"exit code {found}, not {code}: {self.tail()}")
        return self.text

    def until(self, true: Callable[[], object], what: str) -> None:
        """Polls; the trainer must not end before."""
        deadline = time.monotonic() + PATIENCE
        while not true():
            need(self.process.poll() is None, f"ended before {what}: {self.tail()}")
            need(time.monotonic() < deadline, f"no {what} within {PATIENCE:.0f} s: {self.tail()}")
            time.sleep(0.005)

    def paused(self) -> tuple[int, str]:
        """Waits until the trainer stands at its pause; (process id, where)."""
        self.until((self.notes / "paused").exists, "the pause")
        number, where = (self.notes / "paused").read_text().split("\n", 1)
        return int(number), where

    def go(self) -> None:
        (self.notes / "go").touch()

    def tail(self) -> str:
        return " | ".join(self.text.strip().splitlines()[-4:])[-700:]


def living(notes: str, end: str = '"') -> list[int]:
    """The processes whose orders name a folder."""
    mark, found = f'"folder": "{notes}{end}'.encode(), []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # gone meanwhile; a dead one has no environment
            if mark in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


def kill_all(notes: str, end: str = '"') -> None:
    while numbers := living(notes, end):
        for number in numbers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)


def finish(recipe: Path, run: Path, *overrides: str, **options) -> str:
    with Trainer(recipe, run, *overrides, **options) as trainer:
        return trainer.end()


# ------------------------------ what a run is compared by


def lines(run: Path) -> list[dict]:
    """metrics.jsonl, up to a line that is being written."""
    file, found = run / "metrics.jsonl", []
    with contextlib.suppress(FileNotFoundError, ValueError):
        for line in file.read_text().splitlines():
            found.append(json.loads(line))
    return found


def notes(run: Path) -> dict[int, list[dict]]:
    """What paused.py wrote of every step, an entry a rank; of a step that was lost and made again, perhaps by
    another number of ranks, the last."""
    ranks: list[dict[int, dict]] = []
    for file in sorted(run.with_name(f"{run.name}.notes").glob("stream-*.jsonl")):
        ranks.append({})
        for line in file.read_text().splitlines():
            with contextlib.suppress(ValueError):  # torn by a kill
                entry = json.loads(line)
                ranks[-1][entry["step"]] = entry
    return {
        step: [rank[step] for rank in ranks[: e["world"]]] for step, e in sorted(ranks[0].items())
    }


def stream(run: Path) -> dict[int, list[list[int]]]:
    """The rows of every step, of all ranks together."""
    return {
        step: sorted(row for e in ranks for row in e["rows"]) for step, ranks in notes(run).items()
    }


def digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def tensors(source: Path) -> dict[str, str]:
    """SHA-256 of every tensor of a safetensors file, or of a folder of parts of them: metadata, order and how
    many processes wrote it are none of it."""
    from nalanda.train import tensor_files

    found = {
        name: torch.empty(*kind[:1], dtype=kind[1])
        for name, kind in tensor_files.shapes(source).items()
    }
    tensor_files.read_tensors(source, found)
    return {name: hash_bits([tensor]) for name, tensor in sorted(found.items())}


def checkpoints(run: Path) -> dict[int, Path]:
    """What has a checkpoint's name, by step."""
    found = {int(p.name[5:]): p for p in (run / "checkpoints").glob("step-*")}
    return {step: found[step] for step in sorted(found)}


def saved_part(folder: Path, name: str) -> Path:
    """`model` or `optimizer` of a checkpoint, sharded or whole."""
    return part if (part := folder / name).is_dir() else folder / f"{name}.safetensors"


def outcome(run: Path) -> dict[str, object]:
    """Hashes of weights, moments and token stream, and every line of metrics but its clock."""
    found = checkpoints(run)
    last = found[max(found)]
    return {
        "weights": digest(tensors(run / "final" / "model.safetensors")),
        "weights of the last checkpoint": digest(tensors(saved_part(last, "model"))),
        "moments": digest(tensors(saved_part(last, "optimizer"))),
        "token stream": digest(stream(run)),
        "metrics": repeatable(lines(run)),
    }


def same(found: Path, expected: Path, *, prepared: bool = False, spread: int = 1) -> str:
    """Raises unless two finished runs are one to the bit; says what was compared. Of a source, a document
    (prepared: a row) comes as often as any other, or up to `spread` times more."""
    a, b = outcome(found), outcome(expected)
    for key in a:
        need(a[key] == b[key], f"{key}: not those of the run that nothing interrupted")
    trained = [line["step"] for line in lines(found) if "loss" in line]
    need(len(trained) == len(set(trained)), "metrics.jsonl: a step stands there twice")
    counts = rows_given(found) if prepared else documents_given(found)
    for source, found_there in counts.items():
        epochs = {whole for n, k in found_there.values() for whole in (k // n, -(-k // n))} or {0}
        need(
            max(epochs) - min(epochs) <= spread, f"{source}: documents came {sorted(epochs)} times"
        )
    return "sha256 of weights, moments, token stream equal"


def rows_given(run: Path) -> dict[str, dict]:
    """{source: {row: (1, times it was trained on)}} for prepared sets, whose rows are the same in each
    epoch."""
    from transformers import AutoTokenizer

    words = AutoTokenizer.from_pretrained(run / "tokenizer").get_vocab().items()
    seen = Counter(tuple(row) for rows in stream(run).values() for row in rows)
    found = {}
    for source in SHARDS:
        own = {token for word, token in words if word.startswith(source)}
        found[source] = {row: (1, count) for row, count in seen.items() if own.intersection(row)}
    return found


def documents_given(run: Path) -> dict[str, dict[str, tuple[int, int]]]:
    """{source: {document's word: (times it stands in the document, times it was trained on)}}; held-out
    documents are left out, and none of them may have been trained on."""
    from transformers import AutoTokenizer

    vocabulary = AutoTokenizer.from_pretrained(run / "tokenizer").get_vocab()
    seen = Counter(token for rows in stream(run).values() for row in rows for token in row)
    found = {}
    for source in SHARDS:
        texts = [text for shard in documents(source) for text in shard]
        words = {
            marker(source, k): text.split().count(marker(source, k)) for k, text in enumerate(texts)
        }
        # The tokenizer was made of the training documents: it does not know the others' words.
        counts = {
            word: (n, seen[vocabulary[word]]) for word, n in words.items() if word in vocabulary
        }
        need(
            0.85 < len(counts) / len(words) < 1,
            f"{source}: {len(counts)} of {len(words)} for training",
        )
        found[source] = counts
    return found
