"""Pictures that cost little."""

import pytest
from matplotlib.figure import Figure

from nalanda.report.figures import STYLE


@pytest.fixture(scope="module", autouse=True)
def coarse():
    """Few pixels: the tests check only that pictures are drawn."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(STYLE, "savefig.dpi", 30)
        yield


@pytest.fixture
def blank(monkeypatch):
    """Figures are made and their files created, but nothing is rendered."""
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **options: path.touch())
