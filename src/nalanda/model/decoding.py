"""Decoding on a CPU: a token of all layers as one call of C++, with states in place.

`generate` opens the context `graphs.decoding_graphs`, which takes this path where the kernels serve the model. The
newest states of a cache are then in the program's memory, as with CUDA graphs. Forks, beams and saved states copy
them out once (`cache.StateBuffers`). Mixers without a rule of a token, or with a map that kernels do not know, run
in Python between two pieces of the program.
"""

from typing import Any

import torch
from torch import Tensor, nn

from . import ops
from .base import Mixer
from .cache import NalandaCache, StateBuffers, alike
from .decoder import GLU, Block
from .layers import LayerNorm, RMSNorm
from .ops import by_kernel
from .sequences import Sequences

ENVIRONMENT = "NALANDA_CPU_TOKEN"  # 0: every layer runs in Python in this process


class NotServed(Exception):
    """A module computes what no operation does."""


def build_token(model: Any, cache: NalandaCache) -> "TokenStep | None":
    """The program of a model for the cache's batch size; None where some module is not what it knows."""
    # Its dtype is that of the model.
    table = model.model.embed_tokens.weight
    program = by_kernel("token", "auto", table, cache.batch_size, table.dtype)
    if program is None or ops._kernels is None:
        return None
    try:
        return TokenStep(model, cache, program)
    except (NotServed, ops._kernels.Unsupported):
        return None


class TokenStep(StateBuffers):
    """One token of `batch` sequences as a program, and mixers that it calls in Python."""

    def __init__(self, model: Any, cache: NalandaCache, program: Any):
        self.decoder: Any = model.model
        self.program, self.lengths = program, program.lengths
        self.one = torch.ones(cache.batch_size, dtype=torch.int64)
        self.newest = list(cache.states)
        # Mixers that run in Python: how many operations precede each, by the layer's index.
        self.called: dict[int, int] = {}

        # The residual stream and its norm, [batch, D].
        D = model.config.hidden_size
        self.x, self.h = program.array("x", D), program.array("h", D)
        # A draft of the first layers alone runs eagerly.
        refuse(model.config.num_hidden_layers != len(self.decoder.layers))
        for i, block in enumerate(self.decoder.layers):
            self._add_block(i, block)
        self._add_norm(self.decoder.norm)
        # Its output is set for each token: callers keep it.
        program.linear(self.h, model.lm_head, "logits")
        self.vocabulary = model.lm_head.out_features
        program.finish()

    def _add_block(self, i: int, block: Block) -> None:
        mlp = block.mlp
        refuse(type(block).forward is not Block.forward or type(mlp).forward is not GLU.forward)
        self._add_norm(block.mixer_norm)
        # A mixer that cannot be added leaves no operation behind.
        end = len(self.program.operations)
        # Memory that the program writes into; the cache's own tensors may be others' too.
        state = {
            name: x.clone(memory_format=torch.contiguous_format)
            for name, x in self.newest[i].items()
        }
        assert ops._kernels is not None
        try:
            self._add_mixer(block.mixer, state)
            self.newest[i] = state
        except (NotServed, ops._kernels.Unsupported):
            del self.program.operations[end:]
            self.called[i] = end

        self._add_norm(block.mlp_norm)
        # SiLU(W_gate h) ⊙ (W_up h), [batch, intermediate_size]
        a = self.program.linear(self.h, mlp.gate_proj, "gated")
        b = self.program.linear(self.h, mlp.up_proj, "up")
        self.program.add("swiglu", a, a, added=b)
        self.program.linear(a, mlp.down_proj, self.x, added=self.x)

    def _add_norm(self, norm: nn.Module) -> None:
        """The norm of x in h."""
        refuse(type(norm) is not RMSNorm)
        weights = {"weight": norm.weight}
        self.program.add("norm", self.x, self.h, weights=weights, number=norm.eps)

    def _add_mixer(self, mixer: Mixer, state: dict[str, Tensor]) -> None:
        """x + mixer(h), as `Mixer.step` computes it."""
        # A subclass may do more around its rule than `Mixer.step` does.
        refuse((type(mixer).forward, type(mixer).step) != (Mixer.forward, Mixer.step))
        program, rule = self.program, mixer.rule_of_a_token()
        inputs = None if rule is None else mixer.add_inputs(program, self.h)
        if rule is None or inputs is None:
            raise NotServed

        # [batch, HV·V], in fp32 below a norm over all heads, whose gate follows that norm
        layer = mixer.step_layer(self.h, state)
        width = mixer.num_v_heads * mixer.V
        o = program.array("o", width, layer.dtype)
        gate = inputs.pop("gate", None) if mixer.norm == "layer" else None
        program.step(inputs, state, o, **rule._asdict(), **layer._asdict())
        if mixer.norm == "layer":
            norm, wide, o = mixer.o_norm, o, program.array("normed", width)
            refuse(type(norm) is not LayerNorm or type(mixer).read_out is not Mixer.read_out)
            weights = {"weight": norm.weight, "bias": norm.bias}
            program.add("layer_norm", wide, o, added=gate, weights=weights, number=norm.eps)
        program.linear(o, mixer.o_proj, self.x, added=self.x)

    def in_place(self, states: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
        """States of the layers that the program has; no call writes into the others, which may grow."""
        return [state for i, state in enumerate(states) if i not in self.called]

    def copied(self) -> list[dict[str, Tensor]]:
        states = list(self.newest)
        for i, state in enumerate(states):
            if i not in self.called:
                states[i] = {name: x.clone() for name, x in state.items()}
        return states

    def fits(self, states: list[dict[str, Tensor]]) -> bool:
        return alike(self.in_place(states), self.in_place(self.newest))

    def fill(self, states: list[dict[str, Tensor]]) -> None:
        for i in self.called:
            self.newest[i] = states[i]
        super().fill(states)

    def __call__(self, tokens: Tensor, cache: NalandaCache) -> Tensor:
        """Logits `[B, 1, vocabulary]` after tokens `[B, 1]`, for the cache that `take` was called with."""
        program, start = self.program, 0
        seq = Sequences(None, cache.lengths, None, self.x.device)
        # [batch, D]: an unknown id raises here, before a state changes
        self.x.copy_(self.decoder._scaled(self.decoder.embed_tokens(tokens), seq)[:, 0])
        for i, end in self.called.items():
            # h is the mixer's input then.
            program.run(start, end)
            mixer = self.decoder.layers[i].mixer
            y, self.newest[i] = mixer(self.h[:, None], seq, self.newest[i])
            self.x.add_(y[:, 0])
            start = end

        # New memory, because a caller keeps the logits of all tokens.
        logits = self.x.new_empty(len(tokens), 1, self.vocabulary)
        program.listed[-1].y = logits.data_ptr()
        program.run(start, len(program.listed))
        # The program's counts give positions to denominators.
        self.lengths.add_(1)
        cache.seen(1, self.one)
        return logits


def refuse(condition: bool) -> None:
    if condition:
        raise NotServed
