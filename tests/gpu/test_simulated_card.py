"""Training, decoding and compiled blocks on a card that is not there (simulated.py), each in a process of its own.

`launches.json` has the launches of a pass and of a token. They may fall, and then the file should; a new mixer or
map needs a row: NALANDA_RECORD=1 writes the file.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parent
RECORD = FOLDER / "launches.json"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="the simulated card is for Linux"),
    pytest.mark.skipif(
        torch.version.cuda is not None, reason="this torch has a real card's kernels"
    ),
    pytest.mark.skipif(
        not any(map(shutil.which, ("g++", "clang++", "c++"))),
        reason="the simulated card needs a C++ compiler",
    ),
]


def run(scenario: str, *arguments: Any) -> dict[str, Any]:
    """The figures of a scenario. An error of it, such as a CPU tensor beside a CUDA one, fails the test."""
    hidden = ("TRITON_INTERPRET", "NALANDA_")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(hidden)}
    command = [sys.executable, str(FOLDER / "scenarios.py"), scenario, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def check_launches(part: str, figures: dict[str, int]) -> None:
    """No figure may exceed the recorded one."""
    recorded = json.loads(RECORD.read_text())
    if os.environ.get("NALANDA_RECORD"):
        RECORD.write_text(json.dumps(recorded | {part: figures}, indent=1) + "\n")
        return
    assert figures.keys() == recorded[part].keys()
    more = {x: (recorded[part][x], n) for x, n in figures.items() if n > recorded[part][x]}
    assert not more, "launches rose, (recorded, now)"


def test_passes_of_every_mixer_and_map():
    figures = run("train")
    assert figures["waits"] == []
    check_launches("pass", figures["launches"])


def test_tokens_of_every_mixer_and_map():
    figures = run("decode")
    assert figures["waits"] == []
    check_launches("token", figures["launches"])


def test_captured_tokens_and_saved_states(tmp_path):
    figures = run("generate", tmp_path)
    assert figures["waits"] == []
    check_launches("captured token", figures["launches"])


def test_the_trainer_from_set_up_to_export(recipe, tmp_path):
    """The run stops at a checkpoint and resumes, in bf16, fp16 and fp32."""
    figures = run("recipe", recipe, tmp_path)
    for precision in figures.values():
        assert len(precision["losses"]) == 8
        assert {phase for phase, _, _ in precision["waits"]} == {"step"}
        assert sum(n for _, _, n in precision["waits"]) <= 2
    check_launches("step", {name: x["launches"] for name, x in figures.items()})


@pytest.mark.skipif(
    not torch.__version__.startswith("2.13"), reason="it reads Inductor of torch 2.13"
)
def test_compiled_blocks_move_few_bytes():
    check_launches("compiled layer of the flagship", run("bytes"))


def test_a_graph_serves_all_packings():
    """Dense batches have one too. Another length makes two graphs, which serve all further ones."""
    figures = run("compile", "gated_deltanet", "kda", "mala", "softmax")
    refused = figures.pop("refused")
    graphs = {"packed": 1, "dense": 1, "lengths": 2, "breaks": 0}
    assert figures == {name: graphs[name.rpartition(", ")[2]] for name in figures}
    # Else every resume and every process would trace anew.
    assert refused == []
