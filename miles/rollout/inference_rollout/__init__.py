"""Samples in, the same samples generated and scored out: what a rollout function of the user's calls."""
