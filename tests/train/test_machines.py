"""A run in a store on machines that share no folder, killed in each phase of a checkpoint."""

import json
import re
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch
from accelerate.state import AcceleratorState
from machines import Machines
from training import configured, tiny_recipe, write_recipe, write_texts

from nalanda.train.loop import train


@pytest.fixture
def machines(bucket, tmp_path) -> Machines:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    write_texts(corpus / "a.jsonl", 600, (1, 2, 60))
    recipe = tiny_recipe(
        tmp_path,
        model={"mixer": "gated_deltanet", "num_hidden_layers": 1},
        # 12 rows, for one, two and three processes
        train={"steps": 20, "tokens_per_step": 384, "micro_batch_size": 2},
        seed=3,
        tokenizer={"train": "bpe", "vocab_size": 320},
        data={"source": str(corpus), "seq_len": 32, "workers": 0, "retries": 1},
        schedule={"warmup_steps": 2},
        validation={"every": 0},
        checkpoint={"every": 5, "keep_last": 2},
    )
    return Machines(tmp_path, bucket, write_recipe(tmp_path / "recipe.yaml", recipe))


def weights(machines: Machines, run: str) -> dict[str, torch.Tensor]:
    """The final model in the store."""
    content = machines.bucket.get(f"{run}/final/model.safetensors")
    return safetensors.torch.load(content)


def whole_steps(machines: Machines, run: str = "run") -> list[int]:
    pattern = rf"{run}/checkpoints/step-(\d+)/manifest\.json"
    found = (re.fullmatch(pattern, name) for name in machines.bucket.names())
    return sorted(int(match[1]) for match in found if match)


def resumed(printed: str) -> str:
    """The checkpoint that the run goes on from."""
    return re.search(r"seed 3(?:, resumes from (\S+))?", printed)[1]


def copy_run(machines: Machines, name: str) -> str:
    """A copy of the run in the store."""
    for file in machines.bucket.names("run/"):
        machines.bucket.put(file.replace("run/", f"{name}/", 1), machines.bucket.get(file))
    return f"s3://bucket/{name}"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_machines_are_killed_in_each_phase_of_a_checkpoint(machines, kind, tmp_path, monkeypatch):
    settings = f"train.parallel={kind}", f"checkpoint.asynchronous={kind == 'fsdp'}".lower()
    machines.run(*settings, url="s3://bucket/undisturbed", names="XY")
    expected = weights(machines, "undisturbed")

    # Before the second machine uploads anything of step 10; both machines are lost.
    machines.run(*settings, kill=(1, "before", "step-10/"))
    assert whole_steps(machines) == [5]
    for name in "AB":
        shutil.rmtree(machines.cache(name))

    # Between the files of the second machine and their list; this machine is lost.
    printed = machines.run(*settings, kill=(1, "before", "step-10/part-1"))
    assert resumed(printed) == "step-5"
    assert whole_steps(machines) == [5]
    shutil.rmtree(machines.cache("B"))

    # Before the manifest, with all parts there.
    printed = machines.run(*settings, kill=(0, "before", "step-10/manifest"))
    assert resumed(printed) == "step-5"
    assert whole_steps(machines) == [5]
    names = machines.bucket.names("run/checkpoints/step-10/")
    assert {"part-1.json", "rank-0.pt", "rank-1.pt"} <= {Path(name).name for name in names}

    # The start puts together the parts that both machines still have. It is killed behind the next manifest.
    printed = machines.run(*settings, kill=(0, "after", "step-15/manifest"))
    assert resumed(printed) == "step-10"
    assert whole_steps(machines) == [5, 10, 15]
    one, three = copy_run(machines, "one"), copy_run(machines, "three")

    # The machines change their places.
    printed = machines.run(*settings, names="BA")
    assert resumed(printed) == "step-15"
    assert whole_steps(machines) == [15, 20]
    found = weights(machines, "run")
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert not [name for name in machines.bucket.names("run/") if "part-" in name]

    # On other numbers of processes the sums have another order.
    printed = machines.run(*settings, names="CDE", url=three)
    assert resumed(printed) == "step-15"
    AcceleratorState._reset_state(reset_partial_state=True)
    monkeypatch.setenv("NALANDA_CACHE", str(tmp_path / "F"))
    train(configured(machines.recipe, Path("unset"), f"output_dir={one}"))
    for run in ("one", "three"):
        found = weights(machines, run)
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_machines_go_back_to_a_checkpoint_of_which_each_has_a_part(machines):
    printed = machines.run("train.parallel=fsdp", roll_back=12)
    assert "Traceback" not in printed
    lines = machines.bucket.get("run/metrics.jsonl").decode().splitlines()
    events = [json.loads(line) for line in lines if "rollback" in line]
    assert [(event["to"], event["at"]) for event in events] == [(10, 12)]
    assert whole_steps(machines) == [15, 20]
    assert weights(machines, "run")
