"""Door: loads what a dotted path names."""

from miles.hooks import function_registry, load_function

__all__ = ["function_registry", "load_function"]
