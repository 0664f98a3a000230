"""Streams the continuation of a prompt or of a saved state."""

import hashlib
import inspect
import json
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from filelock import FileLock
from jinja2 import TemplateError
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from nalanda.common.errors import InputError, first_line, output_file, output_folder
from nalanda.common.processes import peak_resident
from nalanda.common.progress import Progress
from nalanda.common.text import option_of, size
from nalanda.data.tokenizer import tokenizer_fingerprint
from nalanda.inference.load import (
    after_bos,
    bos_token,
    check_chat_template,
    check_tokens,
    end_tokens,
    is_ours,
    load_model,
    number_check,
    tokens_behind,
)
from nalanda.inference.options import (
    LoadOptions,
    PromptFiles,
    Sampling,
    check_chat,
    read_prompt,
    sampling_options,
    state_file,
    state_format,
)
from nalanda.model import NalandaCache, State
from nalanda.model.cache import cache_of
from nalanda.model.precision import check_state_dtype
from nalanda.model.state import fingerprint

PIECE = 4096
"""Tokens of a prompt read between updates of the progress."""

REPLACEMENT = "\ufffd"
"""Stands in decoded text for bytes that form no character, yet or at all."""

MAX_BYTES = 4
"""Bytes of a character in UTF-8, at most."""


def decode(tokenizer: PreTrainedTokenizerBase, tokens: list[int] | Tensor) -> str:
    """Text without special tokens. Spaces are not cleaned up, which would change text that came before."""
    text = tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return str(text)


class Printer(BaseStreamer):
    """Prints generated tokens as soon as they form characters, up to a stop text, and keeps the tokens.

    It prints the text of prompt and answer from the end of the prompt's last whole character. Printed text
    stays where later bytes change how those before them decode, as bytes that form no character may.

    before: tokens of the prompt, whose end decides whether the first word begins with a space.
    """

    CONTEXT, WINDOW = 8, 64  # tokens: as many are decoded again, at least and at most

    def __init__(self, tokenizer: PreTrainedTokenizerBase, before: list[int], stop: str = ""):
        self.tokenizer = tokenizer
        self.stop = stop
        self.tokens: list[int] = []  # generated
        self.ahead = ""  # text that is decoded and not yet printed
        self.prompt_is_next = True

        # Decode from the prompt's last whole character on.
        # A token has at least one byte, so a cut character spans fewer than MAX_BYTES of them.
        complete = len(before)
        for end in range(len(before), max(len(before) - MAX_BYTES, -1), -1):
            if not self._decode(before[:end]).endswith(REPLACEMENT):
                complete = end
                break
        self.window = before[:complete]  # tokens that are decoded together
        self.printed = self._decode(self.window)  # the text of the window that is printed
        self._shorten_window()
        self.window = self.window + before[complete:]
        self.waiting = len(before) - complete  # tokens after the last whole character

    @property
    def stopped(self) -> bool:
        """Whether the stop text has come."""
        return bool(self.stop) and self.stop in self.ahead

    def _decode(self, tokens: list[int]) -> str:
        return decode(self.tokenizer, tokens)

    def _shorten_window(self) -> None:
        """Keeps only the last tokens of the window, if they decode to the end of the printed text."""
        for count in range(self.CONTEXT, min(self.WINDOW, len(self.window))):
            text = self._decode(self.window[-count:])
            if text and self.printed.endswith(text):
                self.window = self.window[-count:]
                self.printed = text
                return

    def put(self, value: Tensor) -> None:
        """Takes tokens from `generate`, which first puts the prompt."""
        if self.prompt_is_next:
            self.prompt_is_next = False
            return
        for token in value.flatten().tolist():
            self.tokens.append(token)
            self.window.append(token)
            self.waiting += 1
            self._print_characters()

    def _print_characters(self) -> None:
        """Prints the window's new text, unless it ends within a character."""
        text = self._decode(self.window)
        within_character = text.endswith(REPLACEMENT)
        if within_character and self.waiting < MAX_BYTES:
            return
        self._print_new(text, open_end=True)
        if len(self.window) > self.WINDOW and not within_character:
            self._shorten_window()

    def _print_new(self, text: str, open_end: bool) -> None:
        """Prints the new end of the window's text; open_end: the last byte may begin a character."""
        if not text.startswith(self.printed):
            # Bytes that form no character have changed those before them: begin a new window.
            self.window = self.window[len(self.window) - self.waiting :]
            self.printed = ""
            text = self._decode(self.window)
        if open_end:
            text = text.removesuffix(REPLACEMENT)
        self._print_until_stop(text[len(self.printed) :])
        self.printed = text
        self.waiting = 0

    def _print_until_stop(self, text: str) -> None:
        """Prints text, and holds back an end that may become the stop text."""
        self.ahead += text
        ready = len(self.ahead)
        if self.stop in self.ahead and self.stop:
            ready = self.ahead.index(self.stop)
        elif self.stop:
            # The longest end that begins the stop text waits; all before it is ready.
            ready = next(
                i for i in range(len(self.ahead) + 1) if self.stop.startswith(self.ahead[i:])
            )
        print(self.ahead[:ready], end="", flush=True)
        self.ahead = self.ahead[ready:]

    def end(self) -> None:
        self._print_new(self._decode(self.window), open_end=False)
        print(self.ahead.split(self.stop)[0] if self.stop else self.ahead, flush=True)
        self.ahead = ""


def read_with_progress(
    model: Any, tokens: list[int], state: State | None = None, state_dtype: str | None = None
) -> State:
    """`model.read`, with progress on stderr for long texts."""
    ids = torch.tensor([tokens], device=model.device)  # [1, T]
    progress = Progress("reading", len(tokens), "tokens", quiet=len(tokens) <= PIECE)
    # Callers add no special tokens: a bos at the start of a piece belongs to the text and needs no warning.
    with warnings.catch_warnings(action="ignore", category=UserWarning), progress:
        # A piece at a time bounds the memory: the state holds what came before.
        for piece in ids.split(PIECE, 1):
            state = model.read(piece, state=state, state_dtype=state_dtype)
            progress.advance(piece.shape[1])
    assert state is not None, "no tokens"
    return state


def fingerprint_of(tokenizer: PreTrainedTokenizerBase | None) -> str | None:
    """The fingerprint that state files have of a tokenizer; None for one without a fast version."""
    if tokenizer is None or not tokenizer.is_fast:
        return None
    return tokenizer_fingerprint(tokenizer)


def load_state(
    path: str | Path, model: Any, tokenizer: PreTrainedTokenizerBase | None = None
) -> State:
    """The saved state of one text.

    Raises InputError if it cannot be read, has several texts, or belongs to another model or tokenizer.
    """
    if not is_ours(model):
        raise InputError(
            f"{model.config.model_type} models have no state to load; leave the state file out"
        )
    path, fingerprint = state_file(path), fingerprint_of(tokenizer)
    # The code that an older export copied takes no tokenizer.
    checks = "tokenizer" in inspect.signature(model.load_state).parameters
    try:
        state = model.load_state(path, fingerprint) if checks else model.load_state(path)
    except (OSError, ValueError) as error:
        raise InputError(first_line(error)) from error
    if state.batch_size > 1:
        raise InputError(f"{path}: the state of {state.batch_size} texts; save that of one")
    return state


def cache_bytes(cache: Any) -> int:
    """Bytes of tensors in any cache of transformers."""
    if isinstance(cache, NalandaCache):
        return cache.nbytes
    values = tree_leaves([vars(layer) for layer in getattr(cache, "layers", ())])
    return sum(value.nbytes for value in values if isinstance(value, Tensor))


def peak_memory(device: torch.device) -> str:
    """The process's peak GPU memory, or its peak resident memory on a CPU."""
    if device.type == "cuda":
        return f"{torch.cuda.max_memory_allocated(device) / 2**20:.0f} MiB of GPU memory at most"
    peak = peak_resident() or 0
    return f"{peak / 2**20:.0f} MiB resident at most"


def describe_speed(new: int, seconds: float, cache: Any, device: torch.device) -> str:
    """The line on stderr after an answer."""
    state = f"{size(cache_bytes(cache))} of state, " if cache is not None else ""
    return f"{new} tokens in {seconds:.1f} s, {new / seconds:.0f} tokens/s; {state}{peak_memory(device)}"


def generate(
    model: str,
    prompt: str | None = None,
    files: PromptFiles = PromptFiles(),
    sampling: Sampling = Sampling(),
    loading: LoadOptions = LoadOptions(),
    *,
    chat: bool = False,
    stream: bool = True,
) -> str:
    """Continues `prompt`, prints each token as it is generated, and returns the continuation.

    Args:
        model: a checkpoint directory or hub id, see `load_model`.
        prompt: the text to continue; `-` reads it from standard input. None continues what `files` give.
        files: a file to read before `prompt`, a folder that keeps its state (`kept_state`), a state that both
            continue, and a file for the state after the prompt, before the continuation.
        sampling: the end-of-text token ends the continuation before `max_new_tokens`.
        chat: the prompt is a user's turn, rendered by the chat template; the continuation is the answer.
        stream: print prompt and continuation to stdout, of a chat the answer alone, and speed and memory to stderr.
    """
    check_chat(chat, prompt, files)
    before, text = read_prompt(None, files.file), read_prompt(prompt, None)
    options = sampling_options(sampling)
    files = replace(files, state_dtype=state_format(files.state_dtype))
    new_file, folder = check_outputs(files)

    network, tokenizer = load_model(model, **vars(loading))
    options |= end_tokens(network, tokenizer) | number_check(network)
    check_states(files, network)
    if chat:
        check_chat_template(tokenizer, model, "--chat")
        text = render_chat(tokenizer, [{"role": "user", "content": text or ""}])

    state, tokens = prepare_prompt(before, text, network, tokenizer, files, folder)

    # After loading, which may draw random numbers.
    if sampling.seed is not None:
        transformers.set_seed(sampling.seed)
    if stream and prompt and prompt != "-" and not chat:
        print(prompt, end="", flush=True)
    # Behind a state alone the first word may begin with a space, too.
    last = tokens if state is None else state.last[0].tolist() + tokens
    printer = Printer(tokenizer, last) if stream else None

    start = time.perf_counter()
    # Ours read the prompt into a state, piece by piece; other models take it whole.
    if is_ours(network):
        if tokens:
            state = read_with_progress(network, tokens, state, files.state_dtype)
        assert state is not None
        if stream and len(tokens) > PIECE:
            seconds = time.perf_counter() - start
            print(f"read {len(tokens)} tokens in {seconds:.1f} s", file=sys.stderr)
        if new_file:
            state.save(new_file, tokenizer=fingerprint_of(tokenizer))
        inputs: dict[str, Any] = {"state": state, "state_dtype": files.state_dtype}
        prompt_length = 0  # of the sequence that `generate` returns
        start = time.perf_counter()
    else:
        ids = torch.tensor([tokens], device=network.device)  # [1, T]
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        prompt_length = len(tokens)

    try:
        out = network.generate(  # type: ignore[not-callable]
            **inputs, **options, streamer=printer, return_dict_in_generate=True
        )
    except (KeyboardInterrupt, InputError):
        if stream:
            print()  # the message about it begins a line
        raise

    new = out.sequences[0, prompt_length:]
    if stream:
        seconds = time.perf_counter() - start
        speed = describe_speed(len(new), seconds, cache_of(out), network.device)
        print(speed, file=sys.stderr)
    return decode(tokenizer, new)


def prepare_prompt(
    before: str | None,
    prompt: str | None,
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    files: PromptFiles,
    folder: Path | None,
) -> tuple[State | None, list[int]]:
    """The state to continue, if there is one, and the tokens that the model has yet to read.

    before: the text of a file, which the prompt follows. folder: that of its kept state.
    """
    allowed = None if files.force else tokenizer
    state = None if files.state is None else load_state(files.state, model, allowed)

    # Only the first text stands behind bos, unless it continues a state.
    first, second = (prompt, None) if before is None else (before, prompt)
    tokens = prompt_tokens(first, model, tokenizer, before=None if state is None else "\n")
    if folder:
        state = kept_state(model, tokens, folder, files.state_dtype, tokenizer)
        tokens = []
    if second:
        tokens = tokens + prompt_tokens(second, model, tokenizer, before="\n")
    return state, tokens


def check_outputs(files: PromptFiles) -> tuple[Path | None, Path | None]:
    """The file of `--save-state` and the folder of `--states`. Raises InputError."""
    new_file = folder = None
    if files.save_state is not None:
        new_file = output_file(files.save_state, "--save-state")
    if files.states is not None:
        if files.file is None or files.state is not None:
            raise InputError("--states keeps the state of --file, without --state; give --file")
        folder = output_folder(files.states, "--states")
    if files.force and files.state is None:
        raise InputError("--force goes on from the state of another tokenizer; give --state")
    return new_file, folder


def check_states(files: PromptFiles, model: Any) -> None:
    """Raises InputError for options of states that the model, or one of its mixers, does not have."""
    for name in ("save_state", "states", "state_dtype"):
        if getattr(files, name) and not is_ours(model):
            kind = model.config.model_type
            raise InputError(f"{kind} models have no state to save; leave {option_of(name)} out")
    try:
        check_state_dtype(files.state_dtype, model.config)
    except ValueError as error:
        raise InputError(str(error)) from None


def kept_state(
    model: Any,
    tokens: list[int],
    folder: str | Path,
    state_dtype: str | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> State:
    """The state after `tokens`: read from its file in `folder`, or else by the model and written there.

    The file's name has the hashes of weights and tokens, and a precision other than float32. A damaged file,
    or one with the state of another text, is written again. Processes that want the same state wait for the
    first. tokenizer: that of `tokens`, for the file to name.
    """
    digest = hashlib.sha256(json.dumps(tokens).encode()).hexdigest()
    name = f"{fingerprint(model)}-{digest[:16]}"
    if state_dtype not in (None, "float32"):
        name += f"-{state_dtype}"
    file = output_folder(folder, "folder") / f"{name}.safetensors"
    with FileLock(file.with_suffix(".lock")):
        if file.exists():
            try:
                state = load_state(file, model)
                if state.notes.get("text") == digest:
                    return state
            except InputError:
                pass  # of no use here, whatever the reason
            print(
                f"{file}: damaged, or the state of another text; reading the text again",
                file=sys.stderr,
            )

        state = read_with_progress(model, tokens, state_dtype=state_dtype)
        state.save(file, tokenizer=fingerprint_of(tokenizer), text=digest)
    return state


def prompt_tokens(
    text: str | None, model: Any, tokenizer: PreTrainedTokenizerBase, *, before: str | None
) -> list[int]:
    """The tokens of a prompt. Raises InputError for the start of a text without any.

    before: what a text behind another one may follow, as of `tokens_behind`; None: the text starts here, after bos.
    """
    if before is not None:
        tokens = tokens_behind(text or "", tokenizer, before)
    else:
        tokens = tokenizer(text, add_special_tokens=False).input_ids if text else []
        tokens = after_bos(tokens, bos_token(model, tokenizer))
    check_tokens(tokens, model, tokenizer)
    if not tokens and before is None:
        raise InputError("the prompt is empty and the tokenizer has no bos token; give a prompt")
    return tokens


def render_chat(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> str:
    """The turns by the chat template, up to the start of the next answer. Raises InputError if it refuses them."""
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except TemplateError as error:
        raise InputError(f"the chat template refuses: {error}") from None
    return str(text)
