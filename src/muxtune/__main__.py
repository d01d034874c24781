"""`python -m muxtune`: the command line, for where the installed `muxtune` is not on the path."""

from muxtune.cli.main import main

if __name__ == "__main__":
    main()
