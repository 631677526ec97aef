"""A conversation at the terminal: its state, its editor, its commands, and how answers look."""
