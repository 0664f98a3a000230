"""Jobs of other schedulers, parsed as their own tools do, and the exit codes that they go by."""

import re
import shlex
from pathlib import Path

import kubeflow_trainer_api.models as kubeflow
import pytest
import yaml
from training import ROOT

from nalanda.common.errors import ExitCode
from nalanda.config.load import load_config

CLUSTER = ROOT / "examples" / "cluster"

FINAL = [ExitCode.REFUSED, ExitCode.DIVERGED]

SKYPILOT = {
    "": {"name", "resources", "envs", "workdir", "setup", "run", "num_nodes", "file_mounts"},
    "resources": {"accelerators", "use_spot", "job_recovery"},
    "job_recovery": {"strategy", "max_restarts_on_errors", "recover_on_exit_codes"},
}
"""Keys of a task of SkyPilot 0.14: https://docs.skypilot.co/en/latest/reference/yaml-spec.html. Its package has
the schema, and takes forty others to import."""


@pytest.fixture(scope="module")
def runtime_and_job() -> list[dict]:
    return [*yaml.safe_load_all((CLUSTER / "trainjob.yaml").read_text())]


def test_kubeflow_knows_every_key(runtime_and_job):
    for given in runtime_and_job:
        model = getattr(kubeflow, f"TrainerV1alpha1{given['kind']}")
        # A key that the model does not know is missing in what it returns.
        assert model.from_dict(given).to_dict() == given


def test_kubernetes_goes_by_the_exit_codes(runtime_and_job):
    runtime, job = runtime_and_job
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    [node] = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    [rule] = node["template"]["spec"]["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["values"] == FINAL
    [container] = node["template"]["spec"]["template"]["spec"]["containers"]
    assert container["name"] == rule["onExitCodes"]["containerName"]
    check_command(container["command"] + container["args"])


def test_skypilot_knows_every_key():
    task = yaml.safe_load((CLUSTER / "skypilot.yaml").read_text())
    assert task.keys() <= SKYPILOT[""]
    assert task["resources"].keys() <= SKYPILOT["resources"]
    assert task["resources"]["job_recovery"].keys() <= SKYPILOT["job_recovery"]
    values = task["envs"] | {"SKYPILOT_NUM_GPUS_PER_NODE": "8"}
    check_command(shlex.split(re.sub(r"\$(\w+)", lambda name: values[name[1]], task["run"])))


def check_command(words: list[str]) -> None:
    """The files are there, and the recipe takes the settings."""
    script = words.index("recipes/pretrain.py")
    assert words[:2] == ["python", "recipes/launch.py"]
    assert all((ROOT / word).is_file() for word in (words[1], words[script]))
    recipe, *overrides = words[script + 1 :]
    load_config(recipe, overrides)


def test_the_page_and_slurm_go_by_the_same_exit_codes():
    """The table of docs/runs.md has each code, and those after which no scheduler starts again."""
    page = (ROOT / "docs" / "runs.md").read_text()
    rows = re.findall(r"^\| ([\d, ]+) \| (.*) \| (.*) \|$", page, flags=re.MULTILINE)
    again = {int(code): says for codes, _, says in rows for code in codes.split(",")}
    assert {*ExitCode} <= again.keys()
    assert [code for code, says in again.items() if says.startswith("no:")] == FINAL
    script = (ROOT / "recipes" / "slurm.sh").read_text()
    [ends] = re.findall(r"^ +([\d |]+)\) +# finished", script, flags=re.MULTILINE)
    assert ends.split(" | ") == ["0", *map(str, FINAL), "130", "143"]


@pytest.mark.parametrize("file", sorted(CLUSTER.glob("*.yaml")), ids=lambda p: p.name)
def test_a_file_is_short(file: Path):
    assert len(file.read_text().splitlines()) <= 40
