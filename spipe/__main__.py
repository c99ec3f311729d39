"""``python -m spipe`` is the command ``spipe``."""

from spipe.cli import main

if __name__ == "__main__":
    main()
