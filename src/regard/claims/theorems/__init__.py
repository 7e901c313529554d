"""One claim a file, named by its id."""
