"""`python -m tileattn`, the same as the command `tileattn`."""

from tileattn.cli.app import main

if __name__ == "__main__":
    main()
