"""A mixer and a feature map of one's own: `plugins: [my_mixer]` in a recipe makes both names known.

S ← σ(w)_h S + φ(k) vᵀ, o = F^-½ Sᵀ φ(q): linear attention whose heads forget at learnt rates.
"""

import torch
import torch.nn.functional as F

from nalanda.model import FeatureMap, Mixer, register_feature_map, register_mixer
from nalanda.model.call import Inputs
from nalanda.model.layers import Fp32Module, at_least_fp32
from nalanda.model.rule import Rule


class SquaredRelu(FeatureMap):
    """max(x, 0)², in fp32 at least, as all maps compute."""

    equation = "max(x, 0)²"
    source = "this example"
    nonnegative = True

    def __init__(self, *, num_heads: int, head_dim: int):
        super().__init__()
        self.feature_dim = head_dim

    def forward(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return at_least_fp32(q).relu().square(), at_least_fp32(k).relu().square()


class Rates(Fp32Module):
    """log σ(w) by head. An `Fp32Module` keeps its parameters in fp32, and sets them in `initial`."""

    def __init__(self, num_heads: int):
        super().__init__()
        self.w = torch.nn.Parameter(torch.empty(num_heads, dtype=torch.float32))

    def initial(self) -> dict[str, torch.Tensor]:
        return {"w": torch.linspace(2.0, 6.0, self.w.numel(), device=self.w.device)}

    def forward(self) -> torch.Tensor:
        return F.logsigmoid(self.w)


class ForgetfulAttention(Mixer):
    equation = "S ← σ(w) S + k vᵀ; o = Sᵀq"
    source = "this example"
    rule = Rule(
        write="add",  # S + k vᵀ
        decay="given",  # by `gates`
        map="squared_relu",  # the default; `model.feature_map` chooses another
        gated=False,  # no output gate, unless `model.use_gate` asks for one
        cut=True,  # it serves rows that are cut over processes
    )

    def __init__(self, config, layer_idx: int, *, forget: bool = True):
        super().__init__(config, layer_idx)
        self.rates = Rates(self.num_heads) if forget else None

    def gates(self, projected: dict[str, torch.Tensor], inputs: Inputs) -> Inputs:
        if self.rates is None:
            return inputs
        return inputs._replace(g=self.rates().expand(*inputs.v.shape[:2], -1))  # [B, T, H]


register_feature_map("squared_relu", SquaredRelu)
register_mixer("forgetful", ForgetfulAttention)
