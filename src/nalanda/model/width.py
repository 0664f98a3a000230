"""µP, the maximal update parametrization: initial weights and rates that fit a model of any width.

With `parametrization: mup` the recipe's initial weights and rates are those of a narrow model, `base_width` wide,
where they can be tuned in an hour. They are carried over to `hidden_size`. Activations, and their change in a step,
then keep their size. Sources: Yang et al., arXiv 2203.03466; for recurrences with gates, arXiv 2606.04048.

A matrix `[n_out, n_in]` and its update must have spectral norms ~ √(n_out / n_in) (arXiv 2310.17813). Let n_out
grow r times and n_in c times from the narrow model to this one. Then, with n = max(n_out, n_in),

    initial standard deviation   × c^(−1/2) · min(1, √(r / c))   since a Gaussian matrix has norm σ (√n_out + √n_in)
    rate of Adam                 × 1 / c                         since its update has entries of one size
    rate of Muon                 × √(r / c) / √(growth of n)     since its update is orthogonal, times √n

A model grows by heads of equal size. What belongs to one head therefore keeps its initial values and rate: decays,
filters, norms, the parameters of feature maps. So do embeddings, because a look-up sums over no side. Weight decay
times rate stays, so that matrices forget their initial values equally fast (arXiv 2405.13698).

A tied head has the factor c^(−1/2), not µP's 1 / c, for its initial size and its rate. That fits updates which are
not aligned with the head's input (arXiv 2407.05872). With 1 / c wide models trained worse than in the standard
parametrization. Nothing but initial weights and rates differs, so a trained model is like any other.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import nn

FINAL_NORM = ("norm", "model.norm")
"""Names of the norm before the head, in a decoder and in a model with a head."""


class Growth(NamedTuple):
    """How many times the sides of a matrix are those at the base width."""

    rows: float = 1.0
    """Growth of n_out."""
    columns: float = 1.0
    """Growth of n_in."""

    def deviation(self) -> float:
        """Factor of the initial weights."""
        return self.columns**-0.5 * min(1.0, math.sqrt(self.rows / self.columns))

    def adam_rate(self) -> float:
        return 1 / self.columns

    def muon_rate(self, n_out: int, n_in: int) -> float:
        """Factor of a matrix `[n_out, n_in]` that is updated as a whole."""
        larger = max(n_out, n_in) / max(n_out / self.rows, n_in / self.columns)
        return math.sqrt(self.rows / self.columns / larger)


def base_config(config: Any) -> Any:
    """The config of the model that is `base_width` wide: fewer heads of equal size, and a narrower GLU.

    Raises ValueError if `base_width` does not hold a whole number of heads.
    """
    share = config.base_width / config.hidden_size

    def shrink(name: str, size: int) -> int:
        if round(size * share) != size * share:
            raise ValueError(
                f"base_width={config.base_width}: {name} would be {size * share:g} there; "
                "take a width that holds a whole number of each"
            )
        return round(size * share)

    def shrink_heads(options: dict[str, Any]) -> dict[str, Any]:
        narrow = {}
        for name, value in options.items():
            if isinstance(value, dict):  # the options of one mixer, by its name
                value = shrink_heads(value)
            elif name.endswith("heads") and value is not None:
                value = shrink(name, value)
            narrow[name] = value
        return narrow

    sizes = {
        name: shrink(name, getattr(config, name))
        for name in ("hidden_size", "num_heads", "intermediate_size")
    }
    standard = {
        "parametrization": "standard",
        "base_width": None,
        "mixer_options": shrink_heads(config.mixer_options),
    }
    return type(config).from_dict(config.to_dict() | sizes | standard)


def growths(model: Any) -> dict[str, Growth]:
    """The growth of each weight that has one, by its module's name; {} in the standard parametrization."""
    config: Any = getattr(model, "config", None)  # models of other libraries may have none
    if getattr(config, "parametrization", None) != "mup":
        return {}
    with torch.device("meta"):
        base = type(model)(base_config(config))
    matrices = {name: m.weight for name, m in base.named_modules() if isinstance(m, nn.Linear)}

    factors = {}
    for name, module in model.named_modules():
        if name in matrices:
            (n_out, n_in), (base_out, base_in) = module.weight.shape, matrices[name].shape
            factors[name] = Growth(n_out / base_out, n_in / base_in)
    if config.tie_word_embeddings:
        # Embeddings that are the head too cannot fit both: the norm before the head is scaled in their
        # place. Both of its factors are 1 / columns, so the root of c makes them c^(−1/2).
        head = Growth(columns=math.sqrt(config.hidden_size / config.base_width))
        factors |= {name: head for name, _ in model.named_modules() if name in FINAL_NORM}
    return factors
