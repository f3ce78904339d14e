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
    "action": (
        "不支持的操作: {value}。支持的操作: {known}",
        "there is no action {value}; there are: {known}",
    ),
    "algorithm": (
        "不支持的算法: {value}。支持的算法: {known}",
        "there is no algorithm {value}; there are: {known}",
    ),
    "format": (
        "不支持的数据格式: {value}。支持的格式: {known}",
        "there is no format {value}; there are: {known}",
    ),
    "reward": (
        "不支持的奖励: {value}。可用的奖励: {known}",
        "there is no reward {value}; there are: {known}",
    ),
    "dataset": (
        "没有名为 {value} 的数据集。可用: {known}, 或数据文件的路径, 或 hub 上的 id (所有者/名称)",
        "there is no dataset {value}; there are: {known}, the path of a file, or an id of the hub (owner/name)",
    ),
    "key": (
        "操作 {action} 没有参数 {value}{near}。可用的参数: {known}",
        "the action {action} has no parameter {value}{near}; it has: {known}",
    ),
    "missing": ("缺少必需参数: {value}", "the parameter {value} is missing"),
    "registered": (
        "注册了多个奖励函数: {known}; 请用 reward 写明用哪一个",
        "several rewards are registered: {known}; name one of them by reward",
    ),
    "pairs": (
        "{value} 从成对的回答学习, 而 gsm8k 没有; 请给出含 prompt、chosen 和 rejected 的 custom_dataset 或文件",
        "{value} learns from pairs of answers, which gsm8k has not; give a custom_dataset or file with prompt, chosen "
        "and rejected",
    ),
    "plan": (
        "还没有开始训练, 这是计划。写明 algorithm 和 model_name, 或者在用户同意后加上 confirm: true 开始。"
        "其他操作请写明 action: {known}",
        "Nothing has been started; this is the plan. Name algorithm and model_name, or add confirm: true once the user "
        "agrees. Other actions are named by action: {known}",
    ),
    "interrupted": (
        "训练在第 {steps} 步被中断; 已学到的内容在 {value}",
        "training was interrupted after step {steps}; what was learned is in {value}",
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
    "combined": ("各部分按权重相加: {components}", "the weighted sum of {components}"),
    "registered_dataset": ("已注册数据集: {value}", "registered the dataset {value}"),
    "registered_reward": ("已注册奖励函数: {value}", "registered the reward {value}"),
}


class Texts:
    """Holds the language: `zh`, the textbook's, unless `language` or the environment variable says `en`."""

    def __init__(self, language: str | None = None) -> None:
        chosen = language or os.environ.get(LANGUAGE) or "zh"
        if chosen not in ("zh", "en"):
            raise ValueError(f"the language is {chosen!r}; it must be zh or en (language=, or {LANGUAGE})")
        self.language = chosen

    def __call__(self, name: str, **values: object) -> str:
        return TEXTS[name][self.language == "en"].format(**values)
