"""DDP, FSDP2 and one process train the same model, and a checkpoint of any of them serves the others.

torchrun starts this file itself as two processes over gloo: `worker` does there whatever needs two.
"""

import dataclasses
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import yaml
from accelerate import Accelerator
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.state import AcceleratorState
from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env
from bare_run import add_gradients, bare_run, update
from torch._dynamo.utils import counters
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from training import launched, tiny_recipe, write_recipe, write_texts
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from nalanda import NalandaConfig
from nalanda.common.errors import DiskFull, InputError
from nalanda.common.files import verify_manifest
from nalanda.config.load import load_config
from nalanda.config.schema import CheckpointConfig, OptimConfig, TrainConfig
from nalanda.train import checkpoint, launch, memory, parallel, tensor_files
from nalanda.train.checkpoint import Saver
from nalanda.train.checkpoint_dir import checkpoint_folders, latest_checkpoint
from nalanda.train.export import export
from nalanda.train.log import read_metrics
from nalanda.train.loop import train
from nalanda.train.loss import packed_logits
from nalanda.train.needs import check_weights_fit
from nalanda.train.optim import build_optimizer, undecayed

ROOT = Path(__file__).parents[2]
ROWS, LENGTH, VOCABULARY, STEPS = (
    8,
    24,
    65,
    2,
)  # 65 rows of the embedding: the shards are of unequal size
VARIANTS = {
    "fp32": ("gated_deltanet", {"precision": "fp32"}),
    "bf16": ("gated_deltanet", {"precision": "bf16"}),
    "bf16, recomputed, tied": ("deltanet", {"precision": "bf16", "gradient_checkpointing": True}),
    "foreign": ("llama", {"precision": "bf16"}),
}
"""Mixer (or a foreign model type) and train settings."""
COMPILED = {f"{name}, compiled": name for name in VARIANTS if name != "fp32"}
VARIANTS |= {
    new: (VARIANTS[old][0], VARIANTS[old][1] | {"compile": True}) for new, old in COMPILED.items()
}


# Inductor would compile C++ for minutes.
parallel.compile_blocks = functools.partial(parallel.compile_blocks, backend="aot_eager")


def build(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 48,
    }
    if name == "llama":
        config = LlamaConfig(num_attention_heads=2, num_key_value_heads=2, **shape)
    else:
        config = NalandaConfig(
            num_heads=2, mixer=name, tie_word_embeddings=name == "deltanet", **shape
        )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def prepared(name: str, kind: str, shard_size: int | None = None, **settings):
    """(accelerator, bare model, what to call, optimizer)."""
    AcceleratorState._reset_state()
    settings = {"precision": "fp32"} | settings
    accelerator = Accelerator(mixed_precision="bf16" if settings["precision"] == "bf16" else "no")
    chosen = TrainConfig(
        steps=1,
        tokens_per_step=1,
        micro_batch_size=1,
        shard_size=shard_size,
        **settings | {"parallel": kind},
    )
    model, sharing = build(name), parallel.Sharing(accelerator, chosen)
    made = parallel.parallelize(
        accelerator, model, sharing, chosen, lambda: build_optimizer(model, OptimConfig(lr=3e-3))
    )
    return accelerator, model.train(), *made


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def steps(accelerator, model, wrapped, optimizer, first: int = 0, count: int = STEPS) -> dict:
    """Trains on rows that depend on the step alone, two micro-batches a process and step."""
    torch._dynamo.reset()
    counters.clear()

    def reduced_once(_: str) -> None:
        """Before each micro-batch: FSDP2 adds up the gradients of all processes after the last one."""
        assert not isinstance(model, FSDPModule) or all(p.grad is None for p in model.parameters())

    optim = {"lr": 3e-3, "max_grad_norm": 0.5}
    run = bare_run(model, optimizer, accelerator, wrapped, reduced_once, **optim)
    losses, norms, gradients = [], [], {}
    for step in range(first, first + count):
        rows = torch.randint(
            0, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step)
        ).chunk(accelerator.num_processes)[accelerator.process_index]
        micro_batches = [
            {
                "input_ids": part,
                "labels": part,
                "cu_seqlens": torch.arange(len(part) + 1) * LENGTH,
                "position_ids": torch.arange(LENGTH).expand(len(part), -1),
            }
            for part in rows.chunk(2)
        ]
        done = add_gradients(run, micro_batches)
        losses.append(done.loss)
        norms.append(done.norm)
        if step == first:
            gradients = {name: whole(p.grad) for name, p in model.named_parameters()}
        update(run, done)
    weights = {name: whole(p) for name, p in model.named_parameters()}
    graphs = counters["stats"]["unique_graphs"]
    return {
        "losses": losses,
        "norms": norms,
        "gradients": gradients,
        "weights": weights,
        "graphs": graphs,
    }


def moments(model, optimizer) -> dict[str, torch.Tensor]:
    return {k: whole(v) for k, v in checkpoint.optimizer_tensors(model, optimizer).items()}


# ------------------------------------------------------------------------------------------ in two processes


def worker(folder: Path) -> None:
    results: dict = {
        name: {kind: steps(*prepared(mixer, kind, **settings)) for kind in ("ddp", "fsdp")}
        for name, (mixer, settings) in VARIANTS.items()
    }
    rank = dist.get_rank()
    # Two dimensions of mesh: of replicas only one may be saved.
    hybrid = prepared("gated_deltanet", "hybrid", shard_size=1, parallel="hybrid")
    results["hybrid"] = steps(*hybrid)
    saver = Saver(folder / "hybrid", CheckpointConfig(asynchronous=False), rank=rank, processes=2)
    state = {"data_state": {"position": rank}, "trainer_state": {"tokens": 7}}
    saver.save(1, model=hybrid[1], optimizer=hybrid[3], **state)

    # A sharded checkpoint, saved while training goes on.
    saver = Saver(folder / "sharded", CheckpointConfig(asynchronous=True), rank=rank, processes=2)
    accelerator, model, wrapped, optimizer = prepared("gated_deltanet", "fsdp")
    steps(accelerator, model, wrapped, optimizer)
    results["saved"] = {"moments": moments(model, optimizer)}
    saver.save(2, model=model, optimizer=optimizer, **state)
    results["on"] = steps(accelerator, model, wrapped, optimizer, first=STEPS)
    saver.wait()

    # One process's disk is full in the next: both hear of it, and what there was stays.
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    fsync = os.fsync
    try:
        os.fsync = full if rank == 1 else fsync
        saver.save(6, model=model, optimizer=optimizer, **state)
        saver.wait()
        results["full"] = "nothing was raised"
    except DiskFull as error:
        results["full"] = str(error)
    finally:
        os.fsync = fsync
    results["full, rank 1"] = saver._exchange(results["full"])[1]

    # To one process, and from it to two again.
    if rank == 0:
        alone = build("gated_deltanet")
        optimizer_alone = build_optimizer(alone, OptimConfig(lr=3e-3))
        checkpoint.load(folder / "sharded" / "step-2", model=alone, optimizer=optimizer_alone)
        results["alone"] = {
            "weights": {name: whole(p) for name, p in alone.named_parameters()},
            "moments": moments(alone, optimizer_alone),
        }
        Saver(folder / "plain", CheckpointConfig(asynchronous=False)).save(
            2, model=alone, optimizer=optimizer_alone, **state
        )
    dist.barrier()
    for source in ("plain", "sharded", "hybrid"):
        again = prepared("gated_deltanet", "fsdp")
        step = checkpoint_folders(folder / source)[-1]
        _, data = checkpoint.load(step, model=again[1], optimizer=again[3], rank=rank)
        assert data["position"] == (0 if source == "plain" else rank)
        results["again from " + source] = {"moments": moments(again[1], again[3])} | steps(
            *again, first=STEPS
        )

    # What torch.distributed.checkpoint writes itself.
    theirs = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    (folder / "theirs").mkdir(exist_ok=True)
    writer = HuggingFaceStorageWriter(str(folder / "theirs"), save_distributed=True)
    dcp.save(theirs, storage_writer=writer)
    if rank == 0:
        torch.save(results, folder / "results.pt")

    # The trainer itself: whole, and from the middle again.
    for name in ("whole", "resumed"):
        if name == "resumed" and rank == 0:
            halved(folder / "whole", folder / "resumed")
        dist.barrier()
        AcceleratorState._reset_state(reset_partial_state=True)
        train(
            load_config(
                folder / "recipe.yaml", [f"output_dir={folder / name}", "train.parallel=fsdp"]
            )
        )
    dist.barrier()
    dist.destroy_process_group()


def halved(run_dir: Path, copy: Path) -> Path:
    """A run as it stood at its checkpoint of step 2."""
    shutil.copytree(run_dir, copy, ignore=shutil.ignore_patterns("step-4", "final", "run.json"))
    return copy


if __name__ == "__main__":
    worker(Path(sys.argv[1]))
    sys.exit()


@pytest.fixture(autouse=True)
def fresh_accelerate():
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    (folder / "corpus").mkdir()
    write_texts(folder / "corpus" / "a.jsonl", 500, (1, 2, 60))
    recipe = tiny_recipe(
        folder,
        model={"mixer": "gated_deltanet"},
        train={"steps": 4, "tokens_per_step": 256, "micro_batch_size": 2},
        tokenizer={"train": "bpe", "vocab_size": 320},
        data={"source": str(folder / "corpus"), "seq_len": 32, "max_validation_rows": 7},
        validation={"every": 2},
        checkpoint={"every": 2, "asynchronous": True},
    )
    write_recipe(folder / "recipe.yaml", recipe)
    launched(__file__, str(folder))
    return folder


@pytest.fixture(scope="module")
def results(folder) -> dict:
    return torch.load(folder / "results.pt", weights_only=True)


def furthest(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """The largest difference between two sets of tensors, relative to the largest value of each tensor."""
    assert a.keys() == b.keys()
    return max(
        (
            (a[k].float() - b[k].float()).abs().max() / a[k].float().abs().max().clamp(min=1e-12)
        ).item()
        for k in a
    )


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_sharded_whole_and_alone_train_the_same(results, variant):
    mixer, settings = VARIANTS[variant]
    alone, ddp, fsdp = steps(*prepared(mixer, "ddp", **settings)), *results[variant].values()
    # FSDP2 has the gradients of DDP to the last bits, under bf16 too: what is gathered in bf16 is what
    # autocast makes of the weights. Adam then magnifies the last bits of gradients near zero.
    bf16 = settings["precision"] == "bf16"
    assert furthest(ddp["gradients"], fsdp["gradients"]) < 1e-6
    assert fsdp["losses"] == pytest.approx(ddp["losses"], rel=1e-3 if bf16 else 1e-6)
    assert fsdp["norms"] == pytest.approx(ddp["norms"], rel=1e-2 if bf16 else 1e-6)
    assert furthest(ddp["weights"], fsdp["weights"]) < (0.1 if bf16 else 1e-4)
    # One process has other batches in its products, and under bf16 rounds their sums elsewhere.
    for many in (ddp, fsdp):
        assert many["losses"] == pytest.approx(alone["losses"], rel=1e-3 if bf16 else 1e-6)
        assert many["norms"][0] == pytest.approx(alone["norms"][0], rel=1e-2 if bf16 else 1e-6)
        assert furthest(alone["gradients"], many["gradients"]) < (0.05 if bf16 else 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("variant", COMPILED)
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_compiled_blocks_train_the_same(results, variant, kind):
    compiled, eager = results[variant][kind], results[COMPILED[variant]][kind]
    assert compiled["graphs"] == 1  # for both blocks, and none for evaluation
    assert compiled["losses"] == pytest.approx(eager["losses"], rel=1e-3)
    # In bf16 sums are rounded elsewhere; a step amplifies it.
    assert compiled["norms"][0] == pytest.approx(eager["norms"][0], rel=1e-2)
    assert compiled["norms"] == pytest.approx(eager["norms"], rel=3e-2)
    assert furthest(compiled["gradients"], eager["gradients"]) < 0.05


@pytest.mark.slow
def test_decays_stay_fp32_and_move(results):
    """A bf16 A_log would move in steps of 1 %."""
    start = dict(build("gated_deltanet").named_parameters())
    ddp, fsdp = (results["bf16"][kind]["weights"] for kind in ("ddp", "fsdp"))
    for name in [name for name in start if name.endswith(("A_log", "dt_bias"))]:
        moved = (ddp[name] - start[name]).abs()
        assert fsdp[name].dtype == torch.float32
        assert 0 < moved.max() < 0.02
        assert not torch.equal(ddp[name], ddp[name].bfloat16().float())
        assert (fsdp[name] - ddp[name]).abs().max() < 1e-3 * moved.max()


@pytest.mark.slow
def test_replicas_of_shards_train_the_same(results, folder):
    assert furthest(results["fp32"]["ddp"]["weights"], results["hybrid"]["weights"]) < 1e-4
    assert (
        furthest(
            results["hybrid"]["weights"], tensor_files.read_weights(folder / "hybrid" / "step-1")
        )
        == 0
    )
    files = list((folder / "hybrid" / "step-1" / "model").iterdir())
    assert sum(file.stat().st_size > 2000 for file in files) == 1


@pytest.mark.slow
def test_a_checkpoint_of_two_serves_one_and_one_of_one_serves_two(results, folder):
    path = folder / "sharded" / "step-2"
    assert verify_manifest(path) is None
    trained = results["fp32"]["fsdp"]["weights"]
    saved, alone, on = results["saved"]["moments"], results["alone"], results["on"]
    assert furthest(trained, alone["weights"]) == 0
    assert furthest(trained, tensor_files.read_weights(path)) == 0
    assert furthest(saved, alone["moments"]) == 0
    assert all(v.ndim == 0 and v == STEPS for k, v in saved.items() if k.endswith(".step"))
    for source in ("plain", "sharded"):
        again = results["again from " + source]
        assert furthest(saved, again["moments"]) == 0
        assert again["losses"] == on["losses"]  # bit for bit, as if nothing had stopped it
        assert furthest(on["weights"], again["weights"]) == 0
    assert results["again from hybrid"]["losses"] == pytest.approx(on["losses"], rel=1e-6)


@pytest.mark.slow
def test_torch_reads_what_is_written_here_and_the_other_way_round(results, folder):
    for source, expected in (
        ("sharded/step-2/model", results["fp32"]["fsdp"]["weights"]),
        ("theirs", None),
    ):
        expected = expected or results["on"]["weights"]
        read = {name: torch.full_like(tensor, torch.nan) for name, tensor in expected.items()}
        reader = HuggingFaceStorageReader(str(folder / source))
        dcp.load(read, storage_reader=reader, no_dist=True)
        assert furthest(expected, read) == 0
        ours = {name: torch.full_like(tensor, torch.nan) for name, tensor in expected.items()}
        tensor_files.read_tensors(folder / source, ours)
        assert furthest(expected, ours) == 0


@pytest.mark.slow
def test_a_disk_that_is_full_for_one_process_stops_both(results, folder):
    for said in (results["full"], results["full, rank 1"]):
        assert "step-2 stays" in said
        assert "were still to be written" in said
        assert "\n" not in said
    assert [p.name for p in (folder / "sharded").iterdir()] == ["step-2"]


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "add"])
def test_each_file_of_a_sharded_checkpoint_is_held_to_its_sum(folder, tmp_path, damage):
    names = [p.relative_to(folder) for p in (folder / "sharded").rglob("*") if p.is_file()]
    assert len([name for name in names if name.suffix == ".safetensors"]) == 4
    for i, name in enumerate(names):
        shutil.copytree(folder / "sharded", tmp_path / str(i))
        file = tmp_path / str(i) / name.relative_to("sharded")
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        match damage:
            case "flip":
                file.write_bytes(content)
            case "truncate":
                file.write_bytes(file.read_bytes()[:-1])
            case "remove":
                file.unlink()
            case "add":
                shutil.copy(file, file.with_name("more.safetensors"))
        said: list[str] = []
        assert latest_checkpoint(tmp_path / str(i), said.append) is None
        assert "step-2" in said[0]


@pytest.mark.slow
def test_parts_that_are_missing_are_not_taken_for_zeros(folder, tmp_path):
    shutil.copytree(folder / "sharded" / "step-2" / "model", tmp_path / "model")
    next(iter(sorted((tmp_path / "model").glob("shard-00001*")))).unlink()
    with pytest.raises(InputError, match="lacks parts of"):
        checkpoint.load_weights(tmp_path / "model", build("gated_deltanet"))


# ------------------------------------------------------------------------------------------------ the trainer


def logged(run_dir: Path, key: str) -> list[float]:
    return [line[key] for line in read_metrics(run_dir / "metrics.jsonl") if key in line]


@pytest.mark.slow
def test_a_sharded_run_goes_on_bit_for_bit_and_on_one_process(folder, tmp_path):
    manifests = [
        json.loads((folder / name / "checkpoints" / "step-4" / "manifest.json").read_text())[
            "files"
        ]
        for name in ("whole", "resumed")
    ]
    assert manifests[0] == manifests[1]
    assert len([name for name in manifests[0] if "shard-" in name]) == 4
    assert logged(folder / "whole", "loss") == logged(folder / "resumed", "loss")
    one = halved(folder / "whole", tmp_path / "one")
    train(load_config(folder / "recipe.yaml", [f"output_dir={one}", "train.parallel=fsdp"]))
    assert len(logged(one, "loss")) == 4
    for key in ("loss", "val_loss", "grad_norm"):
        assert logged(one, key) == pytest.approx(logged(folder / "whole", key), rel=1e-5)


@pytest.mark.slow
def test_a_sharded_checkpoint_is_exported_whole(folder, tmp_path):
    out = export(folder / "whole", tmp_path / "out", step=2)
    model, report = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(report.values())
    path = folder / "whole" / "checkpoints" / "step-2"
    assert furthest(tensor_files.read_weights(path), dict(model.named_parameters())) == 0
    assert (
        furthest(
            tensor_files.read_weights(path.with_name("step-4")),
            safetensors.torch.load_file(folder / "whole" / "final" / "model.safetensors"),
        )
        == 0
    )
    assert AutoTokenizer.from_pretrained(out).vocab_size > 100
    assert json.loads((out / "config.json").read_text())["architectures"] == ["NalandaForCausalLM"]
    assert json.loads((out / "run.json").read_text())["step"] == 2
    assert yaml.safe_load((out / "config.yaml").read_text())["train"]["steps"] == 4
    card = (out / "README.md").read_text()
    for part in (
        "# out\n",
        "gated_deltanet",
        "512 in 2 steps",
        "| trained on | cpu, 2 process(es), ",
        f"{logged(folder / 'whole', 'loss')[1]:.4f} at step 2",
    ):
        assert part in card
    assert str(tmp_path) not in card.replace(str(folder), "")
    assert {"language.py", "generation_config.json", "tokenizer.json"} <= {
        p.name for p in out.iterdir()
    }
    with pytest.raises(InputError, match="exists"):
        export(folder / "whole", out)
    with pytest.raises(InputError, match="no step 3; there are 2, 4"):
        export(folder / "whole", tmp_path / "other", step=3)
    with pytest.raises(InputError, match="neither a run's folder nor"):
        export(folder / "corpus", tmp_path / "other")


# ---------------------------------------------------------------------------------------------- the launchers


TRAIN = TrainConfig(steps=1, tokens_per_step=1, micro_batch_size=1)
ACCELERATE = {
    "one_gpu": ("ddp", 1, 1),
    "one_node": ("ddp", 8, 1),
    "one_node_fsdp": ("fsdp", 8, 1),
    "many_nodes": ("ddp", 32, 4),
    "many_nodes_hybrid": ("hybrid", 32, 4),
}


def test_accelerate_takes_the_configs(monkeypatch):
    files = sorted((ROOT / "recipes" / "accelerate").glob("*.yaml"))
    assert [file.stem for file in files] == sorted(ACCELERATE)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    for file in files:
        kind, processes, nodes = ACCELERATE[file.stem]
        load_config_from_file(str(file))  # refuses unknown keys
        arguments = ["--config_file", str(file), "recipes/pretrain.py", "recipe.yaml"]
        args, _, _ = _validate_launch_command(launch_command_parser().parse_args(arguments))
        assert (args.num_processes, args.num_machines) == (processes, nodes)
        if processes == 1:
            env = prepare_simple_launcher_cmd_env(args)[1]
        else:
            env = prepare_multi_gpu_env(args)
            assert int(args.nproc_per_node) == 8
        prefixes = ("ACCELERATE", "FSDP", "PARALLELISM_CONFIG")
        env = {key: value for key, value in env.items() if key.startswith(prefixes)}
        env["WORLD_SIZE"] = str(processes)  # torchrun's
        followed = parallel.as_launched(TRAIN, env)
        assert followed.parallel == kind
        assert followed.shard_size == (8 if kind == "hybrid" else None)


@pytest.fixture
def cluster(tmp_path):
    """Stand-ins for Slurm and recipes/launch.py in an environment to be activated. Gives a function that starts
    recipes/slurm.sh from a folder elsewhere, and says how the launcher ends: by a signal, or with a code."""
    (tmp_path / "env" / "bin").mkdir(parents=True)
    programs = {
        "scontrol": 'echo "$@" >> log; echo node1',
        # The last task's code, as Slurm's is if it ends the tasks of other nodes.
        "srun": 'echo "$SRUN_CPUS_PER_TASK" > cores; shift; exec "$@"',
        "python": f'[[ "$1" == */launch.py ]] && echo "$@" > asked && set worker.py; exec {sys.executable} "$@"',
    }
    for name, text in programs.items():
        (tmp_path / "env" / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "env" / "bin" / name).chmod(0o755)
    (tmp_path / "env" / "bin" / "activate").write_text(f"PATH={tmp_path}/env/bin:$PATH\n")
    (tmp_path / "worker.py").write_text("""
import os, pathlib, signal
def end(code, *later):
    with open(os.environ["NALANDA_EXIT_CODES"], "a") as file: print(code, *later, sep="\\n", file=file)
    os._exit(int((later or [code])[-1]))
def stop(signum, frame):
    for each in (signal.SIGUSR1, signal.SIGTERM): signal.signal(each, signal.SIG_IGN)
    with open("log", "a") as log: print("saved", file=log)
    end(128 + signum)
if codes := os.environ.get("CODES"): end(*codes.split()) if codes != "0" else os._exit(0)
signal.signal(signal.SIGUSR1, stop)
signal.signal(signal.SIGTERM, stop)
signal.alarm(60)
pathlib.Path("up").touch()
while True: signal.pause()
""")

    def start(**more) -> subprocess.Popen:
        slurm = {
            "SLURM_JOB_NODELIST": "node[1-2]",
            "SLURM_JOB_ID": "17",
            "SLURM_JOB_NUM_NODES": "2",
        }
        env = os.environ | slurm | {"NALANDA_ENV": str(tmp_path / "env")} | more
        command = ["bash", ROOT / "recipes" / "slurm.sh", "recipe.yaml"]
        return subprocess.Popen(command, env=env, cwd=tmp_path, stderr=subprocess.PIPE, text=True)

    return start


def slurm_was_told(tmp_path) -> list[str]:
    """What stands in the stand-ins' log behind the call that asks for the first host."""
    first, *said = (tmp_path / "log").read_text().splitlines()
    (tmp_path / "log").unlink()
    assert first == "show hostnames node[1-2]"
    return said


def test_slurm_requeues_what_it_interrupted(tmp_path, cluster):
    script = cluster(SLURM_CPUS_PER_TASK="64")
    while not (tmp_path / "up").exists():
        assert script.poll() is None
        time.sleep(0.02)
    script.send_signal(signal.SIGUSR1)
    assert script.wait(timeout=60) == 0
    assert slurm_was_told(tmp_path) == ["saved", "requeue 17"]
    assert (tmp_path / "cores").read_text() == "64\n"  # srun does not take over sbatch's
    launcher, *options = (tmp_path / "asked").read_text().split()
    assert launcher == str(ROOT / "recipes" / "launch.py")
    assert options[-4:] == [
        "--max_restarts",
        "2",
        str(ROOT / "recipes" / "pretrain.py"),
        "recipe.yaml",
    ]


def test_slurm_lets_a_run_save_at_sigterm_and_ends(tmp_path, cluster):
    script = cluster()
    while not (tmp_path / "up").exists():
        assert script.poll() is None
        time.sleep(0.02)
    script.send_signal(signal.SIGTERM)
    assert script.wait(timeout=60) == 143
    assert slurm_was_told(tmp_path) == ["saved"]


@pytest.mark.parametrize("code", [0, 2, 65, 143])
def test_slurm_requeues_no_run_that_ended_for_good(tmp_path, cluster, code):
    """However soon that was: here every shell waits, before each command, until what it started has ended."""
    (tmp_path / "slow.sh").write_text(
        "trap '[[ -z \"${!-}\" ]] || while builtin kill -0 $!; do :; done 2>/dev/null' DEBUG\n"
    )
    script = cluster(CODES=str(code), BASH_ENV=str(tmp_path / "slow.sh"))
    assert script.wait(timeout=60) == code
    assert slurm_was_told(tmp_path) == []


def test_slurm_requeues_after_crashes_until_there_are_too_many(tmp_path, cluster):
    for _ in range(2):
        assert cluster(CODES="137", NALANDA_REQUEUES="2").wait(timeout=60) == 0
        assert slurm_was_told(tmp_path) == ["requeue 17"]
    script = cluster(CODES="137", NALANDA_REQUEUES="2")
    said = script.communicate(timeout=60)[1]
    assert (said, script.returncode) == (
        "exit code 137: failed 3 times in a row, not requeued\n",
        137,
    )
    assert slurm_was_told(tmp_path) == []


def test_slurm_counts_only_failures_in_a_row(tmp_path, cluster):
    for codes in ("1", "138", "1"):  # a crash, the time limit, a crash
        assert cluster(CODES=codes, NALANDA_REQUEUES="1").wait(timeout=60) == 0
        assert slurm_was_told(tmp_path) == ["requeue 17"]


def test_slurm_goes_by_the_first_node_that_failed(tmp_path, cluster):
    """It ends the tasks of the others, and srun returns the highest code."""
    assert cluster(CODES="2 143").wait(timeout=60) == 2
    assert slurm_was_told(tmp_path) == []
    assert cluster(CODES="1 143").wait(timeout=60) == 0
    assert slurm_was_told(tmp_path) == ["requeue 17"]


def test_slurm_without_nalanda_is_told_what_to_set(tmp_path, cluster):
    (tmp_path / "env" / "bin" / "python").write_text("#!/bin/bash\nexit 1\n")
    script = cluster()
    assert script.communicate()[1].strip() == (
        f"slurm.sh: no Nalanda in {tmp_path}/env: set NALANDA_ENV to the folder of its environment"
    )
    assert script.returncode == 2


# ------------------------------------------------------------------------------------------------- the choice


def test_auto_is_what_accelerates_config_says():
    fsdp = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    assert (
        parallel.choose_parallel("auto", {}) == parallel.choose_parallel("ddp", dict(fsdp)) == "ddp"
    )
    assert parallel.choose_parallel("auto", environ := dict(fsdp)) == "fsdp"
    assert "ACCELERATE_USE_FSDP" not in environ  # nobody wraps the model once more
    assert (
        parallel.choose_parallel("ddp", environ := {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"})
        == "ddp"
    )
    assert not environ  # nor compiles it as a whole
    assert parallel.choose_parallel("hybrid", {}) == "hybrid"
    with pytest.raises(InputError, match="offload"):
        parallel.choose_parallel("auto", {**fsdp, "FSDP_OFFLOAD_PARAMS": "true"})


def parallelism_config(processes: int, **sizes: object) -> dict[str, str]:
    """The environment that `accelerate launch --use_parallelism_config` makes."""
    options = {"dp_replicate_size": 1, "dp_shard_size": 1, "cp_size": 1, "tp_size": 1, "sp_size": 1}
    options |= {"cp_comm_strategy": "allgather"} | sizes
    env = {f"PARALLELISM_CONFIG_{key.upper()}": str(value) for key, value in options.items()}
    return env | {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "WORLD_SIZE": str(processes)}


@pytest.mark.parametrize(
    ("processes", "sizes", "expected"),
    [
        (8, {"dp_shard_size": 8}, ("fsdp", None, 1)),
        (8, {"dp_shard_size": 2, "cp_size": 4}, ("fsdp", None, 4)),
        (4, {"cp_size": 4}, ("fsdp", None, 4)),
        (8, {"dp_replicate_size": 2, "dp_shard_size": 4}, ("hybrid", 4, 1)),
        (8, {"dp_replicate_size": 2, "dp_shard_size": 2, "cp_size": 2}, ("hybrid", 4, 2)),
        (8, {"dp_replicate_size": 8}, ("ddp", None, 1)),
        (8, {}, ("ddp", None, 1)),
        (1, {}, ("ddp", None, 1)),
    ],
)
def test_accelerates_parallelism_config_is_followed(processes, sizes, expected):
    environ = parallelism_config(processes, **sizes)
    train = parallel.follow_parallelism_config(TRAIN, environ)
    assert (train.parallel, train.shard_size, train.context_parallel) == expected
    assert "ACCELERATE_USE_PARALLELISM_CONFIG" not in environ  # nobody prepares the model once more
    train.check()
    # A recipe that says the same agrees.
    environ = parallelism_config(processes, **sizes)
    assert parallel.follow_parallelism_config(train, environ) == train
    assert parallel.follow_parallelism_config(TRAIN, {}) == TRAIN


@pytest.mark.parametrize(
    ("sizes", "keys", "message"),
    [
        ({"tp_size": 8}, {}, "tp_size is 8, .* set tp_size to 1"),
        ({"sp_size": 8}, {}, "sp_size is 8, .* set sp_size to 1"),
        (
            {"cp_size": 8, "cp_comm_strategy": "alltoall"},
            {},
            "cp_comm_strategy alltoall is not served; set allgather",
        ),
        ({"dp_shard_size": 4}, {}, r"cp_size is 4, and the launch has 8 process\(es\)"),
        (
            {"dp_shard_size": 8},
            {"parallel": "ddp"},
            "train.parallel: the recipe has ddp, but accelerate's parallelism_config means fsdp",
        ),
        (
            {"dp_replicate_size": 2, "dp_shard_size": 4},
            {"parallel": "hybrid", "shard_size": 2},
            "train.shard_size: the recipe has 2, but .* means 4",
        ),
        (
            {"dp_shard_size": 8},
            {"context_parallel": 2},
            "train.context_parallel: the recipe has 2, but .* means 1",
        ),
    ],
)
def test_parallelism_configs_that_cannot_be_followed_are_refused(sizes, keys, message):
    with pytest.raises(InputError, match=message):
        parallel.follow_parallelism_config(
            dataclasses.replace(TRAIN, **keys), parallelism_config(8, **sizes)
        )


def test_config_yaml_has_the_recipe_as_it_was_written(recipe, tmp_path, monkeypatch, capsys):
    """So the run goes on from its config.yaml under another of accelerate's configs."""

    def run_under_config(*more: str) -> Path:
        for name, value in parallelism_config(1).items():
            monkeypatch.setenv(name, value)
        return train(load_config(recipe, [f"output_dir={tmp_path}", "train.steps=1", *more]))

    with pytest.raises(InputError, match="the recipe has hybrid, but"):
        run_under_config("train.parallel=hybrid")
    run = run_under_config()
    assert load_config(run / "config.yaml").train.parallel == "auto"
    run_under_config("train.steps=2")
    assert "train.parallel" not in capsys.readouterr().out


def test_units_are_blocks():
    for name, kind in (("gated_deltanet", "Block"), ("llama", "LlamaDecoderLayer")):
        assert [type(block).__name__ for block in parallel.units(build(name))] == [kind] * 2
    stack = torch.nn.ModuleDict({"few": torch.nn.ModuleList([torch.nn.Linear(1, 1)])})
    stack["many"] = torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in range(3))
    assert parallel.units(stack) == list(stack["many"])


def test_a_folder_that_nodes_do_not_share_is_refused(tmp_path, monkeypatch):
    def touch_first() -> None:
        """The first process comes to its barrier, if the second one sees its folder."""
        if shared and not (file := tmp_path / ".seen-token-0").exists():
            file.touch()

    second = SimpleNamespace(num_processes=2, process_index=1, wait_for_everyone=touch_first)
    monkeypatch.setattr(launch.uuid, "uuid4", lambda: SimpleNamespace(hex="token"))
    monkeypatch.setattr(launch, "from_main_process", lambda value: value)
    monkeypatch.setattr(launch, "gather_object", lambda mine: [None, *mine])
    monkeypatch.setattr(launch.platform, "node", lambda: "node2")
    shared = True
    launch.check_shared(tmp_path, second)
    (tmp_path / ".seen-token-0").unlink()
    shared = False
    with pytest.raises(
        InputError, match="output_dir: node2 does not see what the first process writes"
    ):
        launch.check_shared(tmp_path, second)
    assert not [*tmp_path.iterdir()]
    assert launch.first_to_see(tmp_path / "absent", second) == 1


def test_models_of_flash_linear_attention_get_bounds_under_fsdp_too():
    """FSDP2 makes a class of its own of a model's class."""
    seen = {}

    def forward(self, **inputs):
        seen.update(inputs)
        return SimpleNamespace(logits=torch.zeros(*inputs["input_ids"].shape, 3))

    theirs = type("Model", (torch.nn.Module,), {"__module__": "fla.models.x", "forward": forward})
    sharded = type("FSDPModel", (theirs,), {"__module__": "torch.distributed.fsdp"})
    tokens = torch.zeros(2, 4, dtype=torch.int64)
    for kind in (theirs, sharded):
        seen.clear()
        assert packed_logits(kind(), tokens, tokens, torch.tensor([0, 4, 8])).shape == (2, 4, 3)
        assert seen["cu_seqlens"].tolist() == [0, 4, 8]


def test_a_matrix_that_does_not_decay_keeps_its_mark_in_shards(tmp_path):
    settings = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    config = LlamaConfig(**settings, vocab_size=32, num_attention_heads=2)
    model, name = AutoModelForCausalLM.from_config(config), "model.layers.0.mlp.up_proj.weight"
    model.get_parameter(name)._no_weight_decay = True

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        parallel.shard(model, parallel.units(model), mesh, dtype=None)
    finally:
        dist.destroy_process_group()
    weights = dict(model.named_parameters())
    assert isinstance(weights[name], DTensor)
    assert id(weights[name]) in undecayed(model, weights)


def test_every_process_of_a_machine_needs_its_memory(monkeypatch):
    count = 4321
    monkeypatch.setattr(memory, "host", lambda: 4 * count)
    check_weights_fit(count, 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(InputError, match="M parameters in 2 processes take"):
        check_weights_fit(count, 4)


def test_a_limit_of_any_group_above_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "GROUPS", str(tmp_path))
    (tmp_path / "memory.max").write_text("1000")
    (tmp_path / "memory.current").write_text("600")
    (tmp_path / "memory.stat").write_text("inactive_file 100\n")
    assert 500 in [*memory._limits()]


def test_collectives_wait_longer_than_the_watchdog(recipe):
    config = load_config(recipe, ["guard.hang_timeout=5400"])
    assert launch.patience(config).total_seconds() > 5400
    assert launch.patience(load_config(recipe, ["guard.hang_timeout=null"])).days == 7
