"""Chooses what decodes a token of all layers at once: CUDA graphs, in this file, or a C++ program (`program.py`).

With CUDA graphs the host launches all kernels of a token with one call.

A graph repeats recorded launches on the same memory. So everything that changes from token to token is in
static buffers: the token, the count of tokens before it, the states. There are two buffers for the states
and two graphs; the first reads one buffer and writes the other, the second the reverse. So nothing is
copied between tokens, and no program overwrites what another one has yet to read. In one buffer that could
happen: all programs of a head read the past of its convolutions and its sum of keys, and one of them writes
the next.

`generate` and `read` open the context `choose_decoder`. Its first tokens run eagerly, so short answers do not pay
for a capture. While graphs run, the newest states of a cache are in their buffers, and
`NalandaCache.states` copies them out for any other use. The buffers live as long as a cache that used them.

transformers would compile the model for a cache with `is_compileable`: minutes for our states, whose
tensors are replaced, and its graphs copy what they are given. So that stays False.
"""

import functools
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from . import kernels
from .cache import NalandaCache, StateBuffers, alike, copy_all
from .layers import altered, autocasts, on_host
from .program import ENVIRONMENT as PROGRAM_ENVIRONMENT
from .program import NotServed, ProgramDecoder, build_program
from .projections import FusedLinears
from .sequences import only_tokens

ENVIRONMENT = "NALANDA_CUDA_GRAPHS"  # 0: no graphs in this process
LONGEST_PIECE = 64
"""Tokens of a call for which a program is made."""
EAGER_TOKENS = 8
"""Tokens before a capture, which costs the host about as much as ten."""


class Graph:
    """A CUDA graph on a device: `capture` records what a function launches, `replay` launches it again."""

    @staticmethod
    def serves(device: torch.device) -> bool:
        return device.type == "cuda"

    @staticmethod
    def replayer(device: torch.device) -> tuple:
        """What may replay a graph: one thread on one stream, because two replays would race."""
        return threading.get_ident(), torch.cuda.current_stream(device)

    def __init__(self, device: torch.device):
        self.device, self.graph = device, torch.cuda.CUDAGraph()

    def capture(self, function: Callable[[], Tensor]) -> Tensor:
        """Records `function`; what it returns holds values only after a replay."""
        stream = torch.cuda.current_stream(self.device)  # a failed recording would not return to it
        with _capturing, torch.cuda.device(self.device), torch.cuda.stream(stream):
            try:
                with self._recording(self.graph):
                    return function()
            except BaseException:
                # Until some recording ends well, torch refuses to draw random numbers.
                with suppress(RuntimeError), self._recording(torch.cuda.CUDAGraph()):
                    torch.zeros(1, device=self.device)
                raise

    def _recording(self, graph: torch.cuda.CUDAGraph):
        # Other threads may use the device meanwhile.
        return torch.cuda.graph(
            graph, stream=_side_stream(self.device), capture_error_mode="thread_local"
        )

    def replay(self) -> None:
        with torch.cuda.device(self.device):
            self.graph.replay()


_capturing = threading.Lock()  # torch allows one recording at a time


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class OnDevice(TorchDispatchMode):
    """Raises RuntimeError where the host reads values of the device or writes its memory.

    A graph would repeat neither: some end a capture with an error, others would silently keep old values.
    """

    COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
    READS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)

    def __init__(self, device: torch.device):
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        # An index by a mask has as many rows as the mask has ones, which the host must read.
        masks = [x for x in inputs[1:] if x.dtype in (torch.bool, torch.uint8)]
        reads = any(tag in func.tags for tag in self.READS) and any(
            x.device == self.device for x in inputs
        )
        if reads and not (func is torch.ops.aten.index.Tensor and not masks):  # rows, not a mask
            raise RuntimeError(f"{func} makes the host wait for values")
        result = func(*args, **kwargs)
        tensors = inputs + [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        # A number beside tensors travels with the launch.
        devices = {x.device.type for x in tensors if x.dim() or func in self.COPIES}
        if len(devices) > 1:
            raise RuntimeError(f"{func} copies between the host and the device")
        return result


class StaticState(dict):
    """A layer's state, with the buffers that a kernel may write the next one to."""

    def __init__(self, state: dict[str, Tensor], out: dict[str, Tensor]):
        super().__init__(state)
        self.out = out


class StaticCache(NalandaCache):
    """What a captured call of the decoder takes for a cache; counts stay on the device."""

    static = True

    def __init__(self, states: list[dict[str, Tensor]], lengths: Tensor):
        super().__init__(len(states))
        self.states, self.lengths = states, lengths

    def seen(self, columns: int, tokens: Tensor) -> None:
        assert self.lengths is not None
        self.lengths.add_(1)


class GraphDecoder(StateBuffers):
    """One token of `batch` sequences as two graphs, each of which writes what the other one reads."""

    most = 1
    """Tokens of a call."""

    def __init__(self, model: Any, cache: NalandaCache):
        device, batch = model.device, cache.batch_size
        self.tokens = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        # Two buffers with copies of the cache's states; `take` fills the newest one again.
        self.states = [
            [
                {name: x.clone(memory_format=torch.contiguous_format) for name, x in state.items()}
                for state in cache.states
            ]
            for _ in range(2)
        ]
        self.turn = 0  # which states are the newest
        steps = [functools.partial(self._step, model, turn) for turn in range(2)]
        # Each runs once before its capture: kernels may compile, and a read of values raises.
        with OnDevice(device):
            for step in steps:  # loads what is loaded at its first use
                step()
        self.graphs = [Graph(device) for _ in steps]
        self.logits: list[Tensor] = [g.capture(s) for g, s in zip(self.graphs, steps, strict=True)]

    def _step(self, model: Any, turn: int) -> Tensor:
        old, new = self.states[turn], self.states[1 - turn]
        cache = StaticCache(
            [StaticState(*pair) for pair in zip(old, new, strict=True)], self.lengths
        )
        h = model.model(input_ids=self.tokens, cache=cache).last_hidden_state
        logits = model.lm_head(h)
        # Else the next graph would read buffers that do not fit.
        if not alike(cache.states, new, dtypes=True):
            raise RuntimeError("the states change their shapes or precision")
        # Where no kernel wrote to the buffers.
        copy_all(new, cache.states)
        return logits

    @property
    def newest(self) -> list[dict[str, Tensor]]:
        return self.states[self.turn]

    def fill(self, states: list[dict[str, Tensor]]) -> None:
        self.turn = 0
        super().fill(states)

    def __call__(self, tokens: Tensor, cache: NalandaCache) -> Tensor:
        """Logits `[B, 1, vocabulary]` after tokens `[B, 1]`, for the cache that `take` was called with."""
        self.tokens.copy_(tokens)
        self.graphs[self.turn].replay()
        logits = self.logits[self.turn].clone()  # the graph writes there again
        self.turn = 1 - self.turn
        cache.seen(1, torch.ones(len(tokens), dtype=torch.int64, device="cpu"))
        return logits


TokenDecoder = GraphDecoder | ProgramDecoder
DecodersByKey = weakref.WeakValueDictionary[tuple, TokenDecoder]


class DecoderChoice:
    """The decoders of a context of `choose_decoder`, one for each batch size."""

    by_model: ClassVar[weakref.WeakKeyDictionary[nn.Module, DecodersByKey]] = (
        weakref.WeakKeyDictionary()
    )
    """A model's decoders by what they were made with; caches keep them alive."""
    uncapturable: ClassVar[weakref.WeakKeyDictionary[nn.Module, str]] = weakref.WeakKeyDictionary()
    """Models that could not be captured, and why; nothing tries again."""

    def __init__(self, model: Any):
        self.model, self.eager = model, 0
        self.thread = threading.get_ident()  # another one may inherit the context
        self.decoders: weakref.WeakValueDictionary[int, TokenDecoder] = (
            weakref.WeakValueDictionary()
        )
        self.reason: str | None = self.uncapturable.get(model)
        """Why no decoder serves the model; None: none has refused."""

    @functools.cached_property
    def key(self) -> tuple | None:
        """See `key_of`; None, with a reason, if no decoder serves the model."""
        try:
            return key_of(self.model)
        except NotServed as refusal:
            self.reason = str(refusal)
            return None

    def decode(
        self, model: nn.Module, tokens: Tensor, cache: NalandaCache, mask: Tensor | None = None
    ) -> Tensor | None:
        """Logits `[B, T, vocabulary]` after each of tokens `[B, T]`; None if the call must run eagerly."""
        T = tokens.shape[1]
        if not 0 < T <= (1 if Graph.serves(tokens.device) else LONGEST_PIECE):
            return None
        # A recording cache keeps each token's embeddings, which a decoder does not hand out. Packed states are
        # not what a graph or C++ writes into.
        if (
            model is not self.model
            or threading.get_ident() != self.thread
            or cache.being_read
            or cache.recording
            or cache.state_dtype != "float32"
            or model.training
            or torch.is_grad_enabled()
            or autocasts(tokens)
            or _has_any_global_hook()  # another than when the key was made
            or self.reason is not None
            or self.key is None
        ):
            return None
        if len(tokens) != cache.batch_size or not only_tokens(mask, cache.lengths, T):
            return None
        if not cache.live:
            cache.follow(self.model.dtype)
        decoder = self.decoders.get(len(tokens)) or self._make(cache, (len(tokens), *self.key))
        if decoder is None or decoder.most < T or not decoder.take(cache):
            return None
        return decoder(tokens, cache)

    def _make(self, cache: NalandaCache, key: tuple) -> TokenDecoder | None:
        """The decoder for the cache's batch size. A graph is captured once enough tokens have run eagerly."""
        graphs = Graph.serves(self.model.device)
        self.eager += 1
        by_key = self.by_model.setdefault(self.model, DecodersByKey())
        decoder = by_key.get(key)
        if decoder is None and (not graphs or self.eager > EAGER_TOKENS):
            build = GraphDecoder if graphs else build_program
            try:
                # Buffers for calls in any mode.
                with torch.inference_mode(False), torch.no_grad(), on_host():
                    decoder = by_key[key] = build(self.model, cache)
            except NotServed as refusal:
                self.reason = str(refusal)
            except Exception as error:
                if not graphs:
                    raise
                self.reason = self.uncapturable[self.model] = _cause(error)
                warnings.warn(f"decoding without CUDA graphs: {self.reason}", stacklevel=2)
        if decoder is not None:
            self.decoders[cache.batch_size] = decoder
        return decoder


def _cause(error: BaseException) -> str:
    while error.__context__ is not None:  # the end of a failed recording raises, too
        error = error.__context__
    return str(error).splitlines()[0] if str(error) else type(error).__name__


_current: ContextVar[DecoderChoice | None] = ContextVar("decoder_choice", default=None)
current_choice = _current.get


@contextmanager
def choose_decoder(model: Any) -> Iterator[DecoderChoice | None]:
    """In this context, a decoder of whole tokens serves calls with one token of each sequence, where one can.

    That is a pair of CUDA graphs on a GPU, and a program in C++ on a CPU, which serves a few tokens at once too.
    `generate` and `read` open it. Weights may change in place in it, but not be replaced. A hook of one module that
    is set inside it is not seen. Yields the choice; None if the environment turns it off.
    """
    switch = ENVIRONMENT if Graph.serves(model.device) else PROGRAM_ENVIRONMENT
    choice = None if os.environ.get(switch) == "0" else DecoderChoice(model)
    before = _current.set(choice)
    try:
        yield choice
    finally:
        _current.reset(before)


def key_of(model: Any) -> tuple:
    """What a decoder of the model depends on besides the batch size.

    Raises `NotServed` without a GPU or a program in C++; for states that grow with the text on a GPU, a model on
    several devices, dropout that acts, or modules that run code of others (hooks, adapters, compiled modules).
    """
    device, modules = model.device, dict(model.named_modules())
    graphs, programs = Graph.serves(device), []
    if kernels.package is not None:
        programs = kernels.package.candidates("step" if graphs else "token", "auto", device.type)
    if not (graphs or programs):
        raise NotServed(f"nalanda_kernels decodes no token on this {device.type}")
    for name, module in modules.items():
        if _foreign(module):
            raise NotServed(f"{name or 'the model'} has a hook or an adapter, or is compiled")
        if isinstance(module, nn.Dropout) and module.training and not model.training:
            raise NotServed(f"{name} alone is in training mode")
    # Now, since `eval` would do it while a decoder reads the weights where they are.
    for module in modules.values():
        if isinstance(module, FusedLinears):
            module.join()
    tensors = [*model.parameters(), *model.buffers()]
    if any(x.device != device for x in tensors):
        raise NotServed("the model is on several devices")
    if any(type(x) not in (nn.Parameter, Tensor) for x in tensors):
        raise NotServed("the weights are sharded or quantized")
    if graphs and (growing := model.model.growing_mixers()):
        raise NotServed(f"the state of {growing[0]} grows with the text")
    replayer = Graph.replayer(device) if graphs else (threading.get_ident(),)
    # The place of each tensor: a graph has recorded it, so replaced weights need new graphs.
    places = ((x.data_ptr(), x.stride(), x.dtype) for x in tensors)
    kinds = map(type, modules.values())
    return (*replayer, *programs, *map(id, modules.values()), *kinds, *places)


def _foreign(module: nn.Module) -> bool:
    """Whether calling the module runs more than the `forward` of a class that has no switches."""
    switched = "forward" in vars(module) or module._compiled_call_impl is not None
    return altered(module) or switched or type(module).__module__.startswith("peft.")
