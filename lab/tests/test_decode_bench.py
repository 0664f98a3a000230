"""`nalanda-lab decode`: every row is there. Speeds are not judged."""

import json

import nalanda_lab.speed.decode
from nalanda_lab.commands import app
from typer.testing import CliRunner


def test_bench_decode(tmp_path, monkeypatch):
    sizes = {
        "LAYERS": 1,
        "WIDTH": 32,
        "HEADS": 2,
        "HEAD_DIM": 16,
        "INNER": 32,
        "CONTEXTS": (1024, 2048),
    }
    for name, value in sizes.items():
        monkeypatch.setattr(nalanda_lab.speed.decode, name, value)
    json_file, png = tmp_path / "decode.json", tmp_path / "decode.png"
    words = [
        "decode",
        "--threads",
        "1",
        "--rounds",
        "2",
        "--json",
        str(json_file),
        "--png",
        str(png),
    ]
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert "growth" in result.stdout
    rows = json.loads(json_file.read_text())["rows"]
    assert [row["model"] for row in rows[::2]] == [
        *nalanda_lab.speed.decode.OURS,
        nalanda_lab.speed.decode.PEER,
        nalanda_lab.speed.decode.FLOOR,
    ]
    assert all(row["ms"] > 0 and row["ratio_to_peer"] > 0 for row in rows)
    bytes_of = {(row["model"], row["context"]): row["state_bytes"] for row in rows}
    assert (
        bytes_of["gated_deltanet", 1024]
        == bytes_of["gated_deltanet", 2048]
        == 2 * 16 * 16 * 4 + 3 * 3 * 32 * 4
    )
    assert bytes_of["softmax", 2048] == 2 * bytes_of["softmax", 1024] == 2 * 2048 * 32 * 4
    assert png.stat().st_size > 1000
