#!/bin/bash
# A launch script as RL-Factory has it, to be translated:
#   tfactory import rl-factory examples/search_r1/main_grpo.sh -o examples/search_r1/imported.yaml
set -x

export MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-4B}
DATA="."

python3 -m verl.trainer.main_ppo --config-name=rl_factory_ppo_trainer \
    algorithm.adv_estimator=grpo \
    data.train_files=$DATA/train.jsonl \
    data.val_files=$DATA/test.jsonl \
    data.train_batch_size=8 \
    data.max_prompt_length=3584 \
    data.max_response_length=512 \
    actor_rollout_ref.model.path=$MODEL_PATH \
    actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.model.enable_gradient_checkpointing=True \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=4 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \
    actor_rollout_ref.actor.state_masking=True \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.75 \
    actor_rollout_ref.rollout.n=4 \
    actor_rollout_ref.rollout.max_turns=2 \
    actor_rollout_ref.env.name=search_env \
    actor_rollout_ref.env.mcp_mode=stdio \
    actor_rollout_ref.env.tool_manager=qwen3 \
    actor_rollout_ref.env.enable_thinking=False \
    actor_rollout_ref.env.config_path=mcp_tools.pydata \
    reward_rollout.if_use_reward_rollout=False \
    reward_model.reward_manager=parallel \
    trainer.logger=['console','tensorboard'] \
    trainer.project_name='search' \
    trainer.n_gpus_per_node=1 \
    trainer.nnodes=1 \
    trainer.save_freq=20 \
    trainer.test_freq=10 \
    trainer.total_epochs=5 $@ 2>&1 | tee grpo.log
