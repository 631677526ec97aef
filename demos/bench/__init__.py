"""One script per question; how and what is measured is in METHODOLOGY.md."""
