"""What several test files use."""

import functools
import gc
import math
import os
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any

from training import ENVIRONMENT, configured, tiny_recipe, write_recipe, write_texts

os.environ |= {**ENVIRONMENT, **os.environ}  # before torch and huggingface_hub read it

import kernel_device  # noqa: F401  before anything imports Triton: its own functions are interpreted too
import pytest

GOLDEN = (math.sqrt(5) - 1) / 2

# The process that hands tests out to workers loads this file too: fixtures import torch, which takes seconds.


def pytest_collection():
    """Collections of garbage pass over what was imported, half a second each."""
    gc.disable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Every fifteenth case of a function that is marked `sampled` is fast, and the others are slow.

    Steps of the golden ratio spread over all parameters, however many values each has.
    """
    seen: Counter[Any] = Counter()
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("slow"):
            if seen[item.function] * GOLDEN % 1 >= 1 / 15:
                item.add_marker(pytest.mark.slow)
            seen[item.function] += 1


def pytest_collection_finish():
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)  # a test makes little garbage and many objects that stay
    gc.enable()


@pytest.fixture(autouse=True)
def no_lines_by_time(monkeypatch):
    """A slow machine changes no output; tests of `Progress` set its pauses."""
    from nalanda.common import progress

    monkeypatch.setattr(progress, "FIRST", math.inf)
    monkeypatch.setattr(progress, "LAST", math.inf)


@pytest.fixture(autouse=True, scope="session")
def no_wait_for_the_disk():
    """`os.fsync` needs an open file, as ever. That a machine loses power is no test's subject."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: os.fstat(descriptor) and None)
        yield


@pytest.fixture(autouse=True, scope="session")
def no_version_is_read_twice():
    """Installed packages do not change, and every run asks for the versions of four."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metadata, "version", functools.cache(metadata.version))
        yield


@pytest.fixture
def waits(monkeypatch) -> list[float]:
    """Seconds between two tries, which pass at once."""
    from nalanda.storage import retry

    found: list[float] = []
    monkeypatch.setattr(retry, "sleep", found.append)
    return found


@pytest.fixture(scope="session")
def tokenizer():
    """A token for each byte, behind <|endoftext|>, id 0, which is put in front of what is encoded."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(
        models.BPE({token: i for i, token in enumerate(["<|endoftext|>", *alphabet])}, [])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|endoftext|>", eos_token="<|endoftext|>"
    )
    tokenizer.add_special_tokens({})
    return tokenizer


@pytest.fixture(scope="session")
def recipe(tmp_path_factory) -> Path:
    """A run of a few seconds; documents of 1 to 60 words, so that label counts differ from row to row."""
    folder = tmp_path_factory.mktemp("corpus")
    write_texts(folder / "a.jsonl", 1500, (1, 1, 1, 2, 60))
    recipe = tiny_recipe(
        folder,
        model={"mixer": "gated_deltanet", "num_hidden_layers": 1},
        train={"steps": 24, "tokens_per_step": 256, "micro_batch_size": 4},
        seed=3,
        tokenizer={"train": "bpe", "vocab_size": 320},
        data={"source": str(folder), "seq_len": 32, "shuffle_buffer": 50, "max_validation_rows": 7},
        schedule={"warmup_steps": 2},
        validation={"every": 10},
        checkpoint={"every": 5, "keep_last": 9},
    )
    return write_recipe(folder / "recipe.yaml", recipe)


@pytest.fixture
def fresh_accelerate():
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    # A precision of this test is not that of the next.
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="session")
def whole(recipe, tmp_path_factory) -> Path:
    """The run as nothing interrupts it."""
    from accelerate.state import AcceleratorState

    from nalanda.train.loop import train

    AcceleratorState._reset_state(
        reset_partial_state=True
    )  # this is made before `fresh_accelerate`
    return train(configured(recipe, tmp_path_factory.mktemp("runs") / "whole"))


@pytest.fixture(scope="session")
def s3_server():
    from buckets import buckets

    with buckets() as started:
        yield started


@pytest.fixture
def bucket(s3_server, tmp_path, monkeypatch):
    """An S3 server with an empty bucket, credentials in the environment, and an empty cache."""
    from buckets import environment
    from s3fs import S3FileSystem

    for name, value in environment(s3_server.endpoint).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NALANDA_CACHE", str(tmp_path / "cache"))
    s3_server.clear()
    S3FileSystem.clear_instance_cache()  # they keep the endpoint and the credentials of another test
    yield s3_server
    S3FileSystem.clear_instance_cache()
