"""The speed of this release on a CPU as one table: every ratio beside its peer.

A row is measured in one process, in rounds that call each side once. Its file keeps the seconds of every round, and
the table is printed from the files alone. So a killed command goes on with the next row.

`before` stands for the release before: torch's own operators, its default route of products, and a layer at a time.
"""

import copy
import gc
import importlib
import importlib.util
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache, partial
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from nalanda_kernels import use_backend
from torch.profiler import ProfilerActivity, profile, record_function

from nalanda.common.allocator import keep_freed_memory
from nalanda.common.errors import InputError, output_folder
from nalanda.common.files import write_atomically
from nalanda.common.products import choose_product_route, product_route, set_product_route
from nalanda.common.text import suggest
from nalanda.common.versions import cpu_model, list_versions, versions
from nalanda.model import (
    Int8Config,
    NalandaCache,
    NalandaConfig,
    NalandaForCausalLM,
    ops,
    sequences,
)
from nalanda.model.feature_maps import build_feature_map
from nalanda.train.loss import summed_loss
from nalanda_lab.speed import ops as recurrences
from nalanda_lab.speed.decode import (
    TIMED,
    products_of,
    qwen3_next,
    random_keys,
    timed_calls,
    timed_tokens,
)
from nalanda_lab.speed.serve import byte_tokenizer
from nalanda_lab.speed.train import build_llama, random_batch, training_step
from nalanda_lab.track import median_ratio, ratios_of, take_turns, torch_threads

Shape = dict[str, Any]
"""Keys of a model's config."""
Side = Callable[[], float]
"""Measures one side of a comparison once; returns its seconds."""
Measured = dict[str, list[float]]
"""The seconds of each side, by round."""

NAMES = ("hidden_size", "num_hidden_layers", "num_heads", "head_dim", "intermediate_size")
SHAPES: dict[str, Shape] = {
    "2.4 M": dict(zip(NAMES, (256, 2, 2, 128, 512), strict=True)) | {"vocab_size": 4096},
    "30 M": dict(zip(NAMES, (512, 8, 4, 128, 1536), strict=True)) | {"vocab_size": 4096},
    "340 M": dict(zip(NAMES, (1024, 24, 8, 128, 2816), strict=True)) | {"vocab_size": 32000},
}
TRAINED = SHAPES["30 M"] | {"num_hidden_layers": 4}
SOFTMAX = {"hidden_size": 512, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 64}
SOFTMAX |= {"intermediate_size": 1024, "vocab_size": 1000}
"""The model whose softmax attention decodes behind a long text."""
MIXERS: dict[str, Shape] = {"Gated DeltaNet": {}, "NaLa": {"feature_map": "nala", "expand_k": 0.5}}
BATCHES = {512: (4, 512), 4096: (1, 4096)}
"""Rows and tokens of a row in a training step, by its name in the table."""
TOKENS = {"2.4 M": 128, "30 M": 16, "340 M": 8, "softmax": 4, "llama.cpp": 128}
"""Tokens of a measurement."""
TEXTS = (4, 16)
"""Texts that are decoded at once."""
CONTEXT = 32768
ROWS_OF_HEADS = {f"{T} × {H}": (T, H) for T, H in recurrences.SHAPES}
"""Tokens and heads of the delta rules, by their name in the table."""
MAPPED = (2, 512, 4, 128)
"""B, T, H and K of the feature map's row."""
SLOWEST = 16
"""Operators of a profile."""


@dataclass(frozen=True)
class Line:
    """A line of the table: the ratio of two sides' seconds."""

    name: str
    numerator: str
    denominator: str
    before: tuple[str, str]
    """The numerator and the denominator without this release's parts."""
    ours_above: bool = False
    """Whether the ratio is our time by another of ours, and not a peer's by ours."""
    floor: str | None = None
    """A side that ours cannot pass: its share of our time stands below the table."""

    @property
    def ours(self) -> str:
        return self.numerator if self.ours_above else self.denominator

    @property
    def ours_before(self) -> str:
        return self.before[0 if self.ours_above else 1]

    @property
    def sides(self) -> set[str]:
        return {self.numerator, self.denominator, *self.before, self.floor or self.ours}


@dataclass(frozen=True)
class Row:
    """Sides that are measured together, and the lines of the table that they give."""

    build: Callable[[], dict[str, Side]]
    lines: tuple[Line, ...]
    repeats: int
    needs: tuple[str, ...] = ()
    trains: bool = False
    """Whether it runs as in training, where freed memory is kept for ever. Those rows come last."""


# ------------------------------ sides


@contextmanager
def parts(new: bool, route: str | None = None) -> Iterator[None]:
    """In this context the release's parts for a CPU are on, or off. route: of products; by default theirs."""
    before = product_route()
    set_product_route(route or (choose_route() if new else "default"))
    try:
        with use_backend("auto" if new else "torch"):
            yield
    finally:
        set_product_route(before)


@cache
def choose_route() -> str:
    """The route that this process would take; measured once."""
    return choose_product_route()


def side(call: Side, new: bool, route: str | None = None) -> Side:
    def measure() -> float:
        with parts(new, route):
            return call()

    return measure


def before_and_now(name: str, call: Side) -> dict[str, Side]:
    return {f"{name}, before": side(call, new=False), f"{name}, now": side(call, new=True)}


def token_of(name: str, model: NalandaForCausalLM, tokens: int) -> dict[str, Side]:
    """A token of a model, before a layer at a time, and its matrix products alone."""
    decode = partial(timed_tokens, model, read_prompt(model), tokens)
    products = partial(timed_calls, products_of(model), tokens)
    return {
        f"{name}, before": side(partial(decode, as_generate=False), new=False),
        f"{name}, now": side(decode, new=True),
        f"{name}, products alone": side(products, new=True),
    }


def build_ours(shape: Shape, **options: Any) -> NalandaForCausalLM:
    keys: Shape = {"mixer": "gated_deltanet", "tie_word_embeddings": True} | shape | options
    torch.manual_seed(0)
    return NalandaForCausalLM(NalandaConfig(**keys))


def train_sides(length: int, dtype: torch.dtype) -> dict[str, Side]:
    """Training steps of ours and of Llama, ours with four of the eight layers of 30 M."""
    rows, length = BATCHES[length]
    batch = random_batch(rows, length, TRAINED["vocab_size"])
    sizes = TRAINED | {"num_attention_heads": TRAINED["num_heads"], "tie_word_embeddings": True}
    for name in ("num_heads", "head_dim"):
        del sizes[name]
    step = training_step(build_llama(**sizes, max_position_embeddings=length), batch, dtype)
    sides = before_and_now("Llama", step)
    for name, options in MIXERS.items():
        step = training_step(build_ours(TRAINED, **options), batch, dtype)
        sides |= before_and_now(name, step)
        sides[f"{name}, torch on our route"] = side(step, new=False, route=choose_route())
    return sides


def evaluation_sides() -> dict[str, Side]:
    """The losses of four rows of 512 tokens, without gradients."""
    rows, length = BATCHES[512]
    sides = {}
    for name, options in MIXERS.items():
        model = build_ours(SHAPES["30 M"], **options).eval()
        batch = random_batch(rows, length, model.config.vocab_size)
        forward = torch.inference_mode()(partial(summed_loss, model, batch, model.device))
        sides |= before_and_now(name, partial(timed_calls, forward, 1))
    return sides


def read_prompt(model: NalandaForCausalLM, texts: int = 1) -> NalandaCache:
    with torch.inference_mode():
        return model(torch.zeros(texts, 16, dtype=torch.int64), logits_to_keep=1).past_key_values


def token_sides(size: str, mixers: tuple[str, ...], peer: bool = True) -> dict[str, Side]:
    """One token at batch 1, fp32."""
    sides: dict[str, Side] = {}
    for name in mixers:
        model = build_ours(SHAPES[size], **MIXERS[name]).eval()
        sides |= token_of(name, model, TOKENS[size])
    if peer:
        token, _ = qwen3_next(SHAPES[size] | {"tie_word_embeddings": True}, 16)
        sides["Qwen3-Next"] = side(partial(timed_calls, token, TOKENS[size]), new=False)
    return sides


def softmax_sides() -> dict[str, Side]:
    """One token of softmax attention behind a long text; before, each copied all keys and values."""
    model = build_ours(SOFTMAX, mixer="softmax").eval()
    cache = read_prompt(model)
    cache.states = random_keys(
        CONTEXT, SOFTMAX["num_hidden_layers"], SOFTMAX["num_heads"], SOFTMAX["head_dim"]
    )
    cache.seen_tokens, cache.lengths = CONTEXT, torch.tensor([CONTEXT])
    decode = partial(timed_tokens, model, cache, TOKENS["softmax"])

    def concatenating() -> float:
        with mock.patch.object(sequences, "grown", lambda kept, x: torch.cat([kept, x], 1)):
            return decode(as_generate=False)

    return {"softmax, before": side(concatenating, new=False), "softmax, now": side(decode, True)}


def map_sides() -> dict[str, Side]:
    """NaLa's map of queries and keys with their L2 norm, forward and backward."""
    B, T, H, K = MAPPED
    feature_map = build_feature_map("nala", num_heads=H, head_dim=K)
    q, k = (torch.randn(B, T, H, K, requires_grad=True) for _ in range(2))
    gradients = [torch.randn(B, T, H, 2 * K) for _ in range(2)]

    def call() -> None:
        features = ops.map_features(q, k, feature_map, "l2")
        torch.autograd.grad(features, (q, k), gradients)

    return before_and_now("map", partial(timed_calls, call, 4))


def channel_sides() -> dict[str, Side]:
    """Delta rules with gates by channel beside that with a decay a head, forward and backward."""
    sides = {}
    for sizes, (T, H) in ROWS_OF_HEADS.items():
        for case in (recurrences.CASES[0], *recurrences.CHANNEL_CASES):
            sides |= before_and_now(f"{case}, {sizes}", recurrences.timed_case(case, T, H))
    return sides


# ------------------------------ llama.cpp


def llama_sides() -> dict[str, Side]:
    """One token of ours and of llama.cpp, from the same weights, with as many threads."""
    sides: dict[str, Side] = {}
    model = build_ours(SHAPES["30 M"], bos_token_id=0, eos_token_id=0).eval()
    for name, dtype in (("f32", torch.float32), ("bf16", torch.bfloat16)):
        ours = model if dtype == torch.float32 else in_bf16(model)
        sides |= token_of(name, ours, TOKENS["llama.cpp"])
        sides[f"{name}, llama.cpp"] = llama_token(model, name, TOKENS["llama.cpp"])
    return sides


def int8_sides(size: str) -> dict[str, Side]:
    """One token with weights in int8 beside wider ones and llama.cpp's Q8_0; and of several texts at once."""
    sides: dict[str, Side] = {}
    model = build_ours(SHAPES[size], bos_token_id=0, eos_token_id=0).eval()
    for name, ours in (("bf16", in_bf16(model)), ("fp32", model), ("int8", in_int8(model))):
        decode = partial(timed_tokens, ours, read_prompt(ours), TOKENS[size])
        sides[name] = side(decode, new=True)
        products = partial(timed_calls, products_of(ours), TOKENS[size])
        sides[f"{name}, products alone"] = side(products, new=True)
    for texts in TEXTS:
        decode_all = partial(timed_tokens, ours, read_prompt(ours, texts), TOKENS[size])
        sides[f"{texts} texts"] = side(decode_all, new=True)
        sides[f"{texts} texts, one by one"] = partial(times, texts, sides["int8"])
    sides["llama.cpp"] = llama_token(model, "q8_0", TOKENS[size])
    return sides


def times(count: int, call: Side) -> float:
    return count * call()


def in_bf16(model: NalandaForCausalLM) -> Any:
    ours: Any = copy.deepcopy(model)
    return ours.to(torch.bfloat16)


def in_int8(model: NalandaForCausalLM) -> Any:
    """The model as `from_pretrained` rounds its weights."""
    with tempfile.TemporaryDirectory() as folder, redirect_stderr(StringIO()):
        model.save_pretrained(folder)
        loaded = NalandaForCausalLM.from_pretrained(folder, quantization_config=Int8Config())
    return loaded.eval()


def llama_token(model: NalandaForCausalLM, dtype: str, tokens: int) -> Side:
    """Seconds a token: a long answer's less a short one's, which has the cost of a request."""
    xllamacpp: Any = importlib.import_module("xllamacpp")  # an extra

    params = xllamacpp.CommonParams()
    params.verbosity, params.port, params.n_ctx, params.n_parallel = -1, 0, 2048, 1
    params.n_gpu_layers, params.warmup = 0, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder:
        params.model.path = str(write_gguf_of(model, Path(folder), dtype))
        server = xllamacpp.Server(params)  # has read the file then

    def answer(tokens: int) -> float:
        request = {"prompt": [5, 6, 7, 8], "n_predict": tokens, "temperature": 0.0}
        start = time.perf_counter()
        server.handle_completions(request | {"ignore_eos": True, "cache_prompt": False})
        return time.perf_counter() - start

    short, long = 8, 8 + tokens
    return lambda: (answer(long) - answer(short)) / (long - short)


def write_gguf_of(model: NalandaForCausalLM, folder: Path, dtype: str) -> Path:
    """Writes the model as a file for llama.cpp, with a tokenizer of single bytes."""
    from nalanda.convert.engines import quiet
    from nalanda.convert.gguf import write_gguf

    with quiet(), redirect_stderr(StringIO()):
        byte_tokenizer(("t", "h")).save_pretrained(folder)  # llama.cpp needs a merge
        model.save_pretrained(folder)
        return write_gguf(folder, folder / f"{dtype}.gguf", dtype, check=False)


# ------------------------------ rows


def against_itself(name: str, what: str) -> Line:
    floor = f"{what}, products alone" if name.startswith("token") else None
    before = f"{what}, before"
    return Line(name, before, f"{what}, now", (before, before), floor=floor)


def against_llama(name: str, what: str, route: str = "before") -> Line:
    """route: of Llama, that of `before` or `now`; ours has its own in both."""
    ours = f"{what}, before" if route == "before" else f"{what}, torch on our route"
    peer = f"Llama, {route}"
    return Line(name, peer, f"{what}, now", (peer, ours))


def against_qwen(size: str) -> Line:
    ours = "Gated DeltaNet"
    before = ("Qwen3-Next", f"{ours}, before")
    name, floor = f"token, {size}: Qwen3-Next's layers", f"{ours}, products alone"
    return Line(name, before[0], f"{ours}, now", before, floor=floor)


def against_llama_cpp(dtype: str) -> Line:
    peer = f"{dtype}, llama.cpp"
    before = (peer, f"{dtype}, before")
    name, floor = f"token, 30 M, {dtype}: llama.cpp", f"{dtype}, products alone"
    return Line(name, peer, f"{dtype}, now", before, floor=floor)


def int8_row(size: str, repeats: int) -> Row:
    """Weights in int8 beside wider ones."""
    name, floor = f"token, {size}, int8", "int8, products alone"

    def line(what: str, peer: str, ours: str = "int8", floor: str | None = None) -> Line:
        return Line(f"{name}{what}", peer, ours, (peer, ours), floor=floor)

    peers = {"llama.cpp, Q8_0": "llama.cpp", "bf16": "bf16", "fp32": "fp32"}
    lines = [line(f": {label}", peer, floor=floor) for label, peer in peers.items()]
    for texts in TEXTS:
        one_by_one = f"{texts} texts, one by one"
        lines.append(line(f", {one_by_one}", one_by_one, f"{texts} texts"))
    return Row(partial(int8_sides, size), tuple(lines), repeats, needs=("xllamacpp", "gguf"))


def against_scalar(case: str, sizes: str) -> Line:
    scalar = recurrences.CASES[0]
    before = (f"{case}, {sizes}, before", f"{scalar}, {sizes}, before")
    now = (f"{case}, {sizes}, now", f"{scalar}, {sizes}, now")
    return Line(f"{case} / {scalar}, {sizes}", *now, before, ours_above=True)


def training_row(length: int, dtype: torch.dtype) -> Row:
    """In fp32 Gated DeltaNet stands beside a Llama on our route, too."""
    title = f"training, {'fp32' if dtype == torch.float32 else 'bf16'}, T = {length}"
    lines = [against_llama(f"{title}: {name}", name) for name in MIXERS]
    if dtype == torch.float32:
        name = "Gated DeltaNet"
        lines.append(against_llama(f"{title}: {name}, Llama on our route", name, "now"))
    repeats = (
        5 if length == 4096 and dtype == torch.float32 else 11
    )  # three minutes with two threads
    return Row(partial(train_sides, length, dtype), tuple(lines), repeats, trains=True)


def token_row(size: str, mixers: tuple[str, ...], repeats: int, peer: bool = True) -> Row:
    """peer: whether Qwen3-Next's layers stand beside Gated DeltaNet."""
    lines = [against_itself(f"token, {size}: {name}", name) for name in mixers]
    if peer:
        lines.append(against_qwen(size))
    return Row(partial(token_sides, size, mixers, peer), tuple(lines), repeats)


ROWS: dict[str, Row] = {
    "train_512": training_row(512, torch.float32),
    "train_4096": training_row(4096, torch.float32),
    "train_bf16_512": training_row(512, torch.bfloat16),
    "train_bf16_4096": training_row(4096, torch.bfloat16),
    "evaluation": Row(
        evaluation_sides,
        tuple(against_itself(f"evaluation, forward: {name}", name) for name in MIXERS),
        repeats=11,
    ),
    "token_2m": token_row("2.4 M", tuple(MIXERS), repeats=20, peer=False),
    "token_30m": token_row("30 M", tuple(MIXERS), repeats=20),
    "token_340m": token_row("340 M", ("Gated DeltaNet",), repeats=15),
    "llama_cpp": Row(
        llama_sides,
        (against_llama_cpp("f32"), against_llama_cpp("bf16")),
        repeats=10,
        needs=("xllamacpp", "gguf"),
    ),
    "int8_30m": int8_row("30 M", repeats=15),
    "int8_340m": int8_row("340 M", repeats=9),
    "softmax": Row(
        softmax_sides, (against_itself("softmax token at 32 k", "softmax"),), repeats=15
    ),
    "map": Row(
        map_sides, (against_itself("NaLa's map with its norm", "map"),), repeats=30, trains=True
    ),
    "channels": Row(
        channel_sides,
        tuple(
            against_scalar(case, sizes)
            for case in recurrences.CHANNEL_CASES
            for sizes in ROWS_OF_HEADS
        ),
        repeats=9,
        trains=True,
    ),
}


# ------------------------------ measuring


def bench_cpu(
    *,
    rows: list[str] | None = None,
    repeats: int | None = None,
    threads: int = 2,
    output: str | Path = "runs/speed_cpu",
) -> str:
    """Measures the rows that have no file yet, prints the table as Markdown, and returns it.

    Args:
        rows: names in `ROWS`; by default all.
        repeats: timed rounds of each row, after one that warms up; by default the row's own number.
        threads: number of threads for torch and for llama.cpp.
        output: folder for a JSON file a row. Rows of the same version and settings are kept.

    Raises:
        InputError: no such row.
    """
    names = list(ROWS) if rows is None else rows
    for name in names:
        if name not in ROWS:
            raise InputError(f"--rows: no row {name!r}{suggest(name, ROWS)}")
    folder = output_folder(output, "--output")

    torch.set_flush_denormal(True)
    with torch_threads(threads):
        for name in sorted(names, key=lambda name: ROWS[name].trains):
            if missing_module(ROWS[name]):
                continue
            settings = settings_of(name, threads, repeats or ROWS[name].repeats)
            file = folder / f"{name}.json"
            if not file.is_file() or json.loads(file.read_text())["settings"] != settings:
                record = measure(name, settings)
                write_atomically(file, json.dumps(record, indent=1) + "\n")

    table = table_of(folder, names)
    print(table)
    return table


def missing_module(row: Row) -> str | None:
    return next((name for name in row.needs if importlib.util.find_spec(name) is None), None)


def settings_of(row: str, threads: int, repeats: int) -> dict[str, Any]:
    """All that a record must share with a later call to be kept."""
    return {
        "row": row,
        "threads": threads,
        "repeats": repeats,
        "processor": cpu_model(),
        "versions": versions(*(name for name in ROWS[row].needs if not missing_module(ROWS[row]))),
    }


def measure(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The record of a row: its sides' seconds in every round, and profiles of ours."""
    row, start = ROWS[name], time.monotonic()
    if row.trains:
        keep_freed_memory()
    record: dict[str, Any] = {"settings": settings, "route": choose_route()}
    record["date"] = datetime.now(UTC).strftime("%Y-%m-%d %H:%M")
    record["load"] = [os.getloadavg()[0]]

    compared = set().union(*(line.sides for line in row.lines))
    sides = {each: call for each, call in row.build().items() if each in compared}
    seconds: Measured = take_turns(sides, settings["repeats"], name)

    ours = dict.fromkeys(line.ours for line in row.lines)
    record["profiles"] = {each: profiled(sides[each]) for each in ours}
    record["load"].append(os.getloadavg()[0])
    record["took"] = time.monotonic() - start
    sides.clear()
    gc.collect()
    return record | {"seconds": seconds}


def profiled(call: Side) -> dict[str, float]:
    """The shares of the slowest operators in a side's time; the rest has the C++ that torch does not see."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler, record_function("whole"):
        call()
    events: Any = profiler.events()
    whole = next((event for event in events if event.name == TIMED), None)
    whole = whole or next(event for event in events if event.name == "whole")

    shares = dict.fromkeys({event.name for event in events} - {TIMED, "whole"}, 0.0)
    for event in events:
        inside = whole.time_range.start <= event.time_range.start < whole.time_range.end
        if inside and event.name in shares:
            shares[event.name] += event.self_cpu_time_total / whole.cpu_time_total
    slowest = sorted(shares, key=shares.__getitem__, reverse=True)[:SLOWEST]
    outside = 1 - sum(shares.values())
    return {name: shares[name] for name in slowest} | {"outside of torch": outside}


# ------------------------------ the table


def table_of(folder: Path, names: list[str]) -> str:
    """The table in Markdown, from the records in the folder."""
    lines = ["| | before | now | ratio before | ratio, 25–75 % |"]
    lines.append("|---|---:|---:|---:|---:|")
    records, profiles = [], {}
    for name in names:
        row, file = ROWS[name], folder / f"{name}.json"
        record = json.loads(file.read_text()) if file.is_file() else None
        for line in row.lines:
            if record is None:
                missing = missing_module(row)
                reason = f"{missing} is not installed" if missing else "not measured"
                lines.append(f"| {line.name} | | | | {reason} |")
                continue
            lines.append(line_of(line, figures_of(line, record["seconds"])))
            profiles[profile_of(line, record)] = None  # two lines may share ours
        records += [record] if record else []
    return "\n".join([*lines, "", *captions_of(records), *profiles])


def figures_of(line: Line, seconds: Measured) -> dict[str, Any]:
    """A line's figures: medians of its own ratios within a round, their quartiles, and its medians in ms."""
    ratios = ratios_of(seconds[line.numerator], seconds[line.denominator])
    median = statistics.median(ratios)
    quartiles = (
        statistics.quantiles(ratios, n=4, method="inclusive") if ratios[1:] else [median] * 3
    )
    return {
        "now": 1e3 * statistics.median(seconds[line.ours]),
        "before": 1e3 * statistics.median(seconds[line.ours_before]),
        "ratio_before": median_ratio(*(seconds[name] for name in line.before)),
        "ratio": median,
        "low": quartiles[0],
        "high": quartiles[2],
    }


def line_of(line: Line, figures: dict[str, Any]) -> str:
    before, now = (milliseconds(figures[name]) for name in ("before", "now"))
    ratio = f"{figures['ratio']:.2f} ({figures['low']:.2f} to {figures['high']:.2f})"
    ratio_before = f"{figures['ratio_before']:.2f}"
    if line.before == (line.numerator, line.denominator):  # the line has no "before"
        before = ratio_before = "–"
    columns = (line.name, before, now, ratio_before, ratio)
    return f"| {' | '.join(columns)} |"


def milliseconds(ms: float) -> str:
    return f"{ms:.{0 if ms >= 100 else 1 if ms >= 10 else 2}f} ms"


def captions_of(records: list[dict[str, Any]]) -> list[str]:
    """Where and when the records were measured, a line for each set of conditions."""
    loads: dict[str, list[float]] = {}
    for record in records:
        settings = record["settings"]
        threads = settings["threads"]
        conditions = [
            settings["processor"],
            f"{threads} thread{'s' * (threads > 1)}",
            f"{record['route']} products",
            list_versions([settings["versions"]]),
            record["date"][:10],
        ]
        loads.setdefault(", ".join(conditions), []).extend(record["load"])
    return [
        f"({name}, load {min(values):.1f} to {max(values):.1f})" for name, values in loads.items()
    ]


def profile_of(line: Line, record: dict[str, Any]) -> str:
    """Where the time of our side of a line goes."""
    shares = {}
    if line.floor is not None:
        seconds = record["seconds"]
        shares[line.floor] = median_ratio(seconds[line.floor], seconds[line.ours])
    shares |= record["profiles"][line.ours]
    listed = ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share >= 0.01)
    return f"\nTime of {line.ours} in {record['settings']['row']}: {listed}."
