"""The contract of token mixers and feature maps, and what all mixers share.

A mixer is a subclass of `Mixer` and a row in `mixers.MIXERS`; `register_mixer` adds one from outside the
package. It defines

- `equation` and `source`, texts for the tables of `nalanda info`; docs/mixers.md shows only `equation`;
- `__init__(self, config, layer_idx, *, …)`: its options, `mixer_options` of a recipe, are the keyword-only
  arguments. Each has a default and is annotated with its type. Raise ValueError, in one line, for a value
  that cannot work;
- `rule`, what it computes between its projections and o_proj; `rule.Rule` says what each field means. A
  layer's own has the config's choices.

With `rule.write` "own" it defines

- `mix(heads, seq, state, new)`: q, k, v and gates to o. Besides short convolutions it is the only step that
  sees other tokens, and it sees no later ones. It is **linear in v**; for that reason `weights` is exact. It
  reads `state`, which an earlier call put into `new`, and fills `new` unless that is None. It keeps the
  documents of `seq.cu_seqlens` apart; the ops of `ops.py` do that, and take and return states. A rule with `cut`
  calls `context.recurrence` in place of an op;
- `state_spec(T)`: name to shape and dtype of what `mix` and `heads` put into `new`, per sequence;
- `flops(T)`: FLOPs per token without Linear layers. It and `state_spec` add to the base class's result,
  or replace it.

It may define

- `heads` and `read_out`, before and after `mix`; `linears`, the Linear layers that read x, whose outputs
  `heads` takes from `projected(x, seq)`, one product;
- `gates(heads)`: g and beta, from the outputs of `linears`;
- `gate_parameters`, the parameters that decide what the state forgets and takes. Muon leaves them to AdamW;
- `metrics`, names and functions of numbers that validation logs.

In decoding one kernel for one token replaces the three steps, where the `rule` of a mixer of this package says all
that they compute (`one_token.py`). A subclass from outside that overrides one of them decodes by its own.

A feature map is a subclass of `feature_maps.FeatureMap` and a row in `FEATURE_MAPS`; `register_feature_map`
adds one. It defines `equation`, `source`, `feature_dim`, `__init__(self, *, num_heads, head_dim, …)` and
`forward(q, k)`, which **computes in fp32 at least** and returns that precision (`layers.at_least_fp32`). It
sets `nonnegative` if φ(q)·φ(k) ≥ 0 always, and `flops` if it multiplies matrices.

Parameters and buffers of a class's own, outside Linear, norm and convolution modules, are created empty. Its
method `initial()` returns their first values by name; a model refuses those without. Parameters that bf16
would spoil (decays, exponents) belong into a `layers.Fp32Module`, created with dtype=torch.float32; a map
with parameters is one.

`nalanda.testing.check_mixer` and `check_feature_map` test all of this; `examples/my_mixer` is complete.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .epilogues import norm_gate, swiglu
from .feature_maps import EPS, build_feature_map
from .layers import (
    LayerNorm,
    RMSNorm,
    ShortConv,
    altered,
    at_least_fp32,
    direction,
    place_angles,
    rotate,
)
from .one_token import decode_token
from .ops import by_kernel, map_features
from .projections import NARROW, FusedLinears, apply_linear
from .recurrent import form_gates, recurrence_of, rule_flops, state_shape
from .rule import Rule
from .sequences import Sequences

LayerState = dict[str, Tensor]
StateSpec = dict[str, tuple[tuple[int, ...], torch.dtype | None]]


class CarriedState:
    """A layer's states for the rows of a batch, `[B, …]` each.

    Not a dict: FSDP casts tensors inside dicts to the compute dtype.
    """

    def __init__(self, tensors: LayerState):
        self.tensors = tensors


Heads = dict[str, Tensor]


def convolve(
    convs: list[ShortConv],
    xs: list[Tensor],
    seq: Sequences,
    states: list[Tensor] | None,
    carry: bool,
    silu: bool = False,
) -> tuple[list[Tensor], list[Tensor] | None]:
    """`conv(x, seq, state, carry)` for each; SiLU follows the last one if `silu`. By a kernel if one serves.

    states: None for none. Returns their outputs and, with `carry`, their states.
    """
    if seq.bidirectional:
        # Centred convolutions carry no state.
        *outputs, last = [conv(x, seq)[0] for conv, x in zip(convs, xs, strict=True)]
        return [*outputs, F.silu(last) if silu else last], None
    if seq.parts is not None:
        xs, states = seq.parts.conv_states(xs, convs[0].width - 1, states)

    filters = [conv.weight.squeeze(1) for conv in convs]
    # An offloaded one is in memory only while its own module runs.
    if not filters[0].is_meta and not any(map(altered, convs)):
        for i, conv in enumerate(convs):
            if conv.copies > 1:
                filters[i] = filters[i].repeat(conv.copies, 1)
        served = by_kernel(
            *("short_convs", "auto", xs[0], xs, filters, states),
            cu_seqlens=seq.cu_seqlens,
            activations=[None] * (len(xs) - 1) + ["silu" if silu else None],
            output_final_state=carry,
        )
        if served is not None:
            return served

    past = states or [None] * len(xs)
    results = [conv(x, seq, state, carry) for conv, x, state in zip(convs, xs, past, strict=True)]
    outputs = [y for y, _ in results]
    if silu:
        outputs[-1] = F.silu(outputs[-1])
    return outputs, [state for _, state in results] if carry else None


OWN = tuple(f"{__package__}.{name}" for name in ("delta", "linear", "attention", "transnormer"))
ASIDE = {"__init__", "initial", "flops", "gate_parameters", "weights"}
"""Methods that change nothing of what a layer computes."""


def follows_rule(mixer: type["Mixer"]) -> bool:
    """Whether a mixer's class computes what its `rule` says: no class from outside has changed a step."""
    kinds = mixer.__mro__[: mixer.__mro__.index(Mixer)]
    outside = (vars(kind).items() for kind in kinds if kind.__module__ not in OWN)
    changed = (staticmethod, classmethod, property)
    names = {
        name for items in outside for name, x in items if callable(x) or isinstance(x, changed)
    }
    return names <= ASIDE


class Mixer(FusedLinears):
    """Mixes tokens over time in three steps: `heads`, `mix`, `read_out`; the contract is at the top.

    Sizes: K = head_dim·expand_k and V = head_dim·expand_v per head; H heads of q, HK of k, HV of v.
    """

    equation: str
    source: str
    rule = Rule()
    other_readout = ""
    """How to do without a sum of weights, for the refusal of a map with negative products."""
    metrics: ClassVar[dict[str, Callable[["Mixer", Tensor], Tensor]]] = {}
    """Name to a number of a layer from its input x `[B, T, D]`. Validation logs the mean over the layers."""

    def __init_subclass__(cls, **kwargs):
        """Gives an `__init__` with `**options` its parents' options by name, for those who list or check them."""
        super().__init_subclass__(**kwargs)
        own = inspect.signature(cls.__init__)
        named = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
        if "__init__" not in vars(cls) or len(named) == len(own.parameters):
            return
        parent = inspect.signature(super(cls, cls).__init__)
        more = [p for p in parent.parameters.values() if p.name not in own.parameters]
        function: Any = cls.__init__
        first = [p for p in named if p.kind is not p.KEYWORD_ONLY]
        function.__signature__ = own.replace(parameters=[*first, *more, *named[len(first) :]])
        function.__annotations__ |= {p.name: p.annotation for p in more}

    def __init__(
        self,
        config,
        layer_idx: int,
        *,
        k_heads: int | None = None,
        v_heads: int | None = None,
        taps: int | None = None,
    ):
        """k_heads, v_heads: default: those of q. taps: convolution width; default: the config's, else the
        class's, but none in encoders."""
        super().__init__()
        # Read here, because sharding wrappers make a module's class a subclass.
        self.follows_rule = follows_rule(type(self))
        self.bidirectional = not config.is_decoder
        self.layer_idx = layer_idx
        self.num_heads, self.num_v_heads = config.num_heads, v_heads or config.num_heads
        self.K, self.V = config.key_dim, config.value_dim
        self.rule = self._chosen(config, taps)

        self._add_projections(config, k_heads or self.num_heads)
        self._add_convolutions(config)
        if self.rule.map is not None:
            self.feature_map = self.build_map(config)
        if self.rule.read != "plain" and not self.feature_map.nonnegative:
            raise ValueError(
                f"feature_map {self.rule.map!r}: {type(self).__name__} divides by a sum of weights, which "
                f"may be negative; choose relu, exp, elu1, nala or pola{self.other_readout}"
            )
        self._add_output(config)

    def _chosen(self, config, taps: int | None) -> Rule:
        """The rule with the config's choices in place of the class's defaults."""
        rule = self.rule
        if taps is None and rule.conv is not None:
            default = 0 if self.bidirectional else rule.conv
            taps = default if config.conv_size is None else config.conv_size
        named = {
            "map": config.feature_map,
            "gated": config.use_gate,
            "value_conv": config.value_conv,
        }
        # None: the config leaves it open, or the mixer never has it.
        chosen = {name: x for name, x in named.items() if None not in (x, getattr(rule, name))}
        return replace(rule, conv=taps, **chosen)

    def _add_projections(self, config, k_heads: int) -> None:
        D, bias = config.hidden_size, config.use_bias
        self.q_proj = nn.Linear(D, self.num_heads * self.K, bias=bias)
        if not self.rule.shared_qk:
            self.k_proj = nn.Linear(D, self.rule.steps * k_heads * self.K, bias=bias)
        self.v_proj = nn.Linear(D, self.rule.steps * self.num_v_heads * self.V, bias=bias)

    def _add_convolutions(self, config) -> None:
        """The short convolutions of q, k and v, and the one of v that is added to the output."""
        conv = partial(ShortConv, image=config.image_size is not None)
        if self.rule.conv:
            for name, projection in self.projections().items():
                setattr(self, f"{name}_conv1d", conv(projection.out_features, self.rule.conv))

        if not self.rule.value_conv:
            return
        if self.rule.steps > 1:
            raise ValueError(
                f"value_conv={self.rule.value_conv}: a token has {self.rule.steps} values; leave it out"
            )
        if self.rule.shared_filters:
            self.dwc = conv(self.V, self.rule.value_conv, self.num_v_heads)
        else:
            self.dwc = conv(self.num_v_heads * self.V, self.rule.value_conv)

    def _add_output(self, config) -> None:
        """The output's gate, norm and projection."""
        D, bias = config.hidden_size, config.use_bias
        # o has as many heads as the larger of q and v: either may come in groups.
        width = max(self.num_heads, self.num_v_heads) * self.V
        if self.rule.gated:
            self.g_proj = nn.Linear(D, width, bias=bias)
        if self.rule.norm == "head":
            self.o_norm: Any = RMSNorm(self.V, config.norm_eps)
        elif self.rule.norm == "layer":
            self.o_norm = LayerNorm(width, config.norm_eps)
        self.o_proj = nn.Linear(width, D, bias=bias)

    def forward(
        self, x: Tensor, seq: Sequences, state: LayerState | CarriedState | None = None
    ) -> tuple[Tensor, LayerState | CarriedState | None]:
        """x `[B, T, D]` to y `[B, T, D]` and the new state. state: None for none, {} for an empty one."""
        if isinstance(state, CarriedState):
            new, held = {}, self.scatter_states(state.tensors, seq)
            return self.mixed(x, seq, held, new), CarriedState(self.gather_states(new, seq))
        # `decode_token` serves one token behind others, where no gradient is wanted.
        decoding = (
            state and x.shape[1] == 1 and seq.cu_seqlens is None and not torch.is_grad_enabled()
        )
        if decoding and not torch.compiler.is_compiling():
            served = decode_token(self, x, seq, state)
            if served is not None:
                return served
        new: LayerState | None = None if state is None else {}
        return self.mixed(x, seq, state or {}, new), new

    def mixed(self, x: Tensor, seq: Sequences, state: LayerState, new: LayerState | None) -> Tensor:
        """The three steps: x `[B, T, D]` to y `[B, T, D]`."""
        layout = seq.layout
        tokens = x if layout is None else layout.pack(x)
        heads = self.heads(tokens, seq, state, new)
        o = self.mix_directions(heads, seq, state, new)
        o = self.add_local(o, heads)
        if layout is None:
            return self.read_out(o, heads, x)

        # Norm, gate and o_proj see the batch's columns, as the projections did.
        of_tokens = {
            name: layout.unpack(y)
            for name, y in heads.items()
            if y.dim() > 1 and y.shape[:2] == tokens.shape[:2]
        }
        return self.read_out(layout.unpack(o), heads | of_tokens, x)

    def add_local(self, o: Tensor, heads: Heads) -> Tensor:
        """o and the convolution of v, if there is one; heads that share keys and values share that too."""
        if self.rule.gated and self.rule.gate_before == "conv":
            o = o * heads["gate"].view_as(o)
        if not self.rule.value_conv:
            return o
        local = heads["local"]
        return o + local.repeat_interleave(o.shape[2] // local.shape[2], 2)

    def build_map(self, config) -> Any:
        assert self.rule.map is not None
        sizes = {"num_heads": self.num_heads, "head_dim": self.K}
        return build_feature_map(self.rule.map, **sizes, **config.feature_map_options)

    def mix_directions(
        self, heads: Heads, seq: Sequences, state: LayerState, new: LayerState | None
    ) -> Tensor:
        """`mix`; for a rule with a mask, where tokens see both ways, the sum of one result each way."""
        if self.rule.unmasked or not self.bidirectional:
            return self.mix(heads, seq, state, new)
        causal = seq.causal()
        # What only `read_out` reads need not turn, nor what is the same for all tokens.
        same = ("gate", "local", "skip")
        turn = {name: x for name, x in heads.items() if name not in same}
        reversed_heads = heads | {name: seq.reversed_tokens(x) for name, x in turn.items()}

        # A token sees itself both ways, so its own term counts twice.
        forward = self.mix(heads, causal, {}, None)
        backward = self.mix(reversed_heads, causal, {}, None)
        return forward + seq.reversed_tokens(backward)

    def scatter_states(self, state: LayerState, seq: Sequences) -> LayerState:
        """States by row to states by sequence, as `heads` and `mix` take them."""
        return {name: seq.scatter_states(x) for name, x in state.items()}

    def gather_states(self, new: LayerState, seq: Sequences) -> LayerState:
        """States by sequence to states by row, of each row's last sequence."""
        return {name: seq.gather_states(x) for name, x in new.items()}

    def heads(self, x: Tensor, seq: Sequences, state: LayerState, new: LayerState | None) -> Heads:
        """The inputs of `mix`, by name: q `[B, T, H, K]`, k `[B, T, HK, K]`, v `[B, T, HV, V]`, gates; and
        `gate`, the input of the output gate, and `local` `[B, T, HV, V]`, the convolution of v.

        state: what earlier calls put into `new`. new: None if no state is wanted.
        """
        heads = self.projected(x, seq)
        if self.rule.conv:
            heads |= self.convolve(heads, seq, state, new)
        if self.rule.value_conv:
            # Of v behind its short convolution, where there is one.
            past = [state["conv_local"]] if "conv_local" in state else None
            (local,), past = convolve([self.dwc], [heads["v"]], seq, past, new is not None)
            if new is not None and past is not None:
                (new["conv_local"],) = past
            heads["local"] = local.unflatten(-1, (-1, self.V))
        for name in self.projections():
            heads[name] = heads[name].unflatten(-1, (-1, self.V if name == "v" else self.K))
        heads = {"k": heads["q"], **heads}  # k is q where one projection has both
        if self.rule.write == "delta" and self.rule.value_silu and not self.rule.conv:
            heads["v"] = F.silu(heads["v"])
        if self.rule.rotate in ("rope", "lrpe"):
            heads |= self.placed(heads["q"], heads["k"], seq)
        return heads | self.gates(heads)

    def placed(self, q: Tensor, k: Tensor, seq: Sequences) -> Heads:
        """q and k with their positions; `lrpe` turns features."""
        if self.rule.rotate == "rope":
            angles = place_angles(q, seq, self.K, self.rule.theta)
            return {"q": rotate(q, angles), "k": rotate(k, angles)}
        positions, lrpe = seq.positions(q.shape[1], q.device), self.get_submodule("lrpe")
        features = map_features(q, k, self.feature_map)
        q, k = (lrpe(x, positions).to(q.dtype) for x in features)
        return {"q": q, "k": k}

    def gates(self, heads: Heads) -> Heads:
        """The gates of the state, by name: g, the log-decay, `[B, T, HV]` or `[B, T, HV, F]`, and beta."""
        return form_gates(self, heads)

    def projections(self) -> dict[str, nn.Linear]:
        """The projections to q, k and v, by name; convolutions may follow them."""
        return {
            n: getattr(self, f"{n}_proj")
            for n in ("q", "k", "v")
            if n != "k" or not self.rule.shared_qk
        }

    def linears(self) -> dict[str, nn.Linear]:
        """The Linear layers that read x: `heads` has their outputs by these names."""
        return self.projections() | ({"gate": self.g_proj} if self.rule.gated else {})

    def compiled_products(self) -> list[dict[str, nn.Linear]]:
        # One product for q, k and v, one for the narrow layers, one for each other layer. One product for all
        # needs all gradients in one tensor. To write that took 0.56 ms of an H100 at 16,384 tokens.
        first = self.projections()
        others = {n: x for n, x in self.linears().items() if n not in first}
        narrow = {n: x for n, x in others.items() if x.out_features < NARROW}
        wide = [{n: x} for n, x in others.items() if n not in narrow]
        return [product for product in (first, *wide, narrow) if product]

    def second_linears(self) -> dict[str, nn.Linear]:
        """Linear layers that read outputs of `linears`, and take their names in `project`."""
        return {}

    def project(self, x: Tensor) -> Heads:
        heads = super().project(x)
        for name, layer in self.second_linears().items():
            heads[name] = apply_linear(layer, heads[name])
        return heads

    def projected(self, x: Tensor, seq: Sequences) -> Heads:
        """`project` of x as `mix` sees it; the Linear layers see the batch's columns where layers do."""
        layout = seq.layout
        if layout is None:
            return self.project(x)
        return {name: layout.pack(y) for name, y in self.project(layout.unpack(x)).items()}

    def convolve(
        self, heads: Heads, seq: Sequences, state: LayerState, new: LayerState | None
    ) -> Heads:
        """The short convolutions of q, k and v, by name; SiLU follows for v, see `value_silu`."""
        names = list(self.projections())
        convs, past = [getattr(self, f"{n}_conv1d") for n in names], None
        if "conv_v" in state:
            past = [state[f"conv_{n}"] for n in names]
        outputs, past = convolve(
            convs, [heads[n] for n in names], seq, past, new is not None, silu=self.rule.value_silu
        )
        if new is not None and past is not None:
            new |= {f"conv_{n}": x for n, x in zip(names, past, strict=True)}
        return dict(zip(names, outputs, strict=True))

    def mix(
        self, heads: Heads, seq: Sequences, state: LayerState, new: LayerState | None
    ) -> Tensor:
        """o `[B, T, HV, V]` from `heads`; linear in v, and the only step that sees other tokens."""
        return recurrence_of(self.rule)(self, heads, seq, state, new)

    def read_out(self, o: Tensor, heads: Heads, x: Tensor) -> Tensor:
        """Norm, gate and output projection: o to y `[B, T, D]`."""
        rule = self.rule
        gate = (heads["gate"] if "gate" in heads else self.g_proj(x)) if rule.gated else None
        if rule.norm == "head":
            y = norm_gate(o, self.o_norm, gate, x.dtype, rule.gate)
            if rule.norm_read:
                _, length = direction(at_least_fp32(heads["q"]), EPS)
                # ½ + tanh(‖q‖/√K), [B, T, HV, 1]: a head's factor passes its gate.
                s = self.per_value((0.5 + (length / self.K**0.5).tanh()).squeeze(-1))[..., None]
                y = (y.view(o.shape) * s.to(y.dtype)).flatten(-2)
            return self.o_proj(y)

        o = o.flatten(-2)  # [B, T, heads·V]
        if rule.norm is not None:
            if gate is not None and rule.gate_before == "norm":
                o, gate = swiglu(at_least_fp32(gate), o), None
            o = self.o_norm(o)
        o = o.to(x.dtype)
        if gate is None or rule.gate_before == "conv":
            return self.o_proj(o)
        return self.o_proj(o * gate if rule.gate == "plain" else swiglu(gate, o))

    def per_value(self, x: Tensor) -> Tensor:
        """`[B, T, H]` of the heads of k for each head of v, `[B, T, HV]`."""
        group = self.num_v_heads // self.num_heads
        return x.repeat_interleave(group, -1) if group > 1 else x

    def gate_parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of the state's gates. Here: matrices with one row a head, and a step of it."""
        rows = self.rule.steps * max(self.num_heads, self.num_v_heads)
        yield from (p for p in self.parameters() if p.ndim == 2 and len(p) <= rows)

    @torch.no_grad()
    def weights(self, x: Tensor) -> Tensor:
        """The matrix that `mix` multiplies v by, `[B, steps·HV·streams, T, T]`; row t has token t's weights.

        With several steps per token, sum the products over the steps. The matrix is `mix` of the unit vectors:
        exact, because `mix` is linear in v.
        """
        seq, n = Sequences(bidirectional=self.bidirectional), self.rule.streams
        heads = self.heads(x, seq, {}, None)
        B, T, HV = heads["v"].shape[:3]
        # [1, T, 1, n·T]: token j's value is the unit vector j, so o_t is row t of the matrix.
        unit = torch.eye(T, dtype=heads["v"].dtype, device=x.device).repeat(1, n)[None, :, None]
        of_steps = []
        for i in range(self.rule.steps):
            v = unit.new_zeros(B, T, HV, n * T)  # HV: steps times heads
            v.unflatten(2, (self.rule.steps, -1))[:, :, i] = unit
            o = self.mix_directions(heads | {"v": v}, seq, {}, None)
            # [B, T, HV, n·T] to [B, HV·n, T, T]
            of_steps.append(o.unflatten(-1, (n, T)).flatten(2, 3).transpose(1, 2))
        return torch.cat(of_steps, 1)

    def state_spec(self, T: int) -> StateSpec:
        """Name to shape and dtype of a sequence's state after T tokens; dtype None: the model's."""
        past = max((self.rule.conv or 0) - 1, 0)
        spec: StateSpec = {
            f"conv_{name}": ((past, p.out_features), None)
            for name, p in self.projections().items()
            if past
        }
        if self.rule.value_conv:
            spec["conv_local"] = ((self.rule.value_conv - 1, self.v_proj.out_features), None)
        if self.rule.write in ("add", "delta"):
            spec = {"recurrent": (state_shape(self), torch.float32), **spec}
        if self.rule.read == "mala":
            spec["value_sum"] = ((self.num_v_heads, 1, self.V), torch.float32)
        return spec

    def flops(self, T: int) -> float:
        """Forward FLOPs per token at length T, without Linear layers. Here: convolutions, map and recurrence."""
        taps = sum(m.weight.numel() * m.copies for m in self.modules() if isinstance(m, ShortConv))
        mapped = 0.0 if self.rule.map is None else self.num_heads * self.feature_map.flops
        rule = rule_flops(self) if self.rule.write in ("add", "delta") else 0.0
        return rule + 2.0 * taps + mapped
