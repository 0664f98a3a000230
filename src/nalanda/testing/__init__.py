"""The properties that every token mixer and feature map must have, as functions for anybody's tests.

`check_mixer("name")` and `check_feature_map("name")` run all of them on tiny models. Each property is a
function of MIXER_PROPERTIES, ENCODER_PROPERTIES (where tokens see both ways) or MAP_PROPERTIES that raises
AssertionError; Nalanda's own tests run the same.
"""

import copy
import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.utils.logging import disable_progress_bar

from nalanda import NalandaCache, NalandaConfig, NalandaForCausalLM, NalandaForMaskedLM, ops
from nalanda.model import MIXERS, FeatureMap, Mixer, build_feature_map, kernels
from nalanda.model.base import mix_ways
from nalanda.model.call import Call, Inputs, Options
from nalanda.model.context import Context
from nalanda.model.layers import Fp32Module
from nalanda.model.sequences import Sequences
from nalanda.testing import properties
from nalanda.testing import subject as subjects
from nalanda.testing.properties import PROPERTIES
from nalanda.testing.verdicts import Finding, check, find_properties

VOCAB = 61


def check_model(model: Any, only: Sequence[str] = ()) -> list[Finding]:
    """Checks any causal language model by the properties of `nalanda.testing.properties`, and returns their rows.

    model: a transformers model, or the name of one as `nalanda check` takes it. only: names of properties.

    A given model stays as it is: a copy is checked, in float64 where it can compute in it. Some properties make a
    second copy. Both copies of an fp32 model take four times its memory.

    Raises AssertionError that names each property that differs or fails.
    """
    chosen = find_properties(only, "only") if only else PROPERTIES
    of_name = isinstance(model, str)
    subject = subjects.make(model) if of_name else subjects.around(copy.deepcopy(model))
    rows = [*check(subject, chosen)]
    wrong = [row for row in rows if row.is_wrong]
    assert not wrong, "\n".join(f"{row.name}: {row.verdict} {row.reason}" for row in wrong)
    return rows


def check_mixer(name: str, **options: Any) -> None:
    """Raises AssertionError, which names the property, unless mixer `name` has all of MIXER_PROPERTIES, and
    all of ENCODER_PROPERTIES in an encoder.

    options: other fields of `NalandaConfig`, such as mixer_options or feature_map.
    """
    options = {"feature_map": MIXERS[name].rule.map, **options}
    _check(f"mixer {name}", MIXER_PROPERTIES, lambda: build(name, **options))
    encoder = {**options, "is_decoder": False}
    _check(f"mixer {name} of an encoder", ENCODER_PROPERTIES, lambda: build(name, **encoder))


def check_feature_map(name: str, **options: Any) -> None:
    """Raises AssertionError, which names the property, unless map `name` has all of MAP_PROPERTIES, and
    linear attention with it all of MIXER_PROPERTIES.

    options: the map's own, feature_map_options of `NalandaConfig`.
    """
    _check(
        f"feature map {name}",
        MAP_PROPERTIES,
        lambda: lambda **sizes: build_map(name, **sizes, **options),
    )
    denominator = build_map(name, **options).nonnegative
    mixer = {"mixer_options": {"denominator": denominator}, "feature_map_options": options}
    check_mixer("linear_attention", feature_map=name, **mixer)


def _check(what: str, properties: list[Callable], make: Callable[[], Any]) -> None:
    disable_progress_bar()  # of saving and loading
    for holds in properties:
        try:
            holds(make())
        except Exception as error:
            reason = f"{type(error).__name__}: " * (type(error) is not AssertionError) + str(error)
            raise AssertionError(f"{what}: {holds.__name__.replace('_', ' ')}: {reason}") from error


# ------------------------------ tiny models


def build(
    mixer="gated_deltanet", feature_map=None, mixer_options=None, dtype=torch.float64, **options
) -> Any:
    """A tiny `NalandaForCausalLM`, or `NalandaForMaskedLM` of an encoder, in evaluation mode. Its initial
    weights are so large that its mixers change the logits."""
    torch.manual_seed(0)
    if options.get("is_decoder") is False:
        names = [mixer] if isinstance(mixer, str) else mixer
        # Without a mask a mixer sees both ways at once; others need one pass for each.
        options.setdefault(
            "directions", 1 if all(MIXERS[name].rule.unmasked for name in names) else 2
        )
    if mixer == "gated_deltanet" and feature_map is None:
        feature_map = "nala"
    fields: dict[str, Any] = {
        "mixer": mixer,
        "feature_map": feature_map,
        "mixer_options": mixer_options,
        "vocab_size": VOCAB,
        "hidden_size": 24,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_heads": 2,
        "initializer_range": 0.3,
    }
    config = NalandaConfig(**(fields | options))
    model: Any = (NalandaForCausalLM if config.is_decoder else NalandaForMaskedLM)(config)
    return model.to(dtype).eval()


def build_map(name: str, *, num_heads: int = 2, head_dim: int = 16, **options: Any) -> FeatureMap:
    """A map with its parameters at their initial values; five landmarks where it has any."""
    if name in ("soft", "softpp"):
        options = {"landmarks": 5, **options}
    feature_map: Any = build_feature_map(name, num_heads=num_heads, head_dim=head_dim, **options)
    torch.manual_seed(0)
    if list(feature_map.parameters()):
        feature_map.load_state_dict(feature_map.initial())
    return feature_map


def ids(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def normal(*shape: int, seed: int = 0, spread: float = 1.0) -> Tensor:
    return spread * torch.randn(
        *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )


logits = torch.no_grad()(properties.uncached)


def close(a: Tensor, b: Tensor, atol: float = 1e-9) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=atol)


# ------------------------------ norm-awareness


@torch.no_grad()
def norm_awareness(mixer: Mixer, x: Tensor, factor: float = 3.0) -> tuple[float, float]:
    """How far a row of normalised weights moves, in [0, 2], as all queries or all keys grow by `factor`.

    mixer: in float64; x `[B, T, D]`: its input. Queries and keys grow at their projections, so before the
    map: convolutions are linear. Each row of `mixer.weights(x)` is divided by its L2 length, which an output
    norm would erase; the mean is over all rows but the first, whose only weight cannot move.

    Returns the two means: for the queries, for the keys.
    """

    def inputs(mixer: Mixer) -> Inputs:
        return mixer.inputs(x, Sequences(), None)[0]

    def rows(**grown: Tensor) -> Tensor:
        with mock.patch.object(mixer, "inputs", return_value=(plain._replace(**grown), {})):
            # [B, steps·HV·streams, T − 1, T], each row of length 1
            # SOFT's may be tiny.
            return F.normalize(mixer.weights(x)[..., 1:, :], dim=-1, eps=1e-100)

    plain, moved = inputs(mixer), []
    for name in ("q", "k"):
        longer: Any = copy.deepcopy(mixer)
        # Keys that are queries have no projection of their own: q_proj grows for both cases.
        for parameter in (
            longer.q_proj if mixer.rule.shared_qk else longer.get_submodule(f"{name}_proj")
        ).parameters():
            parameter *= factor
        # A distance between rows of length 1, so from 0 to 2.
        moved.append(
            float((rows(**{name: getattr(inputs(longer), name)}) - rows()).norm(dim=-1).mean())
        )
    return moved[0], moved[1]


# ------------------------------ properties of mixers


def moves_the_logits(model: Any) -> None:
    """Zeroed mixers change the logits; otherwise the other properties would prove nothing."""
    tokens = ids(2, 40)
    before = logits(model, tokens)
    for layer in model.model.layers:
        # With no output projection a mixer adds nothing to the residual stream.
        for parameter in layer.mixer.o_proj.parameters():
            parameter.data.zero_()
    assert (before - logits(model, tokens)).norm() > 0.1 * before.norm()


def mix_is_its_weights_times_v(model: Any) -> None:
    """`mix` is linear in v: it equals the matrix of `weights`, lower triangular in decoders, times v."""
    for layer in model.model.layers:
        mixer, x = layer.mixer, torch.randn(2, 37, model.config.hidden_size, dtype=torch.float64)
        seq = Sequences(bidirectional=mixer.bidirectional)
        with torch.no_grad():
            inputs, _ = mixer.inputs(x, seq, None)
            o, _ = mix_ways(mixer, inputs, seq, None)
            o = o.transpose(1, 2)  # [B, HV, T, V]
        # w [B, steps·HV·streams, T, T] and v [B, steps·HV·streams, T, V / streams]
        w = mixer.weights(x)
        v = inputs.v.unflatten(-1, (mixer.rule.streams, -1)).flatten(2, 3).transpose(1, 2)
        # [B, HV, streams, T, V / streams]: the steps of a token add up to its output
        products = (w @ v).unflatten(1, (mixer.rule.steps, -1, mixer.rule.streams)).sum(1)
        close(products.transpose(2, 3).flatten(-2), o)
        # Above the diagonal stand the weights of later tokens.
        assert (w.triu(1).abs().max() == 0) != mixer.bidirectional


def every_token_sees_every_other(model: Any) -> None:
    """Each of four tokens changes the logits of the three others."""
    tokens = ids(1, 4)
    before = logits(model, tokens)
    for t in range(4):
        changed = tokens.clone()
        changed[:, t] = (changed[:, t] + 1) % VOCAB
        moved = (logits(model, changed) - before).abs().amax(-1)[0]  # [4]
        assert (moved > 1e-9).all(), f"token {t} moves the logits of the four by {moved.tolist()}"


def later_logits_alone_move(model: Any) -> None:
    """Tokens change later logits alone. Without that, packed and cached sequences would prove nothing."""
    tokens = ids(2, 70)
    with torch.no_grad():
        close(*properties.causal(model, tokens))
    changed = tokens.clone()
    changed[:, 66] = (changed[:, 66] + 1) % VOCAB
    later = logits(model, changed)[:, 67:] - logits(model, tokens)[:, 67:]
    assert later.abs().max() > 1e-6, "changing a token does not affect later tokens"


def gradients_of_a_prefix_ignore_the_future(model: Any) -> None:
    x, t, both = model.get_input_embeddings()(ids(2, 70)).detach(), 66, []
    for future in (x[:, t:], -2 * x[:, t:]):
        model.zero_grad()
        inputs = torch.cat([x[:, :t], future], 1).requires_grad_()
        model(inputs_embeds=inputs, use_cache=False).logits[:, :t].square().mean().backward()
        # The prefix's gradients, of its inputs and of all parameters, for either future.
        of_inputs, *gradients = [
            x.grad for x in (inputs, *model.parameters()) if x.grad is not None
        ]
        assert of_inputs[:, t:].abs().max() == 0
        both.append([of_inputs[:, :t], *gradients])
    for a, b in zip(*both, strict=True):
        close(a, b, 1e-9 * max(1.0, float(a.abs().max())))


def gradients_are_finite_differences(model: Any) -> None:
    """Along one random direction of all parameters together."""
    tokens, step = ids(2, 70), 1e-6
    parameters = list(model.parameters())
    # One direction d of all parameters: two losses in place of two for each number.
    towards = [torch.randn_like(p) for p in parameters]

    def loss() -> Tensor:
        return model(tokens, labels=tokens, use_cache=False).loss

    gradients = torch.autograd.grad(loss(), parameters)
    slope = torch.stack([(g * d).sum() for g, d in zip(gradients, towards, strict=True)]).sum()

    @torch.no_grad()
    def difference(step: float) -> Tensor:
        """(L(θ + ε d) − L(θ − ε d)) / 2ε, whose error is of order ε²."""
        ends = []
        for sign in (1, -1):
            for p, d in zip(parameters, towards, strict=True):
                p += sign * step * d
            ends.append(loss())
            for p, d in zip(parameters, towards, strict=True):
                p -= sign * step * d
        return (ends[0] - ends[1]) / (2 * step)

    measured, slack = difference(step), 1e-4 * (1 + slope.abs())
    if (slope - measured).abs() >= slack:
        # A norm of a difference, such as Comba's q − d k, bends strongly. Two steps cancel the ε².
        measured = (4 * measured - difference(2 * step)) / 3
    assert (slope - measured).abs() < slack, f"{float(slope)} and {float(measured)}"


def chunkwise_is_recurrent_is_reference(model: Any) -> None:
    """Where a mixer calls `delta_rule` or `linear_attention`: all modes of the op give one result."""
    tokens = ids(2, 70)
    chunkwise = logits(model, tokens)
    for mode in ("recurrent", "reference"):

        def in_mode(
            call: Call, options: Options, _mode: str = mode, _run: Callable = ops._run_in_torch
        ) -> Any:
            return _run(call, options._replace(mode=_mode))

        # Kernels would serve the call before the torch path is asked for a mode.
        without_kernels = mock.patch.object(kernels, "package", None)
        with without_kernels, mock.patch.object(ops, "_run_in_torch", in_mode):
            close(logits(model, tokens), chunkwise)


@torch.no_grad()
def cached_is_uncached(model: Any) -> None:
    """Token by token, and in pieces that split chunk and convolution anywhere; the states are as promised."""
    tokens = ids(2, 70)
    for length in (1, 3, 65):
        _, cache = properties.goes_on(model, tokens[:, :length])
        assert cache.get_seq_length() == length
        _check_states(model, cache, length)

    uncached = logits(model, tokens)
    # One by one from the first token and across token 64, then pieces about as long as a chunk of 64.
    for pieces in ([1] * 12 + [50] + [1] * 8, [1, 2, 63, 1, 3], [66, 4]):
        close(properties.in_pieces(model, tokens, pieces), uncached)


def _check_states(model: Any, cache: Any, length: int) -> None:
    """Raises AssertionError for states of other shapes or dtypes than the mixers promise after `length` tokens."""
    for layer, state in zip(model.model.layers, cache.states, strict=True):
        promised = {
            # Nothing of a float64 model is fp32.
            name: (shape, torch.promote_types(dtype or model.dtype, model.dtype))
            for name, (shape, dtype) in layer.mixer.state_spec(length).items()
        }
        assert {name: (x.shape[1:], x.dtype) for name, x in state.items()} == promised, "state_spec"


@torch.no_grad()
def packed_is_separate(model: Any) -> None:
    """By bounds, by positions, and in two rows of a batch whose bounds count over both."""
    tokens = ids(2, 70)
    by_bounds, separate = properties.packed_by_cu_seqlens(model, tokens)
    close(by_bounds, separate)
    close(*properties.packed_by_positions(model, tokens))
    lengths = torch.tensor([document.shape[1] for document in properties.documents(tokens)])
    bounds = F.pad(lengths.cumsum(0), (1, 0))
    close(logits(model, tokens, cu_seqlens=bounds).view(1, 140, VOCAB), separate)


def cut_rows_are_whole(model: Any) -> None:
    """Losses, gradients and carried states of rows cut over three threads are those of whole rows.

    Documents end, begin or lie inside a part, end at its edge or pass through. Only for mixers with `cut`.
    """
    if not all(layer.mixer.rule.cut for layer in model.model.layers):
        return
    B, T, N = 2, 69, 3
    # Parts of 23 tokens: the three of row 1 begin at 69, 92 and 115.
    packings = [None, [0, 5, 46, 69, 88, 89, 134, 138]]
    carries = not model.model.growing_mixers()
    model.train()

    def run(tokens: Tensor, bounds: list[int] | None, **options: Any) -> Any:
        cu = None if bounds is None else torch.tensor(bounds)
        out = model(
            tokens, labels=tokens, cu_seqlens=cu, use_cache=False, num_items_in_batch=1, **options
        )
        # In the same thread: the backward pass exchanges too.
        out.loss.backward()
        return out

    def gradients() -> list[Tensor]:
        of_parameters = [
            torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()
        ]
        model.zero_grad()
        return of_parameters

    states: Any = None
    for step, bounds in enumerate(packings):
        tokens = ids(B, T, seed=step)
        options: dict[str, Any] = {}
        if carries:
            # In the second step, row 0 goes on with the states of the first.
            carried = torch.tensor([step > 0, False])
            options = {"carried_cache": states, "carried": carried, "return_carried_cache": True}
        # Whole rows first, then their parts, from the same weights and states.
        uncut = run(tokens, bounds, **options)
        expected = gradients()
        outputs = in_threads(N, lambda context: run(tokens, bounds, context=context, **options))  # noqa: B023
        scale = max(1.0, *(float(g.abs().max()) for g in expected))
        # num_items_in_batch=1 makes the losses sums, so those of the parts add up.
        close(torch.stack([output.loss for output in outputs]).sum(), uncut.loss, 1e-9 * T)
        # The threads share the model, so its gradients are sums over the parts already.
        for gradient, of_whole in zip(gradients(), expected, strict=True):
            close(gradient, of_whole, 1e-9 * scale)
        states = uncut.carried_cache
        # Every part returns the states behind the whole rows.
        for output in outputs if carries else ():
            assert output.carried_cache.lengths.tolist() == states.lengths.tolist()
            for part_state, row_state in zip(
                output.carried_cache.states, states.states, strict=True
            ):
                for name, state in row_state.items():
                    close(part_state[name], state, 1e-9 * max(1.0, float(state.abs().max())))


class _Thread(Context):
    """A context whose processes are threads: they meet at `barrier` to look at each other's tensors."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, board: list):
        self.rank, self.size, self.barrier, self.board = rank, size, barrier, board

    def all(self, x: Any) -> list:
        self.board[self.rank] = x
        self.barrier.wait()
        of_all = list(self.board)
        # The second wait: no thread writes to the board before all have read it.
        self.barrier.wait()
        return of_all

    def gather(self, x: Tensor) -> Tensor:
        return torch.stack(self.all(x))

    def shift(self, tensors: list[Tensor], by: int) -> list[Tensor]:
        of_all, source = self.all(tensors), self.rank - by
        if 0 <= source < self.size:
            return of_all[source]
        return [torch.zeros_like(x) for x in tensors]

    def sums(self, x: Tensor) -> Tensor:
        return torch.stack(self.all(x))[:, self.rank].sum(0)  # [N, N, …] to […]

    def exchange(self, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        pieces = [parts[self.rank] for parts in self.all(x.split(sent))]
        assert [*map(len, pieces)] == received
        return torch.cat(pieces)

    def from_last(self, x: Tensor) -> Tensor:
        return self.all(x.detach())[-1].clone()


def in_threads(size: int, run: Callable[[Context], Any]) -> list:
    """`run(context)` in each of `size` threads, and their results; raises what the first one raised."""
    barrier, board = threading.Barrier(size, timeout=60), [None] * size

    def guarded(context: Context) -> Any:
        try:
            return run(context)
        except BaseException:
            barrier.abort()  # the others wait for this one
            raise

    with ThreadPoolExecutor(size) as threads:
        tasks = [
            threads.submit(guarded, _Thread(rank, size, barrier, board)) for rank in range(size)
        ]
    failures = [error for task in tasks if (error := task.exception())]
    # A broken barrier follows from another thread's error, which is raised in its place.
    for error in sorted(failures, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
        raise error
    return [task.result() for task in tasks]


def padded_is_alone(model: Any) -> None:
    """On either side, also where the prompt comes in two pieces and one row is only padding in the first."""
    lengths, T = [3, 9, 12], 12
    rows = [ids(1, n, seed=n) for n in lengths]  # [1, n] each
    for side in ("left", "right"):
        tokens, mask = torch.zeros(3, T, dtype=torch.long), torch.zeros(3, T, dtype=torch.long)
        for i, row in enumerate(rows):
            where = slice(T - row.shape[1], T) if side == "left" else slice(0, row.shape[1])
            tokens[i, where], mask[i, where] = row[0], 1
        padded = [logits(model, tokens, attention_mask=mask)]
        if model.config.is_decoder:
            cache = NalandaCache(len(model.model.layers))
            # Cut at 7: left-padded, the row of 3 tokens has only padding in the first piece.
            first = logits(model, tokens[:, :7], attention_mask=mask[:, :7], cache=cache)
            # The mask is that of all columns, the cached ones too, as transformers passes it.
            second = logits(model, tokens[:, 7:], attention_mask=mask, cache=cache)
            padded.append(torch.cat([first, second], 1))
        for i, row in enumerate(rows):
            alone, real = logits(model, row)[0], mask[i].bool()
            for rows_logits in padded:
                close(rows_logits[i][real], alone)


def every_parameter_learns(model: Any) -> None:
    model.train()
    model(ids(2, 20), labels=ids(2, 20)).loss.backward()
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert p.grad.isfinite().all(), name
        assert p.grad.abs().max() > 0, name


def saved_is_loaded_to_the_bit(model: Any) -> None:
    model = model.float()
    actual, expected = properties.saved_is_loaded(model, ids(2, 9))
    assert torch.equal(actual, expected)


def all_memory_is_set_at_construction(model: Any) -> None:
    """The same draws make the same weights, whatever the memory held before."""
    again, empty = [], torch.empty
    # What construction leaves as it was is NaN in one model and 1 in the other.
    for value in (torch.nan, 1.0):
        torch.manual_seed(0)

        def dirty(*args: Any, _value: float = value, **kwargs: Any) -> Tensor:
            x = empty(*args, **kwargs)
            return x.fill_(_value) if x.is_floating_point() else x

        with mock.patch.object(torch, "empty", dirty):
            again.append(type(model)(model.config).state_dict())
    for name, x in again[0].items():
        assert torch.equal(x, again[1][name]), name


class _Narrow(TorchDispatchMode):
    """Collects the operators that make fp32 tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if any(isinstance(x, Tensor) and x.dtype == torch.float32 for x in tree_leaves(result)):
            self.seen.add(str(function))
        return result


def nothing_of_a_float64_model_is_fp32(model: Any) -> None:
    """Neither angles nor decays nor counts: in a prompt, in a step, and backwards."""
    cache, model = NalandaCache(len(model.model.layers)), model.train()
    with _Narrow() as narrow:
        model(ids(2, 70), labels=ids(2, 70)).loss.backward()
        model.eval()
        # A prompt, then a single token.
        for length in (20, 1):
            logits(model, ids(2, length), **({"cache": cache} if model.config.is_decoder else {}))
    assert not narrow.seen, narrow.seen


def half_precision_agrees(model: Any) -> None:
    """bf16 weights and bf16 autocast are near fp32; fp32 parameters stay so; states have their dtypes.

    The error of bf16 in two layers without a map reaches a tenth; a wrong dtype errs far more.
    """
    model, cache = type(model)(model.config).eval(), NalandaCache(len(model.model.layers))
    full, cast = logits(model, ids(2, 40)), copy.deepcopy(model).bfloat16()
    halves = [logits(cast, ids(2, 40))]
    if model.config.is_decoder:
        # A prompt, a single token and a longer piece, by one cache.
        pieces = [logits(cast, t, cache=cache) for t in ids(2, 40).split([30, 1, 9], 1)]
        halves.append(torch.cat(pieces, 1))
    with torch.autocast("cpu", torch.bfloat16):
        halves.append(logits(model, ids(2, 40)))
    for half in halves:
        assert (half.float() - full).norm() < 0.2 * full.norm()
    fp32_modules = [m for m in cast.modules() if isinstance(m, Fp32Module)]
    assert all(p.dtype == torch.float32 for m in fp32_modules for p in m.parameters())
    if not model.config.is_decoder:
        return
    assert 2 * cast.config.state_bytes(40) == cache.nbytes  # two rows
    _check_states(cast, cache, 40)


MIXER_PROPERTIES: list[Callable[[Any], None]] = [
    moves_the_logits,
    every_parameter_learns,
    later_logits_alone_move,
    mix_is_its_weights_times_v,
    gradients_of_a_prefix_ignore_the_future,
    gradients_are_finite_differences,
    chunkwise_is_recurrent_is_reference,
    cached_is_uncached,
    packed_is_separate,
    cut_rows_are_whole,
    padded_is_alone,
    saved_is_loaded_to_the_bit,
    all_memory_is_set_at_construction,
    nothing_of_a_float64_model_is_fp32,
    half_precision_agrees,
]

ONE_WAY = (
    later_logits_alone_move,
    gradients_of_a_prefix_ignore_the_future,
    chunkwise_is_recurrent_is_reference,
    cached_is_uncached,
    cut_rows_are_whole,
)
"""Properties that no encoder has."""

ENCODER_PROPERTIES: list[Callable[[Any], None]] = [
    every_token_sees_every_other,
    *(holds for holds in MIXER_PROPERTIES if holds not in ONE_WAY),
]


# ------------------------------ properties of feature maps; `make(**sizes)` builds one


def products_are_nonnegative_if_promised(make: Callable[..., FeatureMap]) -> None:
    phi_q, phi_k = make()(normal(1, 100, 2, 16), normal(1, 100, 2, 16, seed=1))
    # [B, H, T, S], φ(q) with φ(k) of every pair of tokens
    products = torch.einsum("bthk,bshk->bhts", phi_q, phi_k)
    assert not make().nonnegative or products.min() >= -1e-12


def small_and_large_inputs_are_finite(make: Callable[..., FeatureMap]) -> None:
    """Outputs and gradients are finite for inputs from 0 and 1e-30 to 1e3."""
    for size in (0.0, 1e-30, 1e-6, 1e-3, 1e3):
        feature_map = make()
        # [B, T, H, K] = [1, 4, 2, 16]
        q, k = (normal(1, 4, 2, 16, seed=s).float().mul_(size).requires_grad_() for s in (0, 1))
        phi = feature_map(q, k)
        torch.stack([x.square().sum() for x in phi]).sum().backward()
        gradients = [x.grad for x in (q, k, *feature_map.parameters()) if x.grad is not None]
        assert all(x.isfinite().all() for x in (*phi, *gradients))


def gradients_are_the_formulas(make: Callable[..., FeatureMap]) -> None:
    """Of q, k and the map's own parameters, by finite differences."""
    feature_map = make(head_dim=4).double()
    parameters_of = dict(feature_map.named_parameters())

    def function(q: Tensor, k: Tensor, *parameters: Tensor) -> Any:
        # gradcheck differentiates by its arguments alone, so the parameters are such.
        return torch.func.functional_call(
            feature_map, dict(zip(parameters_of, parameters, strict=True)), (q, k)
        )

    # [B, T, H, K] = [1, 2, 2, 4]: few numbers, since gradcheck moves each of them
    inputs = (normal(1, 2, 2, 4).requires_grad_(), normal(1, 2, 2, 4, seed=1).requires_grad_())
    assert torch.autograd.gradcheck(function, (*inputs, *parameters_of.values()))


def computed_in_fp32(make: Callable[..., FeatureMap]) -> None:
    """Also where the model was cast, and whatever autocast says."""
    for dtype, spread in itertools.product(
        (torch.float16, torch.bfloat16, torch.float32), (20, 0.5)
    ):
        # [B, T, H, K] = [1, 4, 2, 16], of a large and of a small spread
        q, k = (normal(1, 4, 2, 16, seed=s, spread=spread).to(dtype) for s in (0, 1))
        exact, cast = make()(q.double(), k.double()), make().to(dtype)
        assert all(p.dtype == torch.float32 for p in cast.parameters())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            results = cast(q, k)
        for half, full in zip(results, exact, strict=True):
            assert (half.dtype, full.dtype) == (torch.float32, torch.float64)
            torch.testing.assert_close(half.double(), full, rtol=1e-4, atol=1e-5)


def runs_on_the_meta_device(make: Callable[..., FeatureMap]) -> None:
    feature_map = copy.deepcopy(make()).to("meta")
    q, k = (torch.empty(3, 5, 2, 16, device="meta", requires_grad=True) for _ in range(2))
    phi = feature_map(q, k)
    torch.stack([x.sum() for x in phi]).sum().backward()
    assert all(x.shape == (3, 5, 2, feature_map.feature_dim) for x in phi)


MAP_PROPERTIES: list[Callable[[Callable[..., FeatureMap]], None]] = [
    products_are_nonnegative_if_promised,
    small_and_large_inputs_are_finite,
    gradients_are_the_formulas,
    computed_in_fp32,
    runs_on_the_meta_device,
]
