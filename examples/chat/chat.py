"""Chats with a causal model at the terminal.

    python examples/chat/chat.py runs/demo
    python examples/chat/chat.py runs/demo --state text.safetensors --temperature 0

Turns are rendered by the tokenizer's chat template, or as plain text without one. The model's state is kept
between turns, so each turn reads only new text.
"""

import argparse
import json
import sys
import time
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)

from nalanda.common.errors import InputError, explained, first_line, one_line_errors, output_file
from nalanda.inference.generate import (
    Printer,
    decode,
    describe_speed,
    fingerprint_of,
    load_state,
    prompt_tokens,
    read_with_progress,
    render_chat,
)
from nalanda.inference.load import end_tokens, is_ours, load_model, number_check
from nalanda.inference.options import Sampling, sampling_options
from nalanda.model import State
from nalanda.model.cache import CACHE, cache_of

HELP = "/save FILE, /load FILE, /reset, /quit; ctrl-C ends an answer"


class Conversation:
    """Turns of a user and a model.

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
        self.tokenizer = tokenizer
        self.system = system

        # In plain text an answer ends where the model starts the user's turn.
        self.stop = "" if tokenizer.chat_template else "\nUser:"
        self.options = options | end_tokens(model, tokenizer) | number_check(model)
        self.reset()

    def reset(self, base: State | None = None) -> None:
        """Starts over; base: the state before the first turn."""
        self.base = base
        self.follows_text = base is not None  # a text that the turns do not contain
        self.messages: list[dict[str, str]] = []
        if self.system:
            self.messages.append({"role": "system", "content": self.system})
        self._forget_turns()

    def _forget_turns(self) -> None:
        self.text = ""  # of the turns that were read
        self.state = self.base
        self.tokens: list[int] = []  # these two for models of other libraries
        self.cache = None

    def save(self, path: str) -> None:
        """Writes the state, with the turns in its notes."""
        if self.state is None:
            raise InputError(
                "nothing to save: only a started conversation with a Nalanda model has a state"
            )
        file = output_file(path, "/save")
        notes = {
            "messages": json.dumps(self.messages),
            "text": self.text,
            "follows": "yes" if self.follows_text else "",
        }
        try:
            self.state.save(file, tokenizer=fingerprint_of(self.tokenizer), **notes)
        except (OSError, SafetensorError) as error:
            raise InputError(
                f"{file}: not saved ({first_line(error)}); name another file"
            ) from None

    def load(self, path: str) -> None:
        """Continues a conversation that `save` wrote, or the state of any text."""
        state = load_state(path, self.model, self.tokenizer)
        messages = read_messages(path, state.notes)
        self.reset(state)
        if messages is None:
            return

        self.messages = messages
        self.text = state.notes["text"]
        # Files of older versions have no note "follows".
        self.follows_text = bool(state.notes.get("follows", self.text.startswith("\n")))
        self.base = None  # the file has the state after the turns only

    def render(self) -> str:
        """The turns so far, up to the start of the next answer."""
        if self.tokenizer.chat_template:
            return render_chat(self.tokenizer, self.messages)

        turns = []
        for message in self.messages:
            # The model generates the space before an answer.
            space = "" if message["role"] == "assistant" else " "
            turns.append(f"{message['role'].capitalize()}:{space}{message['content']}")
        start = "\n" if self.follows_text else ""
        return start + "\n".join([*turns, "Assistant:"])

    def answer(self, message: str) -> str:
        """Streams the answer to stdout, prints its speed on stderr, and returns it.

        Ctrl-C ends the answer early. Before its first token, or a second time, ctrl-C drops the message.
        Raises InputError for a message that is no text, or that the chat template refuses.
        """
        self.messages.append({"role": "user", "content": message})
        try:
            text = self._render_readable()
            tokens = self._new_tokens(text)
        except BaseException:
            self.messages.pop()
            raise

        state_before = self.state
        printer = Printer(self.tokenizer, tokens, self.stop)
        start = time.perf_counter()
        try:
            self._generate_or_keep(tokens, printer)
        except BaseException as error:  # ctrl-C, no numbers, no memory
            self.messages.pop()
            self.state = state_before
            if isinstance(error, KeyboardInterrupt):
                return ""
            raise
        seconds = time.perf_counter() - start

        self.text = text
        spoken = decode(self.tokenizer, printer.tokens).removesuffix(self.end)
        self.text += spoken
        answer = spoken.split(self.stop)[0] if self.stop else spoken
        self.messages.append({"role": "assistant", "content": answer})

        cache = self.cache if self.state is None else self.state.cache
        speed = describe_speed(len(printer.tokens), seconds, cache, self.model.device)
        print(speed, file=sys.stderr)
        return answer

    def _render_readable(self) -> str:
        """`render`, which begins with `text`: the conversation is forgotten if the template changes it."""
        try:
            text = self.render()
            text.encode()
        except UnicodeError:
            raise InputError("not UTF-8") from None

        if text.startswith(self.text):
            return text
        if self.follows_text and self.base is None:
            self.follows_text = False
            text = self.render()
            print(
                "the template has changed earlier turns: read again, without the text before the first "
                "turn, which a saved conversation does not contain",
                file=sys.stderr,
            )
        self._forget_turns()
        return text

    def _new_tokens(self, text: str) -> list[int]:
        """The tokens of `text` that were not read, with bos at the start of a conversation."""
        started = self.state is not None or bool(self.tokens)
        new = text[len(self.text) :].removeprefix(self.end)
        before = (self.end or "\n") if started else None
        return prompt_tokens(new, self.model, self.tokenizer, before=before)

    @property
    def end(self) -> str:
        """The token that ended the last answer, or "". The model has read it; `text` lacks it."""
        last = self.tokens[-1:] if self.state is None else self.state.last[0].tolist()
        if self.text and last[-1] in self.options.get("eos_token_id", ()):
            return str(self.tokenizer.decode(last))
        return ""

    def _generate_or_keep(self, tokens: list[int], printer: Printer) -> None:
        """Generates the answer, or its part before ctrl-C."""
        try:
            self._generate(tokens, printer)
        except KeyboardInterrupt:
            printer.end()
            if not printer.tokens:
                raise
            self._keep_interrupted(tokens, printer.tokens)

    def _generate(self, tokens: list[int], printer: Printer) -> None:
        stopping = StoppingCriteriaList([StopAtText(printer)])
        options = self.options | {
            "streamer": printer,
            "stopping_criteria": stopping,
            "return_dict_in_generate": True,
        }
        if is_ours(self.model):
            self.state = read_with_progress(self.model, tokens, self.state)
            out = self.model.generate(state=self.state, **options)
            self.state = State(self.model, cache_of(out), out.sequences[:, -1:])
            return

        ids = self._as_row(self.tokens + tokens)
        # A call writes into its cache: one that fails leaves tokens there that were not said.
        cache, self.cache = self.cache, None
        if cache is not None:
            options |= {CACHE: cache}
        out = self.model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        self.tokens = out.sequences[0].tolist()
        self.cache = cache_of(out)

    def _keep_interrupted(self, tokens: list[int], answer: list[int]) -> None:
        """Reads the part of the answer that was printed: the interrupted call left the state as it was."""
        if is_ours(self.model):
            self.state = self.model.read(self._as_row(answer), state=self.state)
        else:
            self.tokens = self.tokens + tokens + answer

    def _as_row(self, tokens: list[int]) -> torch.Tensor:
        return torch.tensor([tokens], device=self.model.device)  # [1, T]


def read_messages(path: str, notes: dict[str, str]) -> list[dict[str, str]] | None:
    """The messages in the notes of a state; None without any. Raises InputError for notes of another kind."""
    if "messages" not in notes:
        return None
    try:
        messages = json.loads(notes["messages"])
    except ValueError:
        messages = None

    is_conversation = (
        isinstance(messages, list)
        and all(isinstance(message, dict) for message in messages)
        and all({"role", "content"} <= message.keys() for message in messages)
    )
    if not is_conversation or "text" not in notes:
        raise InputError(f"{path}: its notes hold no conversation; continue it by generate --state")
    return messages


class StopAtText(StoppingCriteria):
    """Ends an answer where the printer has met its stop text.

    transformers' `stop_strings` fail with vocabularies of words.
    """

    def __init__(self, printer: Printer):
        self.printer = printer

    def __call__(
        self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        return torch.full((len(input_ids),), self.printer.stopped, device=input_ids.device)


def talk(conversation: Conversation) -> None:
    """Reads messages and commands from the terminal until /quit or the end of the input."""
    print(HELP, file=sys.stderr)
    while True:
        try:
            line = input("> ").strip()
        except (KeyboardInterrupt, UnicodeDecodeError) as error:
            print("" if isinstance(error, KeyboardInterrupt) else "not UTF-8")
            continue
        except EOFError:
            return
        if line == "/quit":
            return

        command, _, file = line.partition(" ")
        try:
            if command == "/reset":
                conversation.reset()
            elif command == "/save" and file:
                conversation.save(file.strip())
            elif command == "/load" and file:
                conversation.load(file.strip())
            elif command.startswith("/"):
                raise InputError(HELP)
            elif line:
                conversation.answer(line)
        except KeyboardInterrupt:
            print(file=sys.stderr)
        except Exception as error:
            if (line := explained(error)) is None:
                raise
            print(line, file=sys.stderr)


def main(arguments: list[str]) -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    add = parser.add_argument
    add("model", help="a run, a checkpoint directory or a hub id")
    add("--system", default="", help="system message")
    add("--state", help="continue a saved state or conversation")
    add("--max-new-tokens", type=int, default=512, help="length limit of an answer, in tokens")
    add("--temperature", type=float, default=0.8, help="sampling temperature; 0 is greedy")
    add("--top-p", type=float, default=1.0, help="likeliest tokens with this total probability")
    add("--top-k", type=int, default=0, help="sample from at most this many tokens; 0: all")
    add("--seed", type=int, help="seed of the sampling; by default every answer differs")
    add("--device", help="cpu, cuda, cuda:1, …; by default a GPU if there is one")
    add("--dtype", default="auto", help="auto (as saved), fp32, bf16, fp16 or fp64")
    add("--trust-remote-code", action="store_true", help="run code from the checkpoint")
    options = parser.parse_args(arguments)

    with one_line_errors():
        sampling = Sampling(
            max_new_tokens=options.max_new_tokens,
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=options.top_k,
            seed=options.seed,
        )
        generation = sampling_options(sampling)
        model, tokenizer = load_model(
            options.model,
            device=options.device,
            dtype=options.dtype,
            trust_remote_code=options.trust_remote_code,
        )
        conversation = Conversation(model, tokenizer, generation, options.system)
        if options.state is not None:
            conversation.load(options.state)
        if options.seed is not None:
            transformers.set_seed(options.seed)
        talk(conversation)


if __name__ == "__main__":
    main(sys.argv[1:])
