"""Import doors that users' code expects; thin re-exports, nothing of ours imports them."""
