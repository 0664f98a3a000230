"""recipes/launch.py: torchrun with the trainer's own exit codes."""

import os
import signal
import subprocess
import sys
import time

import pytest
from training import PRETRAIN, environment, torchrun

WORKER = """
import os, pathlib, signal, sys
import torch
import torch.distributed as dist
ask, folder = sys.argv[1], pathlib.Path(sys.argv[2])
rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
(folder / f"{rank}.{attempt}").touch()
if ask == "killed once":
    # Over the addresses that this start's processes have told, not those of the start before.
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()  # else a thread of gloo now and then aborts at the end
if ask == "killed" and rank == "1":
    os.kill(os.getpid(), signal.SIGKILL)
if ask == "killed once" and rank == "1" and attempt == "0":
    os.kill(os.getpid(), signal.SIGKILL)
if ask == "stay":
    def stop(signum, frame):
        (folder / f"saved.{rank}").touch()
        raise SystemExit(128 + signum)
    signal.signal(signal.SIGUSR1, stop)
    (folder / f"up.{rank}").touch()
    while True: signal.pause()
"""


def start(folder, *command: str) -> subprocess.Popen:
    return subprocess.Popen(
        [*torchrun(2, restarts=1), *command],
        env=environment(2, NALANDA_EXIT_CODES=str(folder / "codes")),
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def worker(tmp_path):
    """A function that starts two workers, which do what is asked."""
    (tmp_path / "worker.py").write_text(WORKER)
    return lambda ask: start(tmp_path, str(tmp_path / "worker.py"), ask, str(tmp_path))


@pytest.mark.slow
def test_processes_start_again_after_a_crash(tmp_path, worker):
    assert worker("killed once").wait(timeout=120) == 0
    assert {p.name for p in tmp_path.glob("*.1")} == {"0.1", "1.1"}
    assert not (tmp_path / "codes").exists()


@pytest.mark.slow
def test_the_code_is_that_of_the_process_that_failed_first(tmp_path, worker):
    assert worker("killed").wait(timeout=120) == 128 + signal.SIGKILL
    assert (tmp_path / "1.1").exists()
    assert (tmp_path / "codes").read_text() == "137\n"


@pytest.mark.slow
def test_a_signal_lets_all_processes_save_and_none_starts_again(tmp_path, worker):
    launcher = worker("stay")
    while len([*tmp_path.glob("up.*")]) < 2:
        assert launcher.poll() is None
        time.sleep(0.02)
    launcher.send_signal(signal.SIGUSR1)
    assert launcher.wait(timeout=120) == 128 + signal.SIGUSR1
    assert len([*tmp_path.glob("saved.*")]) == 2
    assert not [*tmp_path.glob("[01].1")]


@pytest.mark.slow
def test_a_refused_recipe_ends_at_once_with_code_2(tmp_path):
    launcher = start(
        tmp_path, str(PRETRAIN), "demo", "optim.lr=-1", f"output_dir={tmp_path / 'run'}"
    )
    said = launcher.communicate(timeout=120)[1]
    assert launcher.returncode == 2, said
    # The second start only repeats the line of the first.
    assert said.count("nalanda: optim.lr: expected a positive number, got -1.0") == 1
    assert (tmp_path / "codes").read_text() == "2\n"


def test_a_restart_after_an_error_of_one_line_repeats_it(tmp_path):
    """Before it reads its input: that of this command would be right by now."""
    for attempt in ("0", "1"):
        (tmp_path / f"attempt_{attempt}" / "0").mkdir(parents=True)
    codes = []
    for attempt, command in (("0", "no-such-command"), ("1", "--help")):
        file = tmp_path / f"attempt_{attempt}" / "0" / "error.json"
        variables = {"TORCHELASTIC_ERROR_FILE": str(file), "TORCHELASTIC_RESTART_COUNT": attempt}
        done = subprocess.run(
            [sys.executable, "-m", "nalanda_cli", command],
            env=os.environ | variables,
            capture_output=True,
        )
        codes.append(done.returncode)
    assert codes == [2, 2]
    first, second = (p.read_text() for p in sorted(tmp_path.glob("*/0/error.json")))
    assert "No such command" in first
    assert first.split('"timestamp"')[0] == second.split('"timestamp"')[0]
