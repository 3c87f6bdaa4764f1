"""From trajectories to weights: advantages, loss, diagnostics, packing and the Megatron-core model.

    Group --advantages--> Batch --pack--> MicroBatch --Megatron schedule--> log-probabilities, gradients
        --optimizer--> weights

`Learner` is the box; everything it decides about numbers is in the pure functions beside it.
"""
