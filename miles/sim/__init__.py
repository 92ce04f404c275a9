"""The production control plane on a virtual clock: a schedule and a seed in, what it would cost out."""
