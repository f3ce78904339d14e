"""`RLTrainingTool` by itself: what it refuses, what each key does, what it finds by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.kits.hello import STARTED, completion, problems, tool_call, write_gsm8k
from tests.kits.judge import judging
from TrainingFactory.evaluation.records import read_records
from TrainingFactory.integrations.hello_agents import Result, RLTrainingTool
from TrainingFactory.integrations.hello_agents.agents import HelloAgentsLLM, SimpleAgent, ToolRegistry
from TrainingFactory.integrations.hello_agents.training import make_config_sections


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RLTrainingTool:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TFACTORY_GSM8K", str(write_gsm8k(tmp_path / "gsm8k")))
    return RLTrainingTool("en")


def config_of(result: Result) -> dict[str, Any]:
    return yaml.safe_load(Path(result["run"], "config.yaml").read_text())


@pytest.mark.parametrize(
    ("given", "english", "chinese"),
    [
        (None, "JSON text, such as", "参数必须是对象或 JSON 文本"),
        ('{"action": ', "not valid JSON (line 1, column 12)", "第 1 行第 12 列"),
        ({"algorithm": "sft", "reward": "step"}, "algorithms that sample", "只用于会采样的算法"),
    ],
)  # fmt: skip
def test_an_error_is_one_text_in_one_language(given: Any, english: str, chinese: str):
    for language, text in {"en": english, "zh": chinese}.items():
        answer = RLTrainingTool(language).run(given)
        assert answer["status"] == "error" and text in answer["message"]


def test_a_result_is_json_text_and_has_keys():
    result = Result({"status": "success", "name": "数学"})
    assert isinstance(result, str) and json.loads(result) == {"status": "success", "name": "数学"}
    assert result["status"] == result.get("status") == "success" and "数学" in result
    assert list(result.keys()) == ["status", "name"] and result.get("other") is None
    assert result[0] == "{" and dict(result.items()) == json.loads(result)


@pytest.mark.parametrize(
    "vague",
    [
        {},
        {"action": "train"},
        {"algorithm": "grpo"},
        {"action": "train", "model_name": "builtin:tiny", "num_epochs": 2},
        {"input": "please train a good model"},
        "train something",
        '{"action": "train"}',
        {"input": '{"action": "train", "num_epochs": "2"}'},
        {"algorithm": "sft", "model_name": "builtin:tiny", "confirm": False},
    ],
)
def test_a_vague_request_gets_a_plan_and_trains_nothing(tool: RLTrainingTool, vague: Any):
    answer = tool.run(vague)
    assert answer["status"] == "plan" and "confirm: true" in answer["message"]
    assert answer["plan"]["algorithm"] == ("grpo" if "grpo" in str(vague) else "sft")
    assert answer["plan"]["num_epochs"] in (2, 3) and not Path("output").exists()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ({"action": "foo"}, "no action foo"),
        ({"action": "foo"}, ": train, load_dataset"),
        ({"algorithm": "magic"}, "no algorithm magic"),
        ({"algorithm": "magic"}, ": sft, grpo, ppo, rft"),
        ({"learning_rat": 1}, "learning_rat; did you mean learning_rate?"),
        ({"action": "load_dataset", "format": "xx"}, "no format xx"),
        ({"action": "load_dataset", "use_lora": True}, "load_dataset has no parameter use_lora"),
        ({"action": "create_reward", "reward_type": "fame"}, "no reward fame"),
        ({"action": "create_reward", "step_bonus": 1}, "reward accuracy has no option 'step_bonus'"),
        ({"action": "evaluate"}, "parameter model_path"),
        ({"dataset": "gsm9k"}, "no dataset gsm9k"),
        ({"max_samples": 0}, "max_samples is 0; it must be 1 or more"),
        ({"max_samples": "many"}, "max_samples is 'many'; it must be 1 or more"),
        ({"algorithm": "dpo"}, "dpo needs"),
        ({"algorithm": "grpo", "reward": "mine"}, "no reward mine"),
        ({"reward_type": "step"}, "reward_type"),
        ({"num_generations": 4}, "training.group_size: sft samples no groups"),
        ({"use_lora": False, "lora_r": 8}, "lora.r: there is no adapter"),
        ({"lora_r": 8, "lora_rank": 4}, "lora_rank is 4, but lora.r is already 8"),
        ({"num_epochs": "many"}, "training.num_epochs"),
        ({"wandb_project": "x"}, "use_wandb: true"),
        ({"use_wandb": True}, "wandb is not installed"),
        ({"algorithm": "sft", "clip_range": 0.2}, "sft.clip"),
        ({"grpo.klx": 1, "algorithm": "grpo"}, "grpo.klx"),
        ({"custom_dataset": [{"a": 1}]}, "row 0 of the dataset lacks columns: sft needs"),
        ({"output_dir": "mine"}, "output_dir mine holds a model (config.json) that was not trained here"),
    ],
)
def test_what_it_does_not_do_is_refused_by_name(tool: RLTrainingTool, call: dict[str, Any], says: str):
    Path("mine").mkdir()
    Path("mine/config.json").write_text("{}")
    answer = tool.run(
        {"algorithm": "sft", "model_name": "builtin:tiny"} | call if "action" not in call else call
    )
    assert answer["status"] == "error" and says in answer["message"], answer
    assert not Path("output/adapter_config.json").exists()


def test_without_data_it_says_where_to_put_them(tool: RLTrainingTool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TFACTORY_GSM8K", "nowhere")
    text = tool.run({"action": "load_dataset"})["message"]
    assert "nowhere/train.jsonl" in text and "data.tasks" in text and "TFACTORY_GSM8K" in text
    assert tool.run({"action": "load_dataset", "data": {"tasks": "gsm8k"}})["dataset_size"] == 4


def test_messages_are_chinese_unless_told_otherwise(tool: RLTrainingTool, monkeypatch: pytest.MonkeyPatch):
    assert "不支持的操作: foo" in RLTrainingTool().run({"action": "foo"})["message"]
    monkeypatch.setenv("TFACTORY_HELLO_LANGUAGE", "en")
    assert "there is no action foo" in RLTrainingTool().run({"action": "foo"})["message"]
    with pytest.raises(ValueError, match="zh or en"):
        RLTrainingTool("fr")


def test_datasets_have_the_textbooks_records(tool: RLTrainingTool):
    loaded = {form: tool.run({"action": "load_dataset", "format": form, "model_name": "builtin:tiny"})
              for form in ("sft", "rl")}  # fmt: skip
    assert loaded["sft"]["sample_keys"] == ["prompt", "completion", "text"]
    assert loaded["rl"]["sample_keys"] == ["question", "prompt", "ground_truth", "full_answer"]
    part = tool.run(
        {"action": "load_dataset", "format_type": "sft", "split": "train[1:3]", "max_samples": None}
    )
    assert part["dataset_size"] == 2


def test_every_key_takes_effect():
    keys = {
        "num_epochs": 2, "batch_size": 2, "gradient_accumulation_steps": 4, "learning_rate": 1e-4, "warmup_ratio": 0.5,
        "weight_decay": 0.1, "optimizer": "adamw_torch", "save_steps": 7, "num_generations": 4, "max_new_tokens": 9,
        "temperature": 0.7, "kl_coef": 0.05, "clip_range": 0.1, "use_lora": True, "lora_rank": 4, "lora_alpha": 8,
        "lora_dropout": 0.1, "lora_target_modules": ["q_proj"], "max_length": 99, "seed": 5,
        "use_tensorboard": False, "grpo.scale_rewards": True,
    }  # fmt: skip
    assert make_config_sections("grpo", keys, num_rows=32) == {
        "training": {"num_epochs": 2, "batch_size": 8, "learning_rate": 1e-4, "weight_decay": 0.1, "warmup_steps": 4,
                     "optimizer": "adamw", "group_size": 4, "seed": 5},
        "logging": {"checkpoint_every": 7},
        "sampling": {"max_tokens": 9, "temperature": 0.7},
        "lora": {"enabled": True, "r": 4, "alpha": 8, "dropout": 0.1, "target_modules": ["q_proj"]},
        "model": {"max_length": 99},
        "grpo": {"kl": 0.05, "clip_low": 0.1, "clip_high": 0.1, "scale_rewards": True},
    }  # fmt: skip


@STARTED
def test_a_registered_reward_is_found_by_its_own_name(tool: RLTrainingTool, started: Path):
    calls: list[str] = []

    def length(completions: list[str], ground_truth: list[str]) -> list[float]:
        calls.extend(ground_truth)
        return [float(len(text) % 7) for text in completions]

    tool.register_reward_function("my_reward", length)
    tool.register_dataset("my_math", problems(2))
    call = {"algorithm": "grpo", "model_name": str(started), "dataset": "my_math", "num_epochs": 1, "batch_size": 2,
            "num_generations": 2, "max_new_tokens": 8, "use_lora": False, "output_dir": "whole"}  # fmt: skip
    done = tool.run(call)
    assert (done["reward"], done["dataset_size"], done["steps"]) == ("my_reward", 2, 1), done
    assert sorted(calls) == ["3", "3", "4", "4"]
    assert config_of(done)["sampling"]["max_tokens"] == 8 and Path("whole/config.json").exists()
    assert tool.run(call | {"reward_type": "accuracy", "confirm": False})["plan"]["reward"] == "accuracy"
    tool.register_reward_function("other", length)
    assert "several rewards are registered: my_reward, other" in tool.run(call)["message"]


@STARTED
@pytest.mark.parametrize(
    "algorithm",
    ["dpo", "reward_model", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ppo", "rft", "kto"))],
)
def test_the_algorithms_that_the_text_only_names_train(tool: RLTrainingTool, started: Path, algorithm: str):
    pairs = [{"prompt": f"{n}?", "chosen": f"Final Answer: {n}", "rejected": "no"} for n in range(2)]
    labels = [{"prompt": f"{n}?", "completion": f"Final Answer: {n}", "label": bool(n)} for n in range(2)]
    rows = {"dpo": pairs, "reward_model": pairs, "kto": labels}.get(algorithm, problems(2))
    more = {"num_generations": 2, "max_new_tokens": 24} if algorithm in ("ppo", "rft") else {}
    done = tool.run({"algorithm": algorithm, "model_name": str(started), "custom_dataset": rows, "num_epochs": 1,
                     "batch_size": 2, "output_dir": "made", **more})  # fmt: skip
    assert done["status"] == "success" and done["algorithm"] == algorithm.upper(), done
    assert Path("made/adapter_config.json").exists()


@STARTED
def test_training_again_replaces_the_model_and_keeps_the_runs(tool: RLTrainingTool, started: Path):
    call = {"algorithm": "sft", "model_name": str(started), "num_epochs": 1, "output_dir": "model"}
    first = tool.run(call | {"use_lora": False})
    assert (Path("model/model.safetensors").exists(), first["use_lora"]) == (True, False)
    second = tool.run(call | {"lora_r": 4})
    assert Path("model/adapter_config.json").exists() and not Path("model/model.safetensors").exists()
    assert Path(first["run"]).exists() and first["run"] != second["run"]
    again = tool.run(call | {"model_name": "model", "output_dir": "next", "lora_r": 8})
    assert "lora.r: model.adapter keeps" in again["message"]
    assert "use_lora is false" in tool.run(call | {"model_name": "model", "use_lora": False})["message"]


def test_an_adapter_over_the_builtin_model_loads_elsewhere(tool: RLTrainingTool):
    done = tool.run({"algorithm": "sft", "model_name": "builtin:tiny", "num_epochs": 1, "output_dir": "sft"})
    assert done["status"] == "success", done
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained("sft")
    assert any("lora_A" in name for name, _ in loaded.named_parameters())


@STARTED
def test_evaluation_is_numeric_and_says_its_interval(tool: RLTrainingTool, started: Path):
    call = {"action": "evaluate", "model_path": str(started), "split": "train", "max_new_tokens": 64}
    found = tool.run(call | {"return_details": True, "reward_type": "step", "metrics": ["accuracy", "average_reward",
                             "average_length", "average_steps", "format_correctness"]})  # fmt: skip
    right = [each["correct"] for each in found["details"]]
    assert found["num_samples"] == 4 and found["accuracy"] == sum(right) / 4 > 0, found
    assert f"{found['accuracy']:.2%}" == found["accuracy_percent"]
    low, high = found["interval_95"]
    assert 0 <= low <= found["accuracy"] <= high <= 1
    assert len(found["errors"]) == right.count(False)
    assert found["average_reward"] == pytest.approx(sum(each["reward"] for each in found["details"]) / 4)
    [record] = read_records(Path("runs/evaluations.jsonl"))
    assert (record.id, record.metrics["success"]) == (found["record"], found["accuracy"])
    assert record.model.name == str(started) and Path("runs", str(record.episodes_file)).is_file()
    tool.register_reward_function("length", lambda completions, ground_truth: [2.0 for _ in completions])
    many = tool.run(
        call
        | {
            "k": 4,
            "temperature": 1.0,
            "max_samples": 2,
            "metrics": ["average_reward", "accuracy", "accuracy_at_k"],
        }
    )
    assert many["num_samples"] == 2 and many["accuracy_at_k"] >= many["accuracy"]
    assert (many["reward"], many["average_reward"]) == ("length", 2.0)
    assert "k is 4" in tool.run(call | {"k": 4})["message"]
    assert "there is no metric 'speed'" in tool.run(call | {"metrics": ["speed"]})["message"]


def test_our_agent_remembers_and_asks_before_a_vague_training(
    tool: RLTrainingTool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("LLM_API_KEY", "put back afterwards")
    said = [
        tool_call({"action": "train"}),
        completion({"content": "Shall I?"}),
        completion({"content": "Ok."}),
    ]
    with judging(lambda prompt, number: said[number]) as llm:
        model = HelloAgentsLLM(model="fixed", base_url=llm.url, api_key="sk-hello-1234", temperature=0.5)
        agent = SimpleAgent("trainer", model, tools=[tool])
        assert agent.run("Train something.") == "Shall I?"
        assert agent.run("No.") == "Ok."
    assert '"status": "plan"' in llm.asked[1]["messages"][-1]["content"] and not Path("output").exists()
    assert "Shall I?" in llm.asked[2]["messages"][0]["content"] and llm.asked[0]["temperature"] == 0.5
    [listed] = llm.asked[0]["tools"]
    assert {"action", "model_path", "confirm"} <= listed["function"]["parameters"]["properties"].keys()
    assert llm.headers[0]["Authorization"] == "Bearer sk-hello-1234" and "sk-hello" not in repr(model)


def test_a_registry_hands_texts_and_json_on(tool: RLTrainingTool):
    registry = ToolRegistry()
    registry.register_tool(tool)
    assert json.loads(registry.execute_tool("rl_training", "evaluate my model please"))["status"] == "plan"
    call = '{"action": "load_dataset", "max_samples": 1}'
    assert json.loads(registry.execute_tool("rl_training", call))["dataset_size"] == 1
    assert registry.list_tools() == ["rl_training"]
    with pytest.raises(ValueError, match="there is no tool 'thrice'"):
        registry.execute_tool("thrice", "")
