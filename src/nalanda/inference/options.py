"""How a model is loaded and a text continued, and checks of that. Imports neither torch nor transformers."""

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nalanda.common.errors import InputError
from nalanda.common.number_formats import LOADED, STATES, TORCH_NAMES, WEIGHTS, choose_format
from nalanda.common.text import option_of
from nalanda.config.bounds import check_seed


@dataclass(frozen=True)
class LoadOptions:
    """How a model is loaded; see `nalanda.inference.load.load_model`."""

    device: str | None = None
    """cpu, cuda, cuda:1, …; by default a GPU if there is one."""
    dtype: str = "auto"
    """auto (as saved), fp32, bf16, fp16 or fp64."""
    weights: str | None = None
    """int8: matrices in a byte a weight, for speed on a CPU; by default as saved."""
    trust_remote_code: bool = False
    """Run code from the checkpoint."""


@dataclass(frozen=True)
class PromptFiles:
    """Files that a continuation reads and writes."""

    file: str | None = None
    """Text file to continue; the prompt follows it."""
    states: str | None = None
    """Folder that keeps the file's state, so that it is read once."""
    state: str | None = None
    """Continue a state that --save-state wrote."""
    force: bool = False
    """Continue it though another tokenizer read its text."""
    save_state: str | None = None
    """Write the prompt's state to this file."""
    state_dtype: str | None = None
    """Keep states in fp32, bf16, int8 or fp8; by default as --state has them."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. top_p and top_k keep the likeliest tokens; 1 and 0 keep all."""

    max_new_tokens: int = 128
    """Length limit, unless the text ends earlier."""
    temperature: float = 0.8
    """Sampling temperature; 0 is greedy."""
    top_p: float = 1.0
    """Sample from the likeliest tokens with this total probability."""
    top_k: int = 0
    """Sample from at most this many tokens; 0: all."""
    seed: int | None = None
    """Seed of the sampling; by default every call differs."""


def sampling_options(sampling: Sampling) -> dict[str, Any]:
    """The options for transformers' `generate`. Raises InputError for values out of range."""
    length, temperature = sampling.max_new_tokens, sampling.temperature
    if length < 1:
        raise InputError(f"max_new_tokens is {length}: it must be at least 1")
    if not (temperature == 0 or 1e-6 <= temperature < math.inf):
        raise InputError(f"temperature is {temperature}: it must be 0 (greedy), or 1e-6 or more")
    if not 0 < sampling.top_p <= 1:
        raise InputError(f"top_p is {sampling.top_p}: it must be above 0 and at most 1")
    if sampling.top_k < 0:
        raise InputError(f"top_k is {sampling.top_k}: it must be 0 (all tokens) or above")
    check_seed(sampling.seed, "--seed")

    if temperature == 0:
        return {"max_new_tokens": length, "do_sample": False}
    return {
        "max_new_tokens": length,
        "do_sample": True,
        "temperature": temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
    }


CARDS = ("nvidia*", "nvhost*", "kfd", "dxg")
"""Linux's device files of GPUs: NVIDIA's, those of its boards, AMD's, and Windows's in WSL."""


def check_loading(loading: LoadOptions) -> None:
    """Raises `InputError` for an unknown format, and for CUDA on a machine without any GPU."""
    choose_format(loading.dtype, LOADED, "--dtype")
    if loading.weights is not None:
        choose_format(loading.weights, WEIGHTS, "--weights")
    device = loading.device or ""
    if sys.platform == "linux" and device.startswith("cuda"):
        if not any(any(Path("/dev").glob(pattern)) for pattern in CARDS):
            raise InputError(f"--device {device}: not on this machine, which has cpu")


def check_files(files: PromptFiles) -> None:
    """Raises `InputError` for a file to read that cannot be read, or an unknown format of states."""
    state_format(files.state_dtype)
    if files.state is not None:
        state_file(files.state)
    if files.file is not None:
        path = Path(files.file).expanduser()
        # Not from a pipe, which can be read once.
        if path.is_file() or path.is_dir() or not path.exists():
            read_prompt(None, path)


def check_chat(chat: bool, prompt: str | None, files: PromptFiles) -> None:
    """Raises `InputError` for a chat without a prompt, or with files that continue a text."""
    if not chat:
        return
    for name in ("file", "state", "states", "save_state"):
        if getattr(files, name) is not None:
            raise InputError(
                f"--chat asks one question, without {option_of(name)}; "
                "examples/chat/chat.py carries a state from turn to turn"
            )
    if not prompt:
        raise InputError("--chat: no question; give a prompt")


def state_format(name: str | None) -> str | None:
    """torch's name of a format of states; None for none. Raises `InputError` for an unknown one."""
    if name is None:
        return None
    short = choose_format(name, STATES, "--state-dtype")
    return TORCH_NAMES.get(short, short)


def read_prompt(prompt: str | None, file: str | Path | None) -> str | None:
    """The text of a prompt, of standard input (`-`) or of a file. Raises InputError."""
    try:
        # Decoded here, because text streams drop \r.
        if file is not None:
            text = Path(file).expanduser().read_bytes().decode("utf-8-sig")
        elif prompt == "-":
            text = sys.stdin.buffer.read().decode("utf-8-sig")
        else:
            text = prompt
        (text or "").encode()  # arguments may hold bytes that are no text
    except (OSError, UnicodeError) as error:
        reason = "not UTF-8; save it as UTF-8"
        if isinstance(error, OSError):
            reason = f"{error.strerror}; name a text file"
        raise InputError(f"cannot read {file or 'the prompt'}: {reason}") from error
    return text


def state_file(name: str | Path) -> Path:
    """The file of a saved state. Raises `InputError` if there is none."""
    path = Path(name).expanduser()
    if path.is_dir():
        raise InputError(f"{path}: a folder; name a file with a state")
    if not path.exists():
        raise InputError(f"{path}: no such file; write one with --save-state")
    if not path.is_file():
        raise InputError(f"{path}: a device or a pipe; name a file with a state")
    return path
