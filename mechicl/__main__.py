"""`python -m mechicl` is the shell command."""

from mechicl.cli import main

if __name__ == "__main__":
    main()
