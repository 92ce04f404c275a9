"""Prompts in, scored groups out: slots, attempts, rewards and the buffer between generation and training."""
