"""The answer cache: log-likelihoods in a file, so that a killed run resumes and no text is read twice."""

import contextlib
import hashlib
import importlib.metadata
import inspect
import json
import math
import sqlite3
import struct
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import nalanda_kernels
from transformers import PreTrainedModel

from nalanda.common.errors import DiskFull, InputError
from nalanda.common.products import product_route
from nalanda.model.state import fingerprint
from nalanda_eval import scoring
from nalanda_eval.scoring import Answer, Request

ANSWER = struct.Struct("<d?")


class AnswerCache:
    """Answers by everything that determines them: model, device, versions, code and the request's token ids.

    The ids include the effects of the tokenizer, of bos and of truncation; a model's name does not count.
    Several processes may open the same file. An answer is stored with a hash of itself and its request,
    because SQLite does not detect flipped bits.
    """

    def __init__(self, path: Path | None, identity: dict[str, Any]):
        """path: an SQLite file, or None to keep answers in memory only. identity: see `model_identity`."""
        self.path = path
        self.identity = json.dumps(identity, sort_keys=True, default=str).encode()
        with _explain_errors(path):
            self.file = sqlite3.connect(":memory:" if path is None else path, timeout=60)
            self.file.execute(
                "CREATE TABLE IF NOT EXISTS kept (request BLOB PRIMARY KEY, answer BLOB)"
            )

    def find(self, requests: Iterable[Request]) -> dict[Request, Answer]:
        """The cached answers among those to `requests`."""
        answers = {}
        with _explain_errors(self.path):
            for request in requests:
                key = self._hash_request(request)
                row = self.file.execute("SELECT answer FROM kept WHERE request = ?", [key])
                for (sealed,) in row:
                    answer = sealed[: ANSWER.size] if isinstance(sealed, bytes) else b""
                    if len(answer) < ANSWER.size or sealed != _seal_answer(key, answer):
                        raise sqlite3.DatabaseError("an answer in it is damaged")
                    answers[request] = ANSWER.unpack(answer)
        return answers

    def keep(self, answers: dict[Request, Answer]) -> None:
        rows = []
        for request, (logp, greedy) in answers.items():
            if not math.isnan(logp):  # of a broken model
                key = self._hash_request(request)
                rows.append((key, _seal_answer(key, ANSWER.pack(logp, greedy))))
        with _explain_errors(self.path), self.file:
            self.file.executemany("INSERT OR REPLACE INTO kept VALUES (?, ?)", rows)

    def close(self) -> None:
        self.file.close()

    def _hash_request(self, request: Request) -> bytes:
        context, continuation = request
        # The context's length first: else another split of the same ids would have this key.
        tokens = array("q", (len(context), *context, *continuation)).tobytes()
        return hashlib.sha256(self.identity + tokens).digest()[:16]


def model_identity(model: PreTrainedModel) -> dict[str, Any]:
    """Everything besides the request that an answer depends on."""
    config = model.config.to_dict()
    config.pop("_name_or_path", None)

    # A changed file of code makes all answers new, since it may change them.
    files = [Path(scoring.__file__)]
    files += sorted(Path(inspect.getfile(type(model))).parent.glob("*.py"))
    if config["model_type"] == "nalanda":
        kernels = Path(nalanda_kernels.__file__).parent.rglob("*")
        files += sorted(file for file in kernels if file.suffix in (".py", ".cpp", ".h"))
    code = hashlib.sha256()
    for file in files:
        code.update(file.read_bytes())
    return {
        "weights": fingerprint(model),
        "config": config,
        "device": model.device.type,
        "products": product_route(),
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers")},
        "code": code.hexdigest(),
    }


@contextlib.contextmanager
def _explain_errors(path: Path | None) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        # The low byte of an extended code is its primary one.
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code == sqlite3.SQLITE_FULL:
            raise DiskFull(
                f"{path}: the disk is full; the answers before are kept: make room, and start again"
            ) from error
        advice = "remove it, or use another directory"
        if code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR):
            advice = "use another directory"
        raise InputError(f"{path}: cannot keep answers ({error}); {advice}") from error


def _seal_answer(key: bytes, answer: bytes) -> bytes:
    """An answer followed by its hash."""
    return answer + hashlib.sha256(key + answer).digest()[:8]
