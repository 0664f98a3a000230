"""The sizes that the peer's autotuner found, as one file that comes back and goes with the next call.

Triton keeps the times of an autotuned kernel in its cache, as KEY/NAME.autotune.json; flash-linear-attention asks for
that. KEY is a hash of Triton, ptxas, architecture, source, shapes and configurations. It has no path, so the files fit
another machine with the same software; others never read them. Sizes are those of one card: an H100's are not read on
an H200, which has the same architecture.
"""

import json
from pathlib import Path

NAME = "tuned.json"
PATTERN = "*/*.autotune.json"
Tuned = dict[str, dict[str, str]]
"""Contents of the autotuner's files, by card and by their path below the cache."""


def triton_cache() -> Path:
    from triton import knobs

    return Path(knobs.cache.dir)


def read(file: Path) -> Tuned:
    return json.loads(file.read_text()) if file.exists() else {}


def write(file: Path, tuned: Tuned) -> None:
    part = file.with_suffix(".part")  # a machine may be taken back while it is written
    part.write_text(json.dumps(tuned, indent=0, sort_keys=True))
    part.replace(file)


def pack(cache: Path, file: Path, card: str) -> None:
    """Adds what the cache has to the file. Without any there is no file."""
    tuned = read(file)
    found = {path.relative_to(cache).as_posix(): path.read_text() for path in cache.glob(PATTERN)}
    known = tuned.get(card, {})
    if found.keys() - known.keys():
        write(file, tuned | {card: known | found})


def unpack(file: Path, cache: Path, card: str) -> int:
    """Puts a card's sizes into the cache, where it has none. Returns how many kernels and shapes the file has."""
    known = read(file).get(card, {})
    for name, content in known.items():
        path = cache / name
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
    return len(known)


def join(files: list[Path], file: Path) -> None:
    """Writes the sizes of several files into one. Without any there is no file."""
    tuned: Tuned = {}
    for each in files:
        for card, known in read(each).items():
            tuned[card] = tuned.get(card, {}) | known
    if tuned:
        write(file, tuned)
