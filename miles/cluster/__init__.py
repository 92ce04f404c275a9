"""Ray underneath: where processes run, the actors that wrap the rooms, and who is restarted when something dies."""
