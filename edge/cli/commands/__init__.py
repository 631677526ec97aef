"""The commands of `edge`, one module each; imported when called."""
