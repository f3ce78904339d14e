"""`tfactory serve agent@champion`: the alias moves while requests run."""

from __future__ import annotations

import gc
import json
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.kits.serve import CHAT, events, joined, live, post, user
from tests.kits.waiting import HANG, wait_until
from TrainingFactory.apps.serving import follow
from TrainingFactory.apps.serving.follow import estimate_needed_bytes, follow_alias
from TrainingFactory.apps.serving.served import load_served_model, make_serving_config
from TrainingFactory.apps.serving.server import ChatServer, make_server
from TrainingFactory.cli.serve import serve
from TrainingFactory.common.http import listen
from TrainingFactory.models import load_model
from TrainingFactory.promotion.model_registry import ModelRegistry
from TrainingFactory.resolve.model_names import find_model

OPTIONS = ["sampling.slots=2", "model.max_length=200"]
BODY = user(max_tokens=60, seed=4)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models with other weights."""
    folders = [tmp_path_factory.mktemp(name) for name in ("first", "second")]
    for seed, folder in enumerate(folders):
        loaded = load_model("builtin:tiny", revision=str(seed))
        loaded.model.save_pretrained(folder)
        loaded.tokenizer.save_pretrained(folder)
    return folders


@pytest.fixture
def registry(models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelRegistry:
    monkeypatch.setattr(follow, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(follow, "RETRY_SECONDS", 0.05)
    registry = ModelRegistry(runs=tmp_path)
    for folder in models:
        registry.register("agent", folder)
    registry.set_alias("agent:1", "champion")
    return registry


@contextmanager
def served(
    registry: ModelRegistry, name: str = "agent@champion", said: list[str] | None = None
) -> Iterator[tuple[ChatServer, httpx.Client]]:
    found = find_model(name, registry.runs)
    server = make_server(make_serving_config(found, OPTIONS), name, version=str(found.version))
    notify = ([] if said is None else said).append
    with live(server) as client, follow_alias(server, found, OPTIONS, registry.runs, notify=notify):
        yield server, client


def health(client: httpx.Client) -> dict[str, Any]:
    return client.get("/health").json()


def text_of(answer: dict[str, Any]) -> str:
    return answer["choices"][0]["message"]["content"]


def held(engine: Any) -> threading.Event:
    """Let nothing be sampled until the event is set."""
    run, go_on = engine._runner.run, threading.Event()
    engine._runner.run = lambda plan: (go_on.wait(HANG), run(plan))[1]
    return go_on


def test_a_stream_ends_on_the_weights_that_it_began_with(registry: ModelRegistry) -> None:
    with served(registry) as (server, client):
        before = post(client, BODY)
        go_on, old = held(server.model.sampler), weakref.ref(server.model.model)
        with client.stream("POST", CHAT, json=BODY | {"stream": True}) as answer:
            lines = answer.iter_lines()
            first = next(lines)
            registry.set_alias("agent:2", "champion")
            wait_until(lambda: health(client)["version"] == "agent:2")
            assert health(client)["finishing"] == ["agent:1"]
            after = post(client, BODY)  # is answered while the other one waits
            go_on.set()
            rest = [line.removeprefix("data: ") for line in [first, *lines] if line]
        chunks = [json.loads(line) for line in rest[:-1]]
        assert rest[-1] == "[DONE]" and joined(chunks)["content"] == text_of(before)
        assert (
            {chunk["system_fingerprint"] for chunk in chunks} == {before["system_fingerprint"]} == {"agent:1"}
        )
        assert after["system_fingerprint"] == "agent:2" and text_of(after) != text_of(before)
        assert joined(events(client, BODY))["content"] == text_of(after)
        assert client.get("/v1/models").json()["data"][0]["version"] == "agent:2"
        wait_until(lambda: gc.collect() >= 0 and old() is None)  # nothing holds it any more
        assert health(client)["finishing"] == []
        registry.rollback("agent", "champion")
        wait_until(lambda: health(client)["version"] == "agent:1")
        assert text_of(post(client, BODY)) == text_of(before)


def test_without_memory_for_both_the_old_one_goes_on(
    registry: ModelRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    with served(registry, said=said) as (server, client):
        # the weights, and the keys and values of two slots and one for padding, of 200 tokens
        weights = sum(each.nbytes for each in server.model.model.parameters())
        shape = server.model.model.config
        cache = 2 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim * 4 * 3 * 200
        config = make_serving_config(find_model("agent:2", registry.runs), OPTIONS)
        needed = estimate_needed_bytes(config, server.model)
        assert weights + cache <= needed <= 1.5 * weights + cache  # a head that is stored twice
        monkeypatch.setattr(follow, "get_free_bytes", lambda device: needed - 3 * 2**20)
        registry.set_alias("agent:2", "champion")
        wait_until(lambda: bool(said))
        problem = health(client)["problem"]
        assert problem.startswith("agent:2 cannot be loaded: it needs ") and "cpu has" in problem
        assert "3 MiB more" in problem and problem.endswith("agent:1 keeps serving")
        assert said == [f"agent@champion: {problem}"]
        assert post(client, BODY)["system_fingerprint"] == "agent:1"
        monkeypatch.setattr(follow, "get_free_bytes", lambda device: needed)
        wait_until(lambda: health(client)["problem"] is None)
        assert health(client)["version"] == "agent:2" and "agent@champion is now agent:2" in said[-1]


def test_a_version_that_cannot_be_loaded_changes_nothing(
    registry: ModelRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    with served(registry, said=said) as (_, client):

        def told(problem: str) -> None:
            wait_until(lambda: bool(said) and problem in said[-1])
            assert said[-1] == f"agent@champion: {health(client)['problem']}"
            assert said[-1].endswith("agent:1 keeps serving")
            assert post(client, user(max_tokens=2))["system_fingerprint"] == "agent:1"

        weights = registry.get_model_folder(registry.get("agent:2")) / "model.safetensors"
        whole = weights.read_bytes()
        weights.chmod(0o644)
        weights.write_bytes(whole[:-1] + b"\x01")
        registry.set_alias("agent:2", "champion")
        told("tfactory registry verify agent:2")
        registry.remove_alias("agent", "champion")
        told("agent has no alias 'champion'")
        registry.set_alias("agent:2", "champion")
        told("agent:2 is damaged")
        weights.write_bytes(whole)
        with monkeypatch.context() as broken:
            broken.setattr(follow, "load_served_model", lambda *_: 1 // 0)
            told("agent:2 cannot be loaded: integer division")
            path = registry.path.rename(registry.path.with_suffix(".away"))
            told("there is no registered model 'agent@champion'")
        path.rename(registry.path)
        wait_until(lambda: health(client)["version"] == "agent:2")
        assert post(client, user(max_tokens=2))["system_fingerprint"] == "agent:2"


def test_the_command_follows(
    registry: ModelRegistry, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make, runners = listen.make_server, list[Any]()
    monkeypatch.setattr(listen, "make_server", lambda app: runners.append(make(app)) or runners[0])
    bound = listen.bind("127.0.0.1", 0)
    monkeypatch.setattr(listen, "bind", lambda *_: bound)

    def move() -> None:
        wait_until(lambda: bool(runners))
        try:
            with httpx.Client(base_url=listen.format_url(bound), timeout=HANG, trust_env=False) as client:
                registry.set_alias("agent:2", "champion")
                wait_until(lambda: health(client)["version"] == "agent:2")
        finally:
            runners[0].should_exit = True

    with ThreadPoolExecutor(1) as pool:
        moved = pool.submit(move)
        assert serve("agent@champion", *OPTIONS, f"logging.output_dir={registry.runs}") == 0
        moved.result(HANG)
    out, err = capsys.readouterr()
    assert "serving agent@champion (agent:1) at http" in out and "agent@champion is now agent:2" in err


def test_a_version_and_a_folder_follow_nothing(registry: ModelRegistry, models: list[Path]) -> None:
    before = threading.active_count()
    for name in ("agent:1", "agent", str(models[0])):
        found = find_model(name, registry.runs)
        server = ChatServer(
            name, load_served_model(make_serving_config(found, OPTIONS), found.version and str(found.version))
        )
        with follow_alias(server, found, OPTIONS, registry.runs):
            assert threading.active_count() == before and server.follows is None
            assert server.report_health().get("version") == {"agent:1": "agent:1", "agent": "agent:2"}.get(
                name
            )
        server.close()
