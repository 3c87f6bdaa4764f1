"""Agentic RL environments and an aligned rollout harness that implements REINFORCE Zero."""
