"""Generate functions that ship with miles: one file for each way from a prompt to a response."""
