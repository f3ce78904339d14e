"""`tfactory demo`: train a tool-using agent end to end in minutes on a laptop, in two ordinary runs.

    runs/demo-demonstrations.jsonl    training data of the first run
    runs/demo-warm-start/             SFT run of a randomly initialised model, configured by warm_start.yaml
    runs/demo/                        GRPO run from that model, by grpo.yaml; report.html and report.json compare both

Each run folder also holds `model`, the exported model, and `heldout.jsonl`, its episodes on held-out tasks. In an
environment with images, `blind.jsonl` in the second folder has episodes of its model with empty pictures.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from TrainingFactory.apps.demo.lessons import LESSONS, Lessons
from TrainingFactory.apps.demo.report import BLIND_FILE, HELDOUT_FILE, DemoReport
from TrainingFactory.assembly.environment import as_environment_factory
from TrainingFactory.assembly.export import export
from TrainingFactory.common import catalog
from TrainingFactory.config import TrainingConfig, load_config
from TrainingFactory.config.loading import key_value
from TrainingFactory.evaluation.evaluation import Evaluation, make_sections
from TrainingFactory.resolve.model_names import find_model
from TrainingFactory.runs.folder import CONFIG, RunFolder, TrainingReport, is_run
from TrainingFactory.runs.tracking import Watcher
from TrainingFactory.trainers.training_run import Training

DEMO_FOLDER = Path(__file__).parent
WARM_START, GRPO = DEMO_FOLDER / "warm_start.yaml", DEMO_FOLDER / "grpo.yaml"
DEMONSTRATION_SEED = 1_000_000  # seed offset of the demonstrated tasks, so that GRPO does not see them again


class Demo:
    """The two runs and their report. The constructor validates names and folders; then call `warm_start`, `train` and
    `report` in this order. `overrides` apply to both configs."""

    def __init__(
        self,
        environment: str = "search",
        seed: int = 0,
        out: str | Path = "runs/demo",
        lessons: Lessons | None = None,
        overrides: Sequence[str] = (),
    ) -> None:
        catalog_entry = catalog.find("environment", environment)
        if environment not in LESSONS:
            choices = " and ".join(LESSONS)
            raise ValueError(f"the demo has no lessons for environment {environment!r}; choose {choices}")
        self.seed, self.lessons = seed, lessons or LESSONS[environment]
        self.folder = Path(out).expanduser()
        self.warm_folder = self.folder.with_name(f"{self.folder.name}-warm-start")
        self.demonstrations_file = self.folder.with_name(f"{self.folder.name}-demonstrations.jsonl")
        options = [
            key_value("environment.environment_id", environment),
            key_value("training.seed", seed),
            key_value("data.seed", seed),
            key_value("logging.output_dir", str(self.folder.parent)),
            *overrides,
        ]
        dataset = key_value("data.dataset", str(self.demonstrations_file))
        warm_file, grpo_file = (DEMO_FOLDER / name for name in self.lessons.configs)
        self.warm_config = load_config(warm_file, [*options, key_value("model.revision", str(seed)), dataset])
        warm_model = key_value("model.name", str(self.warm_folder / "model"))
        self.config = load_config(grpo_file, [*options, warm_model])
        self.environment = as_environment_factory(catalog_entry, self.config.environment.options)
        self._delete_earlier_runs()

    def _delete_earlier_runs(self) -> None:
        """Delete the runs of an earlier demo; raise ValueError for any other folder of that name."""
        # folder -> path in its config
        source_paths = {self.warm_folder: self.demonstrations_file, self.folder: self.warm_folder}
        existing_folders = [folder for folder in source_paths if folder.exists()]
        for folder in existing_folders:
            if not is_run(folder) or str(source_paths[folder]) not in (folder / CONFIG).read_text("utf-8"):
                raise ValueError(f"{folder} exists and is not an earlier demo; choose another --out")
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        for run in map(RunFolder, existing_folders):
            run.lock()  # raises if another process writes the run
            run.discard()

    def warm_start(self, watcher: Watcher) -> TrainingReport:
        write_lessons(self.demonstrations_file, self.environment, self.seed, self.lessons)
        stages = self.lessons.describe_stages(self.warm_config.training.batch_size)
        return self._run(self.warm_config, self.warm_folder.name, StageAnnouncer(watcher, stages))

    def train(self, watcher: Watcher) -> TrainingReport:
        report = self._run(self.config, self.folder.name, watcher)
        if report.state == "finished" and getattr(self.environment, "shows_images", False):
            with _limit_threads():
                self._evaluate(report.run, watcher, BLIND_FILE, {"blind": True})
        return report

    def _run(self, config: TrainingConfig, name: str, watcher: Watcher) -> TrainingReport:
        with _limit_threads():
            report = Training(config, name=name, watcher=watcher).train()
            if report.state == "finished":
                export(str(report.run), report.run / "model")
                watcher.phase("evaluate")
                self._evaluate(report.run, watcher, HELDOUT_FILE, {})
        return report

    def _evaluate(self, run_folder: Path, watcher: Watcher, file: str, extra_options: dict[str, Any]) -> None:
        """Play every held-out task once, at temperature 1 regardless of the training temperature. `extra_options`
        extends the environment's options."""
        sections = make_sections(find_model(str(run_folder)))
        sections["sampling"]["temperature"] = 1.0
        sections["environment"]["options"] |= extra_options
        evaluation = Evaluation(TrainingConfig(**sections), run_folder / file).run(watcher.episode)
        if evaluation.interrupted:
            raise KeyboardInterrupt

    def report(self) -> DemoReport:
        """Compare the two runs and write the report into the GRPO run's folder."""
        report = DemoReport.read(RunFolder(self.warm_folder), RunFolder(self.folder))
        (self.folder / "report.html").write_text(report.render_page(), encoding="utf-8")
        report_json = json.dumps(report.as_json(), indent=1, ensure_ascii=False)
        (self.folder / "report.json").write_text(report_json, encoding="utf-8", errors="backslashreplace")
        return report


class StageAnnouncer:
    """Watcher that forwards to another one and announces each stage of the warm start before its first step."""

    def __init__(self, watcher: Watcher, stages: Mapping[int, str]) -> None:
        self.phase, self.episode, self.say = watcher.phase, watcher.episode, watcher.say
        self._watcher, self._stages = watcher, stages

    def step(self, step: int, total: int, metrics: dict[str, float]) -> None:
        if step > 1 and step in self._stages:
            self.say(f"From step {step} on: {self._stages[step]}. The loss jumps because the rows are new.")
        self._watcher.step(step, total, metrics)


def write_lessons(path: Path, environment: Any, seed: int, lessons: Lessons) -> None:
    """Write good and bad demonstrations that teach the untrained built-in model enough for GRPO to improve on."""
    from TrainingFactory.models import chat_format, load_model

    loaded_model = load_model(lessons.model, device="cpu")
    chat = chat_format(loaded_model.tokenizer, vision=loaded_model.vision)
    tasks = list(environment.tasks("train", DEMONSTRATION_SEED + seed, lessons.num_demonstrations))
    lessons.write(path, environment, chat, tasks, random.Random(f"demo {seed}"))


@contextmanager
def _limit_threads() -> Iterator[None]:
    """Limit torch to one thread, because the matrices are too small to gain from a second one. Results then do not
    depend on the number of cores."""
    import torch

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
