"""What the tool says, in the textbook's language and in English."""

from __future__ import annotations

import os

LANGUAGE = "TFACTORY_HELLO_LANGUAGE"  # zh or en
TEXTS = {
    "description": (
        "训练语言模型: SFT、GRPO 等算法, 加载数据集, 创建奖励函数, 评估模型。没有写明 algorithm 和 model_name "
        "的训练请求只返回计划; 用户同意后再用 confirm=true 开始。",
        "Train language models (SFT, GRPO and others), load datasets, create rewards, evaluate models. A request to "
        "train that does not name algorithm and model_name gets a plan; confirm=true starts it once the user agrees.",
    ),
    "failed": ("操作失败: {why}", "it failed: {why}"),
    "choice": (
        "不支持的{what}: {value}。支持的{what}: {known}",
        "there is no {what} {value}; there are: {known}",
    ),
    "action": ("操作", "action"),
    "algorithm": ("算法", "algorithm"),
    "format": ("数据格式", "format"),
    "reward": ("奖励", "reward"),
    "dataset": ("数据集", "dataset"),
    "key": (
        "操作 {action} 没有参数 {value}{near}。可用的参数: {known}",
        "the action {action} has no parameter {value}{near}; it has: {known}",
    ),
    "parameters": (
        '参数必须是对象或 JSON 文本, 例如 {{"action": "train"}}, 而不是 {value}',
        'give the parameters as a mapping or as JSON text, such as {{"action": "train"}}, not as {value}',
    ),
    "json": (
        "参数不是有效的 JSON (第 {line} 行第 {column} 列)",
        "the parameters are not valid JSON (line {line}, column {column})",
    ),
    "unread": (
        "{value} 只用于会采样的算法; {algorithm} 从已有的数据学习",
        "{value} is for algorithms that sample; {algorithm} learns from existing rows",
    ),
    "missing": ("缺少必需参数: {value}", "the parameter {value} is missing"),
    "registered": (
        "注册了多个奖励函数: {known}; 请用 reward 写明用哪一个",
        "several rewards are registered: {known}; name one of them by reward",
    ),
    "plan": (
        "还没有开始训练, 这是计划。写明 algorithm 和 model_name, 或者在用户同意后加上 confirm: true 开始。"
        "其他操作请写明 action: {known}",
        "Nothing has been started; this is the plan. Name algorithm and model_name, or add confirm: true once the user "
        "agrees. Other actions are named by action: {known}",
    ),
    "accuracy": (
        "答案正确为 1, 否则为 0 (误差不超过 {tolerance})",
        "1 for the right answer, else 0 (within {tolerance})",
    ),
    "length_penalty": (
        "基础奖励减去 {penalty_weight} * 超出 {max_length} 个字符的比例, 不低于 0",
        "the base reward less {penalty_weight} times the share of characters over {max_length}, at least 0",
    ),
    "step": (
        "答案正确时, 第一行之后每个非空行加 {step_bonus}, 合计不超过 {cap}",
        "where the answer is right, {step_bonus} for each line of text after the first, at most {cap} in all",
    ),
    "added": ("已注册: {value}", "registered {value}"),
    "combined": ("各部分按权重相加: {components}", "the weighted sum of {components}"),
}


class Texts:
    """Says texts in `zh`, the textbook's language, unless `language` or the environment variable says `en`."""

    def __init__(self, language: str | None = None) -> None:
        self.language = language or os.environ.get(LANGUAGE) or "zh"
        if self.language not in ("zh", "en"):
            raise ValueError(f"language is {self.language!r}; it must be zh or en (language=, or {LANGUAGE})")

    def __call__(self, name: str, **values: object) -> str:
        return TEXTS[name][self.language == "en"].format(**values)
