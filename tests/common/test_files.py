"""Folders that appear whole."""

from nalanda.common import files


def test_a_folder_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    synced, out = [], tmp_path / "out"

    def sync(path):
        synced.append((path.name, out.exists()))

    monkeypatch.setattr(files, "sync", sync)
    with files.new_folder(out) as folder:
        (folder / "inside").mkdir()
        for name in ("a", "inside/b"):
            (folder / name).write_text(name)
    before = {name for name, named in synced if not named}
    assert {"a", "b", "inside"} < before
    assert synced[-1] == (tmp_path.name, True)  # the new name itself
    assert (out / "inside" / "b").read_text() == "inside/b"
