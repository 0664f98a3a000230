"""Mixers, maps, optimizers and readers from outside the package: `plugins` of a recipe."""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from nalanda_kernels import KERNELS, use_backend
from training import ROOT
from transformers import AutoModelForCausalLM

import nalanda
from nalanda import NalandaConfig, NalandaForCausalLM
from nalanda.common.errors import InputError
from nalanda.common.plugins import imported
from nalanda.config.load import load_config
from nalanda.config.schema import OPTIMIZERS
from nalanda.data.documents import Document, register_reader
from nalanda.data.readers import READERS
from nalanda.model import FEATURE_MAPS, MIXERS, Mixer, plugins
from nalanda.model.delta import GatedDeltaNet
from nalanda.model.feature_maps import NaLa
from nalanda.model.linear import LinearAttention
from nalanda.model.mixers import faults_of
from nalanda.model.one_token import is_described
from nalanda.testing import (
    VOCAB,
    build,
    cached_is_uncached,
    check_feature_map,
    check_mixer,
    ids,
    in_threads,
    logits,
)
from nalanda.train.export import export
from nalanda.train.loop import train
from nalanda.train.optim import BUILDERS, register_optimizer

EXAMPLE = ROOT / "examples" / "my_mixer"
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
TABLES = (
    *(MIXERS, FEATURE_MAPS, plugins.MODULES, BUILDERS, READERS, sys.modules),
    KERNELS["delta_rule"],
)


@pytest.fixture(autouse=True)
def forget():
    """Undoes what a test registers and imports, at its end or when the test asks."""
    kept = [dict(table) for table in TABLES]
    lists = (sys.path, imported, OPTIMIZERS)
    copies = [list(one) for one in lists]

    def undo():
        for table, before in zip(TABLES, kept, strict=True):
            for name in set(table) - set(before):
                del table[name]
        for one, before in zip(lists, copies, strict=True):
            one[:] = before

    yield undo
    undo()


@pytest.fixture
def my_mixer(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLE)
    import my_mixer

    return my_mixer


def write(folder: Path, name: str, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.py").write_text(text)
    return folder / f"{name}.py"


def run(program: str, folder: Path, **environment: str) -> subprocess.CompletedProcess:
    settings = {**os.environ, "HF_MODULES_CACHE": str(folder / "modules"), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**settings, **environment},
        cwd=folder,
        capture_output=True,
        text=True,
    )


WITHOUT_NALANDA = """
import sys
for name in ("nalanda", "nalanda_kernels", "nalanda_eval"):
    sys.modules[name] = None
import torch
from transformers import AutoModelForCausalLM
"""
COMPARE = """
model = AutoModelForCausalLM.from_pretrained("{name}", trust_remote_code={trust}).eval()
tokens = torch.randint(0, 61, (2, 9), generator=torch.Generator().manual_seed(1))
with torch.no_grad():
    assert torch.equal(model(tokens, use_cache=False).logits, torch.load("expected.pt"))
"""


# ------------------------------ the example


@pytest.mark.slow
def test_the_example_has_every_property(my_mixer):
    check_mixer("forgetful")
    check_mixer("forgetful", mixer_options={"forget": False})
    check_feature_map("squared_relu")


@pytest.mark.slow
def test_the_files_of_the_page_pass_their_tests(tmp_path, monkeypatch):
    """docs/extending.md: each block of Python is a file, which its first line names."""
    files = dict(re.findall(r"^```python\n# (\w+)\.py\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE))
    assert len(files) == PAGE.count("```python") == 11
    tests = [name for name in files if name.startswith("test_")]
    assert tests == ["test_cubed", "test_powers", "test_fading", "test_tsv_reader", "test_looped"]
    for name, text in files.items():
        write(tmp_path, name, text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with warnings.catch_warnings(action="ignore"):  # that pytest was imported before
        assert pytest.main([*(f"{name}.py" for name in tests), "-p", "no:cacheprovider"]) == 0


@pytest.mark.slow
def test_trains_exports_and_loads_where_nalanda_is_not(tmp_path, recipe, fresh_accelerate, forget):
    """With a recipe of the example's model over a small corpus; the plugin stands beside the recipe."""
    shutil.copy(EXAMPLE / "my_mixer.py", tmp_path)
    text = (
        (EXAMPLE / "recipe.yaml").read_text().replace("source: python", f"source: {recipe.parent}")
    )
    (tmp_path / "recipe.yaml").write_text(text)
    run_dir = tmp_path / "run"
    settings = [
        f"output_dir={run_dir}",
        "train.steps=3",
        "tokenizer.vocab_size=320",
        "train.cpu_threads=1",
    ]
    train(load_config(tmp_path / "recipe.yaml", settings))
    assert "plugins:\n- my_mixer\n" in (run_dir / "config.yaml").read_text()
    for folder in (run_dir / "final", run_dir / "checkpoints" / "step-3"):
        assert json.loads((folder / "config.json").read_text())["plugins"] == ["my_mixer"]
        assert "from .mixers import register_mixer" in (folder / "my_mixer.py").read_text()

    model = AutoModelForCausalLM.from_pretrained(run_dir / "final")
    with use_backend("torch"):  # there are no kernels there
        torch.save(logits(model, ids(2, 9)), tmp_path / "expected.pt")
    exporting = "from pathlib import Path; from nalanda.train.export import export; export(Path('run'), Path('out'))"
    done = run(
        exporting, tmp_path, PYTHONSAFEPATH="1"
    )  # as the console script, without the working directory
    assert done.returncode == 0, done.stderr[-2000:]
    (tmp_path / "my_mixer.py").unlink()
    forget()
    with pytest.raises(
        InputError, match=r"step-3: plugins: my_mixer is not importable; import it first"
    ):
        export(run_dir, tmp_path / "exported")
    program = WITHOUT_NALANDA + COMPARE.format(name="run/final", trust=True)
    done = run(program + 'model.save_pretrained("again")', tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    for name in json.loads((tmp_path / "again" / "config.json").read_text())["auto_map"].values():
        assert (tmp_path / "again" / f"{name.partition('.')[0]}.py").exists()
    done = run(WITHOUT_NALANDA + COMPARE.format(name="again", trust=True), tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
def test_loads_with_nalanda(my_mixer, tmp_path):
    """If the plugin is importable, else by trust_remote_code, else not."""
    model = build("forgetful", dtype=torch.float32)
    model.save_pretrained(tmp_path / "model")
    torch.save(logits(model, ids(2, 9)), tmp_path / "expected.pt")
    program = "import os, torch, nalanda\nfrom transformers import AutoModelForCausalLM\n"
    plain, trusted = (
        program + COMPARE.format(name="model", trust=trust) for trust in (False, True)
    )
    done = run(plain, tmp_path, PYTHONPATH=os.pathsep.join([*sys.path[1:], str(EXAMPLE)]))
    assert done.returncode == 0, done.stderr[-2000:]
    # A file beside the weights is code from elsewhere, even where it stands in the working directory.
    refused = f"""{program}
for place, name in ((".", "model"), ("model", ".")):
    os.chdir(place)
    try:
        AutoModelForCausalLM.from_pretrained(name)
    except ValueError as error:
        assert str(error).startswith("plugins: my_mixer is not importable; import it first"), error
        assert "trust_remote_code" in str(error)
    else:
        raise AssertionError(name)
os.chdir("..")
"""
    again = "model.save_pretrained('again')\n" + COMPARE.format(name="again", trust=False)
    done = run(refused + trusted + again, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    files = [(tmp_path / name / "my_mixer.py").read_text() for name in ("model", "again")]
    assert files[0] == files[1]


# ------------------------------ the checks find faults


FAULTS = {  # property → methods of a class that lacks it
    "later logits alone move": """
    def mix(self, inputs, *others):
        o, new = super().mix(inputs, *others)
        return o + inputs.v.mean(1, True), new
""",
    "mix is its weights times v": """
    def mix(self, *inputs):
        o, new = super().mix(*inputs)
        return o + 1, new
""",
    "cached is uncached: state_spec": """
    def state_spec(self, T):
        return {}
""",
    "every parameter learns": """
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.idle = torch.nn.Linear(2, 2)
""",
    "ValueError: nothing sets scale of Faulty": """
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.scale = torch.nn.Parameter(torch.empty(2))
""",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_checks_name_the_property(fault, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    write(
        tmp_path,
        "faulty",
        f"""
import torch
from nalanda.model import register_mixer
from nalanda.model.linear import LinearAttention

class Faulty(LinearAttention):
{FAULTS[fault]}
register_mixer("faulty", Faulty)
""",
    )
    import faulty  # noqa: F401

    with pytest.raises(AssertionError, match=f"mixer faulty: .*{fault}"):
        check_mixer("faulty")


# ------------------------------ refusals


class Bare(Mixer):
    pass


class Changed(GatedDeltaNet):
    def read_out(self, o, inputs, x):
        return super().read_out(2 * o, inputs, x)


class Gentler(GatedDeltaNet):
    def gates(self, projected, inputs):
        return super().gates(projected, inputs)._replace(beta=projected["b"] / 4)


class Doubled(LinearAttention):
    def mix(self, inputs, seq, state):
        o, new = super().mix(inputs, seq, state)
        return 2 * o, new


class Positional(LinearAttention):
    def __init__(self, config, layer_idx, scale):
        super().__init__(config, layer_idx)


class Older(LinearAttention):
    state_gates = ("b_proj",)


class OfHeads(LinearAttention):
    def gates(self, heads):
        return {"g": -heads["a"].abs()}


class Switched(LinearAttention):
    gated = True


class Uncut(LinearAttention):
    rule = replace(LinearAttention.rule, cut=False)


def test_rows_of_a_mixer_that_knows_no_parts_are_not_cut(monkeypatch):
    monkeypatch.setitem(MIXERS, "uncut", Uncut)
    model = build("uncut")
    with pytest.raises(ValueError, match="mixer 'uncut' does not serve rows that are cut"):
        in_threads(1, lambda context: model(ids(1, 4), context=context))


@pytest.mark.parametrize(
    ("name", "mixer", "says"),
    [
        ("mine", 3, "is not a subclass of Mixer"),
        (
            "mine",
            Bare,
            "no text `equation`; .*no text `source`; does not define mix.*state_spec.*flops",
        ),
        ("mine", Positional, "options with defaults"),
        ("mine", Older, r"has `state_gates`, which is gate_parameters\(\) now"),
        ("mine", OfHeads, r"needs gates\(self, projected, inputs\)"),
        ("mine", Switched, r"has `gated`, which is rule\.gated now"),
        ("gla", LinearAttention, "nalanda.model has a mixer of that name; choose another"),
    ],
)
def test_registering_checks_the_mixer(name, mixer, says):
    with pytest.raises(ValueError, match=says) as error:
        nalanda.register_mixer(name, mixer)
    assert "\n" not in str(error.value)
    assert name == "gla" or "base.py" in str(error.value)
    assert "mine" not in MIXERS


@pytest.mark.parametrize("name", MIXERS)
def test_a_mixer_that_changes_nothing_of_its_base_is_accepted(name):
    assert not [*faults_of(type("Mine", (MIXERS[name],), {}))]


@pytest.mark.parametrize("mixer", [Changed, Gentler, Doubled])
def test_a_subclass_decodes_as_it_reads_without_its_parents_kernel(mixer, monkeypatch):
    """A subclass may change a step, so its parent's rule does not speak of it."""
    monkeypatch.setitem(MIXERS, "mine", mixer)
    model = build("mine")
    assert not is_described(model.model.layers[0].mixer)
    cached_is_uncached(model)


@pytest.mark.parametrize("name", MIXERS)
def test_a_rule_says_what_a_mixer_computes(name):
    """Also where a sharding wrapper has made the module's class a subclass."""
    mixer = build(name).model.layers[0].mixer
    own = ("soft", "comba", "rwkv7", "mamba3", "forgetting")
    assert is_described(mixer) is (name not in own)
    mixer.__class__ = type("Sharded", (type(mixer),), {"unshard": lambda self: None})
    assert is_described(mixer) is (name not in own)


class Sharper(NaLa):
    def exponents(self, n):
        return 4.0, 2.0


class Rounder(NaLa):
    equation = "mine"
    kernel_settings = NaLa.kernel_settings

    def __init__(self, *, num_heads, head_dim):
        super().__init__(num_heads=num_heads, head_dim=head_dim, power=3.0)


def test_kernels_do_not_compute_a_map_whose_methods_a_subclass_changed():
    sizes = {"num_heads": 1, "head_dim": 8}
    assert NaLa(**sizes).fused
    assert Sharper(**sizes).fused is None
    assert Rounder(**sizes).fused == NaLa(**sizes, power=3.0).fused
    assert type("Sharpest", (Sharper,), {})(**sizes).fused is None


class Map(nalanda.model.FeatureMap):
    def __init__(self, *, num_heads, head_dim):
        super().__init__()
        self.w = torch.nn.Parameter(torch.empty(head_dim))

    def forward(self, q, k):
        return q, k


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (nalanda.model.FeatureMap, "does not define forward"),
        (
            Map,
            "no `equation`; has no `source`; has no `feature_dim`; .* no Fp32Module; .* no initial",
        ),
        (torch.nn.ReLU, "not a subclass of FeatureMap"),
    ],
)
def test_registering_checks_the_map(kind, says):
    with pytest.raises(ValueError, match=says):
        nalanda.register_feature_map("mine", kind)


PLUGIN = """
{line}
from nalanda.model import FeatureMap, register_feature_map

class Twice(FeatureMap):
    equation, source, nonnegative = "2x", "-", False

    def __init__(self, *, num_heads, head_dim):
        super().__init__()
        self.feature_dim = head_dim

    def forward(self, q, k):
        return 2 * q.float(), 2 * k.float()

register_feature_map("twice_{name}", Twice)
"""


@pytest.mark.parametrize(
    ("name", "line", "says"),
    [
        (
            "takes_yaml",
            "import yaml",
            "takes_yaml.py, line 2: imports yaml; checkpoints carry this file",
        ),
        (
            "takes_train",
            "from nalanda.train.optim import register_optimizer",
            "line 2: imports nalanda.train.optim; ",
        ),
        ("takes_sibling", "import nalanda.model.ops", "line 2: imports nalanda.model.ops; "),
        ("takes_the_package", "from nalanda import model", "line 2: imports nalanda; "),
        ("takes_testing", "from nalanda import testing", "line 2: imports nalanda; "),
        ("layers", "", "must be one flat file, named unlike those of nalanda.model"),
    ],
)
def test_what_cannot_travel_is_refused(name, line, says, tmp_path, monkeypatch, recipe):
    """When it is saved, and before a run begins."""
    write(tmp_path / "code", name, PLUGIN.format(name=name, line=line))
    monkeypatch.chdir(tmp_path / "code")
    overrides = [f"plugins=[{name}]", "model.mixer=deltanet", f"model.feature_map=twice_{name}"]
    with pytest.raises(InputError, match=says) as error:
        load_config(recipe, overrides)
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=says):
        build("deltanet", f"twice_{name}").save_pretrained(tmp_path / "model")


LAYOUTS = {
    "form_feed": "\f",
    "line_separator": "'\u2028'",
    "after_a_word": "beta = 'β'; from nalanda.model.layers import at_least_fp32 as φ",
    "two_in_a_line": "from nalanda.model.rule import Rule; from nalanda.model.ops import map_features",
    "three_lines": "from nalanda.model import (\n    ops,\n)",
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_copy_loads_however_its_file_is_laid_out(name, tmp_path, monkeypatch, forget):
    monkeypatch.syspath_prepend(tmp_path)
    file = write(tmp_path, name, PLUGIN.format(name=name, line=LAYOUTS[name]))
    file.write_text(file.read_text(encoding="utf-8"), encoding="utf-8-sig")
    importlib.import_module(name)
    model = build("deltanet", f"twice_{name}", dtype=torch.float32)
    model.save_pretrained(tmp_path / "model")

    file.unlink()
    forget()
    again = NalandaForCausalLM.from_pretrained(tmp_path / "model", trust_remote_code=True)
    assert type(again.model.layers[0].mixer.feature_map).__module__ == f"nalanda.model.{name}"
    assert torch.equal(logits(again, ids(2, 9)), logits(model, ids(2, 9)))


def test_plugins_that_cannot_be_imported(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        InputError, match=r"plugins: no_such_one cannot be imported: .*; install it or put its"
    ):
        load_config(recipe, ["plugins=[no_such_one]"])
    write(tmp_path, "broken", "1 / 0")
    with pytest.raises(InputError, match=r"plugins: broken cannot be imported: .*division by zero"):
        load_config(recipe, ["plugins=[broken]"])
    with pytest.raises(InputError, match="unknown mixer 'forgetful'"):
        load_config(recipe, ["model.mixer=forgetful"])


def test_a_plugin_is_named_by_its_path(recipe, tmp_path, monkeypatch, forget):
    """From where it is typed, and the run's own recipe from anywhere."""
    for folder in ("mine", "work", "elsewhere"):
        (tmp_path / folder).mkdir()
    for folder in ("mine", "elsewhere"):
        write(tmp_path / folder, "by_path", PLUGIN.format(name="by_path", line=""))
    monkeypatch.chdir(tmp_path / "work")
    chosen = ["model.mixer=deltanet", "model.feature_map=twice_by_path"]
    config = load_config(recipe, ["plugins=[../mine/by_path.py]", *chosen])
    assert config.plugins == [str(tmp_path / "mine" / "by_path.py")]
    assert "by_path" in imported  # as processes that it starts import it

    stored = tmp_path / "config.yaml"
    stored.write_text(config.to_yaml())
    forget()
    monkeypatch.chdir(tmp_path)
    assert load_config(stored).plugins == config.plugins
    assert "twice_by_path" in FEATURE_MAPS

    with pytest.raises(
        InputError, match=r"elsewhere/by_path\.py: .*/mine/by_path\.py has .* rename"
    ):
        load_config(recipe, ["plugins=[elsewhere/by_path.py]", *chosen])


@pytest.mark.parametrize("place", ["elsewhere", "run"])
@pytest.mark.parametrize("plugin", ["came_along", "came_along.py"])
def test_a_folder_with_weights_brings_no_plugin(place, plugin, recipe, tmp_path, monkeypatch):
    """`nalanda verify` of a run from elsewhere must not run its code, also where one stands in it."""
    run_dir = tmp_path / "run"
    for folder in (run_dir / "checkpoints", tmp_path / "elsewhere"):
        folder.mkdir(parents=True)
    write(run_dir, "came_along", f"open({str(tmp_path / 'ran')!r}, 'w')")
    stored = run_dir / "config.yaml"
    stored.write_text(f"plugins: [{plugin}]\n{recipe.read_text()}")
    monkeypatch.chdir(tmp_path / place)
    with pytest.raises(InputError, match=r"plugins: came_along.* (cannot be imported|no such)"):
        load_config(stored)
    assert not (tmp_path / "ran").exists()


def test_a_config_imports_plugins_only(tmp_path, monkeypatch):
    """Config files come from anywhere: what they name is imported if it is a plugin that a user put there."""
    monkeypatch.syspath_prepend(tmp_path)
    write(tmp_path, "elsewhere", "open('ran', 'w')  # register_mixer")
    write(tmp_path, "reaching", "import yaml  # register_mixer")
    sizes = {"vocab_size": VOCAB, "hidden_size": 24, "num_heads": 2, "num_hidden_layers": 1}
    for name in ("this", "os.path", "reaching", "../elsewhere", "elsewhere"):
        with pytest.raises(ValueError, match=r"plugins: .* is not importable|imports yaml"):
            NalandaForCausalLM(NalandaConfig(**sizes, mixer="unheard_of", plugins=[name]))
    assert "this" not in sys.modules
    assert "elsewhere" not in sys.modules


# ------------------------------ optimizers and readers


@pytest.mark.slow
def test_a_run_with_an_optimizer_and_a_reader(tmp_path, monkeypatch, recipe, fresh_accelerate):
    write(
        tmp_path,
        "my_parts",
        """
import torch
from nalanda.data.documents import Document, register_reader
from nalanda.train.optim import register_optimizer

def momentum(groups, config):
    return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum)

def read_records(path, fields, start):
    for i, text in enumerate(path.read_text().split("%"), 1):
        if i > start:
            yield Document(text), i

register_optimizer("momentum", momentum)
register_reader(".records", read_records)
""",
    )
    (tmp_path / "corpus").mkdir()
    texts = [
        json.loads(line)["text"] for line in (recipe.parent / "a.jsonl").read_text().splitlines()
    ]
    (tmp_path / "corpus" / "a.records").write_text("%".join(texts))
    monkeypatch.chdir(tmp_path)
    settings = [
        *("plugins=[my_parts]", "optim.name=momentum", f"data.source={tmp_path / 'corpus'}"),
        *("data.workers=2", "checkpoint.every=2", f"output_dir={tmp_path / 'run'}"),
    ]
    with pytest.raises(
        InputError, match=r"optim.name: expected one of adamw, muon; got 'momentum'"
    ):
        load_config(recipe, settings[1:])
    train(load_config(recipe, [*settings, "train.steps=2"]))
    train(load_config(recipe, [*settings, "train.steps=4"]))
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4]

    from nalanda.config.schema import TokenizerConfig
    from nalanda.data.prepare import prepare

    data = load_config(recipe, settings).data
    index = prepare(data, TokenizerConfig(train="bpe", vocab_size=320), tmp_path / "set", workers=2)
    assert index["train"]["documents"] > 1000


def test_names_that_are_taken():
    with pytest.raises(ValueError, match=r"register_optimizer\('muon'\): the name is taken"):
        register_optimizer("muon", lambda groups, config: None)
    with pytest.raises(ValueError, match=r"register_reader\('.txt'\): the suffix is taken"):
        register_reader(".txt", lambda path, fields, start: iter([(Document(""), 1)]))
    with pytest.raises(ValueError, match=r"expected a suffix such as .csv"):
        register_reader("csv", lambda path, fields, start: iter(()))


def test_every_plugin_of_a_config_is_looked_at(tmp_path, monkeypatch):
    """One that is loaded, or that is missing, hides none behind it."""
    for name in ("plugin_on_the_path", "another_on_the_path"):
        (tmp_path / f"{name}.py").write_text("from nalanda.model import register_mixer\n")
    names = ["known", "plugin_on_the_path", "no_such_module", "another_on_the_path"]
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(plugins.MODULES, "a mixer", "known")
    assert plugins.missing_plugins(names) == names[1:]  # they register nothing
    assert sys.modules.pop("plugin_on_the_path")
    assert sys.modules.pop("another_on_the_path")


@pytest.mark.parametrize("name", ["no_such_module_anywhere", "sys", "not a name", "textwrap"])
def test_only_files_that_register_something_are_imported_for_a_config(name):
    assert plugins.missing_plugins([name]) == [name]
