"""The learner's model, optimizer and checkpoints: Megatron-core's, with `kernels` operations in its layers.

Without TransformerEngine, Apex, bridges or `megatron.training`; on CPU as on CUDA. Megatron-core warns about
each absence when it is imported; here they are intended, so that import is quiet.
"""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import megatron.core.distributed
    import megatron.core.models.gpt.gpt_model
    import megatron.core.optimizer  # noqa: F401
