"""Token ids in, sampled ids with log-probs and versions out: the client contract and the servers behind it."""
