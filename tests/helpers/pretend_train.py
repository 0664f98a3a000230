"""Stands for `nalanda train` in tests of studies: writes the records of a run, with a loss that is a formula.

The loss is that of the rate, of the arm's weight decay, and of a noise that the seed shares among the arms.
Started as a launcher: `python pretend_train.py -m nalanda_cli train RECIPE KEY=VALUE …`.
"""

import json
import math
import random
import sys
import time
from pathlib import Path

import yaml


def main(words: list[str]) -> None:
    settings = dict(word.split("=", 1) for word in words[4:])
    folder, seed = Path(settings["output_dir"]), int(settings["seed"])
    rate = float(settings.get("optim.lr", 4e-3))
    decay = float(settings.get("optim.weight_decay", 0.1))
    steps = int(settings.get("train.steps", 512))
    started = folder / "starts"
    folder.mkdir(parents=True, exist_ok=True)
    with started.open("a") as stream:
        stream.write(f"{settings.get('train.resume', '')}\n")

    # The best rate is 1e-2, and half of it for a decay of 0.
    best = 1e-2 if decay else 5e-3
    noise = random.Random(seed).gauss(0, 0.05) + random.Random(f"{seed}/{decay}").gauss(0, 0.004)
    loss = 3 + 0.1 * math.log2(rate / best) ** 2 + decay + noise
    facts = {"state": "finished", "step": steps, "steps": steps, "parameters": 1000}
    if rate >= 0.1:
        facts |= {"state": "failed", "step": 7, "reason": "step 7: loss is nan", "diverged": True}

    (folder / "config.yaml").write_text(
        yaml.safe_dump({"model": {"mixer": "gla"}, "train": {"steps": steps}})
    )
    lines = [{"step": steps, "tokens": 2048 * steps, "loss": loss, "tokens_per_second": 1e5}]
    lines += [{"step": steps, "tokens": 2048 * steps, "val_loss": loss, "val_bpb": loss / 4}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    time.sleep(float(settings.get("guard.hang_timeout", 0)))
    (folder / "run.json").write_text(json.dumps(facts))
    sys.exit(2 if facts["state"] == "failed" else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
