"""`rz-agent align`: where, by operation and token, do engine and learner stop computing the same bits."""
