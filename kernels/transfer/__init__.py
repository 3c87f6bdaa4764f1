"""Weights from the learner to an engine that goes on generating: sources, senders and the staging area."""
