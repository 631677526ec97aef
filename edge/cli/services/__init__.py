"""Services that run `edge peer` or `edge serve`, by systemd, launchd or the tasks of Windows."""
