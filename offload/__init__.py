"""Where what does not fit is kept, and when it moves."""
