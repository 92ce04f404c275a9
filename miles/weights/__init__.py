"""Trained weights in, engines that serve them out: versions, segments and publication."""
