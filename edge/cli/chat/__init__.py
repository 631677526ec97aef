"""A conversation at the terminal: state, line editor, commands and the view of answers."""
