"""``python -m regard``: the command line, as torchrun starts it."""

from regard.cli import main

if __name__ == "__main__":
    main()
