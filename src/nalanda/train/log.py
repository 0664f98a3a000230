"""What a run says of itself: metrics.jsonl, TensorBoard, wandb or trackio, the console, FLOPs utilisation."""

import importlib
import json
import math
import os
import platform
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

import accelerate
import torch
import transformers
import yaml

from nalanda.common.errors import InputError, first_line
from nalanda.train.checkpoint import write_atomically
from nalanda.train.optim import describe_groups

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
UTILISATION = (0.1, 0.4)
"""The shares of the peak between which a run is expected. By public figures for one H100 linear attention
reaches 20 % at 340 M and 40 % at 1.3 B parameters; small models and CPUs reach less: the first steps tell."""
MEASURED = 10
"""Steps that correct the estimate of the launch, behind the first, which allocates and compiles."""

CAUSAL = "causal attention is half of T × T"
"""The one convention for counting FLOPs of softmax attention, whoever built the model."""


@dataclass
class LogConfig:
    every: int = 10
    """Steps between two lines of metrics; a line's loss is that of its own step."""
    tensorboard: bool = True
    tracker: Literal["none", "wandb", "trackio"] = "none"
    """Sends the metrics there as well. Where to and whether at all is set as theirs always is: `wandb login`,
    WANDB_MODE=offline, TRACKIO_SPACE_ID, …"""
    project: str = "nalanda"
    """The tracker's."""

    def check(self) -> None:
        """Raises `InputError` for settings that cannot work."""
        if self.every < 1:
            raise InputError(f"log.every: expected 1 or more, got {self.every}")


class RunLog:
    """One process's view of the run: metrics.jsonl, TensorBoard, tracker and console, kept together.

    A log opened at a step forgets everything beyond it: after a resume no step is reported twice. With
    `keep_events`, as after a rollback, it keeps the events. Processes other than the main one pass
    `quiet=True` and write nothing.
    """

    def __init__(
        self,
        run_dir: Path,
        config: LogConfig,
        *,
        step: int,
        steps: int,
        quiet: bool = False,
        keep_events: bool = False,
    ):
        self.quiet, self.steps = quiet, steps
        self.board = self.progress = self.tracker = None
        self.expected: tuple[int, float, float] | None = None
        self.taken: list[float] = []
        if quiet:
            return
        self.file = run_dir / "metrics.jsonl"
        if config.tracker != "none":
            self.tracker = Tracker(config, run_dir, self.say)
        if bad := cut(self.file, step, keep_events):
            self.say(f"{self.file}: {bad} line(s) cannot be read; they stay there and are passed over")
        self.stream = self.file.open("a", encoding="utf-8")
        if config.tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # takes a second to import

            self.board = SummaryWriter(str(run_dir / "tensorboard"), purge_step=step + 1)
        if sys.stdout.isatty():
            self.progress, self.task = _progress_bar(step, steps)
            self.progress.start()

    def write(self, **values: Any) -> None:
        """One line of metrics.jsonl, on the disk when this returns; its numbers go to TensorBoard and to the
        tracker, unless it tells of an event."""
        if self.quiet:
            return
        infinite = {k: str(v) for k, v in values.items() if isinstance(v, float) and not math.isfinite(v)}
        self.stream.write(json.dumps({**values, **infinite}) + "\n")  # JSON has no NaN
        self.stream.flush()
        os.fsync(self.stream.fileno())
        if "event" in values:
            return
        numbers = {k: v for k, v in values.items() if k != "step" and isinstance(v, (int, float))}
        if self.board:
            for key, value in numbers.items():
                self.board.add_scalar(key, value, values["step"])
        if self.tracker:
            self.tracker.log(numbers, values["step"])

    def expect(self, steps: int, seconds: tuple[float, float]) -> None:
        """What the launch takes `steps` to take, (shortest, longest); `step` says once what they do take."""
        self.expected = (steps, *seconds)

    def step(self, step: int, loss: float, rate: float, seconds: float) -> None:
        """Moves the progress bar; seconds: the step's own."""
        if self.progress:
            self.progress.update(self.task, completed=step, loss=f"{loss:.4f}", rate=_si(rate))
        if self.expected:
            self.taken.append(seconds)
            if len(self.taken) > MEASURED:
                self.say(f"estimate   {corrected(*self.expected, self.taken[1:], step)}")
                self.expected = None

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

    def event(self, step: int, kind: str, *, reason: str = "", **values: Any) -> None:
        """What happened to the run at `step`, in metrics.jsonl and for people: skipped, rollback, …"""
        self.write(step=step, event=kind, **({"reason": reason} if reason else {}), **values)
        self.say(": ".join([f"step {step}", kind, *filter(None, [reason])]))

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
        if self.tracker:
            self.tracker.finish()
        self.stream.close()


class Tracker:
    """The run at wandb or trackio, through what the two have in common: init, log, finish.

    tracker.json keeps the run's id there and the last step that was sent: a resumed run goes on in the same
    one, and sends no step twice. One that fails later is given up with a word; the run goes on.

    Raises:
        InputError: it is not installed, or does not start.
    """

    def __init__(self, config: LogConfig, run_dir: Path, say: Callable[[str], None]):
        self.kind, self.say, self.failed = config.tracker, say, False
        try:
            self.module = importlib.import_module(self.kind)
        except ImportError:
            raise InputError(f"log.tracker: no {self.kind} here: pip install {self.kind}") from None
        file, lines = run_dir / "tracker.json", run_dir / "metrics.jsonl"
        known: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
        if known.get("tracker") == self.kind:
            # What metrics.jsonl has went out as well, and a resume is about to cut it.
            steps = [line.get("step", 0) for line in (read(lines) if lines.is_file() else ())]
            known["step"] = max([known["step"], *steps])
        else:
            known = {"tracker": self.kind, "id": secrets.token_hex(4), "step": 0}
        write_atomically(file, json.dumps(known) + "\n")
        self.sent, recipe = known["step"], run_dir / "config.yaml"
        options = {"id": known["id"], "dir": str(run_dir)} if self.kind == "wandb" else {}
        try:
            self.module.init(
                project=config.project,
                name=f"{run_dir.resolve().name}-{known['id']}",  # trackio finds a run by its name
                config=yaml.safe_load(recipe.read_text(encoding="utf-8")) if recipe.is_file() else {},
                resume="allow",
                **options,
            )
        except Exception as error:
            raise InputError(f"log.tracker: {self.kind}: {first_line(error)}") from None

    def log(self, numbers: dict[str, float], step: int) -> None:
        if step > self.sent:
            self._try(self.module.log, numbers, step=step)

    def finish(self) -> None:
        self._try(self.module.finish)

    def _try(self, call: Callable, *arguments: Any, **options: Any) -> None:
        if self.failed:
            return
        try:
            call(*arguments, **options)
        except Exception as error:
            self.failed = True
            self.say(f"{self.kind} gets no more metrics, metrics.jsonl does: {first_line(error)}")


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
    if not log.quiet:
        from nalanda.report.info import estimate  # it imports the trainer, which imports this module

        log.say(f"estimate   {estimate(config, facts, model)}")
        log.expect(c.steps - facts["step"], time_left(config, facts))
    if not facts["documents_kept_apart"]:
        log.say("WARNING    this model lets packed documents see one another; run.json is marked accordingly")


def read_facts(run_dir: Path) -> dict:
    """run.json, {} without one. Raises `InputError` where it cannot be read."""
    file = run_dir / "run.json"
    if not file.is_file():
        return {}
    try:
        facts = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(facts, dict):
            raise ValueError("it holds no facts")
    except ValueError as error:
        raise InputError(f"{file}: unreadable: {error}") from None
    return facts


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
    """The lines of a metrics.jsonl; what is no line of ours, such as one that a kill tore, is passed over.
    Numbers that JSON has no form for are floats again: nan, inf, -inf."""
    for _, values in _lines(file):
        if values is not None:
            yield {key: float(v) if v in ("nan", "inf", "-inf") else v for key, v in values.items()}


def cut(file: Path, step: int, keep_events: bool = False) -> int:
    """Takes the lines beyond `step`, with `keep_events` all but events, and a torn last line out of a
    metrics.jsonl. Returns how many of the others cannot be read; they stay."""
    if not file.exists():
        return 0
    kept, bad, beyond = [], 0, False
    for line, values in _lines(file):
        if values is None:
            if line.endswith(b"\n") and not beyond:
                bad += 1
                kept.append(line)
            continue
        beyond = values.get("step", 0) > step
        if not beyond or (keep_events and "event" in values):
            kept.append(line)
    write_atomically(file, b"".join(kept))
    return bad


def _lines(file: Path) -> Iterator[tuple[bytes, dict | None]]:
    """Every line of a metrics.jsonl as it stands, and what it says; None for one that cannot be read."""
    with file.open("rb") as stream:
        for line in stream:
            values = None
            try:
                values = json.loads(line)
                readable = isinstance(values, dict) and isinstance(values.get("step", 0), int)
            except ValueError:
                readable = False
            yield line, values if readable and line.endswith(b"\n") else None


def peak_flops(device: torch.device, precision: str) -> tuple[float, str]:
    """The peak of one device in FLOPs a second, and where the figure comes from.

    Known GPUs: the data sheet, dense. All else, CPUs among it: the rate of a large matrix product, measured
    here.
    """
    if device.type == "cuda" and (known := known_peak(torch.cuda.get_device_name(device), precision)):
        return known
    # The faster of the two: in bf16 runs the recurrence stays fp32, and some CPUs only emulate bf16.
    dtypes = {torch.float32, torch.bfloat16 if precision == "bf16" else torch.float32}
    rate = max(matmul_flops(device, dtype) for dtype in dtypes)
    return rate, f"matrix product on {device.type}, measured"


def known_peak(name: str, precision: str) -> tuple[float, str] | None:
    """As `peak_flops`, for a GPU by its name; None for one that is not in `PEAK_FLOPS`."""
    for key in sorted(PEAK_FLOPS, key=len, reverse=True):
        if key.lower() in name.lower():
            return PEAK_FLOPS[key][precision != "bf16"], f"{name}, data sheet"
    return None


def run_time(flops: float, peak: float) -> tuple[float, float]:
    """(shortest, longest) seconds that `flops` are expected to take at a share of `peak` in UTILISATION."""
    low, high = UTILISATION
    return flops / (high * peak), flops / (low * peak)


def time_left(config: Any, facts: dict) -> tuple[float, float]:
    """`run_time` of what is left of a run; facts: as run.json has them."""
    tokens = (config.train.steps - facts["step"]) * config.train.tokens_per_step
    return run_time(tokens * facts["training_flops_per_token"], facts["peak_flops"])


def corrected(steps: int, shortest: float, longest: float, taken: list[float], step: int) -> str:
    """The estimate for `steps` steps by the seconds that the last of them, up to `step`, have taken."""
    whole = steps * median(taken)
    by = f"{duration(whole)} by steps {step - len(taken) + 1} to {step}"
    if shortest <= whole <= longest:
        return by
    share = UTILISATION[1] * shortest / whole
    return f"{by}, not {duration(shortest)} to {duration(longest)}: {100 * share:.1f} % of the peak"


def matmul_flops(device: torch.device, dtype: torch.dtype, seconds: float = 0.3) -> float:
    """FLOPs a second of the fastest of the square matrix products that `seconds` allow; nothing random.

    On a CPU one thread's, times the number of threads: where others compute as well, threads that wait for
    one another would measure the others.
    """
    size, threads = (256, torch.get_num_threads()) if device.type == "cpu" else (4096, 1)
    a, b = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    best, end = math.inf, time.perf_counter() + seconds
    try:
        if threads > 1:
            torch.set_num_threads(1)
        while time.perf_counter() < end or best == math.inf:
            start = time.perf_counter()
            a @ b
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            best = min(best, time.perf_counter() - start)
    finally:
        if threads > 1:
            torch.set_num_threads(threads)
    return threads * 2 * size**3 / best


def flops_per_token(model: torch.nn.Module, seq_len: int) -> tuple[float, str]:
    """Training FLOPs of one token, forward and backward, and how they were counted.

    Backward is twice forward; causal attention sees half of T × T. Our models count for themselves
    (linear-attention terms included). For any other model: 6 a weight in a matrix product, the head's
    included, and 6·L·D·T for attention, D = heads × head size (Chowdhery et al., 2022, halved). Neither
    counts the embedding's look-up, nor, as MFU has it, recomputation under gradient checkpointing.
    """
    config: Any = model.config
    if hasattr(config, "flops_per_token"):
        return 3 * config.flops_per_token(seq_len), f"the model's own count; {CAUSAL}"
    # Norms and biases are vectors, and no products.
    weights = sum(p.numel() for p in model.parameters() if p.dim() > 1)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    if head is not None and embedding.weight is not head.weight:
        weights -= embedding.weight.numel()
    text: Any = config.get_text_config() if hasattr(config, "get_text_config") else config
    heads = getattr(text, "num_attention_heads", None)
    if not heads:
        return 6.0 * weights, "estimated as 6 a weight, the mixers' own terms left out"
    width = heads * (getattr(text, "head_dim", None) or text.hidden_size // heads)
    attention = 6.0 * text.num_hidden_layers * width * seq_len
    return 6 * weights + attention, f"estimated as 6 a weight and attention; {CAUSAL}"


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
    """`45 s`, `12 min`, `3 h 05 min`, `4 d 07 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    hours = round(seconds / 3600)
    return (
        f"{minutes // 60} h {minutes % 60:02d} min" if hours < 72 else f"{hours // 24} d {hours % 24:02d} h"
    )


def _si(number: float) -> str:
    for unit in ("", " K", " M"):
        if number < 1000:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.4g} G"
