"""Launches and bytes of a layer; counts of today."""

import pytest
from nalanda_lab.kernels import step_cost


@pytest.mark.slow
def test_a_layer_of_the_flagship_launches_and_moves_little():
    """Casts move little, because norms give Linear layers the dtype that they read."""
    costs = step_cost.layer_costs("nala_gated_deltanet_340m", length=64)
    launches = {
        name: sum(x.launches for key, x in costs.items() if key[0] == name) for name, _ in costs
    }
    assert 0 < launches["forward"] <= 27
    assert 0 < launches["backward"] <= 58
    assert 0 < launches["a token"] <= 9
    assert sum(x.by_token for (_, kind), x in costs.items() if kind == "casts") < 8 * 1024
    assert sum(x.by_token for (_, kind), x in costs.items() if kind != "products") < 380 * 1024
