"""Labels: one row an episode, kept as gold rows that an audit reads; audits as they were kept."""

from __future__ import annotations

import json
from pathlib import Path

from tests.kits.page import serving
from tests.kits.registry import made_run
from tests.web.test_pages import episode
from TrainingFactory.apps.judge_audit.gold import load_gold
from TrainingFactory.apps.judge_audit.report import Audit, save_audit
from TrainingFactory.rewards.judge.model_judge import ModelJudge, model_judge
from TrainingFactory.runs.folder import TRAJECTORIES


def test_labels_are_gold_rows(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    run = made_run(runs, "rl")
    for member in range(3):
        run.append(TRAJECTORIES, episode(1, "task-0", member, float(member % 2), f"Tunis {member}"))
    run.append(TRAJECTORIES, episode(1, "task-0", 3, 0.0) | {"turns": []})
    with serving(runs) as page:
        assert page.get("/api/labels", run="rl")["rows"] == []
        page.post("/api/labels", run="rl", number=1, label=False)
        page.post("/api/labels", run="rl", number=2, label=True)
        path = Path(page.post("/api/labels", run="rl", number=1, label=True)["path"])
        with path.open("a") as file:
            file.write('{"prompt": "mine", "response": "too", "label": true}\nno JSON\n')
        told = page.post("/api/labels", run="rl", number=3, score=7.5)
        assert [(each["number"], each["label"], each["score"], each["reward"]) for each in told["rows"]] == [
            (2, True, None, 1.25), (1, True, None, 0.25), (3, None, 7.5, 0.25)
        ]  # fmt: skip
        assert told["unread"] == 2 and f"--gold {path} --runs {runs} " in told["command"]
        path.write_text(path.read_text().replace("no JSON\n", ""))
        judge = model_judge(base_url="http://127.0.0.1:1/v1", model="m", api_key_env=None)
        assert isinstance(judge, ModelJudge)
        gold = load_gold(path, judge)
        assert [item.value for item in gold] == [1.0, 1.0, 1.0, 0.75]
        assert gold[1].trajectory.answer == "Tunis 1" and gold[1].trajectory.task.answer == "Tunis"
        assert gold[1].trajectory.turns[0].message.tool_calls[0].name == "search"
        assert len(page.post("/api/labels", run="rl", number=2)["rows"]) == 2  # taken back
        for wrong in ({"run": "../rl", "number": 1}, {"run": "rl", "number": 9}, {"run": "rl", "number": 4}):
            assert page.send("/api/labels", **wrong, label=True).status_code in (400, 404)


def test_audits_are_listed_as_they_were_kept(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    save_audit(
        runs, Audit(items=2, judged=2, points=[(1.0, 0.9, 10), (0.0, 0.2, 20)]), "a judge", "gold.jsonl"
    )
    (runs / "judge-audits.jsonl").open("a").write("{half\n")
    with serving(runs) as page:
        first, second = page.get("/api/audits")["audits"]
    assert (first["judge"], first["points"]) == ("a judge", [[1.0, 0.9, 10], [0.0, 0.2, 20]])
    assert "cannot be read" in second["problem"] and json.dumps(first["verdict"])
