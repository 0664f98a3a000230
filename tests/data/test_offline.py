"""The offline mirror: filled with a network, then the only source of a run."""

import gzip
import hashlib
import json
import os
import socket
import sys
from pathlib import Path

import pytest
from servers import jsonl
from tokenizers import Tokenizer
from typer.testing import CliRunner

import nalanda_cli
from nalanda.common.errors import InputError, SourceUnavailable
from nalanda.config.load import load_config
from nalanda.config.schema import DataConfig, TokenizerConfig
from nalanda.data.loader import PackedBatches
from nalanda.data.offline import fill_mirror, needs, use_mirror
from nalanda.data.stores import open_urls
from nalanda.data.tokenizer import build_tokenizer, mistral_model, tokenizer_fingerprint

RECIPE = """
output_dir: runs/x
model: {mixer: deltanet, hidden_size: 32, num_hidden_layers: 1, num_heads: 2, vocab_size: 300}
tokenizer: someone/tokens
data: {source: someone/texts, seq_len: 16, validation_share: 0.2, shuffle_buffer: 4, workers: 0}
train: {steps: 1, tokens_per_step: 32, micro_batch_size: 2}
"""


@pytest.fixture(autouse=True)
def _set_back(monkeypatch):
    """Restores what `offline` sets for the process."""
    import datasets.config
    import huggingface_hub.constants

    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setattr(datasets.config, name, False)


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return lambda *overrides: load_config(path, overrides)


@pytest.fixture
def hub(tmp_path, tokenizer, monkeypatch):
    """Stand-ins for the Hub's libraries that count their calls."""
    import datasets
    import huggingface_hub
    import transformers

    home = tmp_path / "hub"
    calls = Calls()
    files = {
        "train": ["train/b.jsonl", "train/chunk1/a.json.gz"],
        "validation": ["validation/c.jsonl"],
    }
    for path in [path for paths in files.values() for path in paths]:
        (home / path).parent.mkdir(parents=True, exist_ok=True)
        body = jsonl(path, 20)
        (home / path).write_bytes(gzip.compress(body) if path.endswith(".gz") else body)
    tokenizer.save_pretrained(home / "tokens")

    class Builder:
        class config:
            data_files = {  # noqa: RUF012
                split: [f"hf://datasets/someone/texts@refs%2Fx/{path}" for path in paths]
                for split, paths in files.items()
            }

    def load_dataset(path, name, split, streaming=False):
        calls.append(f"load_dataset {path} {split}")
        rows = [json.loads(line) for f in files[split] for line in _open(home / f)]
        rows = [{**row, "meta": {"redpajama_set_name": "Web"}} for row in rows]
        return datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=4)

    def hf_hub_download(repo, path, repo_type, revision, local_dir):
        assert (repo, repo_type, revision) == ("someone/texts", "dataset", "refs/x")
        calls.append(f"download {path}")
        target = Path(local_dir) / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((home / path).read_bytes())
        return str(target)

    def snapshot_download(repo, local_dir, allow_patterns):
        calls.append(f"snapshot {repo} {' '.join(allow_patterns)}")
        names = ["config.json", "model.safetensors", "model.bin", "code.py"]
        for name in [n for n in names if any(Path(n).match(p) for p in allow_patterns)]:
            Path(local_dir).mkdir(parents=True, exist_ok=True)
            (Path(local_dir) / name).write_text("{}")
        return str(local_dir)

    load = transformers.AutoTokenizer.from_pretrained

    def from_pretrained(name, *args, **kwargs):
        calls.append(f"tokenizer {name}")
        return load(home / "tokens" if name == "someone/tokens" else name, *args, **kwargs)

    monkeypatch.setattr(datasets, "load_dataset_builder", lambda path, name: Builder)
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda path, name: list(files))
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hf_hub_download)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", from_pretrained)
    calls.builder = Builder  # type: ignore[attr-defined]
    return calls


def _open(path):
    return (gzip.open if path.suffix == ".gz" else open)(path, "rb")


class Calls(list):
    builder = None


def tree(root):
    return sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file())


def texts_of(config, tokenizer, split):
    batches = PackedBatches(config.data, tokenizer, split=split, batch_size=2, epochs=1)
    return sorted(tokenizer.decode(row) for batch in batches for row in batch["input_ids"].tolist())


@pytest.fixture
def no_network(monkeypatch):
    def fail(*args):
        raise AssertionError(f"a connection was opened: {args}")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, fail)
    monkeypatch.setattr(socket, "getaddrinfo", fail)


def test_a_run_without_a_network_reads_the_mirror(recipe, hub, tmp_path, tokenizer, no_network):
    import datasets.config
    import huggingface_hub

    root = fill_mirror(recipe(), tmp_path / "cluster")
    assert [path for path in tree(root) if not path.startswith("tokenizers/")] == [
        "datasets/someone--texts/train/b.jsonl",
        "datasets/someone--texts/train/chunk1/a.jsonl.gz",
        "datasets/someone--texts/validation/c.jsonl",
        "fetched.json",
    ]
    index = json.loads((root / "fetched.json").read_text())
    assert sorted(index["whole"]) == ["datasets/someone--texts", "tokenizers/someone--tokens"]
    for name in tree(root):
        content = (root / name).read_bytes()
        known = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        assert name == "fetched.json" or index["files"][name] == known

    asked = recipe(f"offline={root}")
    config = use_mirror(asked)
    assert asked.data.source == "someone/texts"  # the run's own identity is unchanged
    assert config.data.source == str(root / "datasets/someone--texts")
    hub.clear()
    found = build_tokenizer(config.tokenizer, config.data, tmp_path / "unused")
    assert tokenizer_fingerprint(found) == tokenizer_fingerprint(tokenizer)
    assert len(texts_of(config, found, "train")) > 5
    assert "validation/c." in "".join(texts_of(config, found, "validation"))
    assert all(
        "someone" not in call.removeprefix(f"tokenizer {root}/tokenizers/someone") for call in hub
    )
    assert os.environ["HF_HUB_OFFLINE"] == os.environ["HF_DATASETS_OFFLINE"] == "1"
    assert huggingface_hub.constants.HF_HUB_OFFLINE
    assert huggingface_hub.is_offline_mode()
    assert datasets.config.HF_HUB_OFFLINE
    with pytest.raises(huggingface_hub.errors.OfflineModeIsEnabled):
        huggingface_hub.HfApi().dataset_info("someone/texts")


def test_a_full_mirror_asks_for_nothing_and_an_interrupted_one_resumes(
    recipe, hub, tmp_path, monkeypatch
):
    root = tmp_path / "cluster"
    import huggingface_hub

    download = huggingface_hub.hf_hub_download

    def dies(repo, path, **kwargs):
        if path == "train/chunk1/a.json.gz":
            raise KeyboardInterrupt
        return download(repo, path, **kwargs)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", dies)
    with pytest.raises(KeyboardInterrupt):
        fill_mirror(recipe(), root)
    with pytest.raises(
        InputError, match=r"has only a part of data\.source someone/texts; .*nalanda data fetch"
    ):
        use_mirror(recipe(f"offline={root}"))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    hub.clear()
    fill_mirror(recipe(), root)
    assert [call for call in hub if call.startswith(("download", "tokenizer"))] == [
        "download train/chunk1/a.json.gz"
    ]
    assert not [path for path in tree(root) if "partial" in path]
    before = {path: (root / path).read_bytes() for path in tree(root)}
    hub.clear()
    fill_mirror(recipe(), root)
    assert hub == []
    assert before == {path: (root / path).read_bytes() for path in tree(root)}


def test_a_damaged_file_is_named_and_fetched_again(recipe, hub, tmp_path):
    root = fill_mirror(recipe(), tmp_path / "cluster")
    file = root / "datasets/someone--texts/train/b.jsonl"
    whole = file.read_bytes()
    for damage in (lambda: file.write_bytes(whole[:-1]), file.unlink):
        damage()
        with pytest.raises(
            InputError, match=r"b\.jsonl is missing or of another size; with a network"
        ):
            use_mirror(recipe(f"offline={root}"))
        hub.clear()
        fill_mirror(recipe(), root)
        assert [call for call in hub if call.startswith("download")] == ["download train/b.jsonl"]
        assert file.read_bytes() == whole
        use_mirror(recipe(f"offline={root}"))


def test_missing_things_are_named(recipe, hub, tmp_path, no_network):
    with pytest.raises(
        InputError, match=r"has no fetched\.json; .* nalanda data fetch RECIPE --to"
    ):
        use_mirror(recipe(f"offline={tmp_path}"))
    root = fill_mirror(recipe(), tmp_path / "cluster")
    for override, message in {
        "tokenizer=other/tokens": "no tokenizer.path other/tokens",
        "data.source=other/texts": "no data.source other/texts",
        "data.name=en": "no data.source someone/texts",
        "data.train_split=more": "no data.source someone/texts",
        "data.source=https://me:geheim@host/a.jsonl?sig=geheim": r"no data.source https://\*\*\*@host/a.jsonl\?\*\*\*;",
        "model.init_from=some/model": "no model.init_from some/model",
    }.items():
        with pytest.raises(InputError, match=message) as caught:
            use_mirror(recipe(f"offline={root}", override))
        assert "geheim" not in str(caught.value)
        assert "\n" not in str(caught.value)


def test_local_paths_are_unchanged(recipe, tmp_path, no_network):
    (tmp_path / "here.jsonl").write_text('{"text": "a"}\n')
    config = recipe(
        "offline=/nowhere",
        "tokenizer=mistral",
        f"data.source={tmp_path}/here.jsonl",
        "data.validation_source=python",
    )
    assert needs(config) == []
    assert use_mirror(config) == config
    assert needs(recipe("tokenizer=/no/such/tokens", "data.source=/no/such/texts")) == []
    assert use_mirror(recipe()) is not None  # without `offline` nothing changes


def test_a_part_of_a_large_dataset(recipe, hub, tmp_path):
    root = fill_mirror(recipe(), tmp_path / "cluster", max_shards=1)
    files = [path for path in tree(root) if path.startswith("datasets")]
    assert files == [
        "datasets/someone--texts/train/b.jsonl",
        "datasets/someone--texts/validation/c.jsonl",
    ]
    fill_mirror(recipe(), root)
    assert len([path for path in tree(root) if path.startswith("datasets")]) == 3


def test_files_of_other_kinds_become_documents(recipe, hub, tmp_path, tokenizer):
    hub.builder.config.data_files = {"train": ["hf://datasets/someone/texts/a.csv"]}
    config = recipe()
    online = texts_of(config, tokenizer, "validation")
    root = fill_mirror(config, tmp_path / "cluster")
    part = root / "datasets/someone--texts"
    assert tree(part) == [
        f"{split}/part-0000{i}.jsonl.zst" for split in ("train", "validation") for i in range(4)
    ]
    assert not [call for call in hub if call.startswith("download")]
    config = use_mirror(recipe(f"offline={root}"))
    assert texts_of(config, tokenizer, "validation") == online
    from nalanda.data.corpus import DocumentStream, open_corpus

    stream = DocumentStream(open_corpus(config.data, "train"), seed=0, buffer_size=0, epochs=1)
    assert {document.source for document in stream} == {"Web"}


def test_models(recipe, hub, tmp_path):
    config = recipe("model={init_from: some/model, auto: some/config}")
    assert [(need.key, need.path) for need in needs(config)][-2:] == [
        ("model.auto", "configs/some--config"),
        ("model.init_from", "models/some--model"),
    ]
    root = fill_mirror(config, tmp_path / "cluster")
    assert tree(root / "models/some--model") == [
        "config.json",
        "model.safetensors",
    ]  # no pickle, no code
    assert tree(root / "configs/some--config") == ["config.json"]
    config = use_mirror(
        recipe("model={init_from: some/model, auto: some/config}", f"offline={root}")
    )
    assert config.model == {
        "init_from": str(root / "models/some--model"),
        "auto": str(root / "configs/some--config"),
    }
    assert [need.path for need in needs(recipe("model={init_from: a/b, auto: a/b}"))][-2:] == [
        "models/a--b"
    ] * 2
    assert [need.key for need in needs(recipe("model={auto: llama}"))] == [
        "tokenizer.path",
        "data.source",
    ]


def test_mixtures_and_urls(recipe, hub, server, tmp_path, tokenizer, monkeypatch):
    for path in ("train/b.jsonl", "validation/c.jsonl"):
        server.files[path] = jsonl(path, 20)
    server.files["lone.jsonl"] = jsonl("lone", 20)
    server.files["all.urls"] = b"train/b.jsonl\nvalidation/c.jsonl\n"
    server.faults["train/b.jsonl"] = ["503", "half"]
    mixture = [
        {"name": "web", "source": server.url("all.urls"), "weight": 1},
        {"name": "lone", "source": [server.url("lone.jsonl") + "?sig=geheim"], "weight": 1},
        {"name": "hub", "source": "someone/texts", "weight": 2, "config": "en"},
    ]
    given = f"data={json.dumps({'mixture': mixture, 'seq_len': 16, 'workers': 0})}"
    config = recipe(given)
    root = fill_mirror(config, tmp_path / "cluster")
    host = f"127.0.0.1-{server.server_port}"
    files = [path for path in tree(root) if path.startswith("urls")]
    assert files[:2] == [
        f"urls/{host}--all.urls/train/{host}/train/b.jsonl",
        f"urls/{host}--all.urls/validation/{host}/validation/c.jsonl",
    ]
    assert len(files) == 3
    assert files[2].startswith("urls/list-")
    assert files[2].endswith(f"/{host}/lone.jsonl")
    assert "geheim" not in (root / "fetched.json").read_text()
    asked = len(server.asked)
    local = use_mirror(recipe(given, f"offline={root}"))
    assert [need.path for need in needs(local)] == []
    assert (root / "datasets/someone--texts--en/train/b.jsonl").is_file()
    found = "".join(texts_of(local, tokenizer, "train"))
    assert all(name in found for name in ("train/b.jsonl", "lone", "train/chunk1"))
    assert len(server.asked) == asked


def test_a_server_that_keeps_failing(recipe, hub, server, tmp_path):
    server.files["a.jsonl"], server.faults["a.jsonl"] = jsonl("a", 5), ["503"] * 3
    config = recipe(f"data.source={server.url('a.jsonl')}", "data.retries=2")
    with pytest.raises(SourceUnavailable, match="failed 3 times in a row"):
        fill_mirror(config, tmp_path / "cluster")
    root = fill_mirror(config, tmp_path / "cluster")
    assert len([path for path in tree(root) if path.startswith("urls")]) == 1


def test_the_command(tmp_path, hub, recipe):
    run = CliRunner().invoke
    arguments = ["data", "fetch", str(tmp_path / "recipe.yaml"), "data.seq_len=8"]
    done = run(
        nalanda_cli.app, [*arguments, "--to", str(tmp_path / "cluster"), "--max-shards", "1"]
    )
    assert done.exit_code == 0, done.output
    assert (tmp_path / "cluster/fetched.json").is_file()
    assert run(nalanda_cli.app, arguments).exit_code == 2


# ------------------------------ evaluation


def test_tasks_are_fetched_in_the_form_that_eval_reads(tmp_path, monkeypatch):
    import datasets
    from nalanda_eval.task_data import _official, read_rows

    arc = {
        "question": "?",
        "choices": {"text": ["a", "b"], "label": ["A", "B"]},
        "answerKey": "A",
        "id": "x",
    }
    rows = {
        ("EleutherAI/lambada_openai", "default", "test"): [{"text": "a b c é"}] * 2,
        ("allenai/ai2_arc", "ARC-Challenge", "test"): [arc],
        ("baber/piqa", None, "validation"): [{"goal": "g", "sol1": "1", "sol2": "2", "label": 1}],
    }
    fails = [ConnectionError("no route")]

    def load_dataset(path, name, split):
        if fails:
            raise fails.pop()
        return datasets.Dataset.from_list(rows[path, name, split])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    arguments = [
        "eval",
        "--fetch",
        str(tmp_path / "tasks"),
        "--tasks",
        "lambada_openai,arc_challenge,piqa",
    ]
    done = CliRunner().invoke(nalanda_cli.app, arguments)
    assert done.exit_code == 0, done.output
    names = ["arc_challenge_test", "lambada_test", "piqa_val"]
    assert tree(tmp_path / "tasks") == [f"{name}.jsonl.gz" for name in names]
    for name, expected in zip(
        ("arc_challenge", "lambada_openai", "piqa"), (arc, {}, {}), strict=True
    ):
        found = read_rows(_official(name, tmp_path / "tasks"))
        assert (
            found[0] == {key: expected[key] for key in expected if key != "id"}
            or name != "arc_challenge"
        )
    assert read_rows(_official("lambada_openai", tmp_path / "tasks")) == [{"text": "a b c é"}] * 2
    monkeypatch.setattr(datasets, "load_dataset", None)
    assert "exists already" in CliRunner().invoke(nalanda_cli.app, arguments).output
    with pytest.raises(
        InputError, match="mmlu: no data to fetch; choose from table4, recall, all, wikitext"
    ):
        CliRunner().invoke(nalanda_cli.app, [*arguments[:-1], "mmlu"], catch_exceptions=False)


# ------------------------------ the tokenizer


def test_the_fingerprint_depends_on_what_decides_tokens(tokenizer, tmp_path):
    import subprocess

    first = tokenizer_fingerprint(tokenizer)
    tokenizer.save_pretrained(tmp_path)
    reloaded = build_tokenizer(TokenizerConfig(path=str(tmp_path)), DataConfig(), tmp_path)
    assert tokenizer_fingerprint(reloaded) == first
    reloaded("a b c", truncation=True, max_length=2)
    assert tokenizer_fingerprint(reloaded) == first
    program = (
        "import hashlib, sys, tokenizers; backend = tokenizers.Tokenizer.from_file(sys.argv[1]);"
        "print(hashlib.blake2b(backend.to_str().encode(), digest_size=16).hexdigest())"
    )
    other = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "tokenizer.json")],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "7"},
    )
    assert other.stdout.strip() == first

    backend = json.loads(tokenizer.backend_tokenizer.to_str())

    def changed(change):
        import transformers

        state = json.loads(json.dumps(backend))
        change(state)
        kind = transformers.PreTrainedTokenizerFast
        return tokenizer_fingerprint(kind(tokenizer_object=Tokenizer.from_str(json.dumps(state))))

    assert (
        changed(
            lambda state: (
                state["model"]["merges"].append(["a", "b"])
                or state["model"]["vocab"].update(ab=257)
            )
        )
        != first
    )
    assert changed(lambda state: state.update(normalizer={"type": "NFC"})) != first


def test_mistral_without_its_package(monkeypatch, tmp_path):
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "mistral_common" else find(name)
    )
    for name in ("mistral", "mistral-common"):
        with pytest.raises(InputError, match="pip install mistral-common") as caught:
            build_tokenizer(TokenizerConfig(path=name), None, tmp_path)  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)


def test_mistral_out_of_its_package(recipe, tmp_path):
    pytest.importorskip("mistral_common")
    found = build_tokenizer(TokenizerConfig(path="mistral"), recipe().data, tmp_path)
    assert (len(found), found.bos_token_id, found.eos_token_id) == (32000, 1, 2)
    assert found("Hello world").input_ids == [1, 22557, 1526]
    from sentencepiece import SentencePieceProcessor

    model = SentencePieceProcessor(model_file=str(mistral_model()))
    for text in (
        "def f(x):\n\n    return  x  # Größe 漢字\t",
        "  leading",
        "🦜🦜 \u200d",
        "½ e\u0301 \n \n",
    ):
        assert found(text).input_ids == [1, *model.encode(text)]


# ------------------------------ secrets


def test_stored_files_have_no_password(recipe, tmp_path):
    url = "https://me:geheim@host/a.jsonl?X-Amz-Signature=geheim"
    config = recipe(f"data.source={url}")
    assert "geheim" not in config.to_yaml()
    assert config.data.source == url
    saved = tmp_path / "config.yaml"
    saved.write_text(config.to_yaml())
    again = load_config(saved)
    assert again.to_dict() == config.to_dict()  # so the run resumes, also with another signature
    with pytest.raises(InputError, match=r"never stored; give data.source as it was"):
        open_urls(again.data, again.data.source, "train")
    listed = recipe(f"data.source=['{url}', 'https://host/b.jsonl']")
    assert "geheim" not in listed.to_yaml()
