"""`python -m edge` is the command line."""

from edge.cli.main import main

if __name__ == "__main__":
    main()
