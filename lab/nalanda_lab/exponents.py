"""NaLa's exponent p over the length of a query, and where the queries of a model lie before training.

`nalanda-lab exponents` makes the figures of docs/norm_awareness.md: `exponents.json` and a picture.
"""

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nalanda.common.errors import output_folder
from nalanda.config.load import load_config, read_yaml
from nalanda.config.model import build_model_config
from nalanda.model import NalandaConfig, NalandaForCausalLM, build_feature_map
from nalanda.report.figures import COLOURS, GREY, drawing
from nalanda_lab.equal import configured
from nalanda_lab.fork import FIRST
from nalanda_lab.fork_levels import MIXERS, POWER, own_exponents, read_tar
from nalanda_lab.norms import changed_norms

MAPS = ("nala", "nala_paper", "nala_released", "nala_code")
RECIPES = ("nala_gated_deltanet_340m", "nala_deltanet_340m", "nala_340m")
TOKENS, SKIPPED = 256, 3
"""Tokens of the random row, and those at its start for which the convolution lacks taps."""
VOCABULARY = 2048
"""That of the models of 2 M parameters."""
OTHERS = "others"
"""nala_paper, nala_released and nala_code: they have one exponent."""
SHARES = (0.01, 0.25, 0.5, 0.75, 0.99)
LONGEST = 12.0
"""The longest query of the picture."""
TRAINED = Path(__file__).parents[1] / "records" / "fork.tar.xz"


def exponent(name: str, lengths: Tensor, head_dim: int) -> Tensor:
    """p of a map for queries of these lengths."""
    feature_map: Any = build_feature_map(name, num_heads=1, head_dim=head_dim)
    return feature_map.exponents(lengths)[0]


@torch.no_grad()
def query_lengths(config: NalandaConfig, seed: int = 0) -> Tensor:
    """‖q‖ as the map gets it, in an untrained model that reads random tokens: `[layers, tokens · heads]`."""
    torch.manual_seed(seed)
    model = NalandaForCausalLM(config).eval()
    ids = torch.randint(config.vocab_size, (1, TOKENS))
    seen: list[Tensor] = []

    def note(norm: Tensor) -> Tensor:
        seen.append(norm[0, SKIPPED:].float().flatten())
        return norm

    with changed_norms([layer.mixer for layer in model.model.layers], note):
        model(ids, use_cache=False)
    return torch.stack(seen)


def summary(values: Tensor) -> dict[str, Any]:
    """Mean, standard deviation, extremes and quantiles, rounded to five digits."""
    numbers = {"mean": values.mean(), "sd": values.std(), "min": values.min(), "max": values.max()}
    found: dict[str, Any] = {name: round(float(x), 5) for name, x in numbers.items()}
    return found | {"quantiles": [round(float(values.quantile(share)), 5) for share in SHARES]}


def measure(config: NalandaConfig) -> dict[str, Any]:
    """‖q‖ over all layers, tokens and heads, its mean by layer, and p of each map."""
    lengths = query_lengths(config)
    size = config.key_dim
    record: dict[str, Any] = {
        "K": size,
        "layers": len(lengths),
        "length": summary(lengths.flatten()),
    }
    record["by_layer"] = [round(float(x), 3) for x in lengths.mean(-1)]
    return record | {name: summary(exponent(name, lengths.flatten(), size)) for name in MAPS}


def configs() -> dict[str, NalandaConfig]:
    """The recipes of 340 M parameters, and the models of 2 M of the fork experiment."""
    found: dict[str, Any] = {name: build_model_config(load_config(name)) for name in RECIPES}
    study = read_yaml(FIRST)
    for name in ("deltanet", "gated_deltanet", "nala"):
        model = study["model"] | study["mixers"][name]["model"]
        found[f"{name}, 2 M"] = configured(model, VOCABULARY)
    return found


def exponents(output: str) -> dict[str, Any]:
    """Measures all models, prints a line for each, and writes the figures and the picture."""
    folder = output_folder(output, "--output")
    records = {}
    for name, config in configs().items():
        records[name] = measure(config)
        print(describe(name, records[name]), flush=True)
    (folder / "exponents.json").write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    draw(records, folder / "norm_awareness.png")
    return records


def describe(name: str, record: dict[str, Any]) -> str:
    cells = [
        f"{label} {record[key]['mean']:.3f} ± {record[key]['sd']:.3f}" for label, key in LABELS
    ]
    return f"{name}, K = {record['K']}: {', '.join(cells)}"


LABELS = (("‖q‖", "length"), ("p of nala", "nala"), ("p of nala_paper", "nala_paper"))


def draw(records: dict[str, Any], file: Path) -> None:
    """p over ‖q‖, a panel for each size of a head, with the lengths of untrained queries as a band."""
    large = [records[name] for name in RECIPES]
    small = [record for record in records.values() if record["K"] != large[0]["K"]]
    titles = {"340 M parameters, K = 128": large, "2 M parameters, K = 64": small}
    title = "For untrained queries the paper's exponent is a constant, that of nala is not"
    caption = (
        "Others: nala_paper, nala_released and nala_code, which have one exponent. Band: 98 % of the queries of "
        "untrained models, all layers and heads; line in it: their median. Dots: heads of 24 trained models, at "
        "their mean p. "
        "Dotted: the limits."
    )
    trained = [p for mixer in MIXERS for p in own_exponents(read_tar(TRAINED), mixer)]
    lengths = torch.linspace(0, LONGEST, 281)
    with drawing(file, title, caption, 2, height=2.9, sharey=True) as panels:
        for panel, (heading, models) in zip(panels, titles.items(), strict=True):
            draw_panel(panel, models, lengths)
            if models is small:
                places = [length_at(p, models[0]["K"]) for p in trained]
                panel.plot(places, trained, "o", color=COLOURS[0], markersize=3, alpha=0.5)
                panel.text(max(places), min(trained), "trained heads", color=COLOURS[0])
            panel.set(title=heading, xlabel="length of the query, ‖q‖", ylabel="exponent p")
            panel.set(xlim=(0, LONGEST), ylim=(0, 5), xticks=range(0, int(LONGEST) + 1, 2))


def length_at(p: float, head_dim: int) -> float:
    """The length of a query for which `nala` has this exponent."""
    return head_dim**0.5 * math.atanh(p / POWER - 0.5)


def draw_panel(panel: Any, models: list[dict[str, Any]], lengths: Tensor) -> None:
    curve = partial(exponent, lengths=lengths, head_dim=models[0]["K"])
    panel.plot(lengths, curve("nala"), color=COLOURS[0], label="nala")
    panel.plot(lengths, curve("nala_paper"), color=COLOURS[1], linestyle="--", label=OTHERS)
    for limit, colour in ((3.0, COLOURS[0]), (4.5, COLOURS[1])):
        panel.axhline(limit, color=colour, linestyle=":", linewidth=0.8)
    low = min(model["length"]["quantiles"][0] for model in models)
    high = max(model["length"]["quantiles"][-1] for model in models)
    panel.axvspan(low, high, color=COLOURS[5], alpha=0.25, linewidth=0)
    median = sorted(model["length"]["quantiles"][2] for model in models)[len(models) // 2]
    panel.axvline(median, color=GREY, linewidth=0.8)
    panel.text(high + 0.2, 0.25, "untrained queries", color=GREY)
