"""A run in a store: it works in a local folder, and its finished checkpoints are copied to the store.

A checkpoint's manifest is uploaded last and removed first, so one that is cut short is not taken for a whole
one. Copying runs in a thread beside the training. If it fails, it is tried again with the next checkpoint.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from nalanda.common.errors import InputError
from nalanda.common.files import verify_manifest, write_atomically
from nalanda.config.schema import CheckpointConfig, RunConfig
from nalanda.storage.remote import (
    RemoteFile,
    download,
    files_at,
    is_store,
    read_bytes,
    remove,
    staging,
    upload,
)
from nalanda.train.checkpoint_dir import MARK, checkpoint_folders, step_of

RETRIES = 3
"""Tries of a copy beside the training, which the next checkpoint repeats."""

RECORDS = ("config.yaml", "run.json", "metrics.jsonl", "tracker.json")
"""Files of a run that a resume needs beside its checkpoint and tokenizer."""

MANIFEST = "manifest.json"

Files = dict[str, RemoteFile]
"""Files of the store by their names in the run's folder."""


def staged(config: RunConfig) -> tuple[RunConfig, Mirror | None]:
    """`config` with a local folder in place of an `output_dir` in a store, and the mirror of this folder."""
    if not is_store(config.output_dir):
        return config, None
    mirror = Mirror(
        staging(config.output_dir), config.output_dir, config.checkpoint, config.data.retries
    )
    return replace(config, output_dir=str(mirror.folder)), mirror


@contextlib.contextmanager
def mirrored(mirror: Mirror | None) -> Iterator[None]:
    """Fetches the files that a resume needs; at the end, copies the rest.

    Its own error is raised only if the block raised none.
    """
    if mirror is None:
        yield
        return
    mirror.fetch()
    try:
        yield
    except BaseException:
        # In a thread: here the run's error would be taken for the cause of the store's, and so for final.
        with ThreadPoolExecutor(1) as thread:
            problem = thread.submit(mirror.finish, retries=1).exception()
        if problem is not None:
            mirror.say(str(problem))
        raise
    mirror.finish(mirror.retries)


class Mirror:
    """Copies a run's folder to the folder `url` of a store. Only the main process has one."""

    def __init__(self, folder: Path, url: str, keep: CheckpointConfig, retries: int):
        self.folder, self.url, self.keep, self.retries = folder, url.rstrip("/"), keep, retries
        self.begun = time.time()
        self._sent: dict[str, bytes] = {}  # checkpoint → its manifest in the store
        self._thread: threading.Thread | None = None

    def say(self, line: str) -> None:
        print(f"nalanda: {line}", file=sys.stderr, flush=True)

    # ------------------------------ from the store

    def fetch(self) -> None:
        """Downloads the newest whole checkpoint and the run's records, if the store is ahead of the folder.

        Raises:
            InputError: the store cannot be read, or has other files than a run.
        """
        self.say(f"{self.url}: the run works in {self.folder} and is copied from there")
        stored = files_at(self.url, self.retries)
        if stored and not {"config.yaml", "run.json", "metrics.jsonl"} & stored.keys():
            raise InputError(
                f"{self.url} has files that are no run of Nalanda's; choose another output_dir"
            )
        checkpoints = self.folder / "checkpoints"
        newest = max((step_of(path) for path in checkpoint_folders(checkpoints)), default=-1)
        # A checkpoint without its manifest is still on its way, or being removed.
        whole = {step for step in _steps(stored) if f"checkpoints/step-{step}/{MANIFEST}" in stored}
        # From the newest on, until one is undamaged.
        ahead = sorted((step for step in whole if step > newest), reverse=True)
        fetched = any(self._fetch_checkpoint(step, stored) for step in ahead)
        # Records belong to the checkpoint: without a newer one, those of the folder stay.
        if fetched or not (self.folder / "config.yaml").is_file():
            for name, file in stored.items():
                if name in RECORDS or name.startswith("tokenizer/"):
                    download(file, self.folder / name, self.retries)

    def _fetch_checkpoint(self, step: int, stored: Files) -> bool:
        """Downloads a checkpoint; returns whether it is whole."""
        prefix = f"checkpoints/step-{step}/"
        temporary = self.folder / "checkpoints" / f".tmp-step-{step}"
        shutil.rmtree(temporary, ignore_errors=True)
        for name, file in stored.items():
            if name.startswith(prefix):
                download(file, temporary / name.removeprefix(prefix), self.retries)

        if problem := verify_manifest(temporary):
            self.say(f"{self.url}/{prefix}: damaged, passed over: {problem}")
            shutil.rmtree(temporary)
            return False
        temporary.rename(temporary.with_name(f"step-{step}"))
        return True

    # ------------------------------ to the store

    def start(self) -> None:
        """Begins to copy, unless an earlier copy still runs. The next copy then brings the files it lacks."""
        if self._thread is None or not self._thread.is_alive():
            # A daemon: a process that fails does not wait for it.
            self._thread = threading.Thread(target=self._try, name="nalanda-mirror", daemon=True)
            self._thread.start()

    def _try(self) -> None:
        try:
            self.copy(RETRIES)
        except Exception as error:  # training goes on without the store
            self.say(
                f"{self.url}: not copied there; it is tried again with the next checkpoint ({error})"
            )

    def finish(self, retries: int) -> None:
        """Copies the files that the store lacks. Raises `InputError`, with the local folder's name."""
        if self._thread is not None:
            self._thread.join()
        try:
            self.copy(retries, model=True)
        except InputError as error:
            raise type(error)(
                f"{self.url}: lacks the newest files, which are in {self.folder} ({error})"
            ) from None

    def copy(self, retries: int, *, model: bool = False) -> None:
        """Copies the records, then the checkpoints, then run.json.

        Whenever it is cut short, the metrics there reach up to each checkpoint there, and run.json claims no
        checkpoint that is not there. A resume leaves out the metrics behind its checkpoint.

        model: whether final/ is copied too. Checkpoints that are not kept are removed in the store.
        """
        stored = files_at(self.url, retries)
        folders = checkpoint_folders(self.folder / "checkpoints")
        names = [name for name in RECORDS if (self.folder / name).is_file()]
        names += self._new_files("tokenizer", stored)
        # metrics.jsonl before the checkpoints, run.json after them: see above.
        for name in names:
            if name != "run.json":
                self._upload(name, retries)
        for path in folders:
            self._copy_checkpoint(path, stored, retries)

        last = self._new_files("final", stored) if model else []
        if "run.json" in names:
            last.append("run.json")
        for name in last:
            self._upload(name, retries)
        steps = {step_of(path) for path in folders}
        if steps:
            self._prune(max(steps), len(steps), _steps(stored) - steps, retries)

    def _new_files(self, folder: str, stored: Files) -> list[str]:
        """The files of a folder of the run that the store lacks, or has as they were before this start."""
        names = []
        for file in sorted((self.folder / folder).rglob("*")):
            name = file.relative_to(self.folder).as_posix()
            if file.is_file():
                same = name in stored and stored[name].size == file.stat().st_size
                if not same or file.stat().st_mtime > self.begun:
                    names.append(name)
        return names

    def _upload(self, name: str, retries: int) -> None:
        file = self.folder / name
        if file.name == "config.yaml":
            # In the store it names the store, so that another machine can train on.
            recipe = re.sub(
                r"(?m)^output_dir: .*$", f"output_dir: {self.url}", file.read_text(), count=1
            )
            file = self.folder / ".mirrored" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, recipe)
        upload(file, f"{self.url}/{name}", retries)

    def _copy_checkpoint(self, path: Path, stored: Files, retries: int) -> None:
        """Copies a checkpoint that the store lacks, has in part, or has with other bytes."""
        prefix = f"checkpoints/{path.name}/"
        there = {name.removeprefix(prefix) for name in stored if name.startswith(prefix)}
        try:
            manifest = (path / MANIFEST).read_bytes()
            names = [f.relative_to(path).as_posix() for f in sorted(path.rglob("*")) if f.is_file()]
            # It goes last, see the top.
            names.remove(MANIFEST)
            names.append(MANIFEST)
            if MANIFEST in there and path.name not in self._sent:
                # Read once: later this process knows what it has sent.
                self._sent[path.name] = read_bytes(f"{self.url}/{prefix}{MANIFEST}", retries)
            if MANIFEST in there and self._sent[path.name] == manifest:
                # Since then a mark may have come or gone.
                names = [name for name in names if name not in there]
                if MARK in there and not (path / MARK).exists():
                    remove(f"{self.url}/{prefix}{MARK}", retries)
            elif there:
                # Another checkpoint of this step, from before a rollback, or one that was cut short.
                self._remove(path.name, retries)

            for name in names:
                self._upload(prefix + name, retries)
            self._sent[path.name] = manifest
        except (OSError, InputError):
            if path.exists():  # else it was removed meanwhile, and is needed no more
                raise

    def _prune(self, newest: int, count: int, others: set[int], retries: int) -> None:
        """Removes checkpoints that only the store has. others: their steps.

        Those after `newest` are from before a rollback or a return to an earlier step. Older ones go once the
        run's folder has `keep_last`; count: how many it has.
        """
        for step in sorted(others):
            for_good = self.keep.keep_every and step % self.keep.keep_every == 0
            if step > newest or (count >= self.keep.keep_last and not for_good):
                self._remove(f"step-{step}", retries)

    def _remove(self, checkpoint: str, retries: int) -> None:
        folder = f"{self.url}/checkpoints/{checkpoint}"
        remove(f"{folder}/{MANIFEST}", retries)
        remove(folder, retries)


def _steps(stored: Files) -> set[int]:
    """The steps of the checkpoints in the store, whole or not."""
    matches = (re.match(r"checkpoints/step-(\d+)/", name) for name in stored)
    return {int(match[1]) for match in matches if match}
