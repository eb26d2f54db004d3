"""`python -m twinax`: the command, for environments whose scripts are not on the path."""

from .cli.entry import main

if __name__ == "__main__":
    main()
