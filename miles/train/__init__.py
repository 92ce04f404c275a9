"""Batches in, new weights out: packing, advantages, losses, FSDP2, checkpoints."""
