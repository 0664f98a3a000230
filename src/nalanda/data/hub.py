"""Documents of Hugging Face Hub datasets."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from nalanda.common.errors import InputError, SourceUnavailable, first_line
from nalanda.common.text import redact
from nalanda.config.schema import DataConfig
from nalanda.data.documents import Document, Fields, Left, Shard, document_of, suffix_of
from nalanda.storage.retry import describe_error, persist, persistent

DOWNLOADED_SHARDS = 256
"""Shards into which a downloaded dataset is cut, so that their order can be shuffled."""


def is_hub_id(source: str) -> bool:
    """Whether `source` has the form OWNER/NAME."""
    return bool(re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", source)) and not suffix_of(source)


def pinned(data: DataConfig, source: str) -> dict[str, Any]:
    """The revision of `source` as an argument of the datasets library; {} for the newest."""
    return {"revision": data.revision} if data.revision and source == data.source else {}


def open_hub(data: DataConfig, source: str, split: str) -> tuple[list[Shard], bool]:
    """The shards of `split`, and whether the dataset has a validation split. Raises `InputError`."""
    import datasets

    # The library's own 20 silent retries of 5 s would hide a stall. Two short ones stay: they resume at a
    # byte, while `retry.persistent` reads the file again up to the position.
    config: Any = datasets.config
    config.STREAMING_READ_MAX_RETRIES = config.STREAMING_OPEN_MAX_RETRIES = 2
    for kind in ("READ", "READ_SERVER_UNAVAILABLE", "READ_RATE_LIMIT", "OPEN"):
        setattr(config, f"STREAMING_{kind}_RETRY_INTERVAL", 1)

    pin = pinned(data, source)

    def load() -> tuple[Any, bool, str]:
        names = datasets.get_dataset_split_names(source, data.name, **pin)
        separate = data.validation_split in names
        chosen = data.validation_split if split == "validation" and separate else data.train_split
        dataset = datasets.load_dataset(
            source, data.name, split=chosen, streaming=data.streaming, **pin
        )
        return dataset, separate, chosen

    try:
        dataset, separate, chosen = persist(load, f"Hub dataset {source}", data.retries)
    except SourceUnavailable:
        raise
    except Exception as error:  # datasets, huggingface_hub and httpx share no base class
        raise InputError(
            f"data.source: {source!r} is neither a local path nor a Hub dataset that can be loaded "
            f"({redact(first_line(error))})"
        ) from None
    if not data.streaming:
        dataset = dataset.to_iterable_dataset(
            num_shards=max(1, min(DOWNLOADED_SHARDS, len(dataset)))
        )

    name = "@".join([f"{source}/{data.name}/{chosen}", *pin.values()])
    fields, count = Fields.of(data), dataset.num_shards
    shards: list[Shard] = [
        HubShard(dataset, f"{name}:{i}/{count}", fields, i, count, data.retries)
        for i in range(count)
    ]
    return shards, separate


@dataclass(frozen=True)
class HubShard:
    """A part of a Hub dataset. The cursor is the dataset's own state."""

    single = False
    size = None
    dataset: Any = field(repr=False)
    name: str
    fields: Fields
    index: int
    count: int
    retries: int = 8

    def read(self, cursor: dict | None) -> Iterator[tuple[Document | Left, dict]]:
        try:
            yield from persistent(
                self._read_records, cursor, f"Hub dataset {self.name}", self.retries
            )
        except (InputError, MemoryError):
            raise
        except Exception as error:  # a broken file raises the error of the library that reads it
            raise InputError(
                f"Hub dataset {self.name}: cannot be read ({describe_error(error)})"
            ) from None

    def _read_records(self, cursor: dict | None) -> Iterator[tuple[Document | Left, dict]]:
        dataset = self.dataset.shard(num_shards=self.count, index=self.index)
        if cursor:
            dataset.load_state_dict(cursor)
        for record in dataset:
            document = document_of(record, self.fields, self.name)
            if isinstance(document, Document):
                # The library has read the record already, so its size is checked last.
                size = len(document.text.encode())
                if size > self.fields.max_bytes:
                    document = self.fields.oversized(self.name, size)
            yield document, dataset.state_dict()
