"""Moving averages of the weights: their values, checkpoints and models."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from training import configured
from transformers import AutoModelForCausalLM

from nalanda.report.verify import verify
from nalanda.train import loop
from nalanda.train.ema import Averages
from nalanda.train.resolve import resolve

pytestmark = pytest.mark.usefixtures("fresh_accelerate")

DECAYS = "train.ema=[0.5, 0.9]"
SHORT = ("train.steps=8", "validation.every=0", "checkpoint.every=1", "checkpoint.keep_last=9")


@pytest.fixture(scope="module")
def averaged(recipe, tmp_path_factory) -> Path:
    """A run of 8 steps with two averages, of which step 4 is skipped."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)

    def judged(run, step):
        bad = step.number == 4
        return loop.Judgement("skip", "for the test") if bad else judge(run, step)

    judge, folder = loop.judge, tmp_path_factory.mktemp("averaged") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "judge", judged)
        return loop.train(configured(recipe, folder, *SHORT, DECAYS))


def weights_of(run: Path, step: int, name: str = "model") -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / f"step-{step}" / f"{name}.safetensors")


@pytest.mark.parametrize("decay", [0.5, 0.9])
def test_an_average_is_the_equations(averaged, decay):
    """d_n = min(d, (1 + n) / (10 + n)), over the weights after each good step; step 4 was skipped."""
    good = [1, 2, 3, 5, 6, 7, 8]
    # The weights before the first step are not saved; the first update has d_0 = 0.1.
    first = weights_of(averaged, 1)
    expected = weights_of(averaged, 1, f"ema-{decay}")
    before = {name: (expected[name] - 0.9 * first[name]) / 0.1 for name in first}
    assert all((before[name] - first[name]).abs().max() < 0.02 for name in first)

    for n, step in enumerate(good[1:], 1):
        weights, d = weights_of(averaged, step), min(decay, (1 + n) / (10 + n))
        expected = {k: d * x + (1 - d) * weights[k] for k, x in expected.items()}
        actual = weights_of(averaged, step, f"ema-{decay}")
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-7)


def test_the_first_weights_are_the_models_own():
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    begun = model.weight.detach().clone()
    averages = Averages(model, [0.999])
    with torch.no_grad():
        model.weight.mul_(3)
    averages.update()
    expected = 0.1 * begun + 0.9 * model.weight
    torch.testing.assert_close(averages.averages[0.999]["weight"], expected.detach())


def test_averages_are_models(averaged):
    for decay in (0.5, 0.9):
        folder = averaged / f"final-ema-{decay}"
        model = AutoModelForCausalLM.from_pretrained(folder)
        saved = weights_of(averaged, 8, f"ema-{decay}")
        for name, weight in model.named_parameters():
            assert torch.equal(weight, saved[name])
        resolved = resolve(str(folder))
        assert (resolved.model, resolved.run) == (str(folder), averaged)
        card = (folder / "README.md").read_text()
        assert f"# {averaged.name}-ema-{decay}" in card
        # The losses are those of the weights.
        assert f"moving average of the run's weights, decay {decay} |" in card
        assert "| training loss of the weights before averaging |" in card
    assert "| training loss | " in (averaged / "final" / "README.md").read_text()
    assert resolve(str(averaged)).model == str(averaged / "final")
    assert all(verdict.good for verdict in verify(averaged))


def test_an_average_of_another_model_is_named(averaged, tmp_path):
    run = Path(shutil.copytree(averaged, tmp_path / "run"))
    step = run / "checkpoints" / "step-8"
    shutil.copy(step / "optimizer.safetensors", step / "ema-0.5.safetensors")
    assert [v.loadable for v in verify(run)][-1].startswith(
        f"{step}/ema-0.5.safetensors: the average of"
    )


@pytest.mark.slow
def test_a_resume_keeps_adds_and_drops_averages(recipe, averaged, tmp_path, capsys):
    run = Path(shutil.copytree(averaged, tmp_path / "run"))
    for path in (*run.glob("final*"), run / "checkpoints" / "step-8"):
        shutil.rmtree(path)
    (run / "run.json").write_text(
        json.dumps({**json.loads((run / "run.json").read_text()), "state": "running"})
    )
    copy = Path(shutil.copytree(run, tmp_path / "copy"))

    loop.train(configured(recipe, run, *SHORT, DECAYS))
    for name in ("model", "ema-0.5", "ema-0.9"):
        torch.testing.assert_close(
            weights_of(run, 8, name), weights_of(averaged, 8, name), rtol=0, atol=0
        )

    capsys.readouterr()
    loop.train(configured(recipe, copy, *SHORT, "train.ema=[0.9, 0.99]"))
    line = "train.ema: [0.5, 0.9] → [0.9, 0.99] (a new average begins with the weights of step 7)"
    assert line in capsys.readouterr().out
    old, new = weights_of(copy, 7), weights_of(copy, 8)
    expected = {name: 0.1 * old[name] + 0.9 * new[name] for name in new}
    torch.testing.assert_close(weights_of(copy, 8, "ema-0.99"), expected, rtol=1e-5, atol=1e-7)
    assert weights_of(copy, 8, "ema-0.9").keys() == new.keys()
    assert not (copy / "checkpoints" / "step-8" / "ema-0.5.safetensors").exists()
    assert [p.name for p in sorted(copy.glob("final*"))] == [
        "final",
        "final-ema-0.9",
        "final-ema-0.99",
    ]
