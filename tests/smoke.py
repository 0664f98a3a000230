"""`make smoke`: one hash a part of the house, to show in seconds that a change moved no value.

    python tests/smoke.py             compares with tests/smoke.json, this machine's entry
    python tests/smoke.py --record    writes the entry anew; a commit that does so says why values moved

A hash is over the bits of losses, logits, gradients, states and trained weights, on one thread. Bits differ
between processors and torch releases, so an entry stands for one of each. Without an entry the hashes are
recorded and nothing is compared.
"""

import contextlib
import io
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).with_name("helpers")))

from training import ENVIRONMENT, WORDS, hash_bits, tiny_recipe, write_texts

# Another compiler may round otherwise than torch.
os.environ |= {**ENVIRONMENT, "ACCELERATE_USE_CPU": "true", "NALANDA_BACKEND": "torch"}

import torch
import torch.distributed as dist
from torch import Tensor

import nalanda  # noqa: F401  registers the model classes
from nalanda.config.load import section
from nalanda.config.schema import RunConfig
from nalanda.model import FEATURE_MAPS, MIXERS, NalandaConfig, NalandaForCausalLM, State

RECORDS = Path(__file__).with_name("smoke.json")
VOCABULARY = 97
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 2}
MODELS = {
    "gated_deltanet": {"mixer": "gated_deltanet"},
    "nala": {"mixer": "nala"},
    "mamba2": {"mixer": "mamba2"},
    "delta_product": {"mixer": "delta_product"},
    "hybrid": {"mixer": ["gated_deltanet", "softmax"], "mixer_options": {"softmax": {"window": 5}}},
}
"""Models of the longer parts; the part `mixers` has every mixer and every map."""

Values = Iterator[Tensor]


def build(**options: Any) -> NalandaForCausalLM:
    torch.manual_seed(1)
    return NalandaForCausalLM(NalandaConfig(**SIZES | options))


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def gradients(model: torch.nn.Module) -> Values:
    for parameter in model.parameters():
        if parameter.grad is not None:
            yield parameter.grad
    model.zero_grad()


def tensors(states: Iterable[dict[str, Any]]) -> Values:
    """The tensors of each layer's state."""
    for state in states:
        yield from (value for value in state.values() if isinstance(value, Tensor))


# ------------------------------ the parts


def every_mixer_and_map() -> Values:
    """A loss, its gradients, a carried state and a continuation: all mixers, all maps."""
    rows = [{"mixer": name} for name in MIXERS]
    rows += [{"mixer": "gated_deltanet", "feature_map": name} for name in FEATURE_MAPS]

    for row in rows:
        try:
            model = build(**row)
        except ValueError:
            continue  # the mixer does not take the map
        loss = model(input_ids=tokens(2, 19), labels=tokens(2, 19)).loss
        loss.backward()
        yield loss
        yield from gradients(model)
        with torch.no_grad():
            prompt = model.eval()(input_ids=tokens(2, 19), use_cache=True)
            yield from tensors(prompt.past_key_values.states)
            yield model(input_ids=tokens(2, 3), past_key_values=prompt.past_key_values).logits


def packed_padded_and_carried() -> Values:
    ids, mask, bounds = tokens(3, 19), torch.ones(3, 19), torch.tensor([0, 5, 19, 38, 40, 57])
    mask[0, :4] = mask[2, :7] = 0

    for options in MODELS.values():
        model = build(**options)
        for batch in ({"cu_seqlens": bounds}, {"attention_mask": mask}):
            loss = model(input_ids=ids, labels=ids, **batch).loss
            loss.backward()
            yield loss
            yield from gradients(model)

        first = model(input_ids=ids, cu_seqlens=bounds, return_carried_cache=True)
        carried = torch.tensor([True, False, True])
        second = model(
            input_ids=ids, cu_seqlens=bounds, carried_cache=first.carried_cache, carried=carried
        )
        yield second.logits
        yield from tensors(second.carried_cache.states)


@torch.no_grad()
def decoding_and_states() -> Values:
    ids, mask = tokens(3, 19), torch.ones(3, 19)
    mask[0, :4] = 0

    for fields in MODELS.values():
        model = build(**fields).eval()
        prompt = model(input_ids=ids, attention_mask=mask)
        mask_after = torch.cat([mask, torch.ones(3, 2)], 1)
        yield prompt.logits
        yield model(
            input_ids=ids[:, :2], attention_mask=mask_after, past_key_values=prompt.past_key_values
        ).logits
        yield from model(input_ids=ids, output_hidden_states=True).hidden_states

        for choice in ({}, {"num_beams": 2}, {"do_sample": True, "top_k": 9}):
            torch.manual_seed(3)
            options = {"max_new_tokens": 5, "do_sample": False} | choice
            yield model.generate(ids, attention_mask=torch.ones_like(ids), **options)

        state = model.read(ids[:1])
        with tempfile.TemporaryDirectory() as folder:
            state.save(Path(folder) / "state.safetensors")
            loaded = State.load(Path(folder) / "state.safetensors", model)
        yield model.generate(state=state, max_new_tokens=4, do_sample=False)
        yield model.generate(state=loaded, max_new_tokens=4, do_sample=False)


def images() -> Values:
    from transformers import AutoModelForImageClassification

    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_heads": 2, "num_labels": 5}
    sizes |= {
        "image_size": 12,
        "patch_size": 4,
        "position_embedding": "learnt",
        "is_decoder": False,
    }
    pixels = torch.randn(3, 3, 12, 12, generator=torch.Generator().manual_seed(1))

    for mixer in ("softmax", "linear_attention", "nala", "mala", "soft"):
        torch.manual_seed(1)
        config = NalandaConfig(mixer=mixer, value_conv=3, **sizes)
        model = AutoModelForImageClassification.from_config(config)
        result = model(pixels, labels=torch.tensor([0, 3, 4]))
        result.loss.backward()
        yield result.loss
        yield result.logits
        yield from gradients(model)


def a_context_of_two_processes() -> Values:
    """Rows cut over two processes; values of the first. The second is this file with `--second`."""
    from nalanda.model.context import Context

    model_of = {"hybrid": MODELS["hybrid"], "gla": {"mixer": "gla"}, "mala": {"mixer": "mala"}}
    ids, bounds = tokens(2, 32), torch.tensor([0, 5, 32, 40, 64])
    for options in model_of.values():
        model = build(**options)
        loss = model(input_ids=ids, labels=ids, cu_seqlens=bounds, context=Context()).loss
        loss.backward()
        yield loss
        yield from gradients(model)


def twenty_training_steps() -> Values:
    """The weights, losses and gradient norms of a run that validates, saves and exports."""
    from safetensors.torch import load_file

    from nalanda.train.log import read_metrics
    from nalanda.train.loop import train

    with tempfile.TemporaryDirectory() as folder:
        config = section(RunConfig, recipe(Path(folder)), "")
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            run = train(config)
        for line in read_metrics(run / "metrics.jsonl"):
            values = [line[key] for key in ("loss", "grad_norm", "val_loss") if key in line]
            yield torch.tensor(values, dtype=torch.float64)
        yield from load_file(run / "final" / "model.safetensors").values()


def recipe(folder: Path) -> dict[str, Any]:
    write_texts(folder / "corpus.jsonl", 300, range(1, 41), WORDS[:10])
    return tiny_recipe(
        folder,
        model={"mixer": ["gated_deltanet", "softmax"], "feature_map": "nala"},
        train={"steps": 20, "tokens_per_step": 512, "micro_batch_size": 4},
        output_dir=str(folder / "run"),
        seed=1,
        tokenizer={"train": "bpe", "vocab_size": 300},
        data={"source": str(folder / "corpus.jsonl"), "seq_len": 64, "max_validation_rows": 7},
        optim={"lr": 5e-3},
        schedule={"warmup_steps": 5},
        validation={"every": 10},
        checkpoint={"every": 10},
    )


PARTS: dict[str, Callable[[], Values]] = {
    part.__name__: part
    for part in (
        every_mixer_and_map,
        packed_padded_and_carried,
        decoding_and_states,
        images,
        a_context_of_two_processes,
        twenty_training_steps,
    )
}


# ------------------------------ the comparison


def machine() -> str:
    """The processor and the torch release, on which bits depend."""
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.exists() else []
    named = dict(
        reversed([re.split(r"\s*:\s*", line, maxsplit=1) for line in lines if ":" in line])
    )
    processor = (
        f"{named['model name']} model {named['model']}"
        if "model name" in named
        else platform.processor()
    )
    return f"{processor}, {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}"


def join(rank: int, meeting: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)


def main(arguments: list[str]) -> int:
    torch.set_num_threads(1)
    if arguments[:1] == ["--second"]:
        join(1, arguments[1])
        hash_bits(a_context_of_two_processes())
        return 0

    hashes = {}
    with tempfile.TemporaryDirectory() as folder:
        meeting = str(Path(folder) / "meeting")
        second = subprocess.Popen([sys.executable, __file__, "--second", meeting])
        for name, part in PARTS.items():
            start = time.perf_counter()
            if part is a_context_of_two_processes:
                join(0, meeting)
            hashes[name] = hash_bits(part())[:16]
            if part is a_context_of_two_processes:
                dist.destroy_process_group()
                second.wait()
            print(f"{hashes[name]}  {name}  ({time.perf_counter() - start:.1f} s)", flush=True)

    records = json.loads(RECORDS.read_text()) if RECORDS.exists() else {}
    known = records.get(machine())
    if known is None or "--record" in arguments:
        RECORDS.write_text(json.dumps(records | {machine(): hashes}, indent=1) + "\n")
        print(f"recorded for {machine()} in {RECORDS.name}")
        return 0

    moved = [name for name in PARTS if known.get(name) != hashes[name]]
    print(f"moved: {', '.join(moved)}" if moved else f"equal to the record of {machine()}")
    return int(bool(moved))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
