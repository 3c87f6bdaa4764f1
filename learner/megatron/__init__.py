"""The learner's model, optimizer and checkpoints: Megatron-core's, with `kernels` operations in its layers.

Without TransformerEngine, Apex, bridges or `megatron.training`; on CPU as on CUDA.
"""
