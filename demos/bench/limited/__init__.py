"""Models larger than memory: this program and others, each in a control group of one size."""
