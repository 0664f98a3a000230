"""What a run says of itself: metrics.jsonl, TensorBoard, the console, FLOPs utilisation, the loss curve."""

import json
import math
import os
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers

from nalanda.checkpoint import write_atomically
from nalanda.errors import InputError
from nalanda.optim import describe_groups

# A second, by the vendors' data sheets, dense: (bf16, fp32 outside the tensor cores).
PEAK_FLOPS = {
    "GB200": (2500e12, 80e12),
    "B200": (2250e12, 80e12),
    "H200": (989e12, 67e12),
    "H100 PCIe": (756e12, 51e12),
    "H100": (989e12, 67e12),
    "GH200": (989e12, 67e12),
    "H20": (148e12, 44e12),
    "A100": (312e12, 19.5e12),
    "A800": (312e12, 19.5e12),
    "L40S": (362e12, 91.6e12),
    "L4": (121e12, 30.3e12),
    "A10": (125e12, 31.2e12),
    "RTX 4090": (165e12, 82.6e12),
    "RTX 3090": (71e12, 35.6e12),
    "MI300X": (1307e12, 163e12),
}


@dataclass
class LogConfig:
    every: int = 10
    """Steps between two lines of metrics; a line's loss is that of its own step."""
    tensorboard: bool = True

    def check(self) -> None:
        """Raises `InputError` for settings that cannot work."""
        if self.every < 1:
            raise InputError(f"log.every: expected 1 or more, got {self.every}")


class RunLog:
    """One process's view of the run: metrics.jsonl, TensorBoard and the console, kept together.

    A log opened at a step forgets everything beyond it: after a resume no step is reported twice. Processes
    other than the main one pass `quiet=True` and write nothing.
    """

    def __init__(self, run_dir: Path, config: LogConfig, *, step: int, steps: int, quiet: bool = False):
        self.quiet, self.steps, self.board, self.progress = quiet, steps, None, None
        if quiet:
            return
        self.file = run_dir / "metrics.jsonl"
        cut(self.file, step)
        self.stream = self.file.open("a", encoding="utf-8")
        if config.tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # takes a second to import

            self.board = SummaryWriter(str(run_dir / "tensorboard"), purge_step=step + 1)
        if sys.stdout.isatty():
            self.progress, self.task = _progress_bar(step, steps)
            self.progress.start()

    def write(self, **values: Any) -> None:
        """One line of metrics.jsonl, on the disk when this returns; its numbers go to TensorBoard."""
        if self.quiet:
            return
        self.stream.write(json.dumps(values) + "\n")
        self.stream.flush()
        os.fsync(self.stream.fileno())
        if self.board:
            for key, value in values.items():
                if key != "step" and isinstance(value, (int, float)):
                    self.board.add_scalar(key, value, values["step"])

    def step(self, step: int, loss: float, rate: float) -> None:
        """Moves the progress bar."""
        if self.progress:
            self.progress.update(self.task, completed=step, loss=f"{loss:.4f}", rate=_si(rate))

    def train(self, **values: Any) -> None:
        """A training line: step, tokens, loss, grad_norm, lr, tokens_per_second, mfu."""
        self.write(**values)
        step, rate = values["step"], values["tokens_per_second"]
        left = (self.steps - step) * values["tokens"] / step / rate
        self.say(
            f"step {step:>{len(str(self.steps))}}/{self.steps}  loss {values['loss']:.4f}"
            f"  grad norm {values['grad_norm']:.2f}  lr {values['lr']:.2e}  {_si(rate)} tokens/s"
            f"  MFU {values['mfu']:.1%}  ETA {duration(left)}"
        )

    def say(self, line: str) -> None:
        """A line for people, above the progress bar if there is one."""
        if self.quiet:
            return
        if self.progress:
            self.progress.console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            print(line, flush=True)

    def close(self) -> None:
        if self.quiet:
            return
        if self.progress:
            self.progress.stop()
        if self.board:
            self.board.close()
        self.stream.close()


def announce(
    log: RunLog,
    config: Any,
    facts: dict,
    model: Any,
    optimizer: Any,
    accumulation: int,
    resume: Path | None,
    changes: dict,
) -> None:
    """What a person wants to see before the first step."""
    c, processes = config.train, facts["processes"]
    log.say(
        f"run        {config.output_dir}, seed {config.seed}"
        + (f", goes on from {resume.name}" if resume else "")
    )
    for key, (old, new) in changes.items():
        note = " (the schedule follows it from here on)" if key == "train.steps" else ""
        log.say(f"changed    {key}: {old} → {new}{note}")
    log.say(
        f"model      {model.config.model_type}, {facts['parameters']:,} parameters, "
        f"{facts['parameters_without_embeddings']:,} without embeddings"
    )
    log.say(f"optimizer  {config.optim.name}: {describe_groups(optimizer.param_groups)}")
    log.say(
        f"step       {c.tokens_per_step:,} tokens = {c.micro_batch_size} rows × {config.data.seq_len} tokens"
        f" × {accumulation} accumulated × {processes} process(es)"
    )
    log.say(f"steps      {c.steps:,} = {c.steps * c.tokens_per_step:,} tokens")
    log.say(
        f"device     {facts['device']}, {c.precision}, peak {facts['peak_flops'] / 1e12:.3g} TFLOP/s"
        f" ({facts['peak']})"
    )
    log.say(f"FLOPs      {facts['training_flops_per_token']:.3g} a token ({facts['flops']})")
    if not facts["documents_kept_apart"]:
        log.say("WARNING    this model lets packed documents see one another; run.json is marked accordingly")


def read_facts(run_dir: Path) -> dict:
    file = run_dir / "run.json"
    return json.loads(file.read_text()) if file.is_file() else {}


@torch.no_grad()
def negative_share(model: Any, tokens: torch.Tensor) -> dict[str, float]:
    """Share of negative weights in the mixers whose rows sum to 1 in spite of them (MALA), over all layers.

    tokens: `[B, T]`; the first row's first 256 are looked at. Empty for models without such mixers.
    """
    shares = []

    def look(mixer: Any, inputs: tuple) -> None:
        weights = mixer.weights(inputs[0])
        seen = torch.ones_like(weights[0, 0], dtype=torch.bool).tril()
        shares.append((weights[..., seen] < 0).float().mean())

    mixers = [m for m in model.modules() if getattr(m, "signed_weights", False)]
    hooks, training = [m.register_forward_pre_hook(look) for m in mixers], model.training
    model.eval()
    try:
        if mixers:
            model(tokens[:1, :256].to(model.device), use_cache=False)
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    return {"negative_weights": torch.stack(shares).mean().item()} if shares else {}


def write_facts(run_dir: Path, facts: dict) -> None:
    write_atomically(run_dir / "run.json", json.dumps(facts, indent=1) + "\n")


def versions() -> dict[str, str]:
    found = {m.__name__: m.__version__ for m in (torch, transformers, accelerate)}
    return {"python": platform.python_version(), **found}


def read(file: Path) -> Iterator[dict]:
    """The lines of a metrics.jsonl; a last one that a killed process left unfinished is not a line."""
    with file.open(encoding="utf-8") as stream:
        for line in stream:
            try:
                yield json.loads(line)
            except ValueError:
                return


def cut(file: Path, step: int) -> None:
    """Takes the lines beyond `step`, and a torn last line, out of a metrics.jsonl."""
    if file.exists():
        kept = [json.dumps(values) for values in read(file) if values.get("step", 0) <= step]
        write_atomically(file, "".join(f"{line}\n" for line in kept))


def peak_flops(device: torch.device, precision: str) -> tuple[float, str]:
    """The peak of one device in FLOPs a second, and where the figure comes from.

    Known GPUs: the data sheet, dense. All else, CPUs among it: the rate of a large matrix product, measured
    here.
    """
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for key in sorted(PEAK_FLOPS, key=len, reverse=True):
            if key.lower() in name.lower():
                return PEAK_FLOPS[key][precision != "bf16"], f"{name}, data sheet"
    # The faster of the two: in bf16 runs the recurrence stays fp32, and some CPUs only emulate bf16.
    dtypes = {torch.float32, torch.bfloat16 if precision == "bf16" else torch.float32}
    rate = max(matmul_flops(device, dtype) for dtype in dtypes)
    return rate, f"matrix product on {device.type}, measured"


def matmul_flops(device: torch.device, dtype: torch.dtype, size: int = 512, seconds: float = 0.3) -> float:
    """FLOPs a second of the fastest of the square matrix products that `seconds` allow; nothing random."""
    a, b = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    best, end = math.inf, time.perf_counter() + seconds
    while time.perf_counter() < end or best == math.inf:
        start = time.perf_counter()
        a @ b
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def flops_per_token(model: torch.nn.Module, seq_len: int) -> tuple[float, str]:
    """Training FLOPs of one token, forward and backward, and how they were counted.

    Our models count for themselves (linear-attention terms included, the embedding's look-up not); backward
    is twice forward. For any other model: 6 a weight in a matrix product, the head's included and the
    embedding's look-up not, and 6·L·D·T for causal attention over a mean context of T/2 (Chowdhery et al.,
    2022, halved). Recomputation under gradient checkpointing is not counted, as MFU has it.
    """
    config: Any = model.config
    if hasattr(config, "flops_per_token"):
        return 3 * config.flops_per_token(seq_len), "the model's own count"
    weights = sum(p.numel() for p in model.parameters())
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    if head is not None and embedding.weight is not head.weight:
        weights -= embedding.weight.numel()
    text: Any = config.get_text_config() if hasattr(config, "get_text_config") else config
    if not getattr(text, "num_attention_heads", None):
        return 6.0 * weights, "estimated as 6 a weight, the mixers' own terms left out"
    attention = 6.0 * text.num_hidden_layers * text.hidden_size * seq_len
    return 6 * weights + attention, "estimated as 6 a weight and 6·L·D·T for attention"


def plot_losses(run_dir: str | Path, png: str | Path) -> Path:
    """Draws a run's metrics.jsonl: the training loss, raw and smoothed, and the validation loss, over tokens.

    Raises:
        InputError: there is nothing to draw.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    run_dir, png = Path(run_dir), Path(png)
    file = run_dir / "metrics.jsonl"
    lines = list(read(file)) if file.is_file() else []
    train = [(line["tokens"], line["loss"]) for line in lines if "loss" in line]
    validation = [(line["tokens"], line["val_loss"]) for line in lines if "val_loss" in line]
    if not train:
        raise InputError(f"{file}: no training loss to draw yet")

    blue, orange, grey = "#2b6cb0", "#dd6b20", "#718096"
    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=150)
    tokens, losses = zip(*train, strict=True)
    axes.plot(tokens, losses, color=blue, alpha=0.35, linewidth=0.8)
    axes.plot(tokens, _smooth(losses), color=blue, linewidth=1.8, label="training")
    if validation:
        x, y = zip(*validation, strict=True)
        label = f"validation, in the end {y[-1]:.3f} (perplexity {math.exp(min(y[-1], 700)):.4g})"
        axes.plot(x, y, color=orange, linewidth=1.2, marker="o", markersize=4.5, label=label)
    # The first steps fall from ln(vocabulary) and would flatten all that follows on a linear axis.
    if max(losses) > 2 * min(losses):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 1.5, 2, 3, 4, 5, 6, 8)))
        axes.yaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
        axes.yaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
    axes.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=" "))
    axes.set_xlim(left=0)
    axes.set_xlabel("tokens", color=grey)
    axes.set_ylabel("loss, nats a token", color=grey)
    axes.set_title(run_dir.resolve().name, loc="left", fontsize=12, fontweight="bold")
    axes.grid(True, which="major", color="#e2e8f0", linewidth=0.8)
    axes.tick_params(colors=grey, which="both", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color("#cbd5e0")
    axes.legend(frameon=False, loc="upper right")
    figure.tight_layout()
    png.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(png)
    plt.close(figure)
    return png


def _smooth(values: tuple[float, ...]) -> list[float]:
    """Means over a fortieth of the curve to either side: centred, so that a fall is not drawn late."""
    half = max(1, len(values) // 40)
    windows = [min(half, i, len(values) - 1 - i) for i in range(len(values))]
    return [math.fsum(values[i - w : i + w + 1]) / (2 * w + 1) for i, w in enumerate(windows)]


def _progress_bar(step: int, steps: int) -> tuple[Any, Any]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    progress = Progress(
        TextColumn("training"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("loss [bold]{task.fields[loss]}[/]"),
        TextColumn("{task.fields[rate]} tokens/s"),
        TextColumn("ETA"),
        TimeRemainingColumn(),
        speed_estimate_period=120,
    )
    return progress, progress.add_task("training", total=steps, completed=step, loss="–", rate="–")


def duration(seconds: float) -> str:
    """`45 s`, `12 min`, `3 h 05 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


def _si(number: float) -> str:
    for unit in ("", " K", " M"):
        if number < 1000:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.4g} G"
