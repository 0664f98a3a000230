"""A conversation at the terminal. The model's state is kept, so each turn reads only new text."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from nalanda.common.errors import InputError
from nalanda.config.schema import check_seed
from nalanda.inference.generate import Printer, describe_speed, load_state, read_with_progress
from nalanda.inference.load import bos_token, end_tokens, is_ours, load_model
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
        self.tokenizer, self.options, self.system = tokenizer, options, system
        # In plain text an answer ends where the model starts the user's turn.
        self.stop = "" if tokenizer.chat_template else "\nUser:"
        eos = (tokenizer.eos_token_id, getattr(model.generation_config, "eos_token_id", None))
        flat = [i for ids in eos for i in (ids if isinstance(ids, list) else [ids]) if i is not None]
        self.options = options | ({"eos_token_id": sorted(set(flat))} if flat else {})
        if self.stop:
            self.options |= {"stop_strings": [self.stop], "tokenizer": tokenizer}
        self.ended = False  # whether the last answer ended with an end-of-text token
        self.reset()

    def reset(self, base: State | None = None) -> None:
        """Starts over; base: the state before the first turn."""
        self.base, self.messages = base, []
        if self.system:
            self.messages.append({"role": "system", "content": self.system})
        self._forget()

    def _forget(self) -> None:
        self.state, self.tokens, self.cache, self.text = self.base, [], None, ""

    def save(self, path: str) -> None:
        if self.state is None:
            raise InputError("nothing to save: only a started conversation with a Nalanda model has a state")
        notes = {"messages": json.dumps(self.messages), "text": self.text}
        self.state.save(Path(path).expanduser(), **notes)

    def load(self, path: str) -> None:
        state = load_state(path, self.model)
        self.reset(state)
        if "messages" in state.notes:
            self.messages, self.text = json.loads(state.notes["messages"]), state.notes["text"]
            self.base = None  # the turns render everything that it has read

    def render(self) -> str:
        """The turns so far, up to the start of the next answer."""
        if self.tokenizer.chat_template:
            return str(
                self.tokenizer.apply_chat_template(self.messages, add_generation_prompt=True, tokenize=False)
            )
        # The model generates the space before an answer.
        turns = [
            f"{m['role'].capitalize()}:{'' if m['role'] == 'assistant' else ' '}{m['content']}"
            for m in self.messages
        ]
        return "\n" * (self.base is not None) + "\n".join([*turns, "Assistant:"])

    def answer(self, said: str) -> str:
        """Streams the answer to stdout, prints its speed on stderr, and returns it; ctrl-C ends it early."""
        self.messages.append({"role": "user", "content": said})
        whole = self.render()
        if not whole.startswith(self.text):  # the template renders earlier turns differently
            self._forget()
        begun = self.state is not None or bool(self.tokens)
        new = whole[len(self.text) :]
        eos = self.tokenizer.eos_token
        if self.text and self.ended and isinstance(eos, str):
            new = new.removeprefix(eos)  # already read as the answer's last token
        tokens = self.tokenizer(new, add_special_tokens=False).input_ids
        bos = bos_token(self.model, self.tokenizer)
        if not begun and tokens[: len(bos)] != bos:
            tokens = bos + tokens
        printer = Printer(self.tokenizer, tokens, self.stop)
        start = time.perf_counter()
        try:
            self._generate(tokens, printer)
        except KeyboardInterrupt:
            printer.end()
            # Read the partial answer again from the last state, which the interrupted call has not changed.
            if is_ours(self.model):
                self.state = self.model.read(self._ids(tokens + printer.tokens), state=self.state)
            else:
                self.tokens, self.cache = self.tokens + tokens + printer.tokens, None
        seconds = time.perf_counter() - start
        spoken = str(self.tokenizer.decode(printer.tokens, skip_special_tokens=True))
        self.text = whole + spoken
        self.ended = bool(printer.tokens) and printer.tokens[-1] in self.options.get("eos_token_id", ())
        answer = spoken.split(self.stop)[0] if self.stop else spoken
        self.messages.append({"role": "assistant", "content": answer})
        cache = self.cache if self.state is None else self.state.cache
        print(describe_speed(len(printer.tokens), seconds, cache, self.model.device), file=sys.stderr)
        return answer

    def _ids(self, tokens: list[int]) -> torch.Tensor:
        return torch.tensor([tokens], device=self.model.device)

    def _generate(self, tokens: list[int], printer: Printer) -> None:
        options = self.options | {"streamer": printer, "return_dict_in_generate": True}
        if is_ours(self.model):
            out = self.model.generate(state=read_with_progress(self.model, tokens, self.state), **options)
            self.state = State(self.model, out.past_key_values, out.sequences[:, -1:])
        else:
            ids = self._ids(self.tokens + tokens)
            out = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), past_key_values=self.cache, **options
            )
            self.tokens, self.cache = out.sequences[0].tolist(), getattr(out, "past_key_values", None)


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
    network, tokenizer = load_model(model, device=device, dtype=dtype, trust_remote_code=trust_remote_code)
    conversation = Conversation(network, tokenizer, options | end_tokens(tokenizer), system)
    if state is not None:
        conversation.load(state)
    if seed is not None:
        transformers.set_seed(seed)
    print(HELP, file=sys.stderr)
    while True:
        try:
            said = input("> ").strip()
        except KeyboardInterrupt:
            print()
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
