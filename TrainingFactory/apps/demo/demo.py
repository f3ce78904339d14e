"""`tfactory demo`: a tool-using agent learns end to end in minutes on a laptop, in two ordinary runs.

    runs/demo-demonstrations.jsonl    what the first run learns from
    runs/demo-warm-start/             an SFT run of a model of random weights, by warm_start.yaml
    runs/demo/                        a GRPO run from there, by grpo.yaml; report.html and report.json compare the two

Each of the two folders also has `model`, which the run made, and `heldout.jsonl`, what it did on held-out tasks.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from TrainingFactory.apps.demo.lessons import LESSONS, Lessons
from TrainingFactory.apps.demo.report import HELDOUT, Report
from TrainingFactory.assembly.export import export
from TrainingFactory.common import catalog
from TrainingFactory.config import TrainingConfig, load_config
from TrainingFactory.config.loading import key_value
from TrainingFactory.evaluation.evaluation import Evaluation, sections_of
from TrainingFactory.resolve.model_names import find_model
from TrainingFactory.runs.folder import CONFIG, RunFolder, TrainingReport, is_run
from TrainingFactory.runs.tracking import Watcher
from TrainingFactory.trainers.training_run import Training

WARM_START, GRPO = (Path(__file__).parent / name for name in ("warm_start.yaml", "grpo.yaml"))
DEMONSTRATED = 1_000_000  # tasks of a seed so far away that GRPO does not ask them again


class Demo:
    """Checks names and folders when it is made. Then `warm_start`, `train` and `report` are to be called in this order.
    `overrides` are for both configs."""

    def __init__(
        self,
        environment: str = "search",
        seed: int = 0,
        out: str | Path = "runs/demo",
        lessons: Lessons | None = None,
        overrides: Sequence[str] = (),
    ) -> None:
        self.environment = catalog.find("environment", environment)
        if environment not in LESSONS:
            known = " and ".join(LESSONS)
            raise ValueError(f"the demo has no recipe for environment {environment!r}; it has for {known}")
        self.seed, self.lessons = seed, lessons or LESSONS[environment]
        self.folder = Path(out).expanduser()
        self.warm = self.folder.with_name(f"{self.folder.name}-warm-start")
        self.demonstrations = self.folder.with_name(f"{self.folder.name}-demonstrations.jsonl")
        common = [
            key_value("environment.environment_id", environment),
            key_value("training.seed", seed),
            key_value("data.seed", seed),
            key_value("logging.output_dir", str(self.folder.parent)),
            *overrides,
        ]
        learns = key_value("data.dataset", str(self.demonstrations))
        self.warm_config = load_config(WARM_START, [*common, key_value("model.revision", str(seed)), learns])
        self.config = load_config(GRPO, [*common, key_value("model.name", str(self.warm / "model"))])
        self._make_room()

    def _make_room(self) -> None:
        """Remove the runs of an earlier demo; raise if anything else is in the way."""
        earlier = {self.warm: self.demonstrations, self.folder: self.warm}  # folder -> what its config names
        found = [folder for folder in earlier if folder.exists()]
        for folder in found:
            if not is_run(folder) or str(earlier[folder]) not in (folder / CONFIG).read_text("utf-8"):
                raise ValueError(f"{folder} is there already, and no earlier demo; name another with --out")
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        for run in map(RunFolder, found):
            run.lock()  # raises where it is being written
            run.discard()

    def warm_start(self, watcher: Watcher) -> TrainingReport:
        """Write the demonstrations, and learn from them."""
        write_lessons(self.demonstrations, self.environment, self.seed, self.lessons)
        stages = self.lessons.stages(self.warm_config.training.batch_size)
        return self._run(self.warm_config, self.warm.name, StageNotices(watcher, stages))

    def train(self, watcher: Watcher) -> TrainingReport:
        """Learn from rewards, beginning where the warm start has ended."""
        return self._run(self.config, self.folder.name, watcher)

    def _run(self, config: TrainingConfig, name: str, watcher: Watcher) -> TrainingReport:
        with _one_thread():
            done = Training(config, name=name, watcher=watcher).train()
            if done.state == "finished":
                export(str(done.run), done.run / "model")
                watcher.phase("evaluate")
                self._evaluate(done.run, watcher)
        return done

    def _evaluate(self, run: Path, watcher: Watcher) -> None:
        """Try the model once on every held-out task, at temperature 1 whatever it was trained at."""
        sections = sections_of(find_model(str(run)))
        sections["sampling"]["temperature"] = 1.0
        result = Evaluation(TrainingConfig(**sections), run / HELDOUT).run(watcher.episode)
        if result.interrupted:
            raise KeyboardInterrupt

    def report(self) -> Report:
        """Compare the two runs, and write the report into the second one's folder."""
        report = Report.read(RunFolder(self.warm), RunFolder(self.folder))
        (self.folder / "report.html").write_text(report.page(), encoding="utf-8")
        text = json.dumps(report.as_json(), indent=1, ensure_ascii=False)
        (self.folder / "report.json").write_text(text, encoding="utf-8", errors="backslashreplace")
        return report


class StageNotices:
    """Passes everything on to a watcher, and announces each new kind of rows before its first step is shown."""

    def __init__(self, watcher: Watcher, stages: Mapping[int, str]) -> None:
        self.phase, self.episode, self.say = watcher.phase, watcher.episode, watcher.say
        self._watcher, self._stages = watcher, stages

    def step(self, step: int, total: int, metrics: dict[str, float]) -> None:
        if step > 1 and step in self._stages:
            self.say(f"From step {step} on: {self._stages[step]}. The loss jumps because these rows are new.")
        self._watcher.step(step, total, metrics)


def write_lessons(path: Path, environment: Any, seed: int, lessons: Lessons) -> None:
    """Write demonstrations, good and bad, from which the built-in model learns enough for rewards to go on with."""
    from TrainingFactory.models import chat_format
    from TrainingFactory.models.tiny import tiny_tokenizer

    tasks = list(environment.tasks("train", DEMONSTRATED + seed, lessons.played))
    lessons.write(path, environment, chat_format(tiny_tokenizer()), tasks, random.Random(f"demo {seed}"))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute on one core: matrices this small are not worth a second one, on a busy machine waiting for it costs far
    more than it gives, and the result does not depend on the number of cores."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
