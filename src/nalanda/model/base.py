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

- `mix(inputs, seq, state)`: q, k, v and gates to o and the state behind the last token. Besides short
  convolutions it is the only step that sees other tokens, and it sees no later ones. It is **linear in v**; for
  that reason `weights` is exact. `state` is what an earlier call returned, {} before the first token, and None
  where no state is wanted. `mix` keeps the documents of `seq.cu_seqlens` apart; the ops of `ops.py` do that, and
  take and return states. A rule with `cut` calls `recurrent.recurrence` in place of an op;
- `state_spec(T)`: name to shape and dtype of the state that `mix` and `inputs` return, per sequence;
- `flops(T)`: FLOPs per token without Linear layers. It and `state_spec` add to the base class's result,
  or replace it.

It may define

- `inputs` and `read_out`, before and after `mix`; `linears`, the Linear layers that read x, one product;
- `up_projections`, Linear layers that read outputs of these;
- `project_tokens(x, seq, state)`: the outputs of `linears`, where they read more than x or are not all;
- `gates(projected, inputs)`: the inputs with g and beta, from the outputs of `linears`;
- `tp_plan`, how tensor parallelism splits its heads (`plans.py`). A class from outside has no plan without it;
- `gate_parameters`, the parameters that decide what the state forgets and takes. Muon leaves them to AdamW;
- `metrics`, names and functions of numbers that validation logs.

In decoding a whole model may be one program or graph (`decoding.py`). Elsewhere one kernel for one token replaces the
three steps, where the `rule` of a mixer of this package says all that they compute (`one_token.py`). A subclass from
outside that overrides one of them decodes by its own.

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

from .call import Inputs
from .epilogues import norm_gate, swiglu
from .feature_maps import EPS, build_feature_map
from .kernels import by_kernel
from .layers import (
    LayerNorm,
    PreviousToken,
    RMSNorm,
    ShortConv,
    altered,
    at_least_fp32,
    direction,
    overrides,
    place_angles,
    rotate,
    unrecorded,
)
from .one_token import decode_token
from .ops import map_features
from .plans import COLUMNS, FIRST, GATHERED, LOCAL, ROWS, SHARED, all_heads, own_heads, own_outputs
from .projections import FusedLinears, apply_linear
from .recurrent import LayerState, form_gates, per_value, recurrence_of, rule_flops, state_shape
from .rule import Rule
from .sequences import Sequences

StateSpec = dict[str, tuple[tuple[int, ...], torch.dtype | None]]


class CarriedState:
    """A layer's states for the rows of a batch, `[B, …]` each.

    Not a dict: FSDP casts tensors inside dicts to the compute dtype.
    """

    def __init__(self, tensors: LayerState):
        self.tensors = tensors


def convolve(
    convs: dict[str, ShortConv] | dict[str, PreviousToken],
    xs: list[Tensor],
    seq: Sequences,
    state: LayerState | None,
    silu: bool = False,
) -> tuple[list[Tensor], LayerState]:
    """`conv(x, seq, past, carry)` for each; SiLU follows the last one if `silu`. By a kernel if one serves.

    convs: by the names of their states. state: as `Mixer.mix` takes it. Returns their outputs, and with a state those
    behind the last token.
    """
    layers, carry = [*convs.values()], state is not None
    if seq.bidirectional:
        # Centred convolutions carry no state.
        *outputs, last = [conv(x, seq)[0] for conv, x in zip(layers, xs, strict=True)]
        return [*outputs, F.silu(last) if silu else last], {}

    past = [state[name] for name in convs] if state else None
    if seq.parts is not None:
        xs, past = seq.parts.conv_states(xs, layers[0].width - 1, past)

    filters = [conv.filters(x) for conv, x in zip(layers, xs, strict=True)]
    # An offloaded one is in memory only while its own module runs.
    if not (filters[0].is_meta or any(map(altered, layers)) or any(map(overrides, layers))):
        served = by_kernel(
            "short_convs",
            "auto",
            xs[0],  # its device
            *(xs, filters, past),
            cu_seqlens=seq.cu_seqlens,
            activations=[None] * (len(xs) - 1) + ["silu" if silu else None],
            output_final_state=carry,
        )
        if served is not None:
            outputs, ends = served
            return outputs, dict(zip(convs, ends, strict=True)) if carry else {}

    before = past or [None] * len(xs)
    results = [conv(x, seq, y, carry) for conv, x, y in zip(layers, xs, before, strict=True)]
    outputs, ends = [y for y, _ in results], [end for _, end in results]
    if silu:
        outputs[-1] = F.silu(outputs[-1])
    return outputs, dict(zip(convs, ends, strict=True)) if carry else {}


def mix_ways(
    mixer: "Mixer", inputs: Inputs, seq: Sequences, state: LayerState | None
) -> tuple[Tensor, LayerState]:
    """`mixer.mix`. Where tokens see both ways and the rule has a causal form alone: the sum of a result each way."""
    if mixer.rule.unmasked or not mixer.bidirectional:
        return mixer.mix(inputs, seq, state)
    causal = seq.causal()
    # Other fields are read behind `mix`, or are the same for all tokens.
    turned = {
        name: seq.reversed_tokens(x)
        for name in ("q", "k", "v", "beta", "g", "erase", "dt", "angles")
        if (x := getattr(inputs, name)) is not None
    }

    # A token sees itself both ways, so its own term counts twice.
    forward, _ = mixer.mix(inputs, causal, None)
    backward, _ = mixer.mix(inputs._replace(**turned), causal, None)
    return forward + seq.reversed_tokens(backward), {}


def _add_local(rule: Rule, o: Tensor, inputs: Inputs) -> Tensor:
    """o and the convolution of v, if there is one; heads that share keys and values share that too."""
    if inputs.gate is not None and rule.gate_before == "conv":
        o = o * inputs.gate.view_as(o)
    if inputs.local is None:
        return o
    return o + inputs.local.repeat_interleave(o.shape[2] // inputs.local.shape[2], 2)


def by_sequence(mixer: "Mixer", state: CarriedState, seq: Sequences) -> LayerState:
    """States by row to states by sequence, as `inputs` and `mix` take them."""
    return {
        name: x if _stays_by_row(mixer, name) else seq.scatter_states(x)
        for name, x in state.tensors.items()
    }


def by_row(mixer: "Mixer", state: LayerState, seq: Sequences) -> CarriedState:
    """States by sequence to states by row, of each row's last sequence."""
    return CarriedState(
        {
            name: seq.settled(x.detach()) if _stays_by_row(mixer, name) else seq.gather_states(x)
            for name, x in state.items()
        }
    )


def _stays_by_row(mixer: "Mixer", name: str) -> bool:
    """Whether a state is of whole rows: kept keys and values are, see `attention.CachedAttention.mix_rows`."""
    return mixer.rule.write == "rows" and not name.startswith("conv_")


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


def _with_choices(rule: Rule, config, taps: int | None) -> Rule:
    """The rule with the config's choices in place of the class's defaults."""
    if taps is None and rule.conv is not None:
        default = rule.conv if config.is_decoder else 0
        taps = default if config.conv_size is None else config.conv_size
    named = {"map": config.feature_map, "gated": config.use_gate, "value_conv": config.value_conv}
    # None: the config leaves it open, or the mixer never has it.
    chosen = {name: x for name, x in named.items() if None not in (x, getattr(rule, name))}
    return replace(rule, conv=taps, **chosen)


class Mixer(FusedLinears):
    """Mixes tokens over time in three steps: `inputs`, `mix`, `read_out`; the contract is at the top.

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
        signature = inspect.signature(cls.__init__)
        named = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        if "__init__" not in vars(cls) or len(named) == len(signature.parameters):
            return
        parent = inspect.signature(super(cls, cls).__init__)
        more = [p for p in parent.parameters.values() if p.name not in signature.parameters]
        function: Any = cls.__init__
        first = [p for p in named if p.kind is not p.KEYWORD_ONLY]
        function.__signature__ = signature.replace(parameters=[*first, *more, *named[len(first) :]])
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
        self.num_heads = H = config.num_heads
        self.num_v_heads = H if v_heads is None else v_heads
        if k_heads is None and (self.num_v_heads < 1 or self.num_v_heads % H):
            raise ValueError(f"num_v_heads={v_heads} must be a multiple of num_heads={H}")
        self.K, self.V = config.key_dim, config.value_dim
        self.rule = rule = _with_choices(self.rule, config, taps)

        D, bias = config.hidden_size, config.use_bias
        self.q_proj = nn.Linear(D, self.num_heads * self.K, bias=bias)
        if not rule.shared_qk:
            k_heads = k_heads or self.num_heads
            self.k_proj = nn.Linear(D, rule.steps * k_heads * self.K, bias=bias)
        self.v_proj = nn.Linear(D, rule.steps * self.num_v_heads * self.V, bias=bias)

        # The short convolutions of q, k and v, and the one of v that is added to the output.
        conv = partial(ShortConv, image=config.image_size is not None)
        if rule.conv:
            for name in rule.projected:
                width = getattr(self, f"{name}_proj").out_features
                setattr(self, f"{name}_conv1d", conv(width, rule.conv))
        if rule.value_conv and rule.steps > 1:
            raise ValueError(
                f"value_conv={rule.value_conv}: a token has {rule.steps} values; leave it out"
            )
        if rule.value_conv and rule.shared_filters:
            self.dwc = conv(self.V, rule.value_conv, self.num_v_heads)
        elif rule.value_conv:
            self.dwc = conv(self.num_v_heads * self.V, rule.value_conv)

        if rule.map is not None:
            self.feature_map = self.build_map(config)
        if rule.read != "plain" and not self.feature_map.nonnegative:
            raise ValueError(
                f"feature_map {rule.map!r}: {type(self).__name__} divides by a sum of weights, which "
                f"may be negative; choose relu, exp, elu1, nala or pola{self.other_readout}"
            )

        # o has as many heads as the larger of q and v: either may come in groups.
        width = max(self.num_heads, self.num_v_heads) * self.V
        if rule.gated:
            self.g_proj = nn.Linear(D, width, bias=bias)
        if rule.norm == "head":
            self.o_norm: Any = RMSNorm(self.V, config.norm_eps)
        elif rule.norm == "layer":
            self.o_norm = LayerNorm(width, config.norm_eps)
        self.o_proj = nn.Linear(width, D, bias=bias)

    def build_map(self, config) -> Any:
        assert self.rule.map is not None
        return build_feature_map(
            self.rule.map, num_heads=self.num_heads, head_dim=self.K, **config.feature_map_options
        )

    def forward(
        self, x: Tensor, seq: Sequences, state: LayerState | CarriedState | None = None
    ) -> tuple[Tensor, LayerState | CarriedState | None]:
        """x `[B, T, D]` to y `[B, T, D]` and the new state. state: None for none, {} for an empty one."""
        held = by_sequence(self, state, seq) if isinstance(state, CarriedState) else state
        # `decode_token` serves one token behind others, where no gradient is wanted.
        decoding = held and held is state and x.shape[1] == 1 and seq.cu_seqlens is None
        if decoding and unrecorded():
            served = decode_token(self, x, seq, held)
            if served is not None:
                return served

        layout = seq.layout
        tokens = x if layout is None else layout.pack(x)
        inputs, convs = self.inputs(tokens, seq, held)
        o, new = mix_ways(self, inputs, seq, held)
        o = _add_local(self.rule, o, inputs)
        if layout is not None:
            # Norm, gate and o_proj see the batch's columns, as the projections did.
            of_tokens = {
                name: layout.unpack(y)
                for name, y in inputs._asdict().items()
                if y is not None and y.dim() > 1 and y.shape[:2] == tokens.shape[:2]
            }
            o, inputs = layout.unpack(o), inputs._replace(**of_tokens)
        y = self.read_out(o, inputs, x)

        if held is None:
            return y, None
        new = convs | new
        return y, new if held is state else by_row(self, new, seq)

    def inputs(
        self, x: Tensor, seq: Sequences, state: LayerState | None
    ) -> tuple[Inputs, LayerState]:
        """x `[B, T, D]` to the inputs of `mix` and `read_out`, and the convolutions' states behind the last token.

        state: as `mix` takes it.
        """
        rule = self.rule
        outputs, new = self.project_tokens(x, seq, state)
        outputs = own_outputs(self, outputs)
        heads, local = [outputs[name] for name in rule.projected], None
        if rule.conv:
            convs = {f"conv_{name}": getattr(self, f"{name}_conv1d") for name in rule.projected}
            heads, ends = convolve(convs, heads, seq, state, silu=rule.value_silu)
            new |= ends
        if rule.value_conv:
            # Of v behind its short convolution, where there is one.
            (local,), ends = convolve({"conv_local": self.dwc}, heads[-1:], seq, state)
            new |= ends
            local = local.unflatten(-1, (-1, self.V))

        # k is q where one projection has both: [B, T, H, K], [B, T, HK, K] and [B, T, HV, V].
        q, *others = heads
        *qk, v = q, *map(self.own_steps, others)
        q, *others = (y.unflatten(-1, (-1, self.K)) for y in qk)
        k = others[0] if others else q
        v = v.unflatten(-1, (-1, self.V))
        if rule.write == "delta" and rule.value_silu and not rule.conv:
            v = F.silu(v)
        if rule.rotate == "rope":
            angles = place_angles(q, seq, self.K, rule.theta)
            q, k = rotate(q, angles), rotate(k, angles)
        elif rule.rotate == "lrpe":
            # These positions turn features.
            positions, lrpe = seq.positions(q.shape[1], q.device), self.get_submodule("lrpe")
            features = map_features(q, k, self.feature_map)
            q, k = (lrpe(y, positions).to(q.dtype) for y in features)
        return self.gates(outputs, Inputs(q, k, v, gate=outputs.get("gate"), local=local)), new

    def project_tokens(
        self, x: Tensor, seq: Sequences, state: LayerState | None
    ) -> tuple[dict[str, Tensor], LayerState]:
        """x `[B, T, D]` to the outputs of `linears`, by name, and states that they need of earlier tokens: none."""
        return seq.in_columns(self.project_inputs, x), {}

    def project_inputs(self, x: Tensor) -> dict[str, Tensor]:
        """x `[…, D]` to the outputs of `linears` and `up_projections`, by name."""
        return self.project_up(self.project(x))

    def project_up(self, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """The outputs of `linears`, of which some pass their second layer."""
        for name, up in self.up_projections().items():
            outputs[name] = apply_linear(up, outputs[name])
        return outputs

    def gates(self, projected: dict[str, Tensor], inputs: Inputs) -> Inputs:
        """The inputs with the gates of the state: g, the log-decay, `[B, T, HV]` or `[B, T, HV, F]`, and beta."""
        return form_gates(self, projected, inputs)

    def mix(
        self, inputs: Inputs, seq: Sequences, state: LayerState | None
    ) -> tuple[Tensor, LayerState]:
        """o `[B, T, HV, V]` and the new state; linear in v, and the only step that sees other tokens."""
        return recurrence_of(self.rule)(self, inputs, seq, state)

    def read_out(self, o: Tensor, inputs: Inputs, x: Tensor) -> Tensor:
        """Norm, gate and output projection: o to y `[B, T, D]`."""
        rule, gate = self.rule, inputs.gate
        if rule.norm == "head":
            y = norm_gate(o, self.o_norm, gate, x.dtype, rule.gate)
            if rule.norm_read:
                _, length = direction(at_least_fp32(inputs.q), EPS)
                # ½ + tanh(‖q‖/√K), [B, T, HV, 1]: a head's factor passes its gate.
                s = per_value(self, (0.5 + (length / self.K**0.5).tanh()).squeeze(-1))[..., None]
                y = (y.view(o.shape) * s.to(y.dtype)).flatten(-2)
            return self.o_proj(y)

        o = o.flatten(-2)  # [B, T, heads·V]
        if rule.norm is not None:
            if gate is not None and rule.gate_before == "norm":
                o, gate = swiglu(at_least_fp32(gate), o), None
            o = own_heads(self, self.o_norm(all_heads(self, o)))
        o = o.to(x.dtype)
        if gate is None or rule.gate_before == "conv":
            return self.o_proj(o)
        return self.o_proj(o * gate if rule.gate == "plain" else swiglu(gate, o))

    def linears(self) -> dict[str, nn.Linear]:
        """The Linear layers that read x, by the names of their outputs: q, k, v, and what `gates` takes."""
        layers = {name: getattr(self, f"{name}_proj") for name in self.rule.projected}
        return layers | ({"gate": self.g_proj} if self.rule.gated else {})

    def head_counts(self) -> tuple[int, ...]:
        """The numbers of heads of q and of v, both of which tensor parallelism splits."""
        return self.num_heads, self.num_v_heads

    def is_whole(self, state: str) -> bool:
        """Whether every tensor-parallel process has the state of this name whole."""
        return state.removeprefix("conv_") in self.stepped

    @property
    def stepped(self) -> tuple[str, ...]:
        """The projections with columns of each step of a token, then of each head."""
        return ("k", "v", "b") if self.rule.steps > 1 else ()

    def columns(self) -> dict[str, nn.Linear]:
        """The Linear layers with columns of heads, by the names of their outputs: of two in turn, the second."""
        return self.linears() | self.up_projections()

    def up_projections(self) -> dict[str, nn.Linear]:
        """The second of two Linear layers, by the name of their output: gates by channel have a low rank."""
        return {}

    def own_steps(self, y: Tensor) -> Tensor:
        """y `[B, T, steps·n]`, in a tensor-parallel process with the columns of its own heads in each step."""
        if not self.stepped:
            return y
        return own_heads(self, y.unflatten(-1, (self.rule.steps, -1))).flatten(-2)

    def tp_plan(self) -> dict[str, str]:
        """Submodule or parameter to its style in a tensor-parallel plan, see `plans.py`. Others stay whole.

        Raises ValueError for a class from outside that does not define it: only its author knows.
        """
        modules = {
            name: module
            for name, module in self.named_modules()
            if next(module.parameters(recurse=False), None) is not None
        }
        for kind in map(type, (self, *modules.values())):
            is_planned = kind.__module__.startswith((f"{__package__}.", "torch."))
            if not is_planned and not {"tp_plan", "tp_style"} & vars(kind).keys():
                raise ValueError(
                    f"tensor parallelism: {kind.__name__} has no plan; give it `tp_plan`"
                )

        paths = {id(module): name for name, module in modules.items()}
        plan = {"o_proj": ROWS}
        for name, layer in self.columns().items():
            path = paths[id(layer)]
            if not path[-1].isdigit():  # in plans `*` is any number
                plan[path] = GATHERED if name in self.stepped else COLUMNS

        for path, module in modules.items():
            style = getattr(module, "tp_style", None)
            if isinstance(module, ShortConv):
                if path == "dwc" and self.rule.shared_filters:
                    plan[path] = SHARED
                elif path[0] not in self.stepped:
                    plan[f"{path}.weight"] = FIRST
            elif style is not None and (path != "o_norm" or self.rule.by_head):
                plan[path] = style
                if style == LOCAL:
                    plan |= {f"{path}.{name}": FIRST for name, _ in module.named_parameters()}
        return plan

    def gate_parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of the state's gates: matrices with one row a head, and a step of it, and Linear layers
        beside those of q, k, v and the output gate."""
        rows = self.rule.steps * max(self.num_heads, self.num_v_heads)
        yield from (p for p in self.parameters() if p.ndim == 2 and len(p) <= rows)
        for name, layer in (*self.linears().items(), *self.up_projections().items()):
            if name not in (*self.rule.projected, "gate"):
                yield from layer.parameters()

    @torch.no_grad()
    def weights(self, x: Tensor) -> Tensor:
        """The matrix that `mix` multiplies v by, `[B, steps·HV·streams, T, T]`; row t has token t's weights.

        With several steps per token, sum the products over the steps. The matrix is `mix` of the unit vectors:
        exact, because `mix` is linear in v.
        """
        seq, n = Sequences(bidirectional=self.bidirectional), self.rule.streams
        inputs, _ = self.inputs(x, seq, None)
        B, T, HV = inputs.v.shape[:3]
        # [1, T, 1, n·T]: token j's value is the unit vector j, so o_t is row t of the matrix.
        unit = torch.eye(T, dtype=inputs.v.dtype, device=x.device).repeat(1, n)[None, :, None]
        of_steps = []
        for i in range(self.rule.steps):
            v = unit.new_zeros(B, T, HV, n * T)  # HV: steps times heads
            v.unflatten(2, (self.rule.steps, -1))[:, :, i] = unit
            o, _ = mix_ways(self, inputs._replace(v=v), seq, None)
            # [B, T, HV, n·T] to [B, HV·n, T, T]
            of_steps.append(o.unflatten(-1, (n, T)).flatten(2, 3).transpose(1, 2))
        return torch.cat(of_steps, 1)

    def state_spec(self, T: int) -> StateSpec:
        """Name to shape and dtype of a sequence's state after T tokens; dtype None: the model's."""
        past = max((self.rule.conv or 0) - 1, 0)
        spec: StateSpec = {
            f"conv_{name}": ((past, getattr(self, f"{name}_proj").out_features), None)
            for name in self.rule.projected
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
