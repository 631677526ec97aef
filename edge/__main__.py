"""`python -m edge` is the command line."""

from edge.cli import main

if __name__ == "__main__":
    main()
