"""Published weights in, engines that serve them out: updates, catch-up, and which weights are still read."""
