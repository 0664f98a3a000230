"""What a rounded state costs: text and recall over 16 k tokens, by mixer and feature map.

A small model of bytes learns texts that hold pairs of symbols, asked for again later. Then each arm reads the same
held-out streams token by token and rounds its states after each. Arms are rows of one batch, so they are paired.
"""

import json as jsonlib
import math
import time
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nalanda.common.errors import InputError, output_folder
from nalanda.common.files import write_atomically
from nalanda.common.text import markdown_table, suggest
from nalanda.common.versions import versions
from nalanda.config.schema import OptimConfig, ScheduleConfig
from nalanda.data.python_docs import python_documents
from nalanda.model import FEATURE_MAPS, MIXERS, NalandaCache, NalandaConfig, NalandaForCausalLM
from nalanda.model.decoding import choose_decoder
from nalanda.model.precision import NO_MATRIX, STATE_DTYPES, pack_state, unpack_state
from nalanda.train.optim import build_optimizer, learning_rate
from nalanda_lab.paired import take_step
from nalanda_lab.track import track

BYTES, SYMBOLS = 256, 32
"""Of text; of keys, and of values. The last NEEDLES keys are asked once, at the end of a stream."""
NEEDLES, PAIRS, GAP = 8, 4, 100
"""Pairs at the start of a stream; pairs of an episode, and the bytes before they are asked."""
SIZES = {
    "vocab_size": BYTES + 2 * SYMBOLS,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_heads": 2,
    "initializer_range": 0.06,
    "head_dim": 32,
    "max_position_embeddings": 256,
}
ARMS = (*STATE_DTYPES, "int8 alone", "fp8 alone")
"""A row of a batch each: precisions, and two of them without a residual."""
PAIR_STEPS, TEXT_STEPS = 260, 90
"""Batches of pairs alone, at most, and of text with pairs."""
HELD_NATS, HELD_RECALL = 0.01, 0.01
"""How much a precision may lose of the nats, and of the recall in a stream's second half."""
START = 1024
"""Tokens of the stream's start."""


def draw_stream(
    text: Tensor, draw: torch.Generator, length: int, gap: int, asks: int = 1, needles: int = 0
) -> tuple[Tensor, Tensor]:
    """Ids `[length]`, and what each asks for: 0 nothing, 1 text, 2 a value, 3 a needle's value.

    PAIRS keys with their values, `gap` bytes of a text, then `asks` times the keys and values, and so on. Needles
    come first and are asked last.
    """

    def pairs(count: int, keys: Tensor) -> Tensor:
        values = torch.randint(SYMBOLS, (count,), generator=draw)
        return torch.stack([BYTES + keys, BYTES + SYMBOLS + values], 1)

    def asked(rows: Tensor, kind: int) -> tuple[Tensor, Tensor]:
        rows = rows[torch.randperm(len(rows), generator=draw)]
        return rows.flatten(), torch.tensor([0, kind]).repeat(len(rows))

    first = pairs(needles, SYMBOLS - NEEDLES + torch.arange(needles))
    parts = [(first.flatten(), torch.zeros(2 * needles, dtype=torch.int64))]
    text = text[int(torch.randint(len(text) - length, (), generator=draw)) :]
    left, usable = length - 4 * needles, SYMBOLS - needles
    while left > 0:
        rows = pairs(PAIRS, torch.randperm(usable, generator=draw)[:PAIRS])
        piece, text = text[:gap], text[gap:]
        parts += [(rows.flatten(), torch.zeros(2 * PAIRS, dtype=torch.int64))]
        parts += [(piece, torch.ones_like(piece))]
        parts += [asked(rows, 2) for _ in range(asks)]
        left -= gap + 2 * PAIRS * (1 + asks)
    ids, kinds = (torch.cat(each)[: length - 2 * needles] for each in zip(*parts, strict=True))
    last, kind = asked(first, 3)
    return torch.cat([ids, last]), torch.cat([kinds, kind])


def draw_batch(text: Tensor, draw: torch.Generator, rows: int, *sizes: int) -> tuple[Tensor, ...]:
    """Ids and kinds `[rows, length]` of streams."""
    streams = [draw_stream(text, draw, *sizes) for _ in range(rows)]
    return tuple(torch.stack(each) for each in zip(*streams, strict=True))


def read_texts() -> tuple[Tensor, Tensor]:
    """The bytes of Python's own texts: all but every tenth for training, and these."""
    documents = list(python_documents().values())
    both = (
        [x for i, x in enumerate(documents) if bool(i % 10) == train] for train in (True, False)
    )
    train, held = (torch.tensor(list("\n".join(each).encode())) for each in both)
    return train, held


def train(config: NalandaConfig, text: Tensor) -> tuple[Any, int]:
    """A model, and how many batches it took: first 16 rows of pairs that are asked at once, until it recalls them.

    Then TEXT_STEPS batches have 2 rows of text with pairs besides, and the rate falls.
    """
    torch.manual_seed(0)
    model: Any = NalandaForCausalLM(config)
    optim, schedule = OptimConfig(lr=1e-2), ScheduleConfig(warmup_steps=1)
    optimizer, draw = build_optimizer(model, optim), torch.Generator().manual_seed(0)
    step, with_text, smooth = 0, 0, math.log(SYMBOLS)
    while with_text < TEXT_STEPS:
        step, with_text = step + 1, with_text + (with_text > 0 or step > PAIR_STEPS or smooth < 1.5)
        loss = torch.zeros(())
        for rows, *sizes in [(16, 64, 0, 3), (2, 256, GAP, 1)][: 2 if with_text else 1]:
            ids, kinds = draw_batch(text, draw, rows, *sizes)
            losses = F.cross_entropy(
                model(ids[:, :-1]).logits.transpose(1, 2), ids[:, 1:], reduction="none"
            )
            if not with_text:
                smooth += 0.2 * (losses[kinds[:, 1:] == 2].mean().item() - smooth)
            for kind in kinds.unique()[1:]:
                loss = loss + losses[kinds[:, 1:] == kind].mean()
        loss.backward()
        rate = learning_rate(with_text + 1, TEXT_STEPS + 1, optim.lr, schedule)
        take_step(optimizer, model, rate * min(1, step / 20), optim.max_grad_norm)
    return model.eval(), step


def rounded(S: Tensor) -> Tensor:
    """Matrices `[arms, …]` as the next token finds them."""
    exact, *rows = S.split(1)
    arms = [exact]
    for state_dtype, both in zip(STATE_DTYPES[1:], (rows[:1], rows[1::2], rows[2::2]), strict=True):
        packed = pack_state({"recurrent": torch.cat(both)}, state_dtype)
        if len(both) > 1:
            packed["recurrent_residual"][1:] = 8 | 8 << 4  # two zeros
        arms.append(unpack_state(packed)["recurrent"])
    bf16, int8, fp8 = arms[1:]
    return torch.cat([exact, bf16, int8[:1], fp8[:1], int8[1:], fp8[1:]])


@torch.inference_mode()
def read_stream(model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Nats of each next token of ids `[length]`, and whether it is the likeliest value, `[arms, length − 1]`."""
    cache = NalandaCache(len(model.model.layers))
    nats, hits = [], []
    with choose_decoder(model):
        for now, after in pairwise(ids):
            tokens = now.expand(len(ARMS), 1)
            logits = model(tokens, past_key_values=cache).logits[:, 0]
            nats.append(F.cross_entropy(logits, after.expand(len(ARMS)), reduction="none"))
            # Symbols of values alone: text is no answer.
            hits.append(logits[:, BYTES + SYMBOLS :].argmax(1) + BYTES + SYMBOLS == after)

            # Where C++ decodes, the newest states are in its memory.
            states = cache.decoder.newest if cache.live else cache.states
            matrices = [state["recurrent"] for state in states]
            for S, new in zip(matrices, rounded(torch.stack(matrices, 1)).unbind(1), strict=True):
                S.copy_(new)
    return torch.stack(nats, 1), torch.stack(hits, 1)


def measure(options: dict[str, Any], length: int) -> dict[str, Any]:
    """Trains a model and returns its record: what each arm has at the stream's start and in its second half."""
    begin = time.time()
    text, held = read_texts()
    model, steps = train(NalandaConfig(**SIZES, **options), text)
    trained = time.time() - begin

    draw = torch.Generator().manual_seed(1)
    ids, kinds = draw_stream(held, draw, length, GAP, needles=NEEDLES)
    nats, hits = read_stream(model, ids)
    kinds = kinds[1:]
    cache = NalandaCache(len(model.model.layers))
    model(ids[None, :2], past_key_values=cache)

    arms: dict[str, Any] = {}
    for i, arm in enumerate(ARMS):
        of: dict[str, float] = {"state_bytes": cache.fork().convert(arm.split()[0]).nbytes}
        arms[arm] = of
        for name, piece in (("start", slice(0, START)), ("end", slice(length // 2, None))):
            chosen = kinds[piece]
            of[f"nats_{name}"] = nats[i, piece][chosen == 1].mean().item()
            of[f"recall_{name}"] = hits[i, piece][chosen == 2].float().mean().item()
        of["needles"] = hits[i][kinds == 3].float().mean().item()
    seconds = {"training": round(trained), "reading": round(time.time() - begin - trained)}
    facts = {"steps": steps, "parameters": sum(p.numel() for p in model.parameters())}
    settings = options | {"length": length}
    return {"settings": settings, **facts, "seconds": seconds, "arms": arms, "versions": versions()}


def plan() -> dict[str, dict[str, str]]:
    """Each mixer that has a matrix with its own map, deltanet with every map, and two more with NaLa's."""
    models = {name: {"mixer": name} for name in MIXERS if name not in NO_MATRIX}
    for mixer, names in {
        "deltanet": FEATURE_MAPS,
        "gated_deltanet": ["nala"],
        "kda": ["nala"],
    }.items():
        for name in names:
            if name != MIXERS[mixer].rule.map:
                models[f"{mixer}-{name}"] = {"mixer": mixer, "feature_map": name}
    return models


def holds(record: dict[str, Any], arm: str) -> bool:
    """Whether an arm loses at most HELD_NATS, early and late, and at most HELD_RECALL late."""
    exact, of = record["arms"]["float32"], record["arms"][arm]
    nats = max(of[name] - exact[name] for name in ("nats_start", "nats_end"))
    return nats <= HELD_NATS and exact["recall_end"] - of["recall_end"] <= HELD_RECALL


def state_table(records: dict[str, dict[str, Any]]) -> str:
    """The table of the page: a row a model, with what each arm loses at the stream's end."""
    lost = [arm for arm in ARMS if arm != "float32"]
    lines = []
    for name, record in records.items():
        exact, small = record["arms"]["float32"], record["arms"]["int8"]
        cells = [name.replace("-", " + "), f"{exact['state_bytes']} → {small['state_bytes']}"]
        values = (exact["recall_end"], exact["needles"])
        cells += [f"{exact['nats_end']:.3f}, " + ", ".join(f"{100 * x:.0f}" for x in values)]
        for arm in lost:
            of = record["arms"][arm]
            points = 100 * (exact["recall_end"] - of["recall_end"])
            mark = "" if holds(record, arm) else " ✗"
            cells.append(f"{of['nats_end'] - exact['nats_end']:+.4f}, {points:+.1f}{mark}")
        lines.append(cells)
    return markdown_table(["model", "bytes", "nats, recall, needles", *lost], lines)


def states(models: list[str] | None, length: int, output: str) -> None:
    """Trains and measures the models that have no record in `output`, one file each, and prints the table."""
    folder, known = output_folder(output, "--output"), plan()
    torch.set_flush_denormal(True)
    for name in models or known:
        if name not in known:
            raise InputError(f"--models: unknown model {name!r}{suggest(name, known)}")
    for name in track(models or list(known), "measuring"):
        file = folder / f"{name}.json"
        if not file.exists():
            write_atomically(file, jsonlib.dumps(measure(known[name], length), indent=1) + "\n")
    files = {name: folder / f"{name}.json" for name in known}
    records = {n: jsonlib.loads(f.read_text()) for n, f in files.items() if f.exists()}
    print(state_table(records))
