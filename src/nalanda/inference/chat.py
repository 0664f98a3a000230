"""A conversation at the terminal. The model's state is kept, so each turn reads only new text."""

import json
import sys
import time
from typing import Any

import torch
import transformers
from jinja2 import TemplateError
from safetensors import SafetensorError
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)

from nalanda.common.errors import InputError, first_line, output_file
from nalanda.config.schema import check_seed
from nalanda.inference.generate import (
    Printer,
    decode,
    describe_speed,
    load_state,
    read_with_progress,
)
from nalanda.inference.load import bos_token, check_tokens, end_tokens, is_ours, load_model
from nalanda.inference.sampling import sampling_options
from nalanda.model import State

HELP = "/save FILE, /load FILE, /reset, /quit; ctrl-C ends an answer"


class Conversation:
    """Turns of a user and a model, rendered by the tokenizer's chat template, or as plain text without one.

    Our models keep a state. Others keep transformers' cache and all tokens, and read everything again if
    `generate` returns no cache.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        options: dict[str, Any],
        system: str = "",
    ):
        self.model: Any = model
        self.tokenizer, self.system = tokenizer, system
        # In plain text an answer ends where the model starts the user's turn.
        self.stop = "" if tokenizer.chat_template else "\nUser:"
        self.options = options | end_tokens(model, tokenizer)
        self.reset()

    def reset(self, base: State | None = None) -> None:
        """Starts over; base: the state before the first turn."""
        self.base, self.messages = base, []
        self.follows = base is not None  # whether the turns follow a text that they do not contain
        if self.system:
            self.messages.append({"role": "system", "content": self.system})
        self._forget()

    def _forget(self) -> None:
        self.state, self.tokens, self.cache, self.text = self.base, [], None, ""

    def save(self, path: str) -> None:
        if self.state is None:
            raise InputError(
                "nothing to save: only a started conversation with a Nalanda model has a state"
            )
        notes = {
            "messages": json.dumps(self.messages),
            "text": self.text,
            "follows": "yes" * self.follows,
        }
        file = output_file(path, "/save")
        try:
            self.state.save(file, **notes)
        except (OSError, SafetensorError) as error:
            raise InputError(
                f"{file}: not saved ({first_line(error)}); name another file"
            ) from None

    def load(self, path: str) -> None:
        state = load_state(path, self.model)
        messages = saved_messages(path, state.notes)
        self.reset(state)
        if messages is not None:
            self.messages, self.text = messages, state.notes["text"]
            self.follows = bool(state.notes.get("follows", self.text.startswith("\n")))
            self.base = None  # the file has the state after the turns only

    def render(self) -> str:
        """The turns so far, up to the start of the next answer."""
        if self.tokenizer.chat_template:
            return str(
                self.tokenizer.apply_chat_template(
                    self.messages, add_generation_prompt=True, tokenize=False
                )
            )
        # The model generates the space before an answer.
        turns = [
            f"{m['role'].capitalize()}:{'' if m['role'] == 'assistant' else ' '}{m['content']}"
            for m in self.messages
        ]
        return "\n" * self.follows + "\n".join([*turns, "Assistant:"])

    @property
    def end(self) -> str:
        """The token that ended the last answer, which is read but not in `text`; empty if none did."""
        last = self.tokens[-1:] if self.state is None else self.state.last[0].tolist()
        ended = self.text and last[-1] in self.options.get("eos_token_id", ())
        return str(self.tokenizer.decode(last)) if ended else ""

    def answer(self, said: str) -> str:
        """Streams the answer to stdout, prints its speed on stderr, and returns it. Ctrl-C ends it early, or
        drops the message if there is no answer yet.

        Raises InputError for a message that is no text, or that the chat template refuses.
        """
        self.messages.append({"role": "user", "content": said})
        try:
            whole = self.render()
            whole.encode()
        except (TemplateError, UnicodeError) as error:
            self.messages.pop()
            no_text = isinstance(error, UnicodeError)
            raise InputError(
                "not UTF-8" if no_text else f"the chat template refuses: {error}"
            ) from None
        if not whole.startswith(self.text):  # the template renders earlier turns differently
            if self.follows and self.base is None:
                self.follows = False
                lost = "the text before the first turn, which a saved conversation does not contain"
                print(
                    f"the template has changed earlier turns: read again, without {lost}",
                    file=sys.stderr,
                )
                whole = self.render()
            self._forget()
        begun, before = self.state is not None or bool(self.tokens), self.state
        new = whole[len(self.text) :].removeprefix(self.end)
        tokens = self.tokenizer(new, add_special_tokens=False).input_ids
        try:
            check_tokens(tokens, self.model, self.tokenizer)
        except InputError:
            self.messages.pop()
            raise
        bos = bos_token(self.model, self.tokenizer)
        if not begun and tokens[: len(bos)] != bos:
            tokens = bos + tokens
        printer = Printer(self.tokenizer, tokens, self.stop)
        start = time.perf_counter()
        try:
            self._generate(tokens, printer)
        except KeyboardInterrupt:
            printer.end()
            if not printer.tokens:
                self.messages.pop()
                self.state = before
                return ""
            if is_ours(self.model):  # the interrupted call has not changed the state
                self.state = self.model.read(self._ids(printer.tokens), state=self.state)
            else:
                self.tokens, self.cache = self.tokens + tokens + printer.tokens, None
        seconds = time.perf_counter() - start
        self.text = whole
        spoken = decode(self.tokenizer, printer.tokens).removesuffix(self.end)
        self.text += spoken
        answer = spoken.split(self.stop)[0] if self.stop else spoken
        self.messages.append({"role": "assistant", "content": answer})
        cache = self.cache if self.state is None else self.state.cache
        print(
            describe_speed(len(printer.tokens), seconds, cache, self.model.device), file=sys.stderr
        )
        return answer

    def _ids(self, tokens: list[int]) -> torch.Tensor:
        return torch.tensor([tokens], device=self.model.device)

    def _generate(self, tokens: list[int], printer: Printer) -> None:
        options = self.options | {"streamer": printer, "return_dict_in_generate": True}
        options["stopping_criteria"] = StoppingCriteriaList([_Stopped(printer)])
        if is_ours(self.model):
            self.state = read_with_progress(self.model, tokens, self.state)
            out = self.model.generate(state=self.state, **options)
            self.state = State(self.model, out.past_key_values, out.sequences[:, -1:])
        else:
            ids = self._ids(self.tokens + tokens)
            out = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), past_key_values=self.cache, **options
            )
            self.tokens, self.cache = (
                out.sequences[0].tolist(),
                getattr(out, "past_key_values", None),
            )


def saved_messages(path: str, notes: dict[str, str]) -> list[dict[str, str]] | None:
    """The messages in the notes of a state; None without any. Raises InputError for notes of another kind."""
    if "messages" not in notes:
        return None
    try:
        messages = json.loads(notes["messages"])
    except ValueError:
        messages = None
    listed = isinstance(messages, list) and all(isinstance(message, dict) for message in messages)
    if (
        not listed
        or "text" not in notes
        or not all({"role", "content"} <= set(x) for x in messages)
    ):
        raise InputError(f"{path}: its notes hold no conversation; continue it by generate --state")
    return messages


class _Stopped(StoppingCriteria):
    """Ends an answer where the printer has met its stop text. (transformers' `stop_strings` fail with
    vocabularies of words.)"""

    def __init__(self, printer: Printer):
        self.printer = printer

    def __call__(
        self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        return torch.full((len(input_ids),), self.printer.stopped, device=input_ids.device)


def chat(
    model: str,
    *,
    system: str = "",
    state: str | None = None,
    max_new_tokens: int = 512,
    temperature: float = 0.8,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int | None = None,
    device: str | None = None,
    dtype: str = "auto",
    trust_remote_code: bool = False,
) -> None:
    """Talks with a model until /quit or the end of the input; options as for `generate`."""
    check_seed(seed, "--seed")
    options = sampling_options(
        max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, top_k=top_k
    )
    network, tokenizer = load_model(
        model, device=device, dtype=dtype, trust_remote_code=trust_remote_code
    )
    conversation = Conversation(network, tokenizer, options, system)
    if state is not None:
        conversation.load(state)
    if seed is not None:
        transformers.set_seed(seed)
    print(HELP, file=sys.stderr)
    while True:
        try:
            said = input("> ").strip()
        except (KeyboardInterrupt, UnicodeDecodeError) as error:
            print("" if isinstance(error, KeyboardInterrupt) else "not UTF-8")
            continue
        except EOFError:
            return
        command, _, rest = said.partition(" ")
        try:
            if command == "/quit":
                return
            if command == "/reset":
                conversation.reset()
            elif command in ("/save", "/load") and rest:
                (conversation.save if command == "/save" else conversation.load)(rest.strip())
            elif command.startswith("/"):
                raise InputError(HELP)
            elif said:
                conversation.answer(said)
        except InputError as error:
            print(error, file=sys.stderr)
