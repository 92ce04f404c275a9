"""Finished groups in, kept or rejected out."""
