"""The estimate of a run's activations equals what a real model keeps for its backward pass."""

import gc
import itertools
import weakref
from dataclasses import replace

import pytest
import torch
from tiny_models import VARIANTS, main_rows, rows
from training import of_rows

from nalanda import NalandaConfig, NalandaForCausalLM
from nalanda.common.text import size
from nalanda.config.load import load_config
from nalanda.config.schema import StageConfig
from nalanda.model import chunk_forward
from nalanda.model.sequences import Sequences
from nalanda.train import estimate, memory, needs
from nalanda.train.checkpoint_dir import prune
from nalanda.train.estimate import activation_bytes, logits_bytes, meta_model, saved_bytes
from nalanda.train.loop import train

pytestmark = pytest.mark.usefixtures("fresh_accelerate")

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def configured(hidden_size: int = 128, num_heads: int = 2, **options) -> NalandaConfig:
    mixers = options.get("mixer")
    layers = len(mixers) if isinstance(mixers, list) else 2
    sizes = {"vocab_size": 96, "hidden_size": hidden_size, "num_heads": num_heads}
    return NalandaConfig(**sizes, num_hidden_layers=layers, **options)


class Loss(torch.nn.Module):
    """The loss of a training step, called as a block is."""

    def __init__(self, config: NalandaConfig, checkpointing: bool):
        super().__init__()
        torch.manual_seed(0)
        self.model = NalandaForCausalLM(config)
        if checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})

    def forward(self, tokens: torch.Tensor, seq: torch.Tensor) -> torch.Tensor:
        return self.model(
            tokens, labels=tokens, cu_seqlens=seq, use_cache=False, logits_to_keep=1
        ).loss


def kept(
    config: NalandaConfig, batch: int, length: int, dtype: torch.dtype, checkpointing: bool
) -> int:
    """What a forward pass and its loss keep, with the tensors of one block that is computed again."""
    loss, tokens = Loss(config, checkpointing).train(), torch.randint(96, (batch, length))
    # A first, empty document: documents of whole rows alone would be a dense batch.
    bounds = torch.tensor([0, *range(0, batch * length + 1, length)])
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        count = saved_bytes(loss, tokens, bounds)
        if checkpointing:
            x = torch.randn(1, batch * length, config.hidden_size, requires_grad=True)
            seq = estimate._sequences(config, batch, length, None, "cpu")
            loss.model.gradient_checkpointing_disable()
            # The block's input is among what checkpointing keeps.
            count += max(saved_bytes(block, x, seq) for block in loss.model.model.layers) - x.nbytes
    return count


def said(
    config: NalandaConfig, batch: int, length: int, precision: str, checkpointing: bool = False
) -> int:
    recipe = of_rows(batch, length, precision, checkpointing)
    # A training in this process may have set it, by its free memory.
    whole = activation_bytes(recipe, config, saved_tokens=chunk_forward.SAVED_TOKENS)
    return whole - logits_bytes(config, batch * length, "cpu")


SOME = [
    "gated_deltanet-nala",
    "deltanet-nala",
    "gated_deltanet-silu",
    "linear_attention-pola",
    "mala-elu1",
    "softmax-None",
    "norm_attention-elu1",
    "window",
    "transnormer",
    "gated_deltanet-steps",
]


@pytest.mark.sampled
@pytest.mark.parametrize("checkpointing", [False, True], ids=("all", "checkpointing"))
@pytest.mark.parametrize("options", [row for row in rows() if row.id in SOME])
def test_the_estimate_is_what_a_model_keeps(options, checkpointing):
    config = configured(**options)
    found = kept(config, 2, 384, torch.bfloat16, checkpointing)
    assert said(config, 2, 384, "bf16", checkpointing) == pytest.approx(found, rel=0.1)


def test_a_row_of_the_head_is_a_row_of_its_gradient():
    """The loss keeps the gradient of the head in fp32."""
    small, large = configured(), configured()
    large.vocab_size += 1000
    sizes = [said(config, 2, 128, "fp32") for config in (small, large)]
    assert sizes[1] - sizes[0] == 4 * 1000 * small.hidden_size


def test_the_quick_rows_are_there():
    assert {row.id for row in rows()} >= set(SOME)
    assert "window" in VARIANTS


@pytest.mark.slow
@pytest.mark.parametrize(("number", "row"), enumerate(main_rows()))
def test_the_estimate_is_what_every_model_keeps(number, row):
    """Every other model with checkpointing."""
    config, checkpointing = configured(**row.values[0]), bool(number % 2)
    found = kept(config, 2, 1024, torch.bfloat16, checkpointing)
    assert said(config, 2, 1024, "bf16", checkpointing) == pytest.approx(found, rel=0.1)


def peak_of_a_step(config: NalandaConfig, batch: int, length: int) -> int:
    """The most bytes that torch has allocated at a time in a model's second forward and backward pass.

    Torch counts them. A process grows by up to a fifth more, since its C library leaves gaps between tensors.
    """
    model, tokens = NalandaForCausalLM(config).train(), torch.randint(96, (batch, length))
    model(tokens, labels=tokens, logits_to_keep=1).loss.backward()
    model.zero_grad()
    with torch.profiler.profile(profile_memory=True) as profiler:
        model(tokens, labels=tokens, logits_to_keep=1).loss.backward()

    events = profiler.profiler.kineto_results.events()
    changes = [event for event in events if event.name() == "[memory]"]
    changes.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate(event.nbytes() for event in changes))


MIXERS = {
    "gated_deltanet": {"mixer": "gated_deltanet"},
    "nala": {"mixer": "gated_deltanet", "feature_map": "nala"},
    "kda": {"mixer": "kda"},
    "softmax": {"mixer": "softmax"},
}


@pytest.mark.slow
@pytest.mark.parametrize("mixer", MIXERS)
def test_a_step_takes_as_much_memory_as_the_estimate(mixer):
    """The estimate is of all tensors that live at a step's peak, whether autograd or Python holds them."""
    config = configured(num_heads=1, intermediate_size=384, **MIXERS[mixer])
    estimated = activation_bytes(of_rows(1, 1024), config)
    gradients = 4 * estimate.on_meta(config).num_parameters()
    assert peak_of_a_step(config, 1, 1024) == pytest.approx(estimated + gradients, rel=0.1)


@pytest.mark.sampled
@pytest.mark.parametrize("precision", TYPES)
@pytest.mark.parametrize("heads", [2, 16], ids=("chunks kept", "chunks made again"))
def test_the_estimate_knows_the_precision_and_what_the_chunk_form_keeps(
    precision, heads, monkeypatch
):
    """A CPU keeps the chunks of at most 16,384 tokens of a head, if training does not raise that."""
    monkeypatch.setattr(chunk_forward, "SAVED_TOKENS", chunk_forward.FEW_TOKENS)
    config = configured(num_heads=heads, mixer="gated_deltanet", feature_map="nala")
    assert (heads * 3 * 448 <= chunk_forward.SAVED_TOKENS) is (heads == 2)
    found = kept(config, 3, 448, TYPES[precision], False)
    assert said(config, 3, 448, precision) == pytest.approx(found, rel=0.02)


def test_a_cpu_saves_all_chunks_where_memory_is_free(monkeypatch):
    """More than those of few tokens, if a step with them takes at most half of the free memory."""
    sizes = ["train.micro_batch_size=64", "data.seq_len=512", "train.tokens_per_step=32768"]
    config = load_config("demo", ["model.vocab_size=96", *sizes])
    model = meta_model(config)

    def needed(free: int, device: str = "cpu") -> needs.Needs:
        monkeypatch.setattr(memory, "host", lambda: free)
        return needs.needs_of(config, model, 1, device=device)

    few, every = needed(0), needed(1 << 50)
    assert (few.saved_tokens, every.saved_tokens) == (chunk_forward.FEW_TOKENS, 2**62)
    assert every.machine > 1.1 * few.machine
    assert needed(2 * every.machine) == every
    assert needed(2 * every.machine - 1) == few
    assert needed(1 << 50, "cuda").saved_tokens == chunk_forward.FEW_TOKENS


def test_what_would_fit_is_counted_as_a_run_of_those_rows(monkeypatch):
    """Four rows are half of a process's share, so FSDP2 also holds whole gradients."""
    monkeypatch.setattr(memory, "host", lambda: 1 << 50)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("WORLD_SIZE", "4")
    sizes = ["model.vocab_size=96", "train.parallel=fsdp", "data.seq_len=64"]
    eight, four = (
        load_config(
            "demo", [*sizes, "train.tokens_per_step=2048", f"train.micro_batch_size={rows}"]
        )
        for rows in (8, 4)
    )
    needed = needs.needs_of(four, meta_model(four), 4).device
    line = needs.would_fit(eight)
    assert line.startswith(f"train.micro_batch_size=4 needs {size(needed)} of ")

    # Of the stage that needs most, whose rows may be its own.
    more = {"data": {"seq_len": 128}, "train": {"micro_batch_size": 4}}
    staged = replace(four, stages={"long": StageConfig(after_step=9, **more)})
    rows, long = 2, staged.in_stages()[1].config
    long = replace(long, train=replace(long.train, micro_batch_size=rows))
    needed = needs.needs_of(long, meta_model(long), 4).device
    line = needs.would_fit(staged)
    assert line.startswith(f"stages.long.train.micro_batch_size={rows} needs {size(needed)} of ")


def test_a_run_of_endless_steps_is_counted_at_once():
    config = load_config("demo", ["train.steps=1e15", "checkpoint.every=1", "model.vocab_size=96"])
    assert (
        needs.run_files(config, meta_model(config)).checkpoints == config.checkpoint.keep_last + 1
    )


@pytest.mark.parametrize(
    ("every", "steps", "keep_last", "keep_every", "saved"),
    [
        (10, 100, 3, None, []),
        (10, 100, 3, 20, []),
        (0, 100, 3, None, []),
        (10, 25, 3, None, []),
        (7, 100, 2, 14, []),
        (10, 100, 3, 20, [20, 40, 50, 60]),
        (10, 100, 1, None, [10, 20, 30, 40, 50]),  # with a larger keep_last before
        (10, 100, 3, None, [80, 90, 100]),
    ],
)
def test_the_disk_of_a_run_is_the_most_that_its_saves_leave_at_a_time(
    tmp_path, every, steps, keep_last, keep_every, saved
):
    kept = {"every": every, "keep_last": keep_last, "keep_every": keep_every}
    settings = [f"checkpoint.{key}={'null' if x is None else x}" for key, x in kept.items()]
    config = load_config("demo", [f"train.steps={steps}", "model.vocab_size=96", *settings])
    files = needs.run_files(config, meta_model(config), saved)

    # As the loop saves.
    counts = [len(saved)]
    for step in saved:
        (tmp_path / f"step-{step}").mkdir()
    for step in range(max(saved, default=0) + 1, steps + 1):
        if step == steps or (every and step % every == 0):
            (tmp_path / f"step-{step}").mkdir()
            counts.append(len(list(tmp_path.iterdir())))
            prune(tmp_path, config.checkpoint, step)
    last = len(list(tmp_path.iterdir()))

    assert files.checkpoints == max(counts)
    assert files.total == max(max(counts) * files.checkpoint, last * files.checkpoint + files.final)
    assert files.more == files.total - len(saved) * files.checkpoint


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_checkpoint_and_the_model_have_the_bytes_that_are_estimated(recipe, tmp_path, optimizer):
    config = load_config(
        recipe,
        [
            f"output_dir={tmp_path}/run",
            "train.steps=1",
            "model.hidden_size=128",
            f"optim.name={optimizer}",
            "validation.every=0",
        ],
    )
    run = train(config)
    files = needs.run_files(config, meta_model(config))
    saved = run / "checkpoints" / "step-1"
    for path, expected in ((saved, files.checkpoint), (run / "final", files.final)):
        actual = sum(file.stat().st_size for file in path.glob("*.safetensors"))
        assert expected == pytest.approx(actual, rel=0.02)


def test_what_was_measured_is_freed():
    """tanh keeps its output for the backward pass."""
    outputs = []

    class Tanh(torch.nn.Module):
        def forward(self, x, seq):
            y = x.tanh()
            outputs.append(weakref.ref(y))
            return y

    assert saved_bytes(Tanh(), torch.zeros(8, requires_grad=True), Sequences()) == 32
    gc.collect()
    assert outputs[0]() is None


@pytest.mark.parametrize("length", [24, 100])
def test_the_estimate_of_short_rows(length):
    config = configured(mixer="gated_deltanet", feature_map="nala")
    found = kept(config, 6, length, torch.bfloat16, False)
    assert said(config, 6, length, "bf16") == pytest.approx(found, rel=0.1)


def test_a_gpus_rules_make_maps_again():
    config = configured(mixer="gated_deltanet", feature_map="nala")
    here, there = (activation_bytes(of_rows(2, 512, "bf16"), config, d) for d in ("cpu", "cuda"))
    assert there - logits_bytes(config, 1024) < 0.7 * here
    assert not estimate.ops._scarce_memory(torch.empty(1))  # the rules end with the estimate


def test_the_estimate_draws_no_numbers_and_measures_once(monkeypatch):
    config, before = (
        configured(mixer="deltanet", feature_map="silu", hidden_size=64),
        torch.get_rng_state(),
    )
    two = of_rows(2, 512, "bf16")
    activation_bytes(two, config)
    assert torch.equal(before, torch.get_rng_state())
    monkeypatch.setattr(estimate, "saved_bytes", None)
    one = of_rows(1, 512, "bf16")
    assert activation_bytes(one, config) < activation_bytes(two, config)


@pytest.mark.sampled
@pytest.mark.parametrize("precision", TYPES)
@pytest.mark.parametrize("mixer", ["deltanet", "gated_deltanet", "nala"])
def test_rows_that_are_cut_over_processes_take_a_part_of_the_memory(mixer, precision):
    """A process in the middle of a row also joins states: under autocast too they keep their precision."""
    config = configured(mixer=mixer)
    whole, part = (activation_bytes(of_rows(1, 4096, precision, parts=n), config) for n in (1, 4))
    assert part < whole / 2
