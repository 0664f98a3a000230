"""Counts a model's parameters, the activations of a step and its time, before anything is allocated."""

import contextlib
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from nalanda.common.text import duration
from nalanda.config.model import (
    build_model_config,
    config_source,
    in_one_line,
    language_model,
    padded_vocabulary,
)
from nalanda.config.schema import RunConfig, Stage
from nalanda.data.tokenizer import build_tokenizer, vocabulary_of
from nalanda.model import NalandaConfig, chunk_forward, chunk_order, ops
from nalanda.model.context import Context, Parts
from nalanda.model.decoder import Block
from nalanda.model.epilogues import add_norm
from nalanda.model.layers import RMSNorm
from nalanda.model.loss import linear_cross_entropy
from nalanda.model.plans import is_cut
from nalanda.model.sequences import Sequences
from nalanda.train.flops import DTYPES, flops_per_token
from nalanda.train.log import UTILISATION

SHORT = 64
"""Tokens of a document in the first batch that is measured."""


def run_time(flops: float, peak: float) -> tuple[float, float]:
    """(shortest, longest) expected seconds for `flops`, at the shares of `peak` in UTILISATION."""
    low, high = UTILISATION
    return flops / (high * peak), flops / (low * peak)


def time_left(stages: list[Stage], facts: dict) -> tuple[float, float]:
    """`run_time` of the rest of a run. facts: the contents of run.json."""
    costs = [each["training_flops_per_token"] for each in facts.get("stages", [facts])]
    left = [stage.tokens_after(facts["step"]) for stage in stages]
    flops = sum(tokens * cost for tokens, cost in zip(left, costs, strict=True))
    return run_time(flops, facts["peak_flops"])


def stage_figures(stage: Stage, model: Any) -> dict[str, Any]:
    """The figures of a stage that others may not share."""
    data, train = stage.config.data, stage.config.train
    return {
        "name": stage.name or None,
        "after_step": stage.begin,
        "steps": stage.end - stage.begin,
        "seq_len": data.seq_len,
        "tokens_per_step": train.tokens_per_step,
        "tokens": stage.tokens_after(),
        "training_flops_per_token": flops_per_token(model, data.seq_len)[0],
        "changes": stage.changes,
    }


def time_range(seconds: Sequence[float]) -> str:
    """`3 h 05 min to 6 h 10 min, assuming 20 to 40 % of the peak`."""
    low, high = (round(100 * share) for share in UTILISATION)
    shortest, longest = map(duration, seconds)
    return f"{shortest} to {longest}, assuming {low} to {high} % of the peak"


def meta_model(config: RunConfig, tokenizer: Any = None) -> PreTrainedModel:
    """The recipe's model in fp32 on the meta device, with the vocabulary that training gives it.

    tokenizer: the run's, if it is at hand. Raises `InputError` for sizes that no tensor can have.
    """
    keys = config.model
    if tokenizer is None and "vocab_size" not in keys and isinstance(config_source(keys), type):
        keys = {**keys, "vocab_size": padded_vocabulary(vocabulary(config))}
    return on_meta(build_model_config(replace(config, model=keys), tokenizer))


def on_meta(config: PreTrainedConfig) -> PreTrainedModel:
    """A model in fp32 without memory. Raises `InputError` for sizes that no tensor can have."""
    # Called before a run's first step, whose random state must not change.
    with in_one_line("model"), torch.random.fork_rng(devices=[]), torch.device("meta"):
        return language_model(config).from_config(config, dtype=torch.float32)


def tensor_parallel_share(model: Any, seq_len: int, degree: int) -> dict[str, Any]:
    """What each of so many tensor-parallel processes holds, by the model's plan.

    Its parameters, the bytes of a sequence's state of `seq_len` tokens (None for encoders), and the names of the
    parameters that it has whole. Raises ValueError for heads that cannot be split.
    """
    config: NalandaConfig = model.config
    config.check_tensor_parallel(degree)
    count, uncut = 0, []
    for name, parameter in model.named_parameters():
        if is_cut(name, model.tp_plan):
            count += -(-parameter.numel() // degree)
        else:
            count += parameter.numel()
            uncut.append(re.sub(r"^model\.(layers\.\d+\.)?", "", name))
    state = config.state_bytes(seq_len, degree=degree) if config.is_decoder else None
    return {"parameters": count, "state_bytes": state, "whole": list(dict.fromkeys(uncut))}


def vocabulary(config: RunConfig) -> int:
    """Size of the recipe's tokenizer.

    If it is not trained yet: `tokenizer.vocab_size`, or without one the number of words in the training
    documents.
    """
    trained = config.run_dir / "tokenizer"
    if config.tokenizer.train and config.tokenizer.vocab_size:
        return config.tokenizer.vocab_size
    with tempfile.TemporaryDirectory() as unused:  # only `nalanda train` may make the run's folder
        directory = trained if trained.exists() else Path(unused) / "tokenizer"
        return vocabulary_of(build_tokenizer(config.tokenizer, config.data, directory))


class _Counted(Context):
    """A process whose neighbours do not exist; counts the bytes that it would send them."""

    def __init__(self, size: int):
        # Documents pass through the second part, unless it is the last.
        self.rank, self.size, self.sent = 1, size, 0

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        self.sent += (self.size - 1) * x.nbytes
        return x.new_zeros(self.size, *x.shape)  # [N, …]

    def shift(self, tensors: list[torch.Tensor], by: int) -> list[torch.Tensor]:
        if 0 <= self.rank + by < self.size:
            self.sent += sum(x.nbytes for x in tensors)
        return [torch.zeros_like(x) for x in tensors]

    def sums(self, x: torch.Tensor) -> torch.Tensor:
        # x [N, …] has an entry for each process.
        self.sent += (self.size - 1) * x[0].nbytes
        return torch.zeros_like(x[0])

    def exchange(self, x: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        self.sent += (len(x) - sent[self.rank]) * x[:1].nbytes
        return x.new_zeros(sum(received), *x.shape[1:])


def _sequences(
    config: NalandaConfig, rows: int, length: int, context: Context | None, device: str
) -> Sequences:
    """A batch of `rows` documents, packed as in training.

    In a context, it is the part of `length` tokens that a process has of each.
    """
    target = torch.device(device)
    if context is None:
        return Sequences(
            torch.arange(rows + 1) * length, device=target, bidirectional=not config.is_decoder
        )
    # Parts takes whole rows, of N times the part's tokens, here one document each.
    parts = Parts(context, rows, context.size * length, None, None, None)
    return Sequences(parts.cu_seqlens, parts.past, parts.rows, target, False, parts)


def exchanged_bytes(config: RunConfig, model: NalandaConfig) -> int:
    """Bytes that one process sends to the others of its context for a micro-batch, forward and backward.

    Every row is one document. It runs a block of each kind on the meta device. model: the recipe's.
    """
    train, parts = config.train, config.train.context_parallel
    if parts == 1:
        return 0
    dtype, length = DTYPES[train.precision], config.data.seq_len // parts
    # Once for each kind of mixer, times the layers that have it.
    context, sent = _Counted(parts), 0
    seq = _sequences(model, train.micro_batch_size, length, context, "meta")
    for name in dict.fromkeys(model.layer_mixers):
        block = meta_block(model, name).to(dtype)
        # [1, B·T/N, D], this process's part of all rows
        shape = 1, train.micro_batch_size * length, model.hidden_size
        x = torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
        context.sent = 0
        y, _ = block(x, seq)
        # A checkpointed block runs its forward twice, and exchanges twice.
        again = context.sent if train.gradient_checkpointing else 0
        y.sum().backward()
        sent += (context.sent + again) * model.layer_mixers.count(name)
    return sent


def activation_bytes(
    config: RunConfig,
    model: NalandaConfig,
    device: str = "cpu",
    saved_tokens: int = chunk_forward.FEW_TOKENS,
) -> int:
    """Bytes that one micro-batch keeps for the backward pass, and the loss's block of logits, on one process
    of a context. Rows are one document each.

    model: the recipe's. saved_tokens: `chunk_forward.SAVED_TOKENS` of the run.

    device: "cpu", or "cuda" for the torch path under a GPU's rules: maps are computed again in the backward, and no
    chunk is kept. The Triton kernels keep other tensors than the torch path (of a chunk: scores, states and values in
    16 bits); nothing here has measured those.
    """
    train, parts = config.train, config.train.context_parallel
    dtype, length = DTYPES[train.precision], config.data.seq_len // parts
    tokens, names = train.micro_batch_size * length, model.layer_mixers
    blocks = {
        name: _extrapolated(model, name, length, tokens, dtype, parts, device, saved_tokens)
        for name in dict.fromkeys(names)
    }
    ends = _extrapolated(model, None, length, tokens, dtype, 1, device, saved_tokens)
    if train.gradient_checkpointing:
        stream = 4 * tokens * model.hidden_size  # the residual stream is fp32
        # The block that is computed again has its own input.
        in_blocks = stream * (len(names) - 1) + max(blocks.values())
    else:
        in_blocks = sum(blocks[name] for name in names)
    # `_End` was measured with 64 of these rows.
    head = 4 * (model.vocab_size - 64) * model.hidden_size  # the loss keeps its gradient in fp32
    return in_blocks + ends + head + logits_bytes(model, tokens, device)


_measured: dict[tuple, tuple[float, float]] = {}
"""Bytes without tokens, and bytes a token."""


def _extrapolated(
    config: NalandaConfig,
    name: str | None,
    length: int,
    tokens: int,
    dtype: torch.dtype,
    parts: int,
    device: str,
    saved_tokens: int,
) -> int:
    """The bytes that a block with the mixer `name` keeps of `tokens` in documents of `length`.

    They are affine in the tokens, so two short batches on the CPU tell them. Name None: the bytes of the last
    norm and the loss, behind the blocks.
    """
    block = _End(config) if name is None else meta_block(config, name)
    mixer: Any = getattr(block, "mixer", None)
    # A window's blocks are whole, and there is more than one, in both batches as in the real one.
    reach = getattr(mixer, "reach", None) or length
    short = SHORT if reach >= length else reach * max(2, -(-SHORT // reach))
    # (rows, length) of two batches; the second has twice the tokens, in longer documents if these are long
    shapes = [(2, short), (2, 2 * short)] if 2 * short <= length else [(2, length), (4, length)]
    # On a CPU the chunk form keeps the chunks of few tokens.
    few = (
        mixer is not None
        and device == "cpu"
        and mixer.rule.steps * mixer.num_v_heads * tokens <= saved_tokens
    )
    key = (config.to_json_string(), name, tuple(shapes), dtype, parts, device, few)
    if key not in _measured:
        counts = []
        # Called before a run's first step, whose random state must not change.
        with torch.random.fork_rng(devices=[]), _rules(device, few):
            block.to_empty(device="cpu")
            for parameter in block.parameters():
                nn.init.uniform_(parameter, -0.02, 0.02)  # numbers without meaning
            for rows, documents in shapes:
                context = _Counted(parts) if parts > 1 else None
                seq = _sequences(config, rows, documents, context, "cpu")
                x = torch.randn(1, rows * documents, config.hidden_size, requires_grad=True)
                with torch.autocast("cpu", dtype, enabled=dtype.itemsize == 2):
                    counts.append((rows * documents, saved_bytes(block, x, seq)))

        # The line through both points: its slope is the bytes of a token.
        (few_tokens, less), (many_tokens, more) = counts
        each = (more - less) / (many_tokens - few_tokens)
        _measured[key] = less - each * few_tokens, each

    fixed, each = _measured[key]
    return round(fixed + each * tokens)


def meta_block(config: NalandaConfig, name: str) -> Block:
    """A block with the mixer `name`, without memory."""
    # Called before a run's first step, whose random state must not change.
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        return Block(config, config.layer_mixers.index(name))


class _End(nn.Module):
    """The last norm and the loss, behind the blocks, with a vocabulary of 64."""

    def __init__(self, config: NalandaConfig):
        super().__init__()
        with torch.device("meta"):
            self.norm = RMSNorm(config.hidden_size, config.norm_eps)
            self.head = nn.Linear(config.hidden_size, 64, bias=False)

    def forward(self, x: torch.Tensor, seq: Sequences) -> torch.Tensor:
        # h [B·T, D]; which labels they are changes no size
        h, labels = add_norm(x, None, self.norm)[1][0], torch.zeros(x.shape[1], dtype=torch.int64)
        return linear_cross_entropy(h, self.head.weight, labels)


@contextlib.contextmanager
def _rules(device: str, few: bool) -> Iterator[None]:
    """Lets the torch path on the CPU decide as on `device`. few: whether it keeps the chunks."""

    def chunk_of(chunk_size: int, lengths: list[int], q: torch.Tensor, v: torch.Tensor) -> int:
        # A GPU's rule: the power of two that holds the longest document, up to `chunk_size`.
        return min(chunk_size, 1 << (max(lengths) - 1).bit_length())

    with contextlib.ExitStack() as stack:
        # (module, name in it, what stands there meanwhile)
        rules = [(chunk_forward, "SAVED_TOKENS", 2**62 if few else 0)]
        if device != "cpu":
            rules += [(chunk_order, "chunk_of", chunk_of), (ops, "_scarce_memory", lambda x: True)]
        for module, name, value in rules:
            stack.enter_context(mock.patch.object(module, name, value))
        yield


def logits_bytes(config: NalandaConfig, tokens: int, device: str = "cuda") -> int:
    """Bytes of the loss's block of logits and its gradient, fp32, as `linear_cross_entropy` cuts it."""
    rows = max(64, (2**22 if device == "cpu" else 2**26) // config.vocab_size)
    return 2 * 4 * min(rows, tokens) * config.vocab_size


def saved_bytes(block: nn.Module, x: torch.Tensor, seq: Sequences) -> int:
    """Bytes of the distinct storages that `block(x)` keeps for its backward pass, without parameters."""
    # Storages, not tensors: a saved view must not count beside the tensor that it is of.
    weights = {p.untyped_storage()._cdata for p in block.parameters()}
    held: list[torch.Tensor] = []  # kept alive, so that storage addresses stay distinct

    def keep(t: torch.Tensor) -> None:
        # The graph must not hold the tensor itself: an output would hold its own graph, and never be freed.
        held.append(t.detach())

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        _ = block(x, seq)
    # A layer may have moved them together.
    weights |= {p.untyped_storage()._cdata for p in block.parameters()}
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in held}
    return sum(count for address, count in storages.items() if address not in weights)
