"""For each claim, broken arguments with which its check must give another verdict than the recorded one."""
