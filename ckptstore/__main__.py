"""`python -m ckptstore` is the command `ckptstore`."""

from ckptstore.tools.cli import main

if __name__ == "__main__":
    main(prog_name="ckptstore")
