"""A run whose output_dir is in a store: what is copied there, and what a start fetches."""

import re
import shutil
from pathlib import Path

import pytest
import zstandard
from accelerate.state import AcceleratorState
from buckets import SECRET
from servers import jsonl
from training import configured, outcome

from nalanda.common.errors import InputError, SourceUnavailable
from nalanda.common.files import verify_manifest, write_manifest
from nalanda.config.schema import CheckpointConfig, write_yaml
from nalanda.data.make_set import make_token_set
from nalanda.data.options import TokenizerOptions
from nalanda.data.urls import RemoteShard
from nalanda.storage.cache import cache
from nalanda.train import mirror as copies
from nalanda.train.checkpoint_dir import checkpoint_folders, latest_checkpoint, step_of
from nalanda.train.loop import train
from nalanda.train.mirror import Mirror, mirrored

URL = "s3://bucket/run"


@pytest.fixture(autouse=True)
def waits(waits):
    return waits


def save(folder: Path, step: int, content: str = "weights") -> Path:
    """A checkpoint as `Saver` leaves it."""
    path = folder / "checkpoints" / f"step-{step}"
    path.mkdir(parents=True)
    (path / "model.safetensors").write_text(f"{content} {step}")
    write_manifest(path)
    (folder / "config.yaml").write_text(write_yaml({"output_dir": str(folder), "seed": 0}))
    (folder / "run.json").write_text(f'{{"saved": {step}}}')
    (folder / "metrics.jsonl").write_text("{}\n" * step)
    (folder / "tokenizer").mkdir(exist_ok=True)
    (folder / "tokenizer" / "tokenizer.json").write_text("{}")
    return path


def mirror(folder: Path, keep_last: int = 2, keep_every: int | None = None) -> Mirror:
    return Mirror(
        folder, URL, CheckpointConfig(keep_last=keep_last, keep_every=keep_every), retries=1
    )


def steps(bucket) -> list[int]:
    """The checkpoints that have a manifest in the bucket."""
    found = (
        re.fullmatch(r"run/checkpoints/step-(\d+)/manifest\.json", name) for name in bucket.names()
    )
    return sorted(int(match[1]) for match in found if match)


def test_checkpoints_and_records_go_there_and_come_back(bucket, tmp_path):
    # YAML folds a text of several words that is longer than a line.
    here, there = tmp_path / ("here " * 30).strip(), tmp_path / "there"
    for step in (5, 10):
        save(here, step)
    mirror(here).copy(1)
    assert steps(bucket) == [5, 10]
    assert bucket.get("run/config.yaml") == f"output_dir: {URL}\nseed: 0\n".encode()

    mirror(there).fetch()  # another machine
    assert [path.name for path in checkpoint_folders(there / "checkpoints")] == ["step-10"]
    for name in ("run.json", "metrics.jsonl", "tokenizer/tokenizer.json"):
        assert (there / name).read_bytes() == (here / name).read_bytes()
    shutil.rmtree(there / "checkpoints" / "step-10")
    save(there, 15)
    mirror(there).copy(1)
    mirror(here).fetch()  # the first machine again, whose folder is behind
    assert [path.name for path in checkpoint_folders(here / "checkpoints")] == [
        "step-5",
        "step-10",
        "step-15",
    ]
    assert (here / "run.json").read_text() == '{"saved": 15}'

    save(here, 20)
    mirror(here).fetch()  # nothing is newer there
    assert (here / "run.json").read_text() == '{"saved": 20}'


def test_whenever_a_copy_is_cut_short_the_records_fit_the_checkpoints(
    bucket, tmp_path, monkeypatch
):
    sent = []
    monkeypatch.setattr(
        copies, "upload", lambda file, url, retries: sent.append(url.removeprefix(URL))
    )
    save(tmp_path, 5)
    mirror(tmp_path).copy(1)
    manifest = sent.index("/checkpoints/step-5/manifest.json")
    assert (
        sent.index("/metrics.jsonl")
        < sent.index("/checkpoints/step-5/model.safetensors")
        < manifest
    )
    assert sent[-1] == "/run.json"


@pytest.mark.slow
def test_a_checkpoint_cut_short_is_passed_over_and_replaced(bucket, tmp_path, capsys):
    here = tmp_path / "here"
    for step in (5, 10):
        save(here, step)
    mirror(here).copy(1)
    bucket.client().delete_object(Bucket="bucket", Key="run/checkpoints/step-10/manifest.json")
    mirror(tmp_path / "second").fetch()
    assert [p.name for p in checkpoint_folders(tmp_path / "second" / "checkpoints")] == ["step-5"]
    mirror(here).copy(1)
    assert steps(bucket) == [5, 10]

    bucket.put("run/checkpoints/step-10/model.safetensors", b"weights 11")
    mirror(tmp_path / "third").fetch()
    assert "step-10/: damaged, passed over" in capsys.readouterr().err
    assert [p.name for p in checkpoint_folders(tmp_path / "third" / "checkpoints")] == ["step-5"]

    shutil.rmtree(here / "checkpoints" / "step-10")
    save(here, 10, "other weights")  # after a rollback
    copying = mirror(here)
    copying.copy(1)
    assert bucket.get("run/checkpoints/step-10/model.safetensors") == b"other weights 10"
    (here / "checkpoints" / "step-10" / "unsound.txt").write_text("nan")
    copying.copy(1)
    assert bucket.get("run/checkpoints/step-10/unsound.txt") == b"nan"
    (here / "checkpoints" / "step-10" / "unsound.txt").unlink()
    copying.copy(1)
    assert "run/checkpoints/step-10/unsound.txt" not in bucket.names()


@pytest.mark.slow
def test_what_is_not_kept_here_is_removed_there(bucket, tmp_path):
    here = tmp_path / "here"
    for step in (5, 10, 15):
        save(here, step)
    copying = mirror(here, keep_last=2, keep_every=10)
    copying.copy(1)
    shutil.rmtree(here / "checkpoints" / "step-5")
    copying.copy(1)
    assert steps(bucket) == [10, 15]
    assert not [name for name in bucket.names() if "step-5/" in name]

    there = (
        tmp_path / "there"
    )  # which has one checkpoint, and keeps the others of the store until it has two
    copying = mirror(there, keep_last=2, keep_every=10)
    copying.fetch()
    copying.copy(1)
    assert steps(bucket) == [10, 15]
    for step in (20, 25):
        save(there, step)
    copying.copy(1)
    assert steps(bucket) == [10, 15, 20, 25]
    shutil.rmtree(there / "checkpoints" / "step-15")
    copying.copy(1)
    assert steps(bucket) == [10, 20, 25]  # 10 by keep_every
    (there / "checkpoints" / "step-25").rename(there / "checkpoints" / "later-step-25")
    copying.clear_remains()
    assert steps(bucket) == [10, 20]


@pytest.mark.slow
def test_a_store_that_fails_is_told_and_tried_again(bucket, tmp_path, capsys, waits):
    here = tmp_path / "here"
    save(here, 5)
    copying = mirror(here)
    bucket.stop()
    try:
        copying.start_copy()
        copying._thread.join()
        said = capsys.readouterr().err.splitlines()
        assert said[-1].startswith(
            f"nalanda: {URL}: not copied there; it is tried again with the next"
        )
        message = rf"^{URL}: lacks the newest files, which are in {here} \("
        with pytest.raises(SourceUnavailable, match=message) as caught:
            copying.finish(1)
        assert SECRET not in str(caught.value)
    finally:
        bucket.start()
    copying.start_copy()
    copying._thread.join()
    assert steps(bucket) == [5]


@pytest.mark.slow
def test_an_error_of_the_run_is_not_hidden(bucket, tmp_path, capsys):
    save(tmp_path / "here", 5)

    def run():
        with mirrored(mirror(tmp_path / "here")):
            bucket.stop()
            raise InputError("the data")

    with pytest.raises(InputError, match="the data"):
        run()
    bucket.start()
    assert "lacks the newest files" in (said := capsys.readouterr().err)
    assert "try 1 of 1" in said


def test_other_files_are_left_alone(bucket, tmp_path):
    bucket.put("run/book.txt", b"mine")
    with pytest.raises(InputError, match=rf"{URL} has files that are no run of Nalanda's"):
        mirror(tmp_path / "here").fetch()


# ------------------------------ machines with folders of their own


def save_parts(folders: list[Path], step: int, content: str = "weights") -> None:
    """A checkpoint of two machines, each with the whole manifest and its own file."""
    whole = save(folders[0], step, content)
    (whole / "rank-1.pt").write_text(f"{content} of 1, {step}")
    (whole / "manifest.json").unlink()
    write_manifest(whole)
    part = folders[1] / "checkpoints" / whole.name
    part.mkdir(parents=True)
    shutil.copy(whole / "manifest.json", part)
    (whole / "rank-1.pt").rename(part / "rank-1.pt")


def two_mirrors(tmp_path: Path) -> tuple[list[Path], Mirror, Mirror]:
    folders = [tmp_path / "A", tmp_path / "B"]
    mirrors = [mirror(folder) for folder in folders]
    for rank, one in enumerate(mirrors):
        one.rank = one.first = rank
        one.several = True
        one.clear_remains()
    return folders, *mirrors


def test_the_manifest_goes_there_once_all_machines_have_uploaded(bucket, tmp_path):
    folders, main, other = two_mirrors(tmp_path)
    save_parts(folders, 5)
    path, part = (folder / "checkpoints" / "step-5" for folder in folders)
    assert main.copy(1) == [path]
    assert steps(bucket) == []
    assert "run/run.json" not in bucket.names()  # it would claim the checkpoint
    with pytest.raises(InputError, match="step-5 lacks the files of other machines"):
        main.finish(1)

    assert other.copy(1) == []
    assert "run/checkpoints/step-5/part-1.json" in bucket.names()
    assert steps(bucket) == []
    assert not other.complete(part)
    assert main.copy(1) == []
    assert steps(bucket) == [5]
    assert "run/run.json" in bucket.names()
    assert "run/checkpoints/step-5/part-1.json" not in bucket.names()

    for one, folder in ((main, path), (other, part)):
        assert one.complete(folder)
        assert verify_manifest(folder) is None
    other.copy(1)  # what came from there is not sent back
    assert "run/checkpoints/step-5/part-1.json" not in bucket.names()


def test_a_start_puts_together_the_parts_that_the_last_one_left(bucket, tmp_path):
    folders, main, other = two_mirrors(tmp_path)
    save_parts(folders, 5)
    main.copy(1)
    other.copy(1)  # killed here
    assert steps(bucket) == []
    again = mirror(folders[0])
    again.several = True
    again.fetch()
    assert steps(bucket) == [5]


@pytest.mark.slow
def test_parts_of_another_checkpoint_of_the_step_do_not_count(bucket, tmp_path):
    folders, main, other = two_mirrors(tmp_path)
    save_parts(folders, 5)
    other.copy(1)  # killed here
    shutil.rmtree(folders[0])
    shutil.rmtree(folders[1] / "checkpoints")
    save_parts(folders, 5, "others")
    assert main.copy(1)
    assert steps(bucket) == []
    other.copy(1)
    assert main.copy(1) == []
    assert bucket.get("run/checkpoints/step-5/rank-1.pt") == b"others of 1, 5"

    # A new start, in which a machine is lost: its part never comes.
    save_parts(folders, 10)
    main.copy(1)
    shutil.rmtree(folders[1])
    folders, main, other = two_mirrors(tmp_path)
    assert not (folders[0] / "checkpoints" / "step-10").exists()
    assert not [name for name in bucket.names() if "step-10" in name]
    assert steps(bucket) == [5]


def test_a_checkpoint_that_is_removed_meanwhile_stays_in_the_store(bucket, tmp_path, monkeypatch):
    save(tmp_path, 5)
    copying = mirror(tmp_path)
    copying.copy(1)
    folders = copying._folders()
    shutil.rmtree(folders[0])
    monkeypatch.setattr(copying, "_folders", lambda: folders)
    copying.copy(1)
    assert steps(bucket) == [5]


@pytest.mark.parametrize(
    "url", ["http://host/run", "foo://bucket/run", "hf://models/a/b", "gs://bucket/run"]
)
def test_an_output_dir_that_cannot_be_written_is_refused(recipe, url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = configured(recipe, tmp_path)
    config.output_dir = url
    with pytest.raises(InputError, match=rf"{url}: ({url[:3]}.*cannot be written|needs gcsfs)"):
        train(config)
    assert not [*tmp_path.iterdir()]


# ------------------------------ trainings


@pytest.fixture
def texts(recipe, bucket) -> str:
    """The recipe's corpus in a store, where its folder holds nothing else."""
    corpus = (recipe.parent / "a.jsonl").read_bytes()
    bucket.put("texts/a.jsonl.zst", zstandard.ZstdCompressor().compress(corpus))
    return "data.source=s3://bucket/texts"


def run_there(recipe: Path, cache: Path, monkeypatch, *overrides: str) -> Path:
    """A start on a machine whose cache is `cache`; the run's folder there."""
    AcceleratorState._reset_state(reset_partial_state=True)
    monkeypatch.setenv("NALANDA_CACHE", str(cache))
    return train(configured(recipe, Path("unset"), f"output_dir={URL}", *overrides))


@pytest.mark.slow
def test_a_run_in_a_store_resumes_on_another_machine(
    recipe, whole, texts, bucket, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    start_copy = Mirror.start_copy

    def stop_at_the_second(mirror: Mirror) -> None:
        start_copy(mirror)
        if (mirror.folder / "checkpoints" / "step-10").exists():
            raise SystemExit(143)

    with monkeypatch.context() as patch:
        patch.setattr(Mirror, "start_copy", stop_at_the_second)
        with pytest.raises(SystemExit):
            run_there(recipe, tmp_path / "one", patch, texts)
    assert steps(bucket) == [5, 10]

    run = run_there(recipe, tmp_path / "two", monkeypatch, texts)
    found, expected = outcome(run), outcome(whole)
    for facts in (found, expected):
        facts.pop("data")  # one has the hash of a plain file, the other what the store states
    assert found == expected
    assert steps(bucket) == [5, 10, 15, 20, 24]
    assert "run/final/model.safetensors" in bucket.names()
    assert f"output_dir: {URL}" in bucket.get("run/final/config.yaml").decode()
    assert not Path("s3:").exists()

    printed = "".join(capsys.readouterr())
    assert SECRET not in printed
    assert f"{URL}: the run works in {run}" in printed
    contents = [file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()]
    contents += map(bucket.get, bucket.names())
    assert not [content for content in contents if SECRET.encode() in content]


@pytest.mark.slow
def test_a_server_that_dies_under_a_run(recipe, texts, bucket, tmp_path, monkeypatch):
    """The run saves first, and ends with the code of a failing server; it goes on when the server is back."""
    bucket.clear()
    for i in range(3):
        bucket.put(f"texts/{i}.jsonl", jsonl(str(i), 100))
    opened, whole_shard = [], RemoteShard.read

    def read(shard, cursor):
        opened.append(shard.name)
        if len(opened) == 8:
            bucket.stop()
            for file in cache().glob("*-*"):
                file.unlink()
        return whole_shard(shard, cursor)

    small = (
        "train.steps=60",
        "data.workers=0",
        "data.retries=1",
        "validation.every=0",
        "checkpoint.every=0",
    )
    AcceleratorState._reset_state(reset_partial_state=True)
    config = configured(recipe, tmp_path / "run", texts, *small)
    with monkeypatch.context() as patch:
        patch.setattr(RemoteShard, "read", read)
        with pytest.raises(SourceUnavailable, match="failed 2 times in a row, gave up"):
            train(config)
    bucket.start()
    stopped = latest_checkpoint(tmp_path / "run" / "checkpoints")
    assert stopped is not None
    assert 0 < step_of(stopped) < 60
    AcceleratorState._reset_state(reset_partial_state=True)
    train(config)
    assert (tmp_path / "run" / "final" / "model.safetensors").exists()


@pytest.mark.slow
def test_a_token_set_in_a_store_is_trained_on(recipe, texts, bucket, tmp_path, monkeypatch):
    made = make_token_set(
        "s3://bucket/texts", "s3://bucket/tokens", tokenizer=TokenizerOptions(vocab_size=320)
    )
    assert made["train"]["documents"] > 1000
    AcceleratorState._reset_state(reset_partial_state=True)
    (folder,) = (cache() / "output").iterdir()
    tokens = "data.source=s3://bucket/tokens", f"tokenizer={folder}/tokenizer"
    run = train(configured(recipe, tmp_path / "run", *tokens, "train.steps=6"))
    assert "source: s3://bucket/tokens" in (run / "config.yaml").read_text()
