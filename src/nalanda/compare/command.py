"""`nalanda compare`: trains the arms of a study, and writes its verdict."""

import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from nalanda.compare import page
from nalanda.compare.options import Execution
from nalanda.compare.plan import StudyRun, folder_of, rates_at_an_end
from nalanda.compare.results import RETRIES, other_setups
from nalanda.compare.runs import Runner, claimed, fetch
from nalanda.compare.study import Study, load_arms, warn_about
from nalanda.compare.tasks import Evaluate, absent_models, score_tasks
from nalanda.compare.verdict import StudyVerdict, judge_study
from nalanda.compare.widths import figures_of, shared_weights, with_equal_figures
from nalanda.storage.remote import is_store, staging, upload

Sampler = Callable[[Path], Sequence[tuple[str, str]]]
"""Gives samples of the run in a folder, as (prompt, continuation)."""


def run_study(
    study: Study,
    execution: Execution,
    evaluate: Evaluate | None = None,
    sample: Sampler | None = None,
) -> StudyVerdict | None:
    """Trains the runs that a study lacks, and writes its verdict: compare.html, compare.json and compare.md.

    A run that was interrupted goes on. Finished ones are not trained again. `evaluate` scores the study's tasks.

    Returns None if runs of other shares are still missing.

    Raises:
        InputError: the study, an arm or the folder cannot work, or a run failed.
        SystemExit, KeyboardInterrupt: after a signal; the runs under way have saved a checkpoint.
    """
    recorded, share = study, execution.share()
    study = with_equal_figures(study)
    configs = load_arms(study)
    figures = {arm: {"rate": configs[arm].optim.lr, **figures_of(study, arm)} for arm in study.arms}
    notes = [*warn_about(study, configs), *shared_weights(study, configs)]

    with claimed(recorded, configs, share) as folder:
        runner = Runner(study, configs, execution)
        if not runner.train_all():
            missing = [run for run in runner.runs if not runner.result_of(run).ended]
            print(
                f"share {execution.shard} is done; others still lack {len(missing)} run(s). After them, "
                f"nalanda compare {shlex.quote(study.output_dir)} says the verdict."
            )
            return None

        runs, results = runner.runs, runner.results
        parameters = {arm: int(each["parameters"]) for arm, each in figures.items()}
        verdict = judge_study(study, runs, results, parameters, configs)
        notes += rates_at_an_end(study, results)
        notes += other_setups(results[run.name] for run in runs)
        looks = [*verdicts_before(study, folder), (study.seeds, study.margin)]
        seeds, margin = looks[0]
        if seeds < study.seeds:
            notes.append(
                f"Seeds were added after a verdict over {seeds}. Its intervals are too narrow for that."
            )
        if margin != study.margin:
            notes.append(
                f"The margin was {margin:g} at the first verdict, and was changed after it."
            )
        if study.tasks and (absent := absent_models(study, runs, results)):
            notes.append(f"Tasks lack models that are on other machines: {', '.join(absent)}.")
        report = page.Report(
            study, verdict, runs, results, figures, notes, looks=[*dict.fromkeys(looks)]
        )
        # The verdict first: a task or a prompt may fail.
        named = publish(folder, report)
        page.print_report(report)
        print(*named, sep="\n")

        if evaluate and (scores := score_tasks(study, runs, results, folder, evaluate)):
            report = replace(report, scores=scores)
            publish(folder, report)
            page.print_scores(report)
        if sample and (samples := take_samples(study, runs, sample)):
            publish(folder, replace(report, samples=samples))
    return verdict


def publish(folder: Path, report: page.Report) -> list[str]:
    """Writes the report to the study's folder, and to its store. Returns the names of the files."""
    output = report.study.output_dir.rstrip("/")
    files = page.write_files(folder, report)
    named = [f"{output}/{file.name}" for file in files]
    if is_store(output):
        for file, url in zip(files, named, strict=True):
            upload(file, url, RETRIES)
    return named


def verdicts_before(study: Study, folder: Path) -> list[tuple[int, float]]:
    """Seeds and margin of each verdict that the study has had; a folder without compare.json has had none."""
    file = folder / "compare.json"
    try:
        fetch(study, file, folder)
        looks = json.loads(file.read_bytes())["looks"]
        return [(int(seeds), float(margin)) for seeds, margin in looks if seeds > 1]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def take_samples(
    study: Study, runs: Sequence[StudyRun], sample: Sampler
) -> list[tuple[str, str, str]]:
    """(arm, prompt, continuation) by each arm's first seed, where its model is on this machine."""
    texts = []
    for run in runs:
        folder = staging(folder_of(study, run))
        if run.seed == 1 and (folder / "final").is_dir():
            texts += [(run.arm, prompt, text) for prompt, text in sample(folder)]
    return texts
