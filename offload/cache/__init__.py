"""Files that are kept for the next time, and which of them go first."""
