"""A stand-in for CUDA on a CPU: `--dry-run` runs the lines that a card would run."""

import contextlib
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

NAME = "a CPU, dry"
IDLE = ("_sleep", "synchronize", "empty_cache", "reset_peak_memory_stats")


class Event:
    def __init__(self, **_: Any):
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: "Event") -> float:
        return 1e3 * (end.at - self.at) + 1e-6


class Stream:
    def wait_stream(self, other: "Stream") -> None:
        pass


class Graph:
    def replay(self) -> None:
        pass


@contextlib.contextmanager
def cuda() -> Iterator[None]:
    """`torch.cuda` with clocks, streams and graphs that do nothing; `is_available` stays false."""
    fakes: dict[str, Any] = {
        "Event": Event,
        "Stream": Stream,
        "CUDAGraph": Graph,
        "current_stream": Stream,
        "get_device_name": lambda *_: NAME,
        "get_device_properties": lambda *_: SimpleNamespace(
            L2_cache_size=2**10, multi_processor_count=132
        ),
        "max_memory_allocated": lambda *_: 2**30,
        **{
            name: lambda *_: None for name in IDLE
        },  # a function each: the compiler tells them apart
        **{name: lambda *_: contextlib.nullcontext() for name in ("stream", "graph")},
    }
    with mock.patch.multiple(torch.cuda, **fakes):
        yield
