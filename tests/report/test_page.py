"""The page of a run: its text, what it holds back, and how a browser shows it."""

import json
import os
import platform
import re
import shutil
import subprocess
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

import nalanda_cli
from nalanda.common.errors import InputError
from nalanda.report import page as pages
from nalanda.report.page import write_page
from nalanda.report.page_run import read_page_run
from nalanda.report.panels import TITLES, draw_panels, read_points

ZOO = Path(__file__).parents[2] / "docs" / "zoo"
EVIL = "<script>console.error('run')</script>"


class Texts(HTMLParser):
    """The texts of a page outside its scripts, and every attribute that may load something."""

    def __init__(self, page: str):
        super().__init__()
        self.inside: list[str] = []
        self.words: list[str] = []
        self.links: list[str] = []
        self.feed(page)
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attrs):
        self.inside.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href", "srcset", "data")]

    def handle_endtag(self, tag):
        while self.inside and self.inside.pop() != tag:
            pass

    def handle_data(self, data):
        if not {"script", "style"} & set(self.inside):
            self.words.append(data)


@pytest.fixture
def runs(tmp_path) -> list[Path]:
    """A finished run, and one with another rate that was interrupted and has events, but no validation."""
    whole = shutil.copytree(ZOO / "demo", tmp_path / "whole")
    other = tmp_path / "b <i>&amp;"
    other.mkdir()

    config = yaml.safe_load((whole / "config.yaml").read_text())
    config["optim"]["lr"] = 0.123
    config["data"]["source"] = "https://me:secret@server/text"
    config["plugins"] = [EVIL]
    (other / "config.yaml").write_text(yaml.safe_dump(config))
    facts = {"state": "interrupted", "step": 300, "versions": {"torch": "9.8.7"}}
    (other / "run.json").write_text(json.dumps(facts))

    lines = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    # The zoo's run is from before its wait for rows was measured.
    lines = [line | {"data_seconds": 0.01} if "loss" in line else line for line in lines]
    (whole / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    lines = [line for line in lines if line["step"] <= 300 and "val_loss" not in line]
    lines[3] |= {"loss": "nan"}
    lines += [
        {"step": 55, "event": "skipped", "reason": EVIL, "loss": "inf"},
        {"step": 61, "event": "rollback", "reason": "went back to step-50"},
        {
            "step": 66,
            "event": "stage",
            "name": "anneal",
            "reason": "anneal: x",
            "tokens": 65 * 2048,
        },
        {"step": 70, "event": "loss scale", "reason": "8 → 4, gradients overflowed fp16"},
        {"step": 80, "event": "slow rank", "reason": "rank 1 on node-1 waits for rows"},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (other / "metrics.jsonl").write_text(text + '{"step": 310, "lo')
    return [whole, other]


@pytest.mark.slow
def test_the_page_is_one_file_with_all_that_a_run_has(runs):
    file = write_page(runs, samples=[[("def <x>", "\n    return 1 & 2")], []])
    assert file == runs[0].parent / "report.html"
    assert file.stat().st_size < 1_500_000
    page = file.read_text(encoding="utf-8")
    texts = Texts(page)

    assert not texts.links
    assert not re.search(r"@import|url\(\s*['\"]?http|fetch\(['\"]http", page)
    assert "default-src 'none'" in page

    # Bits a byte are the validation loss in another unit.
    titles = re.findall("<figcaption>(.*?)</figcaption>", page)
    assert titles == [title for key, title in TITLES.items() if key not in ("val_loss", "kl")]
    assert page.count('data-root-id="') == len(titles)
    for part in (
        "state",
        "2.37 M",
        "× skipped",
        "▼ rollback",
        "◆ loss scale",
        "● slow rank",
        "9.8.7",
    ):
        assert part in texts.text
    assert "optim.lr 0.006 0.123" in texts.text
    assert "output_dir 0" not in texts.text
    assert "hidden_size: 256" in texts.text  # of the recipe, folded away
    assert page.count("<details>") == 3
    assert 'http-equiv="refresh"' not in page


def test_foreign_text_is_escaped_and_passwords_are_left_out(runs):
    page = write_page(runs, samples=[[], [(EVIL, EVIL)]]).read_text(encoding="utf-8")
    texts = Texts(page)
    assert EVIL not in page
    assert texts.text.count(EVIL) >= 4  # the event, the recipe, the differing setting, the sample
    assert "b <i>&amp;" in texts.text
    assert "<i>" not in page.replace("b &lt;i&gt;", "")
    assert "2 runs, one seed each:" in texts.text
    assert "secret" not in unescape(page)
    assert "https://***@server" in texts.text


@pytest.fixture
def posted(runs) -> Path:
    """A finished run with its model's folder, evaluations of it and of another model, and baselines."""
    run = runs[0]
    (run / "final").mkdir()
    (run / "final" / "config.json").write_text('{"model_type": "nalanda", "is_decoder": true}')
    (run / "final" / "run.json").write_text('{"step": 512}')
    facts = json.loads((run / "run.json").read_text())
    facts |= {
        "command": "nalanda train demo optim.lr=0.123 'model={conv_size: 3, rope: {theta: 5}}'",
        "hardware": "NVIDIA H200",
        "pid": 3651,
    }
    (run / "run.json").write_text(json.dumps(facts))

    scores = {"metrics": {"acc": 0.325}, "stderr": {"acc": 0.0332}}
    own = {"place": "/before/it/was/moved/whole/final", "step": 512, "tasks": {"arc_easy": scores}}
    others = [
        own | {"place": "/runs/other/final", "tasks": {"piqa": scores}},
        own | {"step": 256, "tasks": {"sciq": scores}},
    ]
    (run / "eval").mkdir()
    (run / "eval" / "results.json").write_text(json.dumps({"models": [own, *others]}))
    bigrams = {"bigrams": {"val_ppl": 105.2, "val_loss": 4.656, "val_bpb": 1.853}}
    (run / "baselines.json").write_text(json.dumps(bigrams))
    return run


def test_the_first_screen_of_a_run(posted):
    page = write_page([posted], samples=[[("def <x>", " 1 & 2"), ("other", "text")]], price="$3")
    page = page.read_text(encoding="utf-8")
    text = Texts(page).text
    first, _, rest = text.partition("Events")
    assert "Bits a byte 1.717 in validation bigrams 1.853 perplexity 74.68" in first
    # A masked model and a large corpus have fewer than are held out.
    assert "tokens predicted 56,322" in first
    assert "ARC easy, accuracy 32.5 ± 3.3 %" in first
    assert "PIQA" not in text  # another model's
    assert "SciQ" not in text  # an earlier step's
    # 1,048,576 tokens of 16.37 MFLOPs in 195 s are 42.7 % of the peak.
    assert (
        "Speed 5,366 tokens a second time of all steps 3 min MFU 42.7 % of 205.7 GFLOP/s" in first
    )
    assert "device NVIDIA H200" in first
    assert "cost $0.16, at $3 an hour" in first
    assert "def <x> 1 & 2" in first
    assert 'AutoModelForCausalLM.from_pretrained("' in first
    # The other sample is below, and nothing of use to nobody is anywhere.
    assert "other text" in rest
    assert not re.search("val_|tokens_per_second|3,?651|pid", text)
    assert '"bigrams 1.853"' in page  # beside its line on the curve


def test_settings_that_differ_from_the_recipe(posted):
    config = yaml.safe_load((posted / "config.yaml").read_text())
    config["optim"]["lr"] = 0.123
    config["log"]["tensorboard"] = "auto"  # its default when the run was made was another
    config["model"] |= {"num_heads": 4, "conv_size": 3, "rope": {"theta": 5}}
    (posted / "config.yaml").write_text(yaml.safe_dump(config))
    text = Texts(write_page([posted]).read_text(encoding="utf-8")).text
    own = text.partition("Settings that differ from the recipe demo")[2]
    # Each start writes its own command: of a resumed run it is not that of the beginning.
    assert own.startswith(" The run was last started by nalanda train demo optim.lr=0.123")
    rows = own.partition("this run")[2].split("Recipe, data and versions")[0].split()
    # The run has written out its model's defaults, of which the recipe says nothing.
    assert rows[:6] == ["model.conv_size", "–", "3", "model.num_heads", "2", "4"]
    assert rows[6:9] == ["model.rope.theta", "–", "5"]  # typed within a section
    assert rows[-3:] == ["optim.lr", "0.006", "0.123"]
    assert not {"model.norm_eps", "output_dir"} & set(rows)


def test_large_settings_that_differ_a_little_stand_beside_each_other(runs):
    for run, steps in zip(runs, (100_000, 100_400), strict=True):
        config = yaml.safe_load((run / "config.yaml").read_text())
        config["train"]["steps"] = steps
        config["optim"]["weight_decay"] = 1 if steps == 100_000 else 1.0
        (run / "config.yaml").write_text(yaml.safe_dump(config))
    text = Texts(write_page(runs).read_text(encoding="utf-8")).text
    table = text.partition("Settings that differ")[2].partition("Recipe, data")[0]
    assert "train.steps 100,000 100,400" in table
    assert "weight_decay" not in table


@pytest.mark.parametrize(
    ("price", "cost"),
    [
        ("2.5", "5.00, at 2.5 an hour"),
        ("$2.50", "$5.00, at $2.50 an hour"),
        ("3 €", "6.00 €, at 3 € an hour"),
        ("3 dollars", "6.00 dollars, at 3 dollars an hour"),
    ],
)
def test_a_price_has_any_currency(price, cost):
    assert pages.cost_of(price, hours=2) == cost
    for wrong in ("cheap", "$2.49/h", "2.49 per hour", "-3"):
        with pytest.raises(InputError, match=re.escape(f"--cost-per-hour {wrong}: not a price;")):
            pages.cost_of(wrong, hours=2)


def test_a_page_follows_its_run(runs, capsys):
    run, file = runs[0], runs[0] / "report.html"
    facts = json.loads((run / "run.json").read_text())
    here = {"state": "running", "host": platform.node(), "pid": os.getpid(), "step": 300}
    (run / "run.json").write_text(json.dumps(facts | here))
    seen = []

    def write(refresh):
        return write_page([run], refresh=refresh)

    def end(seconds):
        seen.append(file.read_text(encoding="utf-8"))
        (run / "run.json").write_text(json.dumps(facts))

    pages.follow([run], write, end)
    assert len(seen) == 1
    assert '<meta http-equiv="refresh" content="30">' in seen[0]
    assert "<progress" in seen[0]
    assert "report.html: written every 30 s while " in capsys.readouterr().err
    pages.follow([run], write, end)  # it has ended, so nothing is left to follow
    assert len(seen) == 1

    # Ctrl-C leaves a page that no longer loads itself again.
    def interrupt(seconds):
        raise KeyboardInterrupt

    (run / "run.json").write_text(json.dumps(facts | here))
    with pytest.raises(KeyboardInterrupt):
        pages.follow([run], write, interrupt)
    assert "refresh" not in file.read_text(encoding="utf-8").partition("<style>")[0]


def test_losses_by_source_share_a_panel(runs):
    lines = [json.loads(line) for line in (runs[0] / "metrics.jsonl").read_text().splitlines()]
    extra = {"val_bpb/web": 1.5, "val_bpb/code": 1.2, "val_ppl/web": 9.0, "negative_weights": 0.1}
    lines = [line | extra if "val_loss" in line else line for line in lines]
    (runs[0] / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    alone = draw_panels([read_page_run(runs[0], 0)])
    assert next(iter(alone)) == "val_bpb"
    assert [name for name, *_ in alone["sources"].legend] == ["code", "web"]
    assert alone["negative_weights"].title == "Negative weights, mean over layers"
    # More sources than colours.
    many = {f"val_bpb/{i}": 1.0 for i in range(9)}
    for line in lines:
        line |= many if "val_loss" in line else {}
    run = read_page_run(runs[0], 0)
    run.lines = lines
    panel = draw_panels([run])["sources"]
    assert len({tuple(look) for _, *look in panel.legend}) == 11
    both = draw_panels([read_page_run(folder, i) for i, folder in enumerate(runs)])
    assert "sources" not in both  # whose colours are the runs'
    assert both["val_bpb/web"].title == "Validation on web, bits a byte"
    assert {"mfu", "tokens_per_second"} < both.keys()  # of two models they differ


def test_the_errors_of_a_fit_come_first(runs):
    lines = [json.loads(line) for line in (runs[0] / "metrics.jsonl").read_text().splitlines()]
    kept = ("step", "tokens", "lr")
    fit = [{key: line[key] for key in kept} | {"error/a": 0.5} for line in lines if "lr" in line]
    (runs[0] / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in fit))
    run = read_page_run(runs[0], 0)
    assert [x.title for x in draw_panels([run]).values()] == [
        "Relative error of a",
        "Learning rate",
    ]
    run.lines = [line | {"error/b": 0.4} for line in fit]
    alone, both = draw_panels([run]), draw_panels([run, run])
    assert [name for name, *_ in alone["arms"].legend] == ["a", "b"]
    assert [*alone] == ["arms", "lr"]
    assert [*both] == ["error/a", "error/b", "lr"]  # whose colours are the runs'


def test_curves_of_an_interrupted_run(runs):
    run = read_page_run(runs[1], 0)
    points = read_points(run, "loss")
    assert points["step"] == list(range(10, 301, 10))  # without the torn line and the events
    assert [str(value) for value in points["value"]].count("nan") == 1
    page = write_page([runs[1]]).read_text(encoding="utf-8")
    titles = [
        "loss",
        "grad_norm",
        "lr",
        "mfu",
        "data_seconds",
    ]  # the speed is the MFU in another unit
    assert re.findall("<figcaption>(.*?)</figcaption>", page) == [TITLES[key] for key in titles]
    assert "interrupted" in page
    assert "at step 300 of 512" in page
    assert "Settings that differ" not in page
    assert "one seed each" not in page


def test_a_stage_begins_at_a_line(runs):
    from bokeh.models import Label, Span

    panels = draw_panels([read_page_run(folder, i) for i, folder in enumerate(runs)])
    for panel in panels.values():
        names = [(x.x, x.text) for x in panel.figure.center if isinstance(x, Label)]
        lines = [x.location for x in panel.figure.center if isinstance(x, Span) and x.location]
        assert (names, lines) == ([(65, "anneal")], [65])

    # Steps of different sizes do not compare: the axis is that of tokens.
    config = yaml.safe_load((runs[1] / "config.yaml").read_text())
    config["stages"] = {"anneal": {"after_step": 65, "train": {"tokens_per_step": 4096}}}
    (runs[1] / "config.yaml").write_text(yaml.safe_dump(config))
    panel = draw_panels([read_page_run(runs[1], 0)])["loss"].figure
    assert [x.x for x in panel.center if isinstance(x, Label)] == [65 * 2048]


def test_many_events_of_a_kind_are_drawn_at_once(runs):
    """One by one, the page of a run with hundreds of them took a minute, and the browser longer."""
    run = read_page_run(runs[1], 0)
    run.events = [{"step": step, "event": "skipped"} for step in range(15, 300, 5)]
    drawn = [x.data_source.data for x in draw_panels([run])["loss"].figure.renderers]
    (marks,) = (data for data in drawn if "mean" not in data)
    assert list(marks["x"]) == list(range(15, 300, 5))
    losses = dict(zip(*(drawn[0][name] for name in ("step", "value")), strict=True))
    assert marks["y"][1] == losses[20]
    assert marks["y"][0] == pytest.approx((losses[10] + losses[20]) / 2)


def test_a_tick_of_a_long_run_is_its_step(runs):
    """Zoomed in, ticks of 123,440 and 123,460 were both 123,400 or 123,500."""
    panel = draw_panels([read_page_run(runs[0], 0)])["loss"].figure
    for axis in panel.axis:
        assert [axis.formatter.format % step for step in (60, 123_460)] == ["60", "123460"]
        assert axis.formatter.format % (0.1 + 0.2) == "0.3"


def test_runs_without_records(tmp_path, runs, capsys):
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "metrics.jsonl").touch()
    page = write_page([tmp_path / "begun"]).read_text(encoding="utf-8")
    assert "No step is logged yet." in page
    assert "<section>" not in page
    assert "<figure" not in page

    (tmp_path / "other").mkdir()
    with pytest.raises(SystemExit) as stop:
        nalanda_cli.main(["report", str(tmp_path / "other")])
    assert stop.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not [*(tmp_path / "other").iterdir()]

    (runs[1] / "config.yaml").write_text("a: [")
    with pytest.raises(InputError, match=r"unreadable: config\.yaml is not YAML"):
        write_page(runs)
    (runs[0] / "final").mkdir(exist_ok=True)
    (runs[0] / "final" / "config.json").write_text('{"model_type"')
    with pytest.raises(InputError, match=r"final/config\.json: unreadable"):
        write_page(runs[:1])
    (runs[0] / "baselines.json").write_text('{"bigrams": {"val_ppl": null}}')
    with pytest.raises(InputError, match=r"baselines\.json: unreadable"):
        write_page(runs[:1])


@pytest.mark.slow
def test_runs_of_one_name_are_told_apart(runs, tmp_path):
    again = shutil.copytree(runs[0], tmp_path / "again" / "whole")
    output = tmp_path / "both.html"
    nalanda_cli.main(["report", str(runs[0]), str(again), "--output", str(output)])
    text = Texts(output.read_text(encoding="utf-8")).text
    assert str(runs[0]) in text
    assert str(again) in text


PROBE = """<script>
const canvases = node => (node.tagName == "CANVAS") + (node.shadowRoot ? canvases(node.shadowRoot) : 0)
  + [...node.children].reduce((sum, child) => sum + canvases(child), 0)
const look = () => {
  const drawn = [...document.querySelectorAll("figure")].filter(canvases).length
  const wide = [document.documentElement, ...document.querySelectorAll(".wide, pre, figure")]
  const cut = wide.filter(node => node.scrollWidth > node.clientWidth).length
  document.title = `${drawn} drawn, ${cut} cut off`
}
addEventListener("load", () => setTimeout(look, 1500))
</script>"""
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--enable-logging=stderr", "--v=0", "--virtual-time-budget=4000", "--dump-dom"),
)


@pytest.mark.skipif(BROWSER is None, reason="no chromium on PATH")
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.slow
def test_a_browser_draws_the_page_without_an_error(runs, tmp_path, width):
    file = write_page(runs, samples=[[], [("Once " * 99, "x" * 999)]])
    page = file.read_text(encoding="utf-8")
    file.write_text(page.replace("</body>", f"{PROBE}</body>"), encoding="utf-8")

    profile = f"--user-data-dir={tmp_path / 'profile'}"
    command = [str(BROWSER), *FLAGS, profile, f"--window-size={width},900", file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    texts = Texts(done.stdout)
    assert "<title>7 drawn, 0 cut off</title>" in done.stdout
    assert all(TITLES[key] in texts.text for key in ("val_bpb", "mfu", "data_seconds"))
    assert EVIL in texts.text

    # Bokeh says its level; the observer's line is of a layout that the browser repeats.
    harmless = "setting log level|ResizeObserver loop completed"
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert not [line for line in console if not re.search(harmless, line)]


@pytest.mark.skipif(BROWSER is None, reason="no chromium on PATH")
@pytest.mark.slow
def test_a_run_is_printed_on_two_sheets(posted, tmp_path):
    file = write_page([posted], samples=[[("def <x>", "\n    return" * 30)]])
    paper = tmp_path / "paper.pdf"
    flags = [flag for flag in FLAGS if flag != "--dump-dom"]
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    command = [str(BROWSER), *flags, profile, f"--print-to-pdf={paper}", file.as_uri()]
    subprocess.run(command, capture_output=True, timeout=120, check=True)
    assert len(re.findall(rb"/Type\s*/Page\b", paper.read_bytes())) == 2
