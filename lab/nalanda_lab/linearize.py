"""What seven mixers and maps keep of a pretrained transformer, as hybrids: `nalanda-lab linearize`.

For each seed of the data's order, one pass of the teacher fits all arms; each is then distilled. So is the
transformer itself, whose row is what the text alone changes. Every measurement is a file of `records/`, and
what has one is not done again.
"""

import gzip
import json
import math
import shutil
import time
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.state import AcceleratorState
from accelerate.utils import set_seed
from scipy import stats
from transformers import AutoModelForCausalLM, AutoTokenizer

from nalanda.common.files import write_atomically
from nalanda.config.load import load_config
from nalanda.convert.fit import arm_configs, fit_layers
from nalanda.convert.linearize import build_hybrid, hybrid_config, open_transformer
from nalanda.model.cache import NalandaCache
from nalanda.report.figures import COLOURS, REFERENCE, drawing, log_axis
from nalanda.train.build import open_batches
from nalanda.train.loop import train
from nalanda.train.loss import count_labels, summed_loss
from nalanda_lab.estimate import document_variance, signed

RECIPE = Path(__file__).with_name("linearize.yaml")
STAGES = ("before", "fitted", "distilled")
CPU = torch.device("cpu")


class Bench:
    """One teacher, its held-out text and last words, and the folder of the records."""

    def __init__(self, teacher: Path, text: str, lambada: Path, out: Path, words: int):
        self.teacher, self.text, self.out = teacher, text, out
        self.records = out / "records"
        self.records.mkdir(parents=True, exist_ok=True)
        config = self.recipe(0, "validation.every=1")
        self.arms = list(config.linearize.arms)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(teacher)
        self.rows = [b for part in open_batches(config, self.tokenizer)[1].values() for b in part]
        with gzip.open(lambada, "rt", encoding="utf-8") as lines:
            self.words = [json.loads(line) for line in islice(lines, words)]

    def recipe(self, seed: int, *overrides: str) -> Any:
        folder = f"output_dir={self.out / f'seed-{seed}'}"
        given = f"seed={seed}", f"tokenizer={self.teacher}", f"data.source={self.text}"
        return load_config(RECIPE, [folder, *given, *overrides])

    def run(self, seeds: int) -> None:
        """Makes the records that are missing."""
        self.record("teacher", lambda: load(self.teacher))
        self.measure_decoding()
        self.measure_before(self.recipe(0))
        for seed in range(seeds):
            self.run_seed(seed)

    def run_seed(self, seed: int) -> None:
        config, folder = self.recipe(seed), self.out / f"seed-{seed}"
        if not all(self.has(f"{seed}-{arm}-distilled") for arm in self.arms):
            if not all((folder / arm).is_dir() for arm in self.arms):
                AcceleratorState._reset_state(reset_partial_state=True)
                fit_layers(config, str(self.teacher))
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # gigabytes; the arms stay
        for arm in self.arms:
            fitted, distilled = folder / arm, folder / f"{arm}-distilled"
            self.record(f"{seed}-{arm}-fitted", lambda at=fitted: load(at))
            self.distill(seed, arm, fitted, distilled)
        if not self.has(f"{seed}-teacher-distilled"):
            whole = folder / "transformer"
            self.save_transformer(whole)
            self.distill(seed, "teacher", whole, folder / "transformer-distilled")
            shutil.rmtree(whole)

    def distill(self, seed: int, arm: str, model: Path, to: Path) -> None:
        """Trains a model beside the teacher and records it, unless that is done. Keeps no weights."""
        if self.has(f"{seed}-{arm}-distilled"):
            return
        AcceleratorState._reset_state(reset_partial_state=True)
        init = f"model={{init_from: {model}}}", f"distill.teacher={self.teacher}"
        train(self.recipe(seed, *init, f"output_dir={to}"))
        self.record(f"{seed}-{arm}-distilled", lambda: load(to / "final"))
        for part in ("checkpoints", "final"):
            shutil.rmtree(to / part)

    def save_transformer(self, to: Path) -> None:
        """Writes the teacher as one of our models, with softmax attention in every layer."""
        transformer = open_transformer(self.teacher)
        config = hybrid_config(transformer.config, {"mixer": "softmax"})
        build_hybrid(config, transformer.load(CPU, torch.float32)).save_pretrained(to)
        self.tokenizer.save_pretrained(to)

    def measure_before(self, config: Any) -> None:
        """Records the arms of seed 0 as they are before any training."""
        transformer = open_transformer(self.teacher)
        source = transformer.load(CPU, torch.float32)
        for arm, hybrid in arm_configs(config, transformer.config).items():
            set_seed(0)
            self.record(f"0-{arm}-before", lambda c=hybrid: build_hybrid(c, source))

    def has(self, name: str) -> bool:
        return (self.records / f"{name}.json").is_file()

    def write(self, name: str, record: dict[str, Any]) -> None:
        write_atomically(self.records / f"{name}.json", json.dumps(record, indent=1) + "\n")
        print(time.strftime("%H:%M"), name, flush=True)

    @torch.no_grad()
    def record(self, name: str, load_model: Any) -> None:
        """Measures a model: summed nats and labels of each held-out batch, and each last word's hit."""
        if self.has(name):
            return
        model = load_model()
        nats = [summed_loss(model.eval(), batch, CPU).item() for batch in self.rows]
        hits = [self.hit(model, word["context"], word["continuation"]) for word in self.words]
        labels = [count_labels(batch) for batch in self.rows]
        self.write(name, {"nats": nats, "labels": labels, "hits": hits})

    def hit(self, model: Any, context: str, word: str) -> bool:
        """Whether every token of the word is the likeliest."""
        count = len(self.tokenizer(context).input_ids)
        ids = torch.tensor([self.tokenizer(context + word).input_ids])
        guesses = model(ids, use_cache=False).logits[0, count - 1 : -1].argmax(-1)
        return bool((guesses == ids[0, count:]).all())

    @torch.no_grad()
    def measure_decoding(self, length: int = 16384, steps: int = 16) -> None:
        """Records time and bytes of a token behind `length` others."""
        if self.has("decoding"):
            return
        transformer, record = open_transformer(self.teacher), {}
        source = transformer.load(CPU, torch.float32)
        layouts = {"teacher": "softmax", "3:1": None, "all recurrent": "gated_deltanet"}
        for name, mixer in layouts.items():
            config = hybrid_config(transformer.config, {"mixer": mixer} if mixer else {})
            model = build_hybrid(config, source).eval()
            cache = NalandaCache(config.num_hidden_layers)
            for piece in torch.randint(config.vocab_size, (length,)).split(512):
                model(piece[None], past_key_values=cache, logits_to_keep=1)
            seconds = [time_step(model, cache) for _ in range(steps)]
            size = config.state_bytes(length, torch.float32)
            record[name] = {"seconds": float(np.median(seconds[2:])), "bytes": size}
        self.write("decoding", record)


load = AutoModelForCausalLM.from_pretrained


def time_step(model: Any, cache: NalandaCache) -> float:
    begun = time.perf_counter()
    model(torch.tensor([[5]]), past_key_values=cache)
    return time.perf_counter() - begun


def report(out: Path) -> str:
    """The table of the records, in Markdown; beside it, linearize.png."""
    read = {f.stem: json.loads(f.read_text()) for f in (out / "records").glob("*.json")}
    decoding, teacher = read.pop("decoding", {}), read.pop("teacher")
    arms = load_config(RECIPE).linearize.arms
    first = next(iter(arms))
    heads = ("before", "fitted", "distilled")
    titles = [f"{what} {head}" for what in ("perplexity", "last words") for head in heads]
    titles += ["nats to the first", "over batches"]
    lines = [f"| | {' | '.join(titles)} |", "|---" * (len(titles) + 1) + "|"]
    lines.append(teacher_row(read, teacher, first))
    points: dict[str, list[tuple[float, float]]] = {}
    for arm in arms:
        cells = []
        for figure, unit in ((perplexity, ""), (accuracy, " %")):
            for stage in STAGES:
                names = [n for n in read if n.endswith(f"-{arm}-{stage}")]
                mean, half = interval([figure(read[name]) for name in names])
                if unit == "":
                    points.setdefault(arm, []).append((mean, half))
                spread = f" ± {half:.1f}" if half else ""
                cells.append(f"{mean:.1f}{spread}{unit}" if names else "")
        cells.append(distance(read, arm, first))
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    for name, cost in decoding.items():
        lines.append(
            f"\n{name}: {cost['seconds'] * 1e3:.0f} ms a token, {cost['bytes'] / 2**20:.0f} MiB"
        )

    seeds = len(gaps(read, first, first))
    caption = f"Means and 95 % intervals (Student's t) over {seeds} seeds of the data's order."
    best = min(points, key=lambda arm: points[arm][-1][0])
    title = f"{best} comes closest: perplexity {points[best][-1][0]:.0f}, the transformer has {perplexity(teacher):.0f}"
    with drawing(out / "linearize", title, caption, 1, height=2.5) as [axes]:
        for i, stage in enumerate(STAGES[1:], 1):
            means, halves = zip(*(stages[i] for stages in points.values()), strict=True)
            axes.errorbar(range(len(points)), means, halves, fmt="o", color=COLOURS[i], label=stage)
        axes.axhline(perplexity(teacher), **REFERENCE, label="teacher")
        axes.set_xticks(range(len(points)), list(points))
        axes.set(ylabel="perplexity of held-out text")
        log_axis(axes.yaxis, (40, 80, 160, 320, 640, 1280))
    return "\n".join(lines)


def teacher_row(read: dict[str, dict], teacher: dict, first: str) -> str:
    """The transformer as it is, and distilled on the text of the arms."""
    again = [read[name] for name in read if name.endswith("-teacher-distilled")]
    cells = [f"{perplexity(teacher):.1f}", ""]
    for figure, unit in ((perplexity, ""), (accuracy, " %")):
        mean, half = interval([figure(record) for record in again])
        cells.append(f"{mean:.1f}{f' ± {half:.1f}' if half else ''}{unit}" if again else "")
        if unit == "":
            cells += [f"{accuracy(teacher):.1f} %", ""]
    cells.append(distance(read, "teacher", first))
    return f"| teacher | {' | '.join(cells)} |"


def distance(read: dict[str, dict], arm: str, first: str) -> str:
    """Two cells: nats a token to the first arm with the interval over orders, and that over held-out batches."""
    pairs = pairs_of(read, arm, first)
    if not pairs or arm == first:
        return " | "
    mean, half = interval(gaps(read, arm, first))
    ours, theirs = (np.array([read[pair[i]]["nats"] for pair in pairs]) for i in (0, 1))
    labels = np.array(read[pairs[0][0]]["labels"])
    error = math.sqrt(document_variance(ours, theirs, labels))
    batches = float(stats.t.ppf(0.975, len(labels) - 1)) * error
    return f"{signed(mean, '.3f')} ± {half:.3f} | ± {batches:.3f}"


def perplexity(record: dict) -> float:
    return math.exp(sum(record["nats"]) / sum(record["labels"]))


def accuracy(record: dict) -> float:
    return 100 * float(np.mean(record["hits"]))


def pairs_of(read: dict[str, dict], arm: str, first: str) -> list[tuple[str, str]]:
    """The names of the distilled arm and of `first`, for each seed that has both."""
    names = sorted(name for name in read if name.endswith(f"-{arm}-distilled"))
    pairs = [(name, name.replace(f"-{arm}-", f"-{first}-")) for name in names]
    return [pair for pair in pairs if pair[1] in read]


def gaps(read: dict[str, dict], arm: str, first: str) -> list[float]:
    """Nats a token of the distilled arm, less those of `first` in the same seed."""
    pairs = pairs_of(read, arm, first)
    return [math.log(perplexity(read[a]) / perplexity(read[b])) for a, b in pairs]


def interval(values: list[float]) -> tuple[float, float]:
    """Mean, and the half width of its 95 % interval; infinite without values."""
    if len(values) < 2:
        return (values[0] if values else math.inf), 0.0
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return float(np.mean(values)), float(stats.t.ppf(0.975, len(values) - 1)) * error
