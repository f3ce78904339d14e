"""Messages of the tool in Chinese, the textbook's language, and in English."""

from __future__ import annotations

import os

LANG_VARIABLE = "TFACTORY_HELLO_LANGUAGE"  # zh or en
MESSAGE_TEXTS = {
    "description": (
        "训练语言模型: SFT、GRPO 等算法, 加载数据集, 创建奖励函数, 评估模型。没有写明 algorithm 和 model_name "
        "的训练请求只返回计划; 用户同意后再用 confirm=true 开始。",
        "Train language models (SFT, GRPO and others), load datasets, create rewards, evaluate models. A train request "
        "without algorithm and model_name only returns a plan; set confirm=true to start it once the user agrees.",
    ),
    "failed": ("操作失败: {why}", "the action failed: {why}"),
    "choice": (
        "不支持的{what}: {value}。支持的{what}: {known}",
        "there is no {what} {value}. Available: {known}",
    ),
    "action": ("操作", "action"),
    "algorithm": ("算法", "algorithm"),
    "format": ("数据格式", "format"),
    "reward": ("奖励", "reward"),
    "dataset": ("数据集", "dataset"),
    "key": (
        "操作 {action} 没有参数 {value}{near}。可用的参数: {known}",
        "action {action} has no parameter {value}{near}. Available: {known}",
    ),
    "parameters": (
        '参数必须是对象或 JSON 文本, 例如 {{"action": "train"}}, 而不是 {value}',
        'parameters must be a mapping or JSON text, such as {{"action": "train"}}, not {value}',
    ),
    "json": (
        "参数不是有效的 JSON (第 {line} 行第 {column} 列)",
        "the parameters are not valid JSON (line {line}, column {column})",
    ),
    "unread": (
        "{value} 只用于会采样的算法; {algorithm} 从已有的数据学习",
        "{value} applies only to algorithms that sample; {algorithm} trains on existing rows. Remove it.",
    ),
    "missing": ("缺少必需参数: {value}", "required parameter {value} is missing"),
    "registered": (
        "注册了多个奖励函数: {known}; 请用 reward 写明用哪一个",
        "several rewards are registered: {known}. Select one with the parameter reward.",
    ),
    "plan": (
        "还没有开始训练, 这是计划。写明 algorithm 和 model_name, 或者在用户同意后加上 confirm: true 开始。"
        "其他操作请写明 action: {known}",
        "Training has not started; this is the plan. To start, set algorithm and model_name, or add confirm: true once "
        "the user agrees. For other actions set action: {known}",
    ),
    "accuracy": (
        "答案正确为 1, 否则为 0 (误差不超过 {tolerance})",
        "1 for a correct answer, else 0 (tolerance {tolerance})",
    ),
    "length_penalty": (
        "基础奖励减去 {penalty_weight} * 超出 {max_length} 个字符的比例, 不低于 0",
        "base reward minus {penalty_weight} times the fraction of characters beyond {max_length}, at least 0",
    ),
    "step": (
        "答案正确时, 第一行之后每个非空行加 {step_bonus}, 合计不超过 {cap}",
        "for a correct answer, a bonus of {step_bonus} for each non-empty line after the first, at most {cap} in total",
    ),
    "added": ("已注册: {value}", "registered {value}"),
    "combined": ("各部分按权重相加: {components}", "the weighted sum of {components}"),
}


class ToolMessages:
    """Formats messages in `language`: zh or en. None: the language in the variable TFACTORY_HELLO_LANGUAGE, else zh."""

    def __init__(self, language: str | None = None) -> None:
        self.language = language or os.environ.get(LANG_VARIABLE) or "zh"
        if self.language not in ("zh", "en"):
            raise ValueError(f"language is {self.language!r}; set language= or {LANG_VARIABLE} to zh or en")

    def __call__(self, name: str, **values: object) -> str:
        return MESSAGE_TEXTS[name][self.language == "en"].format(**values)
