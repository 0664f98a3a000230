"""Decoding on a CPU: a token of all layers, or a short piece of text, as one call of C++, with states in place.

`generate` and `read` open the context `decoding.choose_decoder`, which takes this path where kernels serve the model.
The newest states of a cache are then in the program's memory, as with CUDA graphs. Forks, beams and saved states copy
them out once (`cache.StateBuffers`). Mixers without a rule of a token, or with a map that kernels do not know, run
in Python between two pieces of the program.
"""

from typing import Any

import torch
from torch import Tensor

from . import kernels
from .base import Mixer
from .cache import NalandaCache, StateBuffers, alike, copy_all
from .decoder import GLU, Block, Decoder
from .growing import Memory, claim_rows
from .kernels import by_kernel
from .layers import LayerNorm, RMSNorm
from .one_token import kernel_token
from .recurrent import retention_decays
from .sequences import Sequences
from .transnormer import SimpleRMSNorm

ENVIRONMENT = "NALANDA_CPU_TOKEN"  # 0: every layer runs in Python in this process
ROWS = ("k", "v")  # states of attention, with a row a token


class NotServed(Exception):
    """A decoder of whole tokens, or an operation of one, cannot serve a model. The text says why."""


def build_program(model: Any, cache: NalandaCache) -> "ProgramDecoder":
    """The program of a model for the cache's batch size. Raises `NotServed` for a module that it does not know."""
    table, dtype = model.model.embed_tokens.weight, model.dtype
    assert kernels.package is not None  # whose "token" makes the program
    with kernels.package.watch() as attempts:
        # Weights in int8 serve more rows than others.
        program = by_kernel("token", "auto", table, cache.batch_size, dtype, table.dtype)
    if program is None:
        refusals = [attempt.refusal for attempt in attempts if attempt.refusal]
        raise NotServed((*refusals, f"{cache.batch_size} text(s) in {dtype}")[0])
    try:
        return ProgramDecoder(model, cache, program)
    except kernels.package.Unsupported as error:
        raise NotServed(str(error.args[0])) from None


class ProgramDecoder(StateBuffers):
    """A token of `batch` sequences, or up to `most` of each, as a program, and mixers that it calls in Python."""

    def __init__(self, model: Any, cache: NalandaCache, program: Any):
        self.network: Any = model.model
        self.program, self.lengths = program, program.lengths
        self.one = torch.ones(cache.batch_size, dtype=torch.int64)
        # Each layer's state: tensors that the program writes into, and others, which are replaced.
        self.in_place: list[dict[str, Tensor]] = []
        self.replaced: list[dict[str, Tensor]] = []
        # Mixers that run in Python: how many operations precede each, and why, by the layer's index.
        self.in_python: dict[int, tuple[int, str]] = {}
        # Attention, whose states are the first rows of memory with room for more, and the room that is left.
        self.attending: dict[int, Any] = {}
        self.memories: dict[tuple[int, str], Memory] = {}
        self.room = 0

        # The residual stream and its norm, [batch·most, D].
        D = model.config.hidden_size
        self.x, self.h = program.array("x", D), program.array("h", D)
        kind = type(self.network)
        refuse(kind is not Decoder, f"a decoder of the class {kind.__name__}")
        # A draft of the first layers alone runs eagerly.
        refuse(model.config.num_hidden_layers != len(self.network.layers), "a part of the layers")
        for i, block in enumerate(self.network.layers):
            self._add_block(i, block, cache.states[i])
        self._add_norm(self.network.norm, self.x, self.h)
        # Its output is set for each token: callers keep it.
        program.linear(self.h, model.lm_head, "logits")
        self.vocabulary = model.lm_head.out_features
        program.finish()
        # A mixer in Python may widen its state in a piece. `Decoder.forward` narrows it again; a program does not.
        self.most = 1 if self.in_python else program.most

    def _add_block(self, i: int, block: Block, state: dict[str, Tensor]) -> None:
        is_served = type(block).forward is Block.forward and type(block.mlp).forward is GLU.forward
        refuse(not is_served, f"a layer of the class {type(block).__name__}")
        mlp = block.mlp
        self._add_norm(block.mixer_norm, self.x, self.h)
        # A mixer that cannot be added leaves no operation behind.
        end = len(self.program.operations)
        # Memory of its own; the cache's tensors may be others' too.
        in_place = {
            name: x.clone(memory_format=torch.contiguous_format)
            for name, x in state.items()
            if name not in ROWS
        }
        assert kernels.package is not None
        try:
            step = self._add_mixer(block.mixer, in_place)
            if len(in_place) < len(state):
                self.attending[i] = step
        except (NotServed, kernels.package.Unsupported) as error:
            del self.program.operations[end:]
            self.in_python[i], in_place = (end, str(error.args[0])), {}
        self.in_place.append(in_place)
        self.replaced.append({name: x for name, x in state.items() if name not in in_place})

        self._add_norm(block.mlp_norm, self.x, self.h)
        # SiLU(W_gate h) ⊙ (W_up h), [batch, intermediate_size]
        a = self.program.linear(self.h, mlp.gate_proj, "gated")
        b = self.program.linear(self.h, mlp.up_proj, "up")
        self.program.add("swiglu", a, a, added=b)
        self.program.linear(a, mlp.down_proj, self.x, added=self.x)

    def _add_norm(self, norm: Any, x: Tensor, y: Tensor, gate: Tensor | None = None) -> None:
        """y = norm(x), with its gate."""
        norms = (RMSNorm, LayerNorm, SimpleRMSNorm)
        refuse(type(norm) not in norms, f"a norm of the class {type(norm).__name__}")
        weights = {name: getattr(norm, name, None) for name in ("weight", "bias")}
        outside = getattr(norm, "placement", "") == "outside"
        eps = 1e-8 if outside else norm.eps
        kind = "norm" if x.dtype == y.dtype else "wide_norm"
        self.program.add(kind, x, y, added=gate, weights=weights, number=eps, M=outside)

    def _add_mixer(self, mixer: Mixer, state: dict[str, Tensor]) -> Any:
        """x + mixer(h), by the mixer's rule of a token."""
        program, rule = self.program, mixer.rule
        # [batch, heads·V], in fp32 below a norm over all heads, whose gate is that norm's
        token = kernel_token(mixer, self.h.dtype if rule.by_head else torch.float32)
        if token is None:
            raise NotServed("a rule that no operation computes")

        width = mixer.o_proj.in_features
        o = program.array("o", width, token["dtype"])
        inputs = program.linears(self.h, mixer.linears())
        for name, layer in mixer.up_projections().items():
            inputs[name] = program.linear(inputs[name], layer, f"{name}_second")
        if rule.decay == "retention":
            g = inputs["g"] = program.array("retention", mixer.num_heads, torch.float32)
            g.copy_(retention_decays(mixer.num_heads, g))
        gate = None if rule.by_head else inputs.pop("gate", None)
        step = program.step(state, o, **token | inputs)
        if not rule.by_head:
            wide, o = o, program.array("normed", width)
            self._add_norm(mixer.o_norm, wide, o, gate)
        program.linear(o, mixer.o_proj, self.x, added=self.x)
        return step

    @property
    def newest(self) -> list[dict[str, Tensor]]:
        self._show_rows()
        return [
            in_place | replaced
            for in_place, replaced in zip(self.in_place, self.replaced, strict=True)
        ]

    def _show_rows(self) -> None:
        """The rows of attention that are written; what follows them in memory is anybody's from now on."""
        for (i, name), memory in self.memories.items():
            step = self.attending[i]
            end = memory.used = step.used + int(self.program.written_rows)
            # [batch, tokens or window, heads, K or V]
            rows = memory.rows[:, end - step.reach if step.reach else 0 : end]
            if not step.reach:
                rows.memory = memory  # pyrefly: ignore[missing-attribute]
            self.replaced[i][name] = rows

    def copied(self) -> list[dict[str, Tensor]]:
        states = self.newest
        for i, in_place in enumerate(self.in_place):
            # Rows that grow are never overwritten, so views of them are enough.
            windows = self.replaced[i] if i in self.attending and self.attending[i].reach else {}
            states[i] |= {name: x.clone() for name, x in (in_place | windows).items()}
        return states

    def fits(self, states: list[dict[str, Tensor]]) -> bool:
        in_place = [
            {name: x for name, x in state.items() if name not in self.replaced[i]}
            for i, state in enumerate(states)
        ]
        return alike(in_place, self.in_place)

    def fill(self, states: list[dict[str, Tensor]]) -> None:
        copy_all(self.in_place, states)
        for replaced, state in zip(self.replaced, states, strict=True):
            replaced |= {name: state[name] for name in replaced}
        self._make_room()

    def _make_room(self, more: int = 1) -> None:
        """Moves keys and values to where `more` rows fit behind them."""
        self.program.written_rows.zero_()
        longest, rooms = int(self.lengths.max()), []
        for i, step in self.attending.items():
            for name in ROWS:
                rows = self.replaced[i][name].to(self.x.dtype)
                # The longest text may have left the batch.
                if not step.reach and rows.shape[1] > longest:
                    rows = rows[:, -longest:]
                memory = self.memories[i, name] = claim_rows(rows, more, rest=True)
                # The operation reads these fields at each token.
                step.used, room = rows.shape[1], memory.rows.shape[1]
                setattr(step, f"{name}_rows", memory.rows.data_ptr())
                setattr(step, f"{name}_room", room)
                rooms.append(room - step.used)
        self.room = min(rooms, default=0)

    def __call__(self, tokens: Tensor, cache: NalandaCache) -> Tensor:
        """Logits `[B, T, vocabulary]` after each of tokens `[B, T]`, for the cache that `take` was called with."""
        program, start = self.program, 0
        B, T = tokens.shape
        program.take(T)
        x, h = self.x[: B * T], self.h[: B * T]
        seq = Sequences(None, cache.lengths, None, x.device)
        # [B·T, D]: an unknown id raises here, before a state changes
        x.copy_(self.network.scaled(self.network.embed_tokens(tokens), seq).flatten(0, 1))
        # Their memory is full: C++ needs a new place for the next rows.
        if self.attending and int(program.written_rows) + T > self.room:
            self._show_rows()
            self._make_room(T)
        for i, (end, _) in self.in_python.items():
            # h is the mixer's input then.
            program.run(start, end)
            mixer = self.network.layers[i].mixer
            y, self.replaced[i] = mixer(h.view(B, T, -1), seq, self.replaced[i])
            x.add_(y.flatten(0, 1))
            start = end

        # New memory, because a caller keeps the logits of all tokens.
        logits = x.new_empty(B, T, self.vocabulary)
        program.listed[-1].y = logits.data_ptr()
        program.run(start, len(program.listed))
        # The program's counts give positions to its rules.
        self.lengths.add_(T)
        program.written_rows.add_(T)
        cache.seen(T, self.one * T)
        return logits


def refuse(condition: bool, reason: str) -> None:
    if condition:
        raise NotServed(reason)
