"""Tiny random models built like released checkpoints: layer pattern, window, norms of queries and keys, soft caps,
sinks, rotary part, shared layers, ratio of heads, tied or untied embeddings. One row each of docs/COMPATIBILITY.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCABULARY = 128
WINDOW = 24  # far shorter than the sequences of the checks
LAYERS = 4
HEAD_DIM = 8
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": HEAD_DIM, "initializer_range": 0.3,
    "max_position_embeddings": 512, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
TIED = {"tie_word_embeddings": True}
YARN = {
    "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64,
    "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
PLAIN = {"rope_type": "default", "rope_theta": 10_000.0}
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12,
    "rope_interleave": True,
}  # fmt: skip
ROUTED = {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LOCAL_EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2}
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
MAMBA = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_expand": 2,
    "mamba_chunk_size": 16,
}  # fmt: skip
WINDOWED = {"sliding_window": WINDOW}
MULTIPLIERS = {"embedding_multiplier": 12.0, "logits_scaling": 2.0, "residual_multiplier": 0.22}


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """A family of released checkpoints. `released` is one of them; `template` is its chat template in TRL's wheel."""

    key: str  # of the data file
    name: str
    model_type: str
    released: str
    features: str  # beyond full attention with grouped heads and rotary positions
    options: Mapping[str, Any] = field(default_factory=dict)
    template: str | None = None

    def config(self) -> Any:
        options = {**COMMON, **self.options}
        return AutoConfig.for_model(
            self.model_type, **{key: value for key, value in options.items() if value is not ...}
        )

    def build(self, seed: int = 0, **changes: Any) -> PreTrainedModel:
        """Return the model in float32 with random norms, biases and sinks, which are all ones or zeros at first."""
        config = self.config()
        for name, value in changes.items():
            setattr(config, name, value)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            for name, weight in model.named_parameters():
                if weight.dim() == 1 and not name.endswith(("A_log", "dt_bias", ".D")):
                    weight.data += 0.2 * torch.randn_like(weight)
        return model.eval()


# fmt: off
FAMILIES = (
    ModelFamily(
        "llama", "Llama 3", "llama", "meta-llama/Llama-3.2-3B-Instruct",
        "llama3 rotary scaling", {**TIED, "rope_parameters": LLAMA3}, "llama3_1",
    ),
    ModelFamily(
        "llama4", "Llama 4 (text)", "llama4_text", "meta-llama/Llama-4-Scout-17B-16E-Instruct",
        "chunked attention, layers without rotary positions, QK norm, experts",
        {"attention_chunk_size": WINDOW, "num_local_experts": 4, "intermediate_size_mlp": 64,
         "interleave_moe_layer_step": 1, "floor_scale": 32},
    ),
    ModelFamily(
        "qwen2", "Qwen2.5", "qwen2", "Qwen/Qwen2.5-1.5B-Instruct",
        "biases of queries, keys and values", TIED, "qwen2_5",
    ),
    ModelFamily(
        "qwen2_moe", "Qwen1.5-MoE, Qwen2-MoE", "qwen2_moe", "Qwen/Qwen2-57B-A14B-Instruct",
        "biases, experts, shared expert", {**EXPERTS, "shared_expert_intermediate_size": 32},
    ),
    ModelFamily(
        "qwen3", "Qwen3", "qwen3", "Qwen/Qwen3-4B-Instruct-2507",
        "QK norm", TIED, "qwen3_instruct_2507",
    ),
    ModelFamily(
        "qwen3_moe", "Qwen3-MoE", "qwen3_moe", "Qwen/Qwen3-30B-A3B-Instruct-2507",
        "QK norm, experts", {**EXPERTS, "norm_topk_prob": True}, "qwen3_instruct_2507",
    ),
    ModelFamily(
        "qwen3_next", "Qwen3-Next", "qwen3_next", "Qwen/Qwen3-Next-80B-A3B-Instruct",
        "three linear layers to one gated attention, partial rotary positions, experts",
        {**EXPERTS, **DELTA, "shared_expert_intermediate_size": 16},
    ),
    ModelFamily(
        "qwen3_5", "Qwen3.5 (text)", "qwen3_5_text", "Qwen/Qwen3.5-4B",
        "three linear layers to one gated attention, partial rotary positions", {**DELTA, **TIED}, "qwen3_5_think",
    ),
    ModelFamily(
        "qwen3_5_moe", "Qwen3.5-MoE (text)", "qwen3_5_moe_text", "Qwen/Qwen3.5-35B-A3B",
        "three linear layers to one gated attention, partial rotary positions, experts",
        {**EXPERTS, **DELTA, "shared_expert_intermediate_size": 16}, "qwen3_5_think",
    ),
    ModelFamily(
        "mistral", "Mistral", "mistral", "mistralai/Mistral-7B-Instruct-v0.3",
        "no window", {"sliding_window": None},
    ),
    ModelFamily(
        "mistral_window", "Mistral with window", "mistral", "mistralai/Mistral-7B-Instruct-v0.1",
        "window in every layer", WINDOWED,
    ),
    ModelFamily(
        "ministral", "Ministral", "ministral", "mistralai/Ministral-8B-Instruct-2410",
        "three windowed layers to one full layer",
        {**WINDOWED, "layer_types": ["full_attention", *["sliding_attention"] * 3]},
    ),
    ModelFamily(
        "ministral3", "Ministral 3", "ministral3", "mistralai/Ministral-3-8B-Instruct-2512",
        "YaRN, query scale by position", {**TIED,
         "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0,
             "llama_4_scaling_beta": 0.1, "max_position_embeddings": 512}},
    ),
    ModelFamily(
        "mixtral", "Mixtral", "mixtral", "mistralai/Mixtral-8x7B-Instruct-v0.1",
        "experts", LOCAL_EXPERTS,
    ),
    ModelFamily(
        "gemma2", "Gemma 2", "gemma2", "google/gemma-2-2b-it",
        "alternating window, soft caps of scores and logits",
        {**TIED, **WINDOWED, "query_pre_attn_scalar": 12, "attn_logit_softcapping": 5.0,
         "final_logit_softcapping": 3.0},
    ),
    ModelFamily(
        "gemma3", "Gemma 3 (text)", "gemma3_text", "google/gemma-3-1b-it",
        "five windowed layers to one full layer, two rotary bases, QK norm, one KV head",
        {**TIED, **WINDOWED, "num_hidden_layers": 6, "num_key_value_heads": 1, "query_pre_attn_scalar": 12},
        "gemma3",
    ),
    ModelFamily(
        "gemma4", "Gemma 4 (text)", "gemma4_text", "google/gemma-4-E2B-it",
        "window, larger heads in full layers, partial rotary positions, shared KV, embeddings per layer, QK norm",
        {**TIED, **WINDOWED, "num_hidden_layers": 6, "num_key_value_heads": 1, "global_head_dim": 16,
         "num_kv_shared_layers": 3,
         "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
         "use_double_wide_mlp": True, "hidden_size_per_layer_input": 8,
         "vocab_size_per_layer_input": VOCABULARY, "final_logit_softcapping": 30.0}, "gemma4",
    ),
    ModelFamily(
        "gemma4_moe", "Gemma 4 MoE (text)", "gemma4_text", "google/gemma-4-26B-A4B-it",
        "window, larger heads in full layers, keys equal values, experts",
        {**TIED, **WINDOWED, "num_hidden_layers": 6, "global_head_dim": 16, "num_global_key_value_heads": 1,
         "attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": VOCABULARY,
         "final_logit_softcapping": 30.0, "enable_moe_block": True, "num_experts": 8, "top_k_experts": 2,
         "moe_intermediate_size": 16}, "gemma4",
    ),
    ModelFamily(
        "gpt_oss", "gpt-oss", "gpt_oss", "openai/gpt-oss-20b",
        "alternating window, sinks, YaRN, biases, experts",
        {**WINDOWED, **LOCAL_EXPERTS, "rope_parameters": {**YARN, "truncate": False}}, "gptoss",
    ),
    ModelFamily(
        "deepseek_v3", "DeepSeek V3, R1", "deepseek_v3", "deepseek-ai/DeepSeek-V3",
        "latent attention with query compression, interleaved rotary positions, grouped experts",
        {**LATENT, **ROUTED, "q_lora_rank": 16, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
         "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}, "deepseekv3",
    ),
    ModelFamily(
        "kimi_k2", "Kimi K2, Moonlight", "deepseek_v3", "moonshotai/Moonlight-16B-A3B-Instruct",
        "latent attention without query compression, experts in one group",
        {**LATENT, **ROUTED, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    ),
    ModelFamily(
        "kimi_linear", "Kimi Linear", "kimi_linear", "moonshotai/Kimi-Linear-48B-A3B-Instruct",
        "three linear layers to one latent attention, experts",
        {**LATENT, "rope_interleave": ..., "qk_rope_head_dim": 8, "num_local_experts": 8,
         "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_hidden_layers": 5, "linear_head_dim": 8,
         "linear_num_heads": 4},
    ),
    ModelFamily(
        "glm4", "GLM-4-0414", "glm4", "zai-org/GLM-4-9B-0414",
        "partial interleaved rotary positions, norms after the layers", {},
    ),
    ModelFamily(
        "glm4_moe", "GLM-4.5, 4.6, 4.7", "glm4_moe", "zai-org/GLM-4.5-Air",
        "partial rotary positions, QK norm, experts",
        {**ROUTED, "first_k_dense_replace": 1, "use_qk_norm": True, "attention_bias": True}, "glm4moe",
    ),
    ModelFamily(
        "glm4_moe_lite", "GLM-4.7-Flash", "glm4_moe_lite", "zai-org/GLM-4.7-Flash",
        "latent attention, experts", {**LATENT, **ROUTED, "head_dim": ..., "q_lora_rank": 16}, "glm4moe",
    ),
    ModelFamily(
        "phi3", "Phi-3, Phi-3.5, Phi-4-mini", "phi3", "microsoft/Phi-4-mini-instruct",
        "fused projections, partial rotary positions", {**TIED, "head_dim": ..., "partial_rotary_factor": 0.5},
        "phi3_5",
    ),
    ModelFamily(
        "phi4", "Phi-4", "phi3", "microsoft/phi-4",
        "fused projections", {"head_dim": ...},
    ),
    ModelFamily(
        "phi3_window", "Phi-3 mini", "phi3", "microsoft/Phi-3-mini-4k-instruct",
        "fused projections, window in every layer", {**WINDOWED, "head_dim": ..., "num_key_value_heads": 4}, "phi3",
    ),
    ModelFamily(
        "granite", "Granite 3", "granite", "ibm-granite/granite-3.3-2b-instruct",
        "multipliers of embeddings, residuals, scores and logits",
        {**TIED, **MULTIPLIERS, "attention_multiplier": 0.125},
    ),
    ModelFamily(
        "granitemoe", "Granite 3 MoE", "granitemoe", "ibm-granite/granite-3.1-3b-a800m-instruct",
        "multipliers, experts", {**TIED, **MULTIPLIERS, **LOCAL_EXPERTS, "attention_multiplier": 0.125},
    ),
    ModelFamily(
        "granitemoehybrid", "Granite 4", "granitemoehybrid", "ibm-granite/granite-4.0-h-tiny",
        "Mamba-2 layers, experts, no rotary positions",
        {**TIED, **MULTIPLIERS, **LOCAL_EXPERTS, **MAMBA, "attention_multiplier": 0.125,
         "shared_intermediate_size": 32, "position_embedding_type": "nope",
         "layer_types": ["mamba", "mamba", "attention", "mamba"]},
    ),
    ModelFamily(
        "olmo2", "OLMo 2", "olmo2", "allenai/OLMo-2-1124-7B-Instruct",
        "QK norm over all heads, norms after the layers", {"num_key_value_heads": 4},
    ),
    ModelFamily(
        "olmo3", "OLMo 3", "olmo3", "allenai/Olmo-3-7B-Instruct",
        "three windowed layers to one full layer, QK norm over all heads, YaRN in full layers",
        {**WINDOWED, "num_key_value_heads": 4,
         "rope_parameters": {"full_attention": YARN, "sliding_attention": PLAIN}},
    ),
    ModelFamily(
        "olmoe", "OLMoE", "olmoe", "allenai/OLMoE-1B-7B-0125-Instruct",
        "QK norm over all heads, experts", {**EXPERTS, "num_key_value_heads": 4},
    ),
    ModelFamily(
        "smollm3", "SmolLM3", "smollm3", "HuggingFaceTB/SmolLM3-3B",
        "every fourth layer without rotary positions", TIED,
    ),
    ModelFamily(
        "cohere", "Command R", "cohere", "CohereLabs/c4ai-command-r-08-2024",
        "parallel layers, interleaved rotary positions, logit scale", {**TIED, "logit_scale": 0.5}, "cohere",
    ),
    ModelFamily(
        "cohere2", "Command R7B, Command A", "cohere2", "CohereLabs/c4ai-command-r7b-12-2024",
        "three windowed layers to one full layer without rotary positions, logit scale",
        {**TIED, **WINDOWED, "logit_scale": 0.5}, "cohere2",
    ),
    ModelFamily(
        "exaone4", "EXAONE 4", "exaone4", "LGAI-EXAONE/EXAONE-4.0-32B",
        "three windowed layers to one full layer without rotary positions, QK norm", WINDOWED,
    ),
    ModelFamily(
        "exaone4_full", "EXAONE 4 1.2B", "exaone4", "LGAI-EXAONE/EXAONE-4.0-1.2B",
        "QK norm, full attention", {**TIED, "sliding_window": None, "layer_types": ["full_attention"] * LAYERS},
    ),
    ModelFamily(
        "seed_oss", "Seed-OSS", "seed_oss", "ByteDance-Seed/Seed-OSS-36B-Instruct",
        "biases, dropout", {"attention_dropout": 0.1, "residual_dropout": 0.1},
    ),
    ModelFamily(
        "hunyuan", "HunYuan dense", "hunyuan_v1_dense", "tencent/Hunyuan-4B-Instruct",
        "QK norm after the rotary positions", TIED,
    ),
    ModelFamily(
        "ernie4_5", "ERNIE 4.5", "ernie4_5", "baidu/ERNIE-4.5-0.3B-PT",
        "interleaved rotary positions", TIED,
    ),
    ModelFamily(
        "ernie4_5_moe", "ERNIE 4.5 MoE", "ernie4_5_moe", "baidu/ERNIE-4.5-21B-A3B-PT",
        "interleaved rotary positions, experts",
        {**TIED, "moe_num_experts": 8, "moe_k": 2, "moe_num_shared_experts": 1, "moe_intermediate_size": 16},
    ),
    ModelFamily(
        "falcon_h1", "Falcon-H1", "falcon_h1", "tiiuae/Falcon-H1-1.5B-Instruct",
        "Mamba-2 and attention side by side in every layer", {**MAMBA, "mamba_d_ssm": 64},
    ),
    ModelFamily(
        "lfm2", "LFM2", "lfm2", "LiquidAI/LFM2-1.2B",
        "convolutions, QK norm",
        {**TIED, "layer_types": ["conv", "conv", "full_attention", "conv"], "block_multiple_of": 16}, "lfm2",
    ),
    ModelFamily(
        "lfm2_moe", "LFM2-MoE", "lfm2_moe", "LiquidAI/LFM2-8B-A1B",
        "convolutions, QK norm, experts",
        {**TIED, **EXPERTS, "layer_types": ["conv", "conv", "full_attention", "conv"], "num_dense_layers": 1},
        "lfm2",
    ),
    ModelFamily(
        "nemotron", "Nemotron (Minitron)", "nemotron", "nvidia/Minitron-4B-Base",
        "partial rotary positions, squared ReLU", {},
    ),
    ModelFamily(
        "nemotron_h", "Nemotron-H, Nemotron 3", "nemotron_h", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        "Mamba-2 layers, experts, few attention layers", {**ROUTED, "num_hidden_layers": None,
         "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"], "mamba_num_heads": 8,
         "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1, "chunk_size": 16,
         "moe_shared_expert_intermediate_size": 16}, "nemotron_3_nano",
    ),
    ModelFamily(
        "minimax", "MiniMax-01, M1", "minimax", "MiniMaxAI/MiniMax-M1-40k-hf",
        "lightning attention, experts",
        {**LOCAL_EXPERTS, "block_size": 16, "layer_types": ["linear_attention", "full_attention"] * 2},
    ),
    ModelFamily(
        "minimax_m2", "MiniMax M2", "minimax_m2", "MiniMaxAI/MiniMax-M2",
        "QK norm over all heads, partial rotary positions, experts", {**LOCAL_EXPERTS,
         "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}},
    ),
    ModelFamily(
        "apertus", "Apertus", "apertus", "swiss-ai/Apertus-8B-Instruct-2509",
        "QK norm, xIELU", {},
    ),
)
# fmt: on
BY_KEY = {family.key: family for family in FAMILIES}
