"""Perplexity by position, of texts of any length: in one pass through the state, and in windows.

Every token is scored twice: after all before it in its row, and in disjoint windows. Windows are as long as
the rows of training, and each begins after one token of context. Both curves score the same tokens, so their
gap is the gain from longer context.
"""

import csv
import io
import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from nalanda.common.errors import InputError, output_folder
from nalanda.common.files import write_atomically
from nalanda.common.products import product_route
from nalanda.common.progress import Progress, first_process
from nalanda.common.terminal import plain_console
from nalanda.common.text import si
from nalanda.common.versions import versions
from nalanda.config.load import load_config
from nalanda.config.schema import DataConfig
from nalanda.data.documents import suffix_of
from nalanda.data.readers import read_txt
from nalanda.data.records import Document, Fields
from nalanda.data.sources import open_corpus
from nalanda.data.text_bytes import text_bytes
from nalanda.inference.load import (
    bos_token,
    check_tokens,
    choose_device,
    is_ours,
    launched_context,
    load_model,
    number_format,
)
from nalanda.inference.options import LoadOptions
from nalanda.model.cache import CACHE, cache_of
from nalanda.model.context import Context
from nalanda.model.state import fingerprint
from nalanda.report.figures import GREY, drawing, files, in_panels, log_axis
from nalanda.train.resolve import resolve_all
from nalanda_eval.options import PerplexityOptions, check_least
from nalanda_eval.report import model_titles

AT_ONCE = 4096
"""Tokens whose logits are in memory at once."""
CONTEXT_LENGTHS = ("n_positions", "max_position_embeddings", "n_ctx")
"""Keys of configs with the tokens that a model sees at once."""
LONGEST = 16
"""Default length of a row, in windows."""


def perplexity(
    models: list[str],
    text: str = "python",
    options: PerplexityOptions = PerplexityOptions(),
    loading: LoadOptions = LoadOptions(),
) -> dict[str, Any]:
    """Perplexity of models on a text, and its curve over positions; `print_perplexity` prints the result.

    Args:
        models: checkpoint directories or hub ids.
        text: `python` (the demo's held-out documents), a file, a directory (its validation part, if any), a
            glob, or a recipe: the validation part of its `data`, with its bos, eos and joined lines.
        options: as of `nalanda perplexity`. `overrides` are settings of a recipe. `joined` joins documents
            that are too short alone into one text. `length` is of a pass in tokens, `window` of a window, by
            default the training length (`max_position_embeddings`). `output` gets perplexity.json,
            perplexity.csv and the picture.
        loading: as in `nalanda.inference.load.load_model`.

    The processes of a launch (`torchrun --no-python --nproc_per_node N nalanda perplexity …`) read each text
    together, a part each; the first one writes the files.

    Raises:
        InputError: no such model or text, or a length that a model cannot read.
    """
    _check_lengths(options)
    models = resolve_all(models)
    data = text_data(text, options.overrides or [], options.joined)
    device = choose_device(loading.device)
    loading = replace(loading, device=device)
    directory = output_folder(options.output, "--output")

    measured: list[dict[str, Any]] = []
    with launched_context(device) as context:
        for name in models:
            model, tokenizer = load_model(name, **vars(loading))
            if context is not None and not is_ours(model):
                raise InputError(
                    f"{name}: only models of ours are cut over processes; start one process"
                )
            window = options.window or context_length(model.config.get_text_config()) or 2048
            length = options.length or LONGEST * window
            texts = list(tokenise_documents(model, tokenizer, data, limit=options.tokens))
            readings = 2 if window < length else 1
            total = readings * sum(len(ids) - 1 for ids, _, _ in texts)
            with Progress(name, total, "tokens") as progress:
                figures = perplexity_by_position(
                    model, texts, min(window, length), length, progress.advance, context
                )
            measured.append(_model_facts(name, model) | figures)

            # Checked for each model, before the next one is loaded.
            bits = [figures[reading]["bits_per_byte"] for reading in ("one_pass", "windows")]
            if not all(map(math.isfinite, bits)):
                raise InputError(f"{name}: its losses are not finite; its weights may be damaged")
    result: dict[str, Any] = {
        "text": text,
        "joined": data.documents == "joined",
        "versions": versions(),
        "models": measured,
    }
    if not first_process():  # the first one writes the files
        return result
    result["figures"] = [path.name for path in draw_perplexity(result, directory)]
    _write_result(result, directory)
    return result | {"directory": str(directory)}


def _check_lengths(options: PerplexityOptions) -> None:
    """Raises `InputError` for lengths that are too short or do not fit each other."""
    check_least(options, length=2, window=2, tokens=1)
    if options.window and options.length and options.window > options.length:
        raise InputError(f"--window {options.window}: is longer than --length {options.length}")


def _model_facts(name: str, model: PreTrainedModel) -> dict[str, Any]:
    return {
        "name": name,
        "fingerprint": fingerprint(model),
        "device": str(model.device),
        "products": product_route(),
        "dtype": number_format(model),
    }


def _write_result(result: dict[str, Any], directory: Path) -> None:
    content = json.dumps(result, indent=1, allow_nan=False)
    write_atomically(directory / "perplexity.json", content + "\n")

    rows = [
        {"model": model["name"], **point} for model in result["models"] for point in model["curve"]
    ]
    table = io.StringIO(newline="")
    writer = csv.DictWriter(table, rows[0].keys(), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(directory / "perplexity.csv", table.getvalue())


def text_data(text: str, overrides: list[str], joined: bool) -> DataConfig:
    """The data to score. All of a file is scored; nothing is held out."""
    if text.endswith((".yaml", ".yml")):
        data = load_config(text, overrides).data
        return replace(data, documents="joined", bos=False) if joined else data
    if overrides:
        raise InputError(f"{overrides[0]}: settings change a recipe; {text} is not one")
    marks: Any = {"documents": "joined", "bos": False} if joined else {"eos": False}
    file = Path(text).expanduser()
    if file.is_file():  # named by the user, so it may be of any size
        marks["max_document_bytes"] = max(file.stat().st_size, (1 << 31) - 1)
    validation_source = None if text == "python" else text
    return DataConfig(source=text, validation_source=validation_source, **marks)


def documents(data: DataConfig, seed: int | None = None) -> Iterator[str]:
    """The validation texts of `data`, in file order or shuffled by a seed; a plain text file is one text."""
    path = Path(str(data.source)).expanduser()
    if path.is_file() and not suffix_of(path.name):
        for document, _ in read_txt(path, Fields.of(data), start=0):
            if isinstance(document, Document):
                yield document.text
        return
    corpus = open_corpus(data, "validation")
    corpus.ordered |= seed is None
    yield from corpus.once(seed or 0).texts()


def tokenise_documents(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, data: DataConfig, *, limit: int
) -> Iterator[tuple[np.ndarray, int, int]]:
    """Texts as `(tokens, words, bytes)`; the last text is cut where `limit` tokens are predicted.

    A text begins with bos if training wrote one; otherwise its first token is not predicted. Words are
    separated by white space, as lm-evaluation-harness counts them for WikiText. Bytes are those of the text
    behind the predicted tokens (`TextBytes`); of the whole text, if the tokenizer loses some.
    """
    joined = data.documents == "joined"
    bos, eos = bos_token(model, tokenizer), [tokenizer.eos_token_id]
    if joined and eos == [None]:
        raise InputError(
            "--joined: the tokenizer has no eos token to put between documents; read them apart"
        )
    sizes = text_bytes(tokenizer)
    # After an eos or bos the first token is predicted too.
    first_is_predicted = joined or bool(bos)
    left = limit  # predictions

    joined_ids: list[int] = list(eos)  # as in training: the first text follows an eos
    joined_words = joined_size = 0
    empty = True
    for text in documents(data):
        ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        check_tokens(ids, model, tokenizer)
        # A first token that is not predicted does not count.
        room = left if first_is_predicted else left + 1
        if len(ids) > room:
            ids = ids[:room]
            text = _cut_text(text, room, tokenizer, ids)
        empty &= not ids

        words = len(re.split(r"\s+", text))
        size = len(text.encode())
        if sizes:
            predicted = slice(0 if first_is_predicted else 1, None)
            # Bytes of predicted tokens alone, because the losses are of those.
            size = int(sizes.of_text(np.array(ids, int))[predicted].sum())

        if joined:
            # The eos after a text is predicted, so it counts.
            added = (ids + eos)[:left]
            joined_ids += added
            left -= len(added)
            joined_words += words
            joined_size += size
        elif len(bos + ids) > 1:
            left -= len(bos + ids) - 1
            yield np.array(bos + ids), words, size
        if left == 0:
            break

    if joined and len(joined_ids) > 1:
        yield np.array(joined_ids), joined_words, joined_size
    if empty:
        raise InputError(f"{data.source}: holds no text")
    if left == limit:
        raise InputError(
            f"{data.source}: no text has two tokens, and the model has no bos token before the first; "
            "name a longer text, or join them by --joined"
        )


def _cut_text(text: str, count: int, tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> str:
    """The text that the first `count` tokens encode."""
    if not tokenizer.is_fast:
        return str(tokenizer.decode(tokens[:count]))
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return text[: encoding.offset_mapping[count - 1][1]]


def spans(tokens: int, length: int) -> list[tuple[int, int]]:
    """The rows of a text of `tokens` tokens: `length` predictions each, after one token of context.

    Each is (first, last): the tokens after `first` up to `last` are predicted.
    """
    return [(start, min(start + length, tokens - 1)) for start in range(0, tokens - 1, length)]


@torch.inference_mode()
def surprisal(
    model: PreTrainedModel,
    tokens: Tensor,
    advance: Callable[[int, int], None] = lambda first, last: None,
    context: Context | None = None,
) -> Tensor:
    """−log p of each token but the first, in nats: int64 `[B, L + 1]` to float64 `[B, L]`, in one pass.

    Long rows are read in parts, each from the state or cache of the previous one; `advance` gets the columns
    that have been read. The processes of a context read each part together.
    """
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    # Columns at once, so that B × step logits fit; each process of a context has as many.
    step = max(1, AT_ONCE // len(tokens))
    if context is not None:
        return _surprisal_together(model, inputs, targets, step * context.size, advance, context)

    if inputs.shape[1] > step and not is_ours(model):
        _check_parts(model, inputs, targets, step)
    return _in_parts(model, inputs, targets, step, advance)


def _in_parts(
    model: Any, inputs: Tensor, targets: Tensor, step: int, advance: Callable[[int, int], None]
) -> Tensor:
    """−log p of the targets `[B, L]` in parts of `step` columns, each from the cache of the previous one."""
    cache, losses = None, []
    for start in range(0, inputs.shape[1], step):
        columns = slice(start, start + step)
        last = start + step >= inputs.shape[1]
        # A row that fits one part needs no cache.
        use_cache = not (last and start == 0)
        past = {} if cache is None else {CACHE: cache}
        out = model(input_ids=inputs[:, columns], use_cache=use_cache, **past)
        cache = cache_of(out)
        losses.append(_token_losses(out.logits, targets[:, columns]))
        advance(start, start + inputs[:, columns].shape[1])
    return torch.cat(losses, 1)


def _check_parts(model: PreTrainedModel, inputs: Tensor, targets: Tensor, step: int) -> None:
    """Raises `InputError` if a model of another library reads parts otherwise than whole rows: some return no
    cache, and some caches forget. step: the longest row that is no part."""
    few = inputs[:1, : min(step, 48)], targets[:1, : min(step, 48)]
    at_once, in_parts = (_in_parts(model, *few, size, lambda *_: None) for size in (48, 3))
    # Nats. Rounding makes 1e-5 in fp32; a convolution that forgets its last tokens made more than 1e-3.
    allowed = 1e-4 if model.dtype in (torch.float32, torch.float64) else 0.2
    if not float((at_once - in_parts).abs().max()) < allowed:
        raise InputError(
            f"--length: {model.config.model_type} reads rows in parts otherwise than whole ones; take at most {step}"
        )


def _token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """`[B, L, vocabulary]` and `[B, L]` to float64 `[B, L]`."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    loss = F.cross_entropy(wide.flatten(0, 1), targets.flatten(), reduction="none")
    return loss.double().view(targets.shape)


def _surprisal_together(
    model: PreTrainedModel,
    inputs: Tensor,
    targets: Tensor,
    step: int,
    advance: Callable,
    context: Context,
) -> Tensor:
    """`surprisal`, with `step` columns at once cut over the processes. The last are padded on the right."""
    columns = inputs.shape[1]
    states, losses = None, []
    # Padded to a multiple of the processes; the result loses these columns again.
    inputs, targets = (F.pad(x, (0, -columns % context.size)) for x in (inputs, targets))
    for start in range(0, columns, step):
        piece = inputs[:, start : start + step]
        # The first piece starts from zeros, the others from the carried states.
        rows: Any = {"carried_cache": states, "carried": torch.full((len(piece),), start > 0)}
        out = model(input_ids=piece, context=context, return_carried_cache=True, **rows)
        states = out.carried_cache
        local = _token_losses(out.logits, context.part(targets[:, start : start + step]))
        gathered = context.gather(local)  # [processes, B, step / processes]
        losses.append(gathered.movedim(0, 1).flatten(1))  # [B, step]
        advance(start, min(start + step, columns))
    return torch.cat(losses, 1)[:, :columns]


def score_spans(
    model: PreTrainedModel,
    texts: list[np.ndarray],
    length: int,
    advance: Callable[[int], None] = lambda tokens: None,
    context: Context | None = None,
) -> list[np.ndarray]:
    """−log p of each text's tokens but the first, in rows of at most `length` predictions; float64."""
    # [L − 1] for each text; entry t is of token t + 1.
    losses = [np.zeros(len(text) - 1) for text in texts]
    rows = [(i, *span) for i, text in enumerate(texts) for span in spans(len(text), length)]
    # Longest first: memory is exhausted at once or never, and batches need little padding.
    rows.sort(key=lambda row: row[1] - row[2])
    while rows:
        width = rows[0][2] - rows[0][1]
        size = max(1, AT_ONCE // width)
        batch, rows = rows[:size], rows[size:]

        # Shorter rows are padded on the right, which a causal model does not see.
        # [B, width + 1]: a token of context, then those to predict.
        tokens = torch.zeros(len(batch), width + 1, dtype=torch.int64)
        for row, (i, first, last) in zip(tokens, batch, strict=True):
            row[: last - first + 1] = torch.from_numpy(texts[i][first : last + 1])
        lengths = np.array([last - first for _, first, last in batch])

        # Real columns among those read, without the padding.
        def read(first: int, last: int, lengths: np.ndarray = lengths) -> None:
            advance(int((lengths.clip(max=last) - lengths.clip(max=first)).sum()))

        batch_losses = surprisal(model, tokens.to(model.device), read, context).cpu().numpy()
        for loss, (i, first, last) in zip(batch_losses, batch, strict=True):
            # A span (first, last) predicts the tokens first + 1 to last.
            losses[i][first:last] = loss[: last - first]
    return losses


def perplexity_by_position(
    model: PreTrainedModel,
    texts: list[tuple[np.ndarray, int, int]],
    window: int,
    length: int,
    advance: Callable[[int], None] = lambda tokens: None,
    context: Context | None = None,
) -> dict[str, Any]:
    """The result of `perplexity` for one model: totals, and the curve over positions in rows of `length`.

    Standard errors are over texts for the totals and over rows for the curve; None for a single one.
    """
    ids = [text[0] for text in texts]
    try:
        # If a row is no longer than a window, both readings are the same.
        one_pass = windows = score_spans(model, ids, length, advance, context)
        if window < length:
            windows = score_spans(model, ids, window, advance, context)
    except IndexError as error:  # learnt positions are limited
        raise InputError(
            f"--length {length}: the model cannot read rows of {length} tokens; take fewer"
        ) from error

    words = sum(text_words for _, text_words, _ in texts)
    size = sum(text_size for _, _, text_size in texts)
    # Pairs of both readings over the same tokens, a row each, [≤ length].
    rows = []
    for i, text in enumerate(ids):
        for first, last in spans(len(text), length):
            rows.append((one_pass[i][first:last], windows[i][first:last]))
    longest = max(len(row[0]) for row in rows)

    # Positions of the curve double up to the longest row, those of the ranges from the window on.
    # The last range holds at least a fifth of the longest row.
    borders = [0, *(1 << k for k in range(64) if 1 << k < 0.8 * longest), longest]
    doubled = [(0, window)]
    doubled += [(window << k, window << k + 1) for k in range(64) if window << k < longest]
    return {
        "window": window,
        "length": length,
        "texts": len(texts),
        "tokens": sum(map(len, one_pass)),
        "words": words,
        "bytes": size,
        "one_pass": _sum_up(one_pass, words, size),
        "windows": _sum_up(windows, words, size),
        "ranges": [_measure_range(rows, start, min(stop, longest)) for start, stop in doubled],
        "curve": [_measure_range(rows, start, stop) for start, stop in pairwise(borders)],
    }


def _sum_up(losses: list[np.ndarray], words: int, size: int) -> dict[str, float | None]:
    """Figures over all texts, whose tokens' losses are in nats; size: of the texts in bytes."""
    # [texts] each.
    sums = np.array([loss.sum() for loss in losses])
    counts = np.array([len(loss) for loss in losses], float)
    mean, error = ratio(sums, counts)
    value = _exp_or_none(mean)
    return {
        "perplexity": value,
        "stderr": None if error is None or value is None else value * error,
        "word_perplexity": _exp_or_none(sums.sum() / words),
        "bits_per_byte": sums.sum() / size / math.log(2),
    }


def ratio(values: np.ndarray, weights: np.ndarray) -> tuple[float, float | None]:
    """Σvalues/Σweights, and its standard error, None for a single pair.

    The error is that of the mean of values − ratio·weights, divided by the mean weight.
    """
    mean = values.sum() / weights.sum()
    if len(values) < 2:
        return float(mean), None
    # Delta method: the residuals' error over the mean weight.
    error = (values - mean * weights).std(ddof=1) / math.sqrt(len(values)) / weights.mean()
    return float(mean), float(error)


def _measure_range(
    rows: list[tuple[np.ndarray, np.ndarray]], start: int, stop: int
) -> dict[str, Any]:
    """Nats a token at the positions after `start` up to `stop`, over the rows that reach them."""
    reached = []
    for one_pass, windows in rows:
        if len(one_pass) > start:
            reached.append((one_pass[start:stop], windows[start:stop]))
    counts = np.array([len(one_pass) for one_pass, _ in reached], float)
    # [2, rows]: nats in one pass and in windows.
    sums = np.array([(one_pass.sum(), windows.sum()) for one_pass, windows in reached]).T
    point: dict[str, Any] = {
        "after": start,
        "up_to": stop,
        "rows": len(reached),
        "tokens": int(counts.sum()),
    }
    # The difference is by row, because both readings share its tokens and most of its noise.
    values = {"one_pass": sums[0], "windows": sums[1], "difference": sums[0] - sums[1]}
    for name, nats in values.items():
        point[name], point[f"{name}_stderr"] = ratio(nats, counts)
    return point


def context_length(config: Any) -> int | None:
    """Tokens that a model sees at once, as lm-evaluation-harness reads its config; None: it does not say."""
    lengths = (getattr(config, key, None) for key in CONTEXT_LENGTHS)
    return next(filter(None, lengths), None)


def _exp_or_none(nats: float) -> float | None:
    """exp(nats), or None where it overflows: JSON has no infinities."""
    return math.exp(nats) if nats < 700 else None


# ------------------------------ output


def draw_perplexity(result: dict[str, Any], directory: Path) -> list[Path]:
    """Draws perplexity by position, and the gain of one pass over windows."""
    models = result["models"]
    names = model_titles(models)
    groups, looks = in_panels(range(len(models)))
    windows = sorted({model["window"] for model in models})

    rows = sorted({point["rows"] for model in models for point in model["curve"]})
    caption = (
        "Left: one pass (lines; bands: ± 1 standard error over rows) and windows of "
        f"{' or '.join(map(str, windows))} tokens (dotted). Right: the same tokens, one pass beside windows; "
        "below 0 one pass is better; bars: ± 1 standard error. Dashed: the window. "
        f"n = {' to '.join(map(str, sorted({rows[0], rows[-1]})))} rows; one training seed a model."
    )

    file = directory / "perplexity"
    with drawing(file, _title(result, names), caption, 2 * len(groups), height=2.5) as panels:
        pairs = zip(panels[::2], panels[1::2], strict=True)
        for (left, right), members in zip(pairs, groups, strict=True):
            for i in members:
                _draw_model(models[i], names[i], looks[i], left, right)
            right.axhline(0, color=GREY, linestyle=":", label="windows")
            for axes in (left, right):
                for window in windows:
                    axes.axvline(window, color=GREY, linestyle="--", linewidth=0.8)
                log_axis(axes.xaxis, write=si)
                axes.set_xlabel("position in the text (tokens)")
            log_axis(left.yaxis)
            left.set_ylabel("perplexity (a token)")
            right.set_ylabel("one pass beside windows (%)")
    return files(file)


def _title(result: dict[str, Any], names: list[str]) -> str:
    """The perplexity of a model, or the span of several that compare."""
    title, models = f"Perplexity on {result['text']}", result["models"]
    if len(models) == 1:
        return f"{title}: {names[0]}, {_format_cell(models[0]['one_pass']['perplexity'])}"
    if incomparable(models):
        return title
    # No model is called the best: it may be by its seed. Bits a byte do not depend on the tokenizer.
    bits = [model["one_pass"]["bits_per_byte"] for model in models]
    return f"{title}: {len(models)} models, {min(bits):.3f} to {max(bits):.3f} bits a byte"


def _draw_model(
    model: dict[str, Any], name: str, style: dict[str, Any], left: Any, right: Any
) -> None:
    """Draws a model's two curves into the left panel, and their difference into the right one."""
    # Ranges with a single row have no error: they are drawn only where there are no others.
    points = [point for point in model["curve"] if point["rows"] > 1] or model["curve"]
    # The middle of a range on a logarithmic axis.
    x = np.array([math.sqrt((point["after"] + 1) * point["up_to"]) for point in points])

    def values(key: str) -> np.ndarray:
        return np.array([point[key] or 0.0 for point in points])

    one_pass, error = values("one_pass"), values("one_pass_stderr")
    low, high = np.exp(one_pass - error), np.exp(one_pass + error)
    left.plot(x, np.exp(one_pass), **style, label=name)
    left.fill_between(x, low, high, color=style["color"], alpha=0.15, linewidth=0)
    left.plot(x, np.exp(values("windows")), color=style["color"], linestyle=":")

    # The quotient of both perplexities, less 1.
    gain = 100 * np.expm1(values("difference"))
    right.errorbar(x, gain, 100 * values("difference_stderr"), **style, label=name)


def incomparable(models: list[dict[str, Any]]) -> list[str]:
    """Why the models' figures may not be compared; [] if they may."""

    def differ(key: str, quantity: str, advice: str) -> list[str]:
        values = list(dict.fromkeys(model[key] for model in models))
        if len(values) == 1:
            return []
        listed = " and ".join(f"{value:,}" for value in values)
        return [f"the models read {quantity.format(listed)}; {advice}"]

    return [
        *differ("window", "windows of {} tokens", "--window sets one for all"),
        *differ("length", "rows of {} tokens", "--length sets one for all"),
        *differ(
            "bytes",
            "{} bytes of text",
            "their tokenizers differ: name a text that --tokens does not cut",
        ),
    ]


def print_perplexity(result: dict[str, Any]) -> None:
    """Prints the totals, and perplexity by distance from the beginning."""
    console = plain_console()
    console.print(f"perplexity of {result['text']}", style="bold", soft_wrap=True)
    console.print(_totals_table(result["models"]))
    for reason in incomparable(result["models"]):
        console.print(f"not comparable: {reason}", style="yellow", soft_wrap=True)

    for model in result["models"]:
        console.print()
        console.print(model["name"], style="bold", soft_wrap=True)
        console.print(_ranges_table(model))
    names = ", ".join(["perplexity.json", "perplexity.csv", *result["figures"]])
    console.print(f"\n{names} in {result['directory']}", style="dim", soft_wrap=True)


def _totals_table(models: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("model", overflow="fold")
    for head in ("tokens", "one pass", "windows", "a word", "bits a byte"):
        table.add_column(head, justify="right")
    for model in models:
        one_pass, windows = model["one_pass"], model["windows"]
        table.add_row(
            model["name"],
            f"{model['tokens']:,}",
            _format_cell(one_pass["perplexity"], one_pass["stderr"]),
            _format_cell(windows["perplexity"], windows["stderr"]),
            _format_cell(one_pass["word_perplexity"]),
            f"{one_pass['bits_per_byte']:.3f}",
        )
    return table


def _ranges_table(model: dict[str, Any]) -> Table:
    table = Table("tokens before", box=None, pad_edge=False)
    for head in ("rows", "one pass", f"windows of {model['window']}", "one pass / windows"):
        table.add_column(head, justify="right")
    for point in model["ranges"]:
        quotient, error = math.exp(point["difference"]), point["difference_stderr"]
        band = "" if error is None else f" ± {quotient * error:.4f}"
        table.add_row(
            f"{point['after']} – {point['up_to']}",
            str(point["rows"]),
            _format_cell(_exp_or_none(point["one_pass"])),
            _format_cell(_exp_or_none(point["windows"])),
            f"{quotient:.4f}{band}",
        )
    return table


def _format_cell(value: float | None, error: float | None = None) -> str:
    if value is None:
        return "> 1e6"
    if value >= 1e6:
        return f"{value:.3g}"
    if value >= 1e4:
        return f"{value:.0f}"
    return f"{value:.2f}" if error is None else f"{value:.2f} ± {error:.2f}"
