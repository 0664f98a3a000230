"""A run in a store: it works in a local folder, and its finished checkpoints are copied to the store.

A checkpoint's manifest is uploaded last and removed first, so one that is cut short is not taken for a whole
one. Copying runs in a thread beside the training. If it fails, it is tried again with the next checkpoint.

Machines that share no disk have a folder each, which holds the files of their own processes:

1. The first process of each machine uploads the files of its folder, then `part-R.json`, a list of them.
2. The main process uploads its files. Once the lists have the rest, it uploads the manifest.
3. A machine that loads the checkpoint downloads the files that its folder lacks.

The machines meet in the store alone: a thread makes no collective, and no upload waits for a lost machine.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import gather_object

from nalanda.common.errors import InputError
from nalanda.common.files import discard, new_folder, verify_manifest, write_atomically
from nalanda.config.load import read_sections
from nalanda.config.schema import CheckpointConfig, RunConfig, write_yaml
from nalanda.storage.cache import cache
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
from nalanda.train.launch import first_to_see, from_main_process, on_every_process, on_main_process

RETRIES = 3
"""Tries of a copy beside the training, which the next checkpoint repeats."""

PAUSE = 5.0
"""Seconds between two looks for the parts of other machines."""

PATIENCE = 300.0
"""Seconds that a run which was stopped waits for the parts of other machines. A finished one need not wait."""

RECORDS = ("config.yaml", "run.json", "metrics.jsonl", "tracker.json")
"""Files of a run that a resume needs beside its checkpoint and tokenizer."""

MANIFEST = "manifest.json"

PART = re.compile(r"part-\d+\.json")
"""Lists of the files that a machine has uploaded. Once the manifest is there, they are removed."""

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
    """Fetches the files that a resume needs; at the end, copies the rest. All processes must enter it.

    Its own error is raised only if the block raised none.
    """
    if mirror is None:
        yield
        return
    mirror.fetch()
    try:
        yield
    except BaseException as error:
        # The processes stop for these together; after another error they may be gone.
        agreed = isinstance(error, SystemExit | InputError)
        # In a thread: here the run's error would be taken for the cause of the store's, and so for final.
        with ThreadPoolExecutor(1) as thread:
            patience = PATIENCE if agreed else 0.0
            problem = thread.submit(mirror.finish, retries=1, patience=patience).exception()
        if problem is not None:
            mirror.say(str(problem))
        raise
    mirror.finish(mirror.retries)


class Mirror:
    """Copies a run's folder to the folder `url` of a store. Every process has one; the first of each folder
    copies.

    Attributes:
        first: the lowest rank that works in this process's folder.
        several: whether machines have folders of their own.
    """

    def __init__(self, folder: Path, url: str, keep: CheckpointConfig, retries: int):
        self.folder, self.url, self.keep, self.retries = folder, url.rstrip("/"), keep, retries
        self.checkpoints = folder / "checkpoints"
        self.rank = self.first = 0
        self.several = False
        self.begun = time.time()
        self._copies_parts = False  # from `clear_remains` on, if machines have folders of their own
        # By checkpoint: the manifest that the store has, and that of the files which went there.
        self._sent: dict[str, bytes] = {}
        self._sent_parts: dict[str, bytes] = {}
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def meet(self, accelerator: Accelerator) -> None:
        """Finds out which processes share a folder. All must call it."""
        cache().mkdir(parents=True, exist_ok=True)
        self.rank = accelerator.process_index
        self.first = first_to_see(cache(), accelerator)
        self.several = any(gather_object([self.first]))

    @property
    def copies(self) -> bool:
        """Whether this process copies its folder."""
        return self.rank == self.first

    def say(self, line: str) -> None:
        print(f"nalanda: {line}", file=sys.stderr, flush=True)

    # ------------------------------ from the store

    def fetch(self) -> None:
        """Downloads the newest whole checkpoint and the run's records into the main process's folder, if the
        store is ahead of it. All processes must call it.

        Raises:
            InputError: the store cannot be read, or has other files than a run.
        """
        main = self.rank == 0
        if self.several:
            if self.copies and not main:
                # In an earlier start this machine may have been the first, whose records they are.
                self.checkpoints.mkdir(exist_ok=True)
                for name in RECORDS:
                    (self.folder / name).unlink(missing_ok=True)

            # The last start may have been cut short before the parts were put together.
            unsent = on_main_process(main, self._list_unsent)
            folders = checkpoint_folders(self.checkpoints) if self.copies else []
            self._put_together([p for p in folders if unsent.get(p.name) == _manifest_of(p)])
        if main:
            self._fetch_newest()

    def _list_run(self) -> Files:
        """The files in the store. Raises `InputError` if they are of no run."""
        stored = files_at(self.url, self.retries)
        if stored and not {"config.yaml", "run.json", "metrics.jsonl"} & stored.keys():
            raise InputError(
                f"{self.url} has files that are no run of Nalanda's; choose another output_dir"
            )
        return stored

    def _list_unsent(self) -> dict[str, bytes]:
        """The checkpoints of this folder after the newest whole one of the store, each with its manifest."""
        newest = max(_whole_steps(self._list_run()), default=-1)
        folders = [path for path in checkpoint_folders(self.checkpoints) if step_of(path) > newest]
        return {path.name: _manifest_of(path) for path in folders}

    def _fetch_newest(self) -> None:
        self.say(f"{self.url}: the run works in {self.folder} and is copied from there")
        stored = self._list_run()
        folders = [path for path in checkpoint_folders(self.checkpoints) if not _lacks_files(path)]
        newest = max(map(step_of, folders), default=-1)

        # A checkpoint without its manifest is still on its way, or being removed.
        ahead = sorted((step for step in _whole_steps(stored) if step > newest), reverse=True)
        # From the newest on, until one is undamaged.
        fetched = any(self.complete(self.checkpoints / f"step-{step}") for step in ahead)

        # Records belong to the checkpoint: without a newer one, those of the folder stay.
        if fetched or not (self.folder / "config.yaml").is_file():
            for name, file in stored.items():
                if name in RECORDS or name.startswith("tokenizer/"):
                    download(file, self.folder / name, self.retries)

    def complete(self, path: Path) -> bool:
        """Downloads the files that the checkpoint `path` of this folder lacks; returns whether it is whole."""
        # Other machines may have a checkpoint of this step from before a rollback: they ask the store.
        if self.rank == 0 and path.exists() and not _lacks_files(path):
            return True
        url = f"{self.url}/checkpoints/{path.name}"
        stored = files_at(url, self.retries)
        if MANIFEST not in stored:
            return False

        manifest = read_bytes(f"{url}/{MANIFEST}", self.retries)
        names = (_entries(manifest).keys() | {MANIFEST, MARK}) & stored.keys()
        temporary = path.with_name(f".tmp-{path.name}")
        discard(temporary)
        # The files that are here are used, unless they are of another checkpoint or damaged.
        folders = [path] * (_manifest_of(path) == manifest) + [temporary]
        problem = None
        for folder in folders:
            for name in sorted(names):
                if not (folder / name).is_file():
                    download(stored[name], folder / name, self.retries)
            problem = verify_manifest(folder)
            if problem is None:
                break

        if problem is not None:
            self.say(f"{url}/: damaged, passed over: {problem}")
            discard(temporary)
        elif folder == temporary:
            discard(path)
            temporary.rename(path)
        return problem is None

    def bring(self, path: Path | None) -> Path | None:
        """The checkpoint that the main process has chosen, as the folder of this process. All must call it.

        Each machine then has it whole. Raises `InputError` if one cannot.
        """
        of_run = path is not None and path.parent == self.checkpoints
        path, of_run = from_main_process((path, of_run))
        if path is None or not (of_run and self.several):
            return path
        path = self.checkpoints / path.name  # the main process's folder may be elsewhere
        on_main_process(self.rank == 0, lambda: self._copy_checkpoints([path], self.retries))
        on_every_process(lambda: self.require(path))
        return path

    def require(self, path: Path) -> None:
        """`complete`, on the process that copies. Raises `InputError` if the checkpoint is not whole then."""
        if self.copies and not self.complete(path):
            raise InputError(
                f"{self.url}/checkpoints/{path.name}: damaged or cut short; set train.resume to an earlier "
                "checkpoint"
            )

    def share(self, name: str) -> None:
        """Copies a folder of the run from the main process to the folders of other machines. All must call it."""
        if not self.several:
            return
        folder = self.folder / name
        files = [file for file in folder.rglob("*") if file.is_file()] if self.rank == 0 else []
        contents = {file.relative_to(folder).as_posix(): file.read_bytes() for file in files}
        contents = from_main_process(contents)

        def write() -> None:
            if self.copies and self.rank != 0:
                with new_folder(folder, replace=True) as new:
                    for file, content in contents.items():
                        (new / file).parent.mkdir(parents=True, exist_ok=True)
                        (new / file).write_bytes(content)

        on_every_process(write)

    # ------------------------------ to the store

    def clear_remains(self) -> None:
        """Removes the checkpoints of earlier starts that nobody can complete, here and in the store, and those of
        the store that are later than all here. Called once a start is set up."""
        if self.several and self.copies:
            self._copies_parts = True
            for path in checkpoint_folders(self.checkpoints):
                if _lacks_files(path):
                    discard(path)

        folders = checkpoint_folders(self.checkpoints)
        if self.rank == 0:
            # Now, before any process uploads to them again.
            stored = files_at(self.url, self.retries)
            for step in _steps(stored):
                later = folders and step > step_of(folders[-1])
                if later or step not in _whole_steps(stored):
                    self._remove(f"step-{step}", self.retries)

    def start_copy(self) -> None:
        """Copies in a thread, unless an earlier copy still runs. The next copy then brings the files it lacks."""
        if self.copies and (self._thread is None or not self._thread.is_alive()):
            # A daemon: a process that fails does not wait for it.
            self._thread = threading.Thread(target=self._try, name="nalanda-mirror", daemon=True)
            self._thread.start()

    def _try(self) -> None:
        try:
            # Again, until the parts of other machines are there.
            while self.copy(RETRIES) and not self._stop.wait(PAUSE):
                pass
        except Exception as error:  # training goes on without the store
            self.say(
                f"{self.url}: not copied there; it is tried again with the next checkpoint ({error})"
            )

    def _wait(self) -> None:
        """Waits for the copy that runs."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._stop.clear()

    def put_together(self) -> None:
        """Copies the checkpoints of all machines. All processes must call it.

        Raises:
            InputError: a machine cannot write to the store.
        """
        if self.several:
            self._wait()
            self._put_together(self._folders())

    def _put_together(self, folders: list[Path]) -> None:
        """`put_together` for these checkpoints of each folder."""
        retries = self.retries
        on_every_process(lambda: self.copies and self._copy_checkpoints(folders, retries))
        # Now all parts are there. The main process uploads the manifests.
        on_main_process(self.rank == 0, lambda: self._copy_checkpoints(folders, retries))

    def finish(self, retries: int, patience: float = 0.0) -> None:
        """Copies the files that the store lacks. Raises `InputError`, with the local folder's name.

        patience: seconds to wait for the parts of other machines.
        """
        if not self.copies:
            return
        self._wait()
        until = time.monotonic() + patience
        try:
            while (left := self.copy(retries, model=True)) and time.monotonic() < until:
                time.sleep(PAUSE)
            if left:
                raise InputError(f"{left[-1].name} lacks the files of other machines")
        except InputError as error:
            raise type(error)(
                f"{self.url}: lacks the newest files, which are in {self.folder} ({error})"
            ) from None

    def copy(self, retries: int, *, model: bool = False) -> list[Path]:
        """Copies the records, then the checkpoints, then run.json. A machine without the main process copies its
        parts of checkpoints.

        Whenever it is cut short, the metrics there reach up to each checkpoint there, and run.json claims no
        checkpoint that is not there. A resume leaves out the metrics behind its checkpoint.

        model: whether final/ is copied too. Checkpoints that are not kept are removed in the store.

        Returns the checkpoints that lack the parts of other machines there.
        """
        folders = self._folders()
        if self.rank != 0:
            self._copy_checkpoints(folders, retries)
            return []

        stored = files_at(self.url, retries)
        names = [name for name in RECORDS if (self.folder / name).is_file()]
        names += self._new_files("tokenizer", stored)
        # metrics.jsonl before the checkpoints, run.json after them: see above.
        for name in names:
            if name != "run.json":
                self._upload(name, retries)
        left = self._copy_checkpoints(folders, retries)

        models = [path.name for path in self.folder.glob("final-ema-*")] + ["final"]
        last = [name for folder in models for name in self._new_files(folder, stored) if model]
        if "run.json" in names and not left:
            last.append("run.json")
        for name in last:
            self._upload(name, retries)
        complete_steps = {step_of(path) for path in folders if path not in left and path.exists()}
        if complete_steps:
            older = {step for step in _steps(stored) if step < max(complete_steps)}
            self._prune(len(complete_steps), older - set(map(step_of, folders)), retries)
        return left

    def _folders(self) -> list[Path]:
        """The checkpoints to copy. The main process copies parts as well, and the others parts alone."""
        folders = checkpoint_folders(self.checkpoints) if self.copies else []
        kinds = {False} if self.rank == 0 else set()
        if self._copies_parts:
            kinds.add(True)
        return [path for path in folders if _lacks_files(path) in kinds]

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
        if file.name != "config.yaml":
            upload(file, f"{self.url}/{name}", retries)
            return
        # In the store it names the store, so that another machine can train on.
        recipe = read_sections(file) | {"output_dir": self.url}
        self._upload_text(write_yaml(recipe), name, retries)

    def _upload_text(self, text: str, name: str, retries: int) -> None:
        file = self.folder / ".mirrored" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, text)
        upload(file, f"{self.url}/{name}", retries)

    def _copy_checkpoints(self, folders: list[Path], retries: int) -> list[Path]:
        """Copies these checkpoints; returns those that still lack parts there."""
        stored, left = files_at(self.url, retries), []
        for path in folders:
            try:
                if not self._copy_checkpoint(path, stored, retries):
                    left.append(path)
            except (OSError, InputError):
                if path.exists():  # else it was removed meanwhile, and is needed no more
                    raise
        return left

    def _copy_checkpoint(self, path: Path, stored: Files, retries: int) -> bool:
        """Copies a checkpoint that the store lacks, has in part, or has with other bytes.

        Returns whether this process has nothing more to do for it.
        """
        prefix = f"checkpoints/{path.name}/"
        url = f"{self.url}/{prefix}"
        # An error if it was removed meanwhile: without a manifest it would be taken for another checkpoint.
        manifest = (path / MANIFEST).read_bytes()
        entries = _entries(manifest)
        stored_names = {name.removeprefix(prefix) for name in stored if name.startswith(prefix)}
        available = {name for name in entries if (path / name).is_file()}

        if MANIFEST in stored_names and path.name not in self._sent:
            # Read once: later this process knows what it has sent.
            self._sent[path.name] = read_bytes(url + MANIFEST, retries)
        is_complete = MANIFEST in stored_names and self._sent[path.name] == manifest
        if not is_complete and MANIFEST in stored_names:
            # Another checkpoint of this step, from before a rollback.
            remove(url + MANIFEST, retries)

        # `clear_remains` may have removed files that went there.
        sent = self._sent_parts.get(path.name) == manifest and available <= stored_names
        if not is_complete and not sent:
            list_name = f"part-{self.rank}.json"
            if list_name in stored_names:  # a list of other files
                remove(url + list_name, retries)
            for name in sorted(available):
                self._upload(prefix + name, retries)
            if self.rank != 0:
                text = json.dumps({"manifest": _digest(manifest), "files": sorted(available)})
                self._upload_text(text, prefix + list_name, retries)
            self._sent_parts[path.name] = manifest
        if self.rank != 0:
            return True

        # Since the last copy a mark may have come or gone.
        if MARK in stored_names and not (path / MARK).exists():
            remove(url + MARK, retries)
        elif MARK not in stored_names and (path / MARK).exists():
            self._upload(prefix + MARK, retries)

        if not is_complete:
            # Those of other machines count by their lists.
            if available != entries.keys():
                lists = [name for name in files_at(url, retries) if PART.fullmatch(name)]
                stored_names.update(lists)
                available.update(*(self._files_of(url + name, manifest) for name in lists))
            if available != entries.keys():
                return False
            # It goes last, see the top.
            self._upload(prefix + MANIFEST, retries)
            self._sent[path.name] = manifest

        # The lists, and files from before a rollback to other processes.
        for name in stored_names - entries.keys() - {MANIFEST, MARK}:
            remove(url + name, retries)
        return True

    def _files_of(self, url: str, manifest: bytes) -> set[str]:
        """The files of this checkpoint that a machine has uploaded, by its list."""
        listing = json.loads(read_bytes(url, self.retries, b"{}"))  # removed at this moment
        return set(listing["files"]) if listing.get("manifest") == _digest(manifest) else set()

    def _prune(self, count: int, steps: set[int], retries: int) -> None:
        """Removes older checkpoints that only the store has, once the run's folder has `keep_last`.

        count: how many it has. steps: those of the store.
        """
        for step in sorted(steps):
            if count >= self.keep.keep_last and not self.keep.keeps_for_good(step):
                self._remove(f"step-{step}", retries)

    def _remove(self, checkpoint: str, retries: int) -> None:
        folder = f"{self.url}/checkpoints/{checkpoint}"
        remove(f"{folder}/{MANIFEST}", retries)
        remove(folder, retries)


def _steps(stored: Files) -> set[int]:
    """The steps of the checkpoints in the store, whole or not."""
    matches = (re.match(r"checkpoints/step-(\d+)/", name) for name in stored)
    return {int(match[1]) for match in matches if match}


def _whole_steps(stored: Files) -> set[int]:
    """The steps of the checkpoints in the store that have a manifest."""
    return {step for step in _steps(stored) if f"checkpoints/step-{step}/{MANIFEST}" in stored}


def _manifest_of(path: Path) -> bytes:
    """The manifest of a checkpoint; b"" without one."""
    file = path / MANIFEST
    return file.read_bytes() if file.is_file() else b""


def _entries(manifest: bytes) -> dict[str, dict]:
    """The entries of a manifest, by the files' names; {} if it is damaged."""
    try:
        return dict(json.loads(manifest)["files"])
    except (ValueError, KeyError, TypeError):
        return {}


def _digest(manifest: bytes) -> str:
    return hashlib.sha256(manifest).hexdigest()


def _lacks_files(path: Path) -> bool:
    """Whether the folder of a checkpoint has only a part of it, or no manifest."""
    names = _entries(_manifest_of(path))
    return not names or not all((path / name).is_file() for name in names)
