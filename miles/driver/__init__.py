"""The ring and what surrounds it: start everything, turn, evaluate, shut down in order."""
